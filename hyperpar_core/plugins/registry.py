"""What the plugins offer, by kind and name, and the errors for a name that isn't there."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from ..descriptors import CollectiveLowerer, InnerWrapper, LocalComputeFactory, LossFactory, ModelFamily, SpecialHandler
from ..errors import PluginError
from .known import known_distribution

__all__ = ["CORE", "KINDS", "Kind", "Plugin", "Provider", "Registry", "normalise"]

T = TypeVar("T")
CORE = "hyperpar-core"
_MOST = 3  # left-out plugins that an error spells out


def normalise(distribution: str) -> str:
    """The one spelling of a distribution's name."""
    return "-".join(part for part in distribution.lower().replace("_", "-").replace(".", "-").split("-") if part)


@dataclass(frozen=True)
class Kind:
    """One kind of descriptor: its key in reports (the hook's name without `hyperpar_`) and its noun in errors."""

    key: str
    noun: str

    @property
    def hook(self) -> str:
        return f"hyperpar_{self.key}"


KINDS: dict[type, Kind] = {
    InnerWrapper: Kind("inner_wrappers", "inner wrapper"),
    SpecialHandler: Kind("special_handlers", "special handler"),
    LocalComputeFactory: Kind("local_compute_factories", "local compute"),
    CollectiveLowerer: Kind("collective_lowerers", "lowerer"),
    LossFactory: Kind("losses", "loss"),
    ModelFamily: Kind("model_families", "model family"),
}


@dataclass(frozen=True, order=True)
class Provider:
    """Where a descriptor comes from: entry point, distribution and its version."""

    plugin: str
    distribution: str
    version: str

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}"


@dataclass(frozen=True)
class Plugin:
    """One plugin that was found, and what became of it.

    offers   {descriptor type: descriptors, by name}: what it registers, or would register if it weren't broken
    error    what its own code raised, for the traceback
    deprecations, unstated   what it uses that a later core won't have, and what an older one hasn't that it says will do
    """

    provider: Provider
    status: Literal["loaded", "broken", "disabled", "excluded"]
    module: str = ""
    reason: str = ""
    seconds: float = 0.0
    offers: Mapping[type, tuple[Any, ...]] = field(default_factory=dict)
    states_versions: bool = True
    deprecations: tuple[str, ...] = ()
    unstated: tuple[str, ...] = ()
    error: BaseException | None = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        return f"{self.provider.plugin!r} ({self.provider})"

    @property
    def is_core(self) -> bool:
        return normalise(self.provider.distribution) == CORE


