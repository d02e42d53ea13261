"""What was added, renamed or retired since descriptor API 1.0: one table, for fields of descriptors and context names of factories.

A plugin that was written for an older API keeps working while a name is deprecated: its `hyperpar plugins` entry has a note for it.
From the version in `refused` on it is left out with one sentence that says what to write. docs/stability.md has the rules.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from .errors import PluginError

__all__ = ["API_VERSION", "CHANGES", "Change", "deprecated_names", "to_current", "understated", "versioned"]

API_VERSION = "1.1"
T = TypeVar("T")


@dataclass(frozen=True)
class Change:
    """What became of one name.

    of           the descriptor's type whose field it is, or "factory" for a context name
    added        the API version that has it first; "1.0" for those that always were
    deprecated   the version from which on it works with a note; "": not deprecated
    refused      the version from which on it is an error; "": not yet decided
    instead      the name that took its place; "": none, the value is ignored while it is deprecated
    """

    of: str
    name: str
    added: str = "1.0"
    deprecated: str = ""
    refused: str = ""
    instead: str = ""

    def advice(self) -> str:
        return f"write {self.instead}" if self.instead else "leave it out"


CHANGES: tuple[Change, ...] = (
    Change("InnerWrapper", "check", added="1.1"),
    Change("InnerWrapper", "traffic", added="1.1"),
    Change("LocalComputeFactory", "traffic", added="1.1"),
    Change("LossFactory", "traffic", added="1.1"),
    Change("CollectiveLowerer", "error", added="1.1"),
)

_OLD_NAMES = "_old_names"  # of a descriptor: the deprecated ones that it was made with


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def _reached(version: str) -> bool:
    """Whether this core's API is at least `version`; "" is never reached."""
    return bool(version) and _number(API_VERSION) >= _number(version)


def _find(of: str, name: str) -> Change | None:
    return next((change for change in CHANGES if (change.of, change.name) == (of, name)), None)


# ---- fields of descriptors


def versioned(cls: type[T]) -> type[T]:
    """Lets a descriptor be made with deprecated names of fields, which it remembers; PluginError for those that it doesn't have."""
    make: Callable[..., None] = cls.__init__

    @functools.wraps(make)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        known = {f.name for f in fields(cls)}  # type: ignore[arg-type]
        given, old = {}, []
        for name, value in kwargs.items():
            if name in known:
                given[name] = value
                continue
            change = _current(cls.__name__, name, known)
            old.append(name)
            if change.instead:
                if change.instead in kwargs:
                    raise PluginError(f"{cls.__name__}: {name} and {change.instead} are one field; {change.advice()} alone")
                given[change.instead] = value
        make(self, *args, **given)
        if old:
            object.__setattr__(self, _OLD_NAMES, tuple(old))

    cls.__init__ = __init__  # type: ignore[method-assign]
    return cls


def _current(of: str, name: str, known: Iterable[str]) -> Change:
    """The change by which `name`, no field of today, may still be written."""
    change = _find(of, name)
    if change is not None and _reached(change.refused):
        raise PluginError(f"{of}: field {name!r} is gone since core API {change.refused}: {change.advice()}")
    if change is None or not _reached(change.deprecated):
        listed = ", ".join(sorted(known))
        raise PluginError(
            f"{of} has no field {name!r} in core API {API_VERSION} (fields: {listed}); one of a newer core needs that core"
        )
    return change


def deprecated_names(descriptor: Any) -> tuple[str, ...]:
    """The deprecated names of fields that a descriptor was made with."""
    return getattr(descriptor, _OLD_NAMES, ())


# ---- a plugin of an older API


def understated(descriptors: Iterable[Any], api: str) -> str:
    """A sentence on fields of a newer API than the plugin states, which an older core would refuse; "" where there are none."""
    newer: dict[str, str] = {}
    for descriptor in descriptors:
        for f in fields(descriptor):
            change = _find(type(descriptor).__name__, f.name)
            if change is not None and _number(api) < _number(change.added) and getattr(descriptor, f.name) != f.default:
                newer[f"{change.of}.{change.name}"] = change.added
    if not newer:
        return ""
    needed = max(newer.values(), key=_number)
    return f"it uses {', '.join(sorted(newer))} of core API {needed} and states {api}: state {needed}"


class _Renamed:
    """A factory that asks for deprecated context names, as one that asks for today's. `own`: names that stay its options."""

    def __init__(self, factory: Callable[..., Any], names: Mapping[str, str], own: Iterable[str]) -> None:
        self.factory, self.names, self.own_options = factory, dict(names), frozenset(own)
        functools.update_wrapper(self, factory)
        signature = inspect.signature(factory)
        kept = [(self.names.get(name, name), p) for name, p in signature.parameters.items() if self.names.get(name) != ""]
        self.__signature__ = signature.replace(parameters=[p.replace(name=name) for name, p in kept])

    def __call__(self, **given: Any) -> Any:
        old = {new: name for name, new in self.names.items() if new}
        handed = {old.get(name, name): value for name, value in given.items()}
        return self.factory(**handed, **{name: None for name, new in self.names.items() if not new})


def to_current(descriptor: T, api: str) -> tuple[T, list[str]]:
    """(a descriptor that today's core uses as its own, what its author should change), for one of a plugin written for `api`.

    Raises PluginError, with what to write, where it uses a name that is refused.
    """
    of, name = type(descriptor).__name__, getattr(descriptor, "name", "?")
    where, notes = f"{of} {name!r}", []
    for old in deprecated_names(descriptor):
        change = _find(of, old)
        assert change is not None
        notes.append(f"{where}: field {old!r} is deprecated since core API {change.deprecated}: {change.advice()}")
    factory = getattr(descriptor, "factory", None)
    if not callable(factory):
        return descriptor, notes
    names, own, more = _context_names(factory, api, where)
    if names or own:
        descriptor = replace(descriptor, factory=_Renamed(factory, names, own))  # type: ignore[type-var]
    return descriptor, notes + more


def _context_names(factory: Callable[..., Any], api: str, where: str) -> tuple[dict[str, str], list[str], list[str]]:
    """({deprecated name: today's, "" for none}, names that stay options of this plugin, notes) of a factory."""
    names: dict[str, str] = {}
    own, notes = [], []
    try:
        asked = list(inspect.signature(factory).parameters)
    except (TypeError, ValueError):  # the checks say so
        return {}, [], []
    for name in asked:
        change = _find("factory", name)
        if change is None:
            continue
        if _number(api) < _number(change.added):
            if _reached(change.added):
                own.append(name)
                notes.append(
                    f"{where}: its option {name!r} has had the name of a context since core API {change.added}: rename the option"
                )
        elif _reached(change.refused):
            raise PluginError(f"{where}: the factory asks for {name!r}, which is gone since core API {change.refused}: {_ask(change)}")
        elif _reached(change.deprecated):
            names[name] = change.instead
            notes.append(f"{where}: the factory asks for {name!r}, deprecated since core API {change.deprecated}: {_ask(change)}")
    return names, own, notes


def _ask(change: Change) -> str:
    return f"ask for {change.instead}" if change.instead else "do without it"
