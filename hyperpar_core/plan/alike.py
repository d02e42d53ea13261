"""Whether two modules compute alike but for the values of their parameters: their submodules, plain attributes and hooks."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, equal, nn

__all__ = ["difference"]

# what is compared by name (parameters, buffers, submodules), or says nothing of what a module computes
_APART = ("_parameters", "_buffers", "_modules", "_compiled_call_impl", "_is_hf_initialized")


def difference(first: nn.Module, other: nn.Module) -> str | None:
    """What `other` has otherwise than `first`, as "act.negative_slope 0.3, expert 0 has 0.1"; None where they're alike.

    Shapes and values of parameters aren't looked at. What can't be compared (an object without attributes that isn't equal, a function
    that closes over a module) counts as different.
    """
    theirs, mine = (dict(module.named_modules(remove_duplicate=False)) for module in (first, other))
    twins: dict[int, nn.Module] = {}
    for name in dict.fromkeys([*theirs, *mine]):
        here, there = mine.get(name), theirs.get(name)
        if here is None or there is None or type(here) is not type(there) or twins.setdefault(id(here), there) is not there:
            return f"{name or 'class'} {_text(here)}, expert 0 has {_text(there)}"
    for name, there in theirs.items():
        now, then = _attributes(mine[name]), _attributes(there)
        for key in dict.fromkeys([*then, *now]):
            if key not in now or key not in then or not _same(then[key], now[key], twins, set()):
                has, had = (_text(found[key]) if key in found else "none" for found in (now, then))
                return f"{f'{name}.' if name else ''}{key} {has}, expert 0 has {had}"
    return None


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Everything that a module has but its parameters' values, hooks by their place instead of their number."""
    held = vars(module)
    found = {name: value for name, value in held.items() if name not in _APART and "_hooks" not in name}
    found["parameters"] = {name: value is None for name, value in module._parameters.items()}
    found["buffers"] = list(module._buffers)
    found["submodules"] = list(module._modules)
    for name, hooks in held.items():
        if name.endswith("_hooks"):
            flags = [held.get(f"{name}_{flag}", {}) for flag in ("with_kwargs", "always_called")]
            found[name] = [(hook, *(number in flag for flag in flags)) for number, hook in hooks.items()]
    return found


def _same(a: Any, b: Any, twins: Mapping[int, nn.Module], seen: set[tuple[int, int]]) -> bool:
    """Whether a module with `b` for `a` computes alike. twins: {id of a submodule of b's owner: the one in its place in a's}."""
    if isinstance(a, weakref.ref) and isinstance(b, weakref.ref):
        a, b = a(), b()
    if isinstance(b, nn.Module):  # any other would be copied with expert 0, and no longer be the model's
        return twins.get(id(b)) is a
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        if isinstance(a, nn.Parameter) or a.requires_grad or b.requires_grad:
            return False
        return a is b or (not a.is_meta and (a.dtype, a.device) == (b.dtype, b.device) and equal(a, b))
    if (id(a), id(b)) in seen:
        return True
    seen = seen | {(id(a), id(b))}
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(_same(x, y, twins, seen) for x, y in zip(a, b, strict=True))
    if isinstance(a, Mapping):
        return set(a) == set(b) and all(_same(a[key], b[key], twins, seen) for key in a)
    if isinstance(a, MethodType):
        return _same((a.__func__, a.__self__), (b.__func__, b.__self__), twins, seen)
    if isinstance(a, functools.partial):
        return _same((a.func, a.args, a.keywords), (b.func, b.args, b.keywords), twins, seen)
    if a is b:
        return True
    if isinstance(a, FunctionType):
        facts = [(f.__defaults__, f.__kwdefaults__, [cell.cell_contents for cell in f.__closure__ or ()]) for f in (a, b)]
        # a copy of a module keeps its functions, so modules in a closure would stay expert 0's
        return a.__code__ == b.__code__ and a.__globals__ is b.__globals__ and _same(facts[0], facts[1], {}, seen)
    try:
        if bool(a == b):
            return True
    except Exception:  # an array's comparison is no bool
        return False
    return hasattr(a, "__dict__") and bool(vars(a)) and _same(vars(a), vars(b), twins, seen)


def _text(value: Any) -> str:
    if value is None or isinstance(value, nn.Module):
        return type(value).__qualname__ if value is not None else "none"
    text = getattr(value, "__qualname__", None) or repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