class Registry:
    """What loaded plugins offer. A lookup returns (descriptor, Provider), or raises PluginError."""

    def __init__(self, plugins: Iterable[Plugin]) -> None:
        self.plugins = tuple(sorted(plugins, key=lambda plugin: (plugin.provider, plugin.module)))
        self._offered: dict[type, dict[str, tuple[Any, Provider]]] = {kind: {} for kind in KINDS}
        for plugin in self.plugins:
            for kind, descriptors in plugin.offers.items() if plugin.status == "loaded" else ():
                self._offered[kind].update({one.name: (one, plugin.provider) for one in descriptors})

    def inner_wrapper(self, name: str) -> tuple[InnerWrapper, Provider]:
        return self.get(InnerWrapper, name)

    def special_handler(self, name: str) -> tuple[SpecialHandler, Provider]:
        return self.get(SpecialHandler, name)

    def local_compute(self, name: str) -> tuple[LocalComputeFactory, Provider]:
        return self.get(LocalComputeFactory, name)

    def lowerer(self, name: str) -> tuple[CollectiveLowerer, Provider]:
        return self.get(CollectiveLowerer, name)

    def loss(self, name: str) -> tuple[LossFactory, Provider]:
        return self.get(LossFactory, name)

    def families(self) -> list[tuple[ModelFamily, Provider]]:
        """Every model family, by name."""
        return self.offered(ModelFamily)

    def offered(self, kind: type[T]) -> list[tuple[T, Provider]]:
        """Every descriptor of one kind, by name."""
        return [self._offered[kind][name] for name in sorted(self._offered[kind])]

    def find(self, kind: type[T], name: str) -> tuple[T, Provider] | None:
        """A lookup that doesn't mind: None where no plugin offers `name`."""
        return self._offered[kind].get(name)

    def digest_items(self) -> list[tuple[str, str, str]]:
        """(plugin, distribution, version) of every loaded plugin, sorted: what the ranks compare."""
        loaded = (plugin.provider for plugin in self.plugins if plugin.status == "loaded")
        return sorted((one.plugin, one.distribution, one.version) for one in loaded)

    def get(self, kind: type[T], name: str) -> tuple[T, Provider]:
        """The lookup of any kind."""
        found = self.find(kind, name) if isinstance(name, str) else None
        if found is None:
            raise self._missing(kind, str(name))
        return found

    def _missing(self, kind: type, name: str) -> PluginError:
        """Says what is there, what is near, who ships it, and which plugins were left out that might have had it."""
        noun = KINDS[kind].noun
        broken = [plugin for plugin in self.plugins if plugin.status == "broken"]
        owners = [plugin for plugin in broken if any(one.name == name for one in plugin.offers.get(kind, ()))]
        if owners:
            left_out = "\n".join(f"  {plugin} is left out: {plugin.reason}." for plugin in owners[:_MOST])
            return _caused(PluginError(f"no {noun} {name!r}: what offers it is left out.\n{left_out}"), owners)
        near = difflib.get_close_matches(name, self._offered[kind], n=2)
        lines = [f"no {noun} {name!r}." + (f" Nearest: {', '.join(near)}." if near else "")]
        lines.append(f"Known: {self._known(kind)}.")
        lines += self._elsewhere(kind, name) + self._who_ships(kind, name)
        lines += [f"Not loaded: {plugin}: {plugin.reason}." for plugin in broken[:_MOST]]
        if len(broken) > _MOST:
            lines.append(f"{len(broken) - _MOST} more aren't loaded: see `hyperpar plugins`.")
        off = [f"{plugin} {plugin.status}" for plugin in self.plugins if plugin.status in ("disabled", "excluded")]
        if off:
            more = f" and {len(off) - _MOST} more" if len(off) > _MOST else ""
            lines.append(f"Switched off by the environment: {', '.join(off[:_MOST])}{more}.")
        if not any(plugin.is_core for plugin in self.plugins):
            lines.append("hyperpar-core itself has no metadata: install it with pip (a checkout: pip install -e).")
        if not broken:
            lines[-1] += " (No plugin failed to load.)"
        return _caused(PluginError("\n  ".join(lines)), broken)

    def _known(self, kind: type) -> str:
        """names (distribution version), ... grouped by provider."""
        by_provider: dict[Provider, list[str]] = {}
        for name, (_, provider) in sorted(self._offered[kind].items()):
            by_provider.setdefault(provider, []).append(name)
        groups = [f"{', '.join(names)} ({provider})" for provider, names in sorted(by_provider.items())]
        return "; ".join(groups) or "none"

    def _elsewhere(self, kind: type, name: str) -> list[str]:
        others = [
            _with_article(KINDS[other].noun) for other in KINDS if other is not kind and name in self._offered[other]
        ]
        return [f"{name!r} is the name of {' and of '.join(others)}."] if others else []

    def _who_ships(self, kind: type, name: str) -> list[str]:
        distribution = known_distribution(kind, name)
        if distribution is None:
            return []
        found = [plugin for plugin in self.plugins if normalise(plugin.provider.distribution) == distribution]
        if not found:
            return [f"It ships with {distribution}: pip install {distribution}."]
        if any(plugin.status == "loaded" for plugin in found):
            return []  # its names are among the known ones
        return [f"It ships with {distribution}, which is installed but {found[0].status}."]


def _with_article(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def _caused(error: PluginError, plugins: Iterable[Plugin]) -> PluginError:
    error.__cause__ = next((plugin.error for plugin in plugins if plugin.error is not None), None)
    return error
