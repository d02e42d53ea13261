"""Optimizers that were made too early: they hold parameters that a model no longer has."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from ..errors import ApplyError

__all__ = ["remember", "retire"]

_retired: Any = WeakIdKeyDictionary()  # {parameter that a model has let go of: the call that replaced it}
_hooked: list[Any] = []


def remember(model: nn.Module) -> Iterable[Tensor]:
    """The model's parameters as they are now, to be handed to `retire`; it keeps none of them alive."""
    held: Any = WeakIdKeyDictionary()
    for parameter in model.parameters():
        held[parameter] = None
    return held  # type: ignore[no-any-return]


def retire(before: Iterable[Tensor], model: nn.Module, call: str) -> None:
    """Notes which of the parameters `before` the model no longer has; a step of an optimizer that holds one raises ApplyError."""
    now = {id(parameter) for parameter in model.parameters()}
    gone = [parameter for parameter in before if id(parameter) not in now]
    for parameter in gone:
        _retired[parameter] = call
    if gone and not _hooked:
        _hooked.append(register_optimizer_step_pre_hook(_refuse))


def _refuse(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if not len(_retired):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            call = _retired.get(parameter)
            if call is not None:
                raise ApplyError(
                    f"this {type(optimizer).__name__} was made before {call}, and holds parameters that the model no longer has: its"
                    f" steps would change nothing.\n  Make the optimizer after {call}."
                )
