"""Optimizers whose steps would be wrong on a planned model: made too early, or not elementwise on what is cut or packed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from ..apply.generated import plain_name
from ..errors import ApplyError
from .canonical import sections

__all__ = ["remember", "retire"]

_retired: Any = WeakIdKeyDictionary()  # {parameter that a model has let go of: the call that replaced it}
_sections: Any = WeakIdKeyDictionary()  # {parameter that holds a section of a packed one: the packed one's name}
_hooked: list[Any] = []


def remember(model: nn.Module) -> Iterable[Tensor]:
    """The model's parameters as they are now, to be handed to `retire`; it keeps none of them alive."""
    held: Any = WeakIdKeyDictionary()
    for parameter in model.parameters():
        held[parameter] = None
    return held  # type: ignore[no-any-return]


def retire(before: Iterable[Tensor], model: nn.Module, call: str) -> None:
    """Notes which of the parameters `before` the model no longer has, and which it has are sections of packed ones.

    From then on a step raises ApplyError before it changes anything where its optimizer holds a parameter that is gone, or would compute
    something else of a planned one than in one process.
    """
    now = {id(parameter) for parameter in model.parameters()}
    gone = [parameter for parameter in before if id(parameter) not in now]
    for parameter in gone:
        _retired[parameter] = call
    packed = sections(model)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        section = packed.get(plain_name(name))
        if section is not None:
            _sections[parameter] = section.name
    if not _hooked:
        _hooked.append(register_optimizer_step_pre_hook(_refuse))


def _refuse(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    _refuse_early(optimizer)
    _refuse_whole(optimizer)


def _refuse_early(optimizer: Optimizer) -> None:
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


def _refuse_whole(optimizer: Optimizer) -> None:
    """Optimizers that aren't elementwise, by the names of their classes: each where a plan would change what they compute."""
    names = {cls.__name__ for cls in type(optimizer).__mro__}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    why = None
    if "Muon" in names:
        packed = next((_sections[parameter] for parameter in held if parameter in _sections), None)
        why = packed and f"it orthogonalises whole matrices, and {packed} is held in sections.\n  Step packed parameters with AdamW."
    elif "Adafactor" in names and any(isinstance(parameter, DTensor) for parameter in held):
        why = "its statistics are of whole rows, columns and matrices, and parameters here are cut or in sections.\n  Take AdamW."
    elif "LBFGS" in names and len({p.device_mesh if isinstance(p, DTensor) else None for p in held}) > 1:
        why = "it joins all parameters into one vector, and these live on several meshes (experts, and the rest).\n  Take AdamW."
    if why:
        raise ApplyError(f"{type(optimizer).__name__} would not step a planned model as one process does: {why}")
