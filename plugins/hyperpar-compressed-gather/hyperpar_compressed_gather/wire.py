"""Transitions whose float32 tensors travel as bfloat16.

bfloat16 keeps 8 bits of a number: rounding to it is off by at most U = 2^-8 of the value. Gathered values are rounded once; summands
are rounded once each and summed in float32, so a sum is off by at most U of the sum of their absolute values; an all-reduce rounds its
sums once more. Every rank hands on what it received, its own part rounded too, so replicas are bitwise equal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from hyperpar_core.collectives.functional import AxisGroup, all_gather, all_to_all, convert, exchange, keep_first, shard
from hyperpar_core.placement import shard_size

__all__ = ["ERROR", "Step", "lower"]

U = 2.0**-8
ERROR = 2.001 * U  # an all-reduce's (1 + U)^2 - 1, and the rounding of the float32 sum
SENT = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")


class TransitionLike(Protocol):
    """What this lowerer reads of a transition."""

    axis: str
    src: Placement
    dst: Placement
    grad_in: Placement
    grad_out: Placement

    @property
    def forward(self) -> str: ...
    @property
    def backward(self) -> str: ...


def _summed(x_RN: Tensor, group: AxisGroup) -> Tensor:
    """Rows [ranks, ...], one for each rank -> the float32 sum of what all ranks sent to this one."""
    received = exchange(x_RN.bfloat16(), None, None, group)
    return received.to(torch.float32).sum(0)  # in the order of the ranks


def reduce_scatter(x: Tensor, dim: int, group: AxisGroup) -> Tensor:
    """This rank's shard along `dim` of the sum over the ranks, in torch.chunk sizes."""
    dim %= x.ndim
    chunk = -(-x.shape[dim] // group.ranks)
    length = shard_size(x.shape[dim], group.ranks, group.rank)[0]
    parts = _padded(x, dim, chunk * group.ranks).unflatten(dim, (group.ranks, chunk)).movedim(dim, 0)
    return _summed(parts, group).narrow(dim, 0, length).contiguous()


def all_reduce(x: Tensor, group: AxisGroup) -> Tensor:
    """The sum over the ranks: each sums one part, and all gather the parts."""
    flat = x.flatten()
    chunk = -(-flat.numel() // group.ranks)
    mine = _summed(_padded(flat, 0, chunk * group.ranks).view(group.ranks, chunk), group)
    return all_gather(mine.bfloat16(), 0, group).to(torch.float32)[: flat.numel()].view(x.shape)


def _padded(x: Tensor, dim: int, size: int) -> Tensor:
    missing = size - x.shape[dim]
    if not missing:
        return x
    shape = list(x.shape)
    shape[dim] = missing
    return torch.cat([x, x.new_zeros(shape)], dim)


def _send(op: str, x: Tensor, group: AxisGroup, src: int, dst: int, size: int | None) -> Tensor:
    """One conversion of a float32 tensor."""
    if op == "all_gather":
        return all_gather(x.bfloat16(), src, group, size).to(torch.float32)
    if op == "all_to_all":
        return all_to_all(x.bfloat16(), src, dst, group, size).to(torch.float32)
    if op == "reduce_scatter":
        return reduce_scatter(x, dst, group)
    if op == "all_reduce":
        return all_reduce(x, group)
    if op == "shard":
        return shard(x, dst, group)
    if op == "keep_first":
        return keep_first(x, group)
    return x.detach()  # identity; a view would refuse in-place operators later


class _Wire(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, step: Step, group: AxisGroup, size: int | None) -> Tensor:
        ctx.step, ctx.group = step, group
        # the whole length of a dim that the backward joins: the forward cut it
        ctx.size = x.shape[step.grad_src] if step.op in ("shard", "reduce_scatter", "all_to_all") else None
        return _send(step.op, x, group, step.src, step.dst, size)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        step = ctx.step
        return _send(step.grad_op, grad.contiguous(), ctx.group, step.grad_src, step.grad_dst, ctx.size), None, None, None


@dataclass(frozen=True)
class Step:
    """One conversion forward and one backward, with the dims that each joins and cuts. Plain values: it pickles and deep-copies."""

    op: str
    grad_op: str
    src: int
    dst: int
    grad_src: int
    grad_dst: int

    def __call__(self, x: Tensor, group: AxisGroup, size: int | None = None) -> Tensor:
        """`x`: a local tensor; `size`: the whole length of an uneven source dim. Every rank of the group calls it. Differentiable."""
        if x.dtype != torch.float32:
            return convert(
                x, group, self.op, self.grad_op, src_dim=self.src, dst_dim=self.dst, grad_src_dim=self.grad_src,
                grad_dst_dim=self.grad_dst, size=size,
            )  # fmt: skip
        out: Tensor = _Wire.apply(x, self, group, size)  # type: ignore[no-untyped-call]
        return out


def lower(transition: TransitionLike) -> Step | None:
    """The step of a transition over tp that sends something, in either direction; the default lowers the others."""
    if transition.axis != "tp" or not {transition.forward, transition.backward} & set(SENT):
        return None
    placements = (transition.src, transition.dst, transition.grad_in, transition.grad_out)
    dims = [p.dim if isinstance(p, Shard) else 0 for p in placements]
    return Step(transition.forward, transition.backward, *dims)
