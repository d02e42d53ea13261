"""The journal of an apply: every change to the model with its inverse, so that an error, or undo(), takes them all back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from .generated import STATE, ModuleState, generated_class

__all__ = ["Journal"]

_ABSENT = object()


class Journal:
    """Changes are made through it, and undone in reverse order."""

    def __init__(self) -> None:
        self._inverses: list[Callable[[], None]] = []
        self._parameters: list[tuple[nn.Module, str, str, nn.Parameter | None]] = []

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

    def set_parameter(self, module: nn.Module, name: str, fqn: str, value: nn.Parameter) -> None:
        """Registers `value` in the place of a parameter. `fqn`: its name in the model."""
        self._parameters.append((module, name, fqn, module._parameters[name]))
        module._parameters[name] = value

    def on_undo(self, inverse: Callable[[], None]) -> None:
        """Notes the inverse of a change made elsewhere."""
        self._inverses.append(inverse)

    def roll_back(self) -> None:
        """Takes everything back to the very objects that stood there before. Only before `commit`."""
        for module, name, _, original in reversed(self._parameters):
            module._parameters[name] = original
        self._run_inverses()

    def commit(self) -> None:
        """Lets go of the original parameters: from here on only `undo` goes back."""
        self._parameters = [(module, name, fqn, None) for module, name, fqn, _ in self._parameters]

    def undo(self, values: Mapping[str, torch.Tensor]) -> None:
        """Takes everything back, with whole tensors in the place of the parameters; tied names share one parameter."""
        made: dict[int, nn.Parameter] = {}
        for module, name, fqn, _ in reversed(self._parameters):
            current = module._parameters[name]
            if id(current) not in made:
                made[id(current)] = nn.Parameter(
                    values[fqn], requires_grad=bool(current is not None and current.requires_grad)
                )
            module._parameters[name] = made[id(current)]
        self._run_inverses()

    def _run_inverses(self) -> None:
        while self._inverses:
            self._inverses.pop()()
        self._parameters.clear()
