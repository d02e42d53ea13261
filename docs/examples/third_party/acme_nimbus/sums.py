"""A lowerer: sums over tp whose summands are added in the order of the ranks, whatever algorithm the backend has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Shard
from torch.nn.functional import pad

from hyperpar_core.collectives.functional import AxisGroup, all_gather, exchange
from hyperpar_core.placement import shard_size

__all__ = ["lower"]


class _OrderedSum(torch.autograd.Function):
    """Summands -> this rank's shard of their sum along `dim`; the gradient's shards are gathered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: AxisGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim, ctx.size = group, dim, x.shape[dim]
        chunk = -(-x.shape[dim] // group.ranks)
        rows = x.movedim(dim, 0)
        rows = pad(rows, (0, 0) * (rows.ndim - 1) + (0, chunk * group.ranks - len(rows)))
        parts = exchange(rows, None, None, group).unflatten(0, (group.ranks, chunk))
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        length = shard_size(x.shape[dim], group.ranks, group.rank)[0]
        return total[:length].movedim(0, dim).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return all_gather(grad.contiguous(), ctx.dim, ctx.group, ctx.size), None, None


@dataclass(frozen=True)
class _Step:
    dim: int

    def __call__(self, x: Tensor, group: AxisGroup, size: int | None = None) -> Tensor:
        out: Tensor = _OrderedSum.apply(x, group, self.dim % x.ndim)  # type: ignore[no-untyped-call]
        return out


def lower(transition: Any) -> _Step | None:
    """Takes partial -> shard over tp; the default lowers the rest."""
    if transition.axis != "tp" or (transition.forward, transition.backward) != ("reduce_scatter", "all_gather"):
        return None
    assert isinstance(transition.dst, Shard)
    return _Step(transition.dst.dim)
