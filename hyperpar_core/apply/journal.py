"""The journal of an apply: every change to the model with its inverse, so that an error, or undo(), takes them all back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from .expert_stack import ExpertStack
from .generated import STATE, ModuleState, generated_class

__all__ = ["Journal"]

_ABSENT = object()


@dataclass(frozen=True)
class _Replaced:
    module: nn.Module
    name: str
    fqn: str
    now: tuple[str, ...]
    original: nn.Parameter | None


def _exchange(module: nn.Module, old: tuple[str, ...], new: Mapping[str, nn.Parameter | None]) -> None:
    """Registers `new` where `old` stood; the other parameters keep their places."""
    items = list(module._parameters.items())
    module._parameters.clear()
    for name, value in items:
        if name == old[0]:
            module._parameters.update(new)
        elif name not in old:
            module._parameters[name] = value


class Journal:
    """Changes are made through it, and undone in reverse order."""

    def __init__(self) -> None:
        self._inverses: list[Callable[[], None]] = []
        self._replaced: list[_Replaced] = []
        self._lists: list[tuple[str, ExpertStack, nn.ModuleList]] = []

    def set_class(self, module: nn.Module, names: tuple[str, ...], runs: bool) -> ModuleState:
        """Gives `module` its generated subclass and a fresh state."""
        base = type(module)
        state = ModuleState()
        module.__class__ = generated_class(base, names, runs)
        module.__dict__[STATE] = state

        def inverse() -> None:
            module.__class__ = base
            module.__dict__.pop(STATE, None)

        self._inverses.append(inverse)
        return state

    def set_attribute(self, module: nn.Module, name: str, value: Any) -> None:
        """Sets an instance attribute."""
        old = module.__dict__.get(name, _ABSENT)
        module.__dict__[name] = value

        def inverse() -> None:
            if old is _ABSENT:
                module.__dict__.pop(name, None)
            else:
                module.__dict__[name] = old

        self._inverses.append(inverse)

    def replace_parameter(self, module: nn.Module, name: str, fqn: str, values: Mapping[str, nn.Parameter]) -> None:
        """Registers `values` ({its own name: one}, or its sections) in the place of a parameter. `fqn`: its name in the model."""
        self._replaced.append(_Replaced(module, name, fqn, tuple(values), module._parameters[name]))
        _exchange(module, (name,), values)

    def replace_list(self, model: nn.Module, fqn: str, stack: ExpertStack, experts: nn.ModuleList) -> None:
        """Puts a stack in the place of the list of expert modules `fqn`."""
        parent, _, name = fqn.rpartition(".")
        owner = model.get_submodule(parent)
        owner._modules[name] = stack
        self._lists.append((fqn, stack, experts))
        self._inverses.append(lambda: owner._modules.__setitem__(name, experts))

    def on_undo(self, inverse: Callable[[], None]) -> None:
        """Notes the inverse of a change made elsewhere."""
        self._inverses.append(inverse)

    def roll_back(self) -> None:
        """Takes everything back to the very objects that stood there before. Only before `commit`."""
        for entry in reversed(self._replaced):
            _exchange(entry.module, entry.now, {entry.name: entry.original})
        self._run_inverses()

    def commit(self) -> None:
        """Lets go of the original parameters: from here on only `undo` goes back."""
        self._replaced = [replace(entry, original=None) for entry in self._replaced]
        for _, stack, experts in self._lists:
            for expert in experts:
                for path in stack.names.values():
                    owner, _, name = path.rpartition(".")
                    expert.get_submodule(owner)._parameters[name] = None

    def undo(self, values: Mapping[str, torch.Tensor]) -> None:
        """Takes everything back, with whole tensors in the place of the parameters; tied names share one parameter."""
        made: dict[int, nn.Parameter] = {}
        for entry in reversed(self._replaced):
            current = entry.module._parameters[entry.now[0]]
            assert current is not None
            if id(current) not in made:
                made[id(current)] = nn.Parameter(values[entry.fqn], requires_grad=current.requires_grad)
            _exchange(entry.module, entry.now, {entry.name: made[id(current)]})
        for fqn, stack, experts in self._lists:
            for i, expert in enumerate(experts):
                for held, path in stack.names.items():
                    owner, _, name = path.rpartition(".")
                    value = nn.Parameter(values[f"{fqn}.{i}.{path}"], requires_grad=stack.get_parameter(held).requires_grad)
                    expert.get_submodule(owner)._parameters[name] = value
        self._run_inverses()

    def _run_inverses(self) -> None:
        while self._inverses:
            self._inverses.pop()()
        self._replaced.clear()
        self._lists.clear()
