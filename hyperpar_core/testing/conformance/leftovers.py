"""What a plugin may not leave behind: code of its own in torch or transformers, changed settings, a changed model."""

from __future__ import annotations

import functools
import os
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

__all__ = ["changes", "model_state", "patches", "process_state", "reset_settings", "sources"]

PATCHABLE = ("torch", "transformers")  # whose modules and classes no plugin may touch
_WRAPPERS: dict[type, str] = {
    functools.partial: "func", types.MethodType: "__func__", staticmethod: "__func__", classmethod: "__func__", property: "fget",
}  # fmt: skip
_NEVER = frozenset(
    {str, int, float, bool, type(None), dict, list, tuple, set, frozenset, types.ModuleType, types.BuiltinFunctionType}
)


# ---- code


def sources(module: str) -> Path:
    """The folder of the outermost package that `module` belongs to, or the module's own file."""
    file = Path(str(sys.modules[module.split(".")[0]].__file__)).resolve()
    return file.parent if file.name == "__init__.py" else file


def patches(source: Path) -> list[str]:
    """Where code from `source` (a folder or a file) stands in place of torch's or transformers' own: "torch.nn.functional.gelu"."""
    found: set[str] = set()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated objects warn when they are looked at
        for name, module in list(sys.modules.items()):
            if name.split(".")[0] not in PATCHABLE or not isinstance(module, types.ModuleType):
                continue
            for attribute, value in _code(vars(module)):
                if _comes_from(value, source):
                    found.add(f"{name}.{attribute}")
                elif isinstance(value, type) and value.__module__ == name:
                    members = [member for member, inner in _code(vars(value)) if _comes_from(inner, source)]
                    found |= {f"{name}.{value.__qualname__}.{member}" for member in members}
    return sorted(found)


def _code(namespace: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The entries that may be code."""
    return [(name, value) for name, value in list(namespace.items()) if type(value) not in _NEVER]


def _comes_from(value: object, source: Path) -> bool:
    """Whether calling `value` runs code of `source`."""
    for _ in range(8):  # wrappers around wrappers
        kind = type(value)
        if kind is types.FunctionType:
            return _is_in(value.__code__.co_filename, str(source))  # type: ignore[attr-defined]
        if kind not in _WRAPPERS:
            break
        value = getattr(value, _WRAPPERS[kind])
    # a class, or an object of one, defined by the plugin
    owner = value.__module__ if isinstance(value, type) else kind.__module__
    return _is_in(getattr(sys.modules.get(owner), "__file__", None), str(source)) and callable(value)


@functools.cache
def _is_in(file: str | None, source: str) -> bool:
    if file is None:
        return False
    path = Path(file).resolve()
    return path == Path(source) or Path(source) in path.parents


# ---- settings of the process


# {setting: (how it is read, how it is set; None: it can't be)}
_SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any] | None]] = {
    "torch.get_default_dtype()": (torch.get_default_dtype, torch.set_default_dtype),
    "torch.is_grad_enabled()": (torch.is_grad_enabled, torch.set_grad_enabled),
    "torch.get_float32_matmul_precision()": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "torch.are_deterministic_algorithms_enabled()": (
        torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms,
    ),
    "the number of torch function modes": (torch._C._len_torch_function_stack, None),
    "the number of torch dispatch modes": (torch._C._len_torch_dispatch_stack, None),
}  # fmt: skip


def process_state() -> dict[str, Any]:
    """Settings that every model of the process shares."""
    settings = {name: read() for name, (read, _) in _SETTINGS.items()}
    return {**settings, **{f"os.environ[{name!r}]": value for name, value in os.environ.items()}}


FIRST = process_state()  # before a plugin of this process has run anything


def reset_settings() -> None:
    """The settings as they were first: what an earlier run changed is neither this plugin's merit nor its fault."""
    for name, (_, write) in _SETTINGS.items():
        if write is not None:
            write(FIRST[name])


# ---- a model


def model_state(model: nn.Module) -> dict[str, Any]:
    """Everything of a model that a plan, or code that a plan runs, could leave changed: {what: a value that can be compared}."""
    state: dict[str, Any] = {}
    for name, module in model.named_modules():
        where = name or type(model).__name__
        state[f"the class of {where}"] = type(module)
        for attribute, value in vars(module).items():
            if attribute in ("_parameters", "_buffers", "_modules"):
                state[f"{where}.{attribute}"] = list(value)
            else:
                state.update(_attribute(f"{where}.{attribute}", value))
    for kind, tensors in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in tensors:
            state[f"{kind} {name}"] = _Tensor(tensor)
    config: Any = getattr(model, "config", None)
    if hasattr(config, "to_dict"):
        state.update({f"config.{key}": repr(value) for key, value in config.to_dict().items()})
        state.update({f"config.{key}": _plain(value) for key, value in vars(config).items()})
    return state


class _Tensor:
    """A tensor's bytes, to be compared with what stands there later."""

    def __init__(self, tensor: Tensor) -> None:
        self.kind = "DTensor" if isinstance(tensor, DTensor) else type(tensor).__name__
        self.requires_grad = tensor.requires_grad
        self.value = tensor.detach().clone()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Tensor) or (self.kind, self.requires_grad) != (other.kind, other.requires_grad):
            return False
        same = self.value.dtype == other.value.dtype and self.value.shape == other.value.shape
        return same and self.kind != "DTensor" and torch.equal(self.value, other.value)

    __hash__ = None  # type: ignore[assignment]


def _attribute(where: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and not isinstance(value, dict):
        value = dict(value)
    if isinstance(value, dict):  # hooks, and tables of the model's own
        yield where, {key: _plain(one) for key, one in value.items()}
    else:
        yield where, _plain(value)


def _plain(value: Any) -> Any:
    """`value` where it compares by value; else its identity."""
    if value is None or isinstance(value, bool | int | float | str | torch.dtype | torch.device):
        return value
    if isinstance(value, tuple | list):
        return [_plain(one) for one in value]
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    return id(value)


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """One line for each entry that was added, taken away or changed."""
    lines = [f"{what} is new" for what in after if what not in before]
    lines += [f"{what} is gone" for what in before if what not in after]
    return lines + [f"{what} is another than before" for what in before if what in after and before[what] != after[what]]
