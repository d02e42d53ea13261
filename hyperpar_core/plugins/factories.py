"""Calling a factory: it receives the context that it asks for by name, and options that its signature accepts.

What can be known from the signature is known at plan time (`check_factory`); `call_factory` runs at apply time.
"""

from __future__ import annotations

import functools
import inspect
import traceback
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from ..descriptors import CONTEXT_NAMES, InnerWrapper
from ..errors import HyperparError, PluginError

__all__ = ["call_check", "call_factory", "check_factory", "describe_error", "factory_parameters"]

_CHANGES = Path(__file__).parents[1] / "changes.py"
_REFUSED = {
    inspect.Parameter.VAR_KEYWORD: "takes **{}: every option must stand in the signature",
    inspect.Parameter.VAR_POSITIONAL: "takes *{}: context and options are passed by name",
    inspect.Parameter.POSITIONAL_ONLY: "takes {} by position only: context and options are passed by name",
}


def describe_error(error: BaseException) -> str:
    """One line for an exception of a plugin's code, with the line of the plugin that raised it."""
    try:
        text = " ".join(str(error).split())[:400]
    except Exception:  # an exception that can't even be printed
        text = "(no text)"
    places = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    places = [place for place in places if not place[0].startswith("<frozen")]
    while places and Path(places[-1][0]) == _CHANGES:  # a descriptor that refuses a name: the line is the plugin's
        places.pop()
    if places and not _is_machinery(Path(places[-1][0])):
        text += " ({}:{})".format(*places[-1])
    return f"{type(error).__name__}: {text}"


def _is_machinery(file: Path) -> bool:
    """Whether a line in `file` says nothing about the plugin."""
    ours = file.is_relative_to(Path(__file__).parent)
    return ours or file.parent.name in ("importlib", "importlib_metadata", "pluggy")


def factory_parameters(
    factory: Callable[..., Any], where: str, what: str = "factory"
) -> Mapping[str, inspect.Parameter]:
    """The parameters of `factory`; PluginError for *args, **kwargs, positional-only ones and what has no signature."""
    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError) as error:
        raise PluginError(f"{where}: the {what} {factory!r} has no signature to check ({error}).") from None
    for name, parameter in parameters.items():
        if parameter.kind in _REFUSED:
            raise PluginError(f"{where}: the {what} {_REFUSED[parameter.kind].format(name)}.")
    return parameters


def own_options(factory: Callable[..., Any]) -> frozenset[str]:
    """Options of a plugin for an older core that have the name of a context by now, and stay options."""
    own: frozenset[str] = getattr(factory, "own_options", frozenset())
    return own


def check_factory(
    factory: Callable[..., Any],
    options: Mapping[str, Any],
    where: str,
    *,
    available: Collection[str] = CONTEXT_NAMES,
) -> None:
    """Checks what a call would need, without calling: unknown, reserved and missing options, unavailable context.

    `where` starts every text; `available`: the context names that this kind of factory is given.
    """
    parameters = factory_parameters(factory, where)
    reserved = CONTEXT_NAMES - own_options(factory)
    accepted = [name for name in parameters if name not in reserved]
    listed = ", ".join(accepted) or "none"
    for name in options:
        if name in reserved:
            raise PluginError(f"{where}: option {name!r} is a name that the core itself passes. Options: {listed}.")
        if name not in accepted:
            raise PluginError(f"{where}: unknown option {name!r}. Options: {listed}.")
    required = [name for name, parameter in parameters.items() if parameter.default is inspect.Parameter.empty]
    missing = [name for name in required if name in accepted and name not in options]
    if missing:
        raise PluginError(f"{where}: missing option{'s' * (len(missing) > 1)} {', '.join(missing)}. Options: {listed}.")
    absent = ", ".join(name for name in required if name in reserved and name not in available)
    if absent:
        given = ", ".join(sorted(available))
        raise PluginError(f"{where}: the factory asks for {absent}, which isn't given here. Given: {given}.")


def call_factory(
    factory: Callable[..., Any], context: Mapping[str, Any], options: Mapping[str, Any], where: str
) -> Callable[..., Any]:
    """Calls `factory` with what it asks for of `context` and with `options`; returns the function that it made.

    Every rank that applies the plan calls it, once per boundary. PluginError if the signature doesn't fit, the factory
    raises, or what it returns can't be called or closes over a module with weights.
    """
    check_factory(factory, options, where, available=context.keys())
    own = own_options(factory)
    asked = {name: context[name] for name in factory_parameters(factory, where) if name in context and name not in own}
    try:
        made: Any = factory(**asked, **options)
    except HyperparError:
        raise
    except Exception as error:
        raise PluginError(f"{where}: the factory raised {describe_error(error)}.") from error
    if not callable(made):
        raise PluginError(f"{where}: the factory returned {made!r}; it must return fn(module, *args, **kwargs).")
    handed = {id(value) for value in context.values() if isinstance(value, nn.Module)}
    for path, module in _captured_modules(made, getattr(made, "__name__", type(made).__name__), set()):
        # a module without weights (an activation) does no harm, unless it was handed in
        if id(module) in handed or any(True for _ in (*module.parameters(), *module.buffers())):
            raise PluginError(
                f"{where}: the function that the factory returned holds a module ({path}: {type(module).__name__}).\n"
                "  A deepcopy of the model would compute with the original's weights: use the first argument, module."
            )
    function: Callable[..., Any] = made
    return function


def call_check(
    descriptor: InnerWrapper, context: Mapping[str, Any], options: Mapping[str, Any], where: str
) -> None:
    """Runs a wrapper's `check`, where it has one, with what it asks for of `context` and of its options, set or by default.

    Raises what the check raises, PluginError for anything but the core's own errors.
    """
    if descriptor.check is None:
        return
    parameters = factory_parameters(descriptor.factory, where)
    defaults = {n: p.default for n, p in parameters.items() if p.default is not inspect.Parameter.empty}
    known = {**defaults, **options, **context}
    try:
        descriptor.check(**{name: known[name] for name in inspect.signature(descriptor.check).parameters})
    except HyperparError:
        raise
    except Exception as error:
        raise PluginError(f"{where}: its check raised {describe_error(error)}.") from error


def _captured_modules(value: object, path: str, seen: set[int]) -> Iterator[tuple[str, nn.Module]]:
    """(path, module) for every module that `value` holds by closure, default, partial, bound method or attribute."""
    if id(value) in seen:
        return
    outermost = not seen
    seen.add(id(value))
    held: dict[str, object] = {}
    if isinstance(value, nn.Module):
        yield path, value
    elif isinstance(value, types.FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                held[name] = cell.cell_contents
            except ValueError:  # a name that isn't bound yet
                continue
        held["__defaults__"], held["__kwdefaults__"] = value.__defaults__, value.__kwdefaults__
    elif isinstance(value, functools.partial):
        held = {"func": value.func, "args": value.args, "keywords": value.keywords}
    elif isinstance(value, types.MethodType):
        held = {"__self__": value.__self__}
    elif isinstance(value, (list, tuple, set, frozenset)):
        held = {str(index): item for index, item in enumerate(value)}
    elif isinstance(value, dict):
        held = {str(key): item for key, item in value.items()}
    elif outermost or path.endswith("__self__"):  # a callable object: its attributes
        held = dict(getattr(value, "__dict__", {}))
    for name, item in held.items():
        yield from _captured_modules(item, f"{path}.{name}", seen)
