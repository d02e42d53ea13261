"""The runtime of the whole model: what has to hold before its boundaries run."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from ..errors import ApplyError
from .generated import original_forward
from .regions import ModelState, Region

__all__ = ["Root"]


class Root:
    """Runs in front of the model's own forward. `region` is its boundary, where the model itself is one.

    shares: the axes over which each rank's loss is only its share of the whole (gradients are summed over them).
    """

    def __init__(
        self,
        model: nn.Module,
        state: ModelState,
        sequence_parallel: bool,
        shares: tuple[str, ...],
        region: Region | None,
    ) -> None:
        self.state, self.sequence_parallel, self.shares, self.region = state, sequence_parallel, shares, region
        self.known = frozenset(name for name, _ in model.named_parameters(remove_duplicate=False))
        names = list(inspect.signature(type(model).forward).parameters)
        self.labels_position = names.index("labels") - 1 if "labels" in names else None
        self.checked = False

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.checked:
            self._check(module)
        position = self.labels_position
        labels = kwargs.get("labels")
        if labels is None and position is not None and position < len(args):
            labels = args[position]
        if self.sequence_parallel and _asked(module, kwargs, "output_hidden_states"):
            raise ApplyError(
                "output_hidden_states under sequence parallel: each rank would get its own part of the sequence.\n"
                "  Plan with sequence_parallel=False, or take the last hidden states, which are whole."
            )
        if labels is not None and self.shares and kwargs.get("num_items_in_batch") is None:
            raise ApplyError(
                f"labels without num_items_in_batch, and the batch is split over {' x '.join(self.shares)}: the loss would be this rank's"
                " mean, and the gradients' sum too large.\n  Pass the batch through applied.shard_batch(batch)."
            )
        self.state.labels = labels is not None
        if self.region is not None:
            return self.region(module, args, kwargs)
        return original_forward(module, *args, **kwargs)

    def _check(self, module: nn.Module) -> None:
        unknown = [n for n, _ in module.named_parameters(remove_duplicate=False) if _plain(n) not in self.known]
        if unknown:
            raise ApplyError(
                f"{len(unknown)} parameters aren't in the plan: {', '.join(unknown[:3])}{', ...' if len(unknown) > 3 else ''}.\n"
                "  Adapters and other new parameters go on before build_plan, so that they are planned too (applied.undo() first)."
            )
        self.checked = True


def _plain(name: str) -> str:
    """A parameter's name without the components that wrappers of torch put into it."""
    return ".".join(part for part in name.split(".") if part not in ("_checkpoint_wrapped_module", "_orig_mod"))


def _asked(module: nn.Module, kwargs: dict[str, Any], flag: str) -> bool:
    value = kwargs.get(flag)
    return bool(getattr(getattr(module, "config", None), flag, False) if value is None else value)
