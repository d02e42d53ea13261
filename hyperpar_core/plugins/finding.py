"""Finding plugins: entry points of group `hyperpar`, and what the environment says about them; nothing is imported."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..errors import PluginError
from ..hookspecs import PROJECT
from .factories import describe_error
from .registry import Plugin, Provider, normalise

__all__ = ["Found", "Settings", "find_plugins"]


@dataclass(frozen=True)
class Settings:
    """The four variables HYPERPAR_..._PLUGINS."""

    disabled: tuple[str, ...]
    allowed: tuple[str, ...] | None  # None: all
    strict: bool
    trace: bool

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Settings:
        allowed = environ.get("HYPERPAR_LOAD_PLUGINS")
        return cls(
            disabled=_names(environ.get("HYPERPAR_DISABLE_PLUGINS", "")),
            allowed=None if allowed is None else _names(allowed),
            strict=_flag(environ, "HYPERPAR_STRICT_PLUGINS"),
            trace=_flag(environ, "HYPERPAR_TRACE_PLUGINS"),
        )

    def status_of(self, found: Plugin) -> Plugin:
        """`found` as disabled or excluded, where the environment says so."""
        if found.is_core:
            return found
        if any(_is_called(found, name) for name in self.disabled):
            return replace(found, status="disabled", reason="named in HYPERPAR_DISABLE_PLUGINS")
        if self.allowed is not None and not any(_is_called(found, name) for name in self.allowed):
            return replace(found, status="excluded", reason="not named in HYPERPAR_LOAD_PLUGINS")
        return found

    def without_effect(self, found: Iterable[Plugin]) -> list[str]:
        """One sentence for each name that no external plugin has."""
        external = [plugin for plugin in found if not plugin.is_core]
        lists = {"HYPERPAR_DISABLE_PLUGINS": self.disabled, "HYPERPAR_LOAD_PLUGINS": self.allowed or ()}
        return [
            f"{variable} names {name!r}, which is no external plugin and no distribution of one"
            for variable, names in lists.items()
            for name in names
            if not any(_is_called(plugin, name) for plugin in external)
        ]


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _flag(environ: Mapping[str, str], variable: str) -> bool:
    value = environ.get(variable, "")
    if value not in ("", "0", "1"):
        raise PluginError(f"{variable} is {value!r}: write 1 or 0.")
    return value == "1"


def _is_called(plugin: Plugin, name: str) -> bool:
    return name == plugin.provider.plugin or normalise(name) == normalise(plugin.provider.distribution)


# ---- finding


@dataclass(frozen=True)
class Found:
    """The record of a plugin as it stands before loading, and its entry point (None: its metadata can't be read)."""

    plugin: Plugin
    entry_point: Any = None


def find_plugins(distributions: Iterable[Any]) -> list[Found]:
    """The plugins of all distributions, sorted, each once. Of distributions with one name Python imports the first."""
    seen: set[str] = set()
    found: dict[tuple[Provider, str], Found] = {}
    for distribution in distributions:
        name, version = _identity(distribution)
        if normalise(name) in seen:
            continue
        if version:
            seen.add(normalise(name))
        try:
            points = distribution.entry_points.select(group=PROJECT)
        except Exception as error:  # one unreadable file hides no other distribution
            if normalise(name).startswith(f"{PROJECT}-"):
                reason = f"its entry_points.txt can't be read ({describe_error(error)})"
                broken = Plugin(Provider(name, name, version or "?"), "broken", reason=reason)
                found[broken.provider, ""] = Found(broken)
            continue
        for point in points:
            plugin = Plugin(Provider(point.name, name, version or "?"), "loaded", module=point.value)
            if not version:
                reason = "its metadata has no name and version: install it again"
                plugin = replace(plugin, status="broken", reason=reason)
            found.setdefault((plugin.provider, plugin.module), Found(plugin, point if version else None))
    return [found[key] for key in sorted(found)]


def _identity(distribution: Any) -> tuple[str, str]:
    """(name, version) of a distribution; ("?", "") where its metadata can't be read."""
    try:
        metadata = distribution.metadata  # parsed anew at each access
        name, version = metadata["Name"], metadata["Version"]
    except Exception:
        return "?", ""
    return (name, version) if name and version else ("?", "")
