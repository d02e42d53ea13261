"""Gradients that aren't finite, and the boundary that they come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..apply.generated import plain_name
from ..collectives.functional import AxisGroup, all_reduce
from ..errors import ApplyError

__all__ = ["nonfinite_gradients", "refuse_nonfinite"]


@torch.no_grad()
def nonfinite_gradients(model: nn.Module, groups: Mapping[str, AxisGroup]) -> list[str]:
    """Names of the parameters with a gradient that isn't finite on some rank, last layer first. Every rank calls it."""
    named = [(plain_name(name), p.grad) for name, p in model.named_parameters()]
    device = next(model.parameters()).device

    def odd(grad: Tensor | None) -> Tensor:
        if grad is None:
            return torch.zeros((), dtype=torch.int32, device=device)
        local = grad._local_tensor if isinstance(grad, DTensor) else grad
        return (~local.isfinite()).any().to(torch.int32)

    flags = torch.stack([odd(grad) for _, grad in named])
    for group in groups.values():
        flags = all_reduce(flags, group, "max")
    return [name for (name, _), flag in reversed(list(zip(named, flags.tolist(), strict=True))) if flag]


def refuse_nonfinite(
    model: nn.Module, groups: Mapping[str, AxisGroup], boundaries: Sequence[str], norm: Tensor | None = None
) -> None:
    """Raises ApplyError, on every rank, where a gradient isn't finite. boundaries: their modules' names.

    norm: of all gradients; where it is finite on every rank, nothing more is looked at.
    """
    if norm is not None:
        odd = (~norm.isfinite()).to(torch.int32)
        for group in groups.values():
            odd = all_reduce(odd, group, "max")
        if not int(odd):
            return
    names = nonfinite_gradients(model, groups)
    if not names:
        return
    above = [b for b in boundaries if names[0].startswith(f"{b}." if b else "")]
    first = max(above, key=len) if above else names[0].rpartition(".")[0]
    total = sum(1 for _ in model.parameters())
    raise ApplyError(
        f"{len(names)} of {total} gradients aren't finite; the last boundary of the model with one is {first or 'the model itself'}"
        f" ({names[0]}).\n  A backward meets it first: look there. torch.autograd.set_detect_anomaly(True) names the operator."
    )
