"""The parameters that a plan put on a model: still the very objects whose gradients are watched, and still watched."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ..errors import ApplyError
from .generated import plain_name

__all__ = ["Held"]


class Held:
    """parameters: {name: (DTensor parameter, ...)} that the gradient sums watch, kept up to date by whoever replaces them rightly;
    FSDP empties it and swaps parameters of its own."""

    def __init__(self, model: nn.Module, parameters: Mapping[str, tuple[nn.Parameter, Any]]) -> None:
        self.parameters = parameters
        named = model.named_parameters(remove_duplicate=False)
        self.names = frozenset(name for name, parameter in named if isinstance(parameter, DTensor))
        self._accepted: tuple[int, ...] = ()

    def check(self, model: nn.Module) -> None:
        """Raises ApplyError where a parameter was replaced. One pass over the modules; called in front of a training forward."""
        self._arm()
        found = tuple(id(p) for module in model.modules() for p in module._parameters.values())
        if found == self._accepted:
            return
        names = self.replaced(model)
        if names:
            raise ApplyError(
                f"{len(names)} parameters were replaced after apply_plan ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''}):"
                " nothing sums the gradients of the new ones.\n  Values come in through applied.load_full_state_dict(state), or copy_;"
                " for new parameters call applied.undo() and plan anew. load_state_dict(assign=True) replaces them."
            )
        self._accepted = found

    def replaced(self, model: nn.Module) -> list[str]:
        """Names of planned parameters that the model no longer holds."""
        named = {plain_name(name): p for name, p in model.named_parameters(remove_duplicate=False)}
        sharded = {id(p) for p in _sharded(model)}
        if sharded:  # a DTensor may also be one that FSDP leaves alone, or takes over at its next forward
            return sorted(n for n in self.names if not isinstance(named.get(n), DTensor) and id(named.get(n)) not in sharded)
        held = {id(p) for p, _ in self.parameters.values()}
        return sorted(n for n in self.names if id(named.get(n)) not in held)

    def _arm(self) -> None:
        """Module.to and .double() swap what is inside a parameter, and torch then forgets its hooks; setting them brings them back."""
        for parameter, _ in self.parameters.values():
            if parameter._backward_hooks:
                parameter._backward_hooks = parameter._backward_hooks


def _sharded(model: nn.Module) -> Iterator[Any]:
    """Both forms of every parameter that FSDP holds."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            for group in state._fsdp_param_groups:
                for entry in group.fsdp_params:
                    yield entry.sharded_param
                    yield getattr(entry, "_unsharded_param", entry.sharded_param)
