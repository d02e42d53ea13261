"""Rows on their way to other ranks and back, with gradients that go the other way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hyperpar_core.collectives.functional import AxisGroup, exchange

__all__ = ["Way", "back", "out"]


@dataclass(frozen=True)
class Way:
    """How many rows go to each rank of the group, and how many come from it."""

    group: AxisGroup
    sent: tuple[int, ...]
    received: tuple[int, ...]

    def reversed(self) -> Way:
        return Way(self.group, self.received, self.sent)

    def carry(self, tensors: tuple[Tensor, ...]) -> list[Tensor]:
        """Several tensors of as many rows travel in one collective, side by side as bytes."""
        into, sent = list(self.received), list(self.sent)
        if len(tensors) == 1:
            return [exchange(tensors[0], into, sent, self.group)]
        packed = [t.contiguous().view(torch.uint8) for t in tensors]
        rows = exchange(torch.cat(packed, 1), into, sent, self.group)
        parts = rows.split([p.shape[1] for p in packed], 1)
        # a copy even of what is contiguous already: a single row may begin where no wider number can
        return [part.clone(memory_format=torch.contiguous_format).view(t.dtype) for part, t in zip(parts, tensors, strict=True)]


class _Carry(torch.autograd.Function):
    """Tensors [rows, ...] to other ranks in one collective; in the backward the gradients of those that have one, the other way."""

    @staticmethod
    def forward(ctx: Any, way: Way, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.way, ctx.numbers = way, [not t.is_floating_point() for t in tensors]
        arrived = way.carry(tensors)
        ctx.mark_non_differentiable(*(t for t, number in zip(arrived, ctx.numbers, strict=True) if number))
        return tuple(arrived)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        moved = iter(ctx.way.reversed().carry(tuple(g for g, number in zip(grads, ctx.numbers, strict=True) if not number)))
        return None, *(None if number else next(moved) for number in ctx.numbers)


def out(way: Way, *tensors: Tensor) -> tuple[Tensor, ...]:
    """`tensors`, each of sum(way.sent) rows, as the other ranks sent them. Whole numbers carry no gradient."""
    arrived: tuple[Tensor, ...] = _Carry.apply(way, *tensors)  # type: ignore[no-untyped-call]
    return arrived


def back(way: Way, *tensors: Tensor) -> tuple[Tensor, ...]:
    """`tensors`, each of sum(way.received) rows, back where `way` brought them from."""
    return out(way.reversed(), *tensors)
