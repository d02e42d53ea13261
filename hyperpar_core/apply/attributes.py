"""Attributes that count what a region has only a part of: heads, features of a Conv1D, experts."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..plan.heads import attribute_of
from .journal import Journal

__all__ = ["ConfigView", "set_count"]


class ConfigView:
    """A config as one module sees it: some values are that module's own, everything else is the config's."""

    def __init__(self, config: Any, values: dict[str, Any]) -> None:
        self.__dict__.update(values, _hyperpar_config=config)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_hyperpar_config":  # copy and pickle ask before anything is there
            raise AttributeError(name)
        return getattr(self._hyperpar_config, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._hyperpar_config, name, value)


def set_count(journal: Journal, module: nn.Module, path: str, *, divide: int = 1, value: int | None = None) -> None:
    """Divides the integer at `path`, or gives it `value`. One in a config changes for this module alone: its `config` becomes a view."""
    owner, (*parents, leaf), whole = attribute_of(module, path)
    local = whole // divide if value is None else value
    if parents:
        journal.set_attribute(owner, parents[0], ConfigView(getattr(owner, parents[0]), {leaf: local}))
    else:
        journal.set_attribute(owner, leaf, local)
