"""Collectives on local tensors, and their autograd pairs.

Every function runs on all ranks of `mesh`, a 1-D DeviceMesh (or the AxisGroup made from one). Shards have `torch.chunk` sizes:
uneven and empty ones are padded for the wire and trimmed after it. The plain functions are not differentiable; `convert` is, and
takes its forward and its backward from the one table in `transition`. Built on functional collectives, so that torch.compile
traces them without breaks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..placement import shard_size

__all__ = [
    "AxisGroup",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "axis_group",
    "convert",
    "exchange",
    "keep_first",
    "reduce_scatter",
    "shard",
]

_ops = torch.ops._c10d_functional


@dataclass(frozen=True)
class AxisGroup:
    """The ranks along one axis, as plain values: they pickle, deep-copy and compile."""

    name: str
    ranks: int
    rank: int


def axis_group(mesh: DeviceMesh | AxisGroup) -> AxisGroup:
    """The AxisGroup of a 1-D mesh."""
    if isinstance(mesh, AxisGroup):
        return mesh
    return AxisGroup(mesh.get_group().group_name, mesh.size(), mesh.get_local_rank())


def _run(op: Any, *args: Any) -> Tensor:
    """`op`, done. Without gradients to record it skips autograd's layer, which costs as much as a small collective's wire."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return _ops.wait_tensor(op(*args))  # type: ignore[no-any-return]
    with torch._C._AutoDispatchBelowAutograd():
        return _ops.wait_tensor(op(*args))  # type: ignore[no-any-return]


def _pad(x: Tensor, dim: int, size: int) -> Tensor:
    """`x` with zeros appended along `dim` up to `size`."""
    missing = size - x.shape[dim]
    if missing == 0:
        return x
    shape = list(x.shape)
    shape[dim] = missing
    return torch.cat([x, x.new_zeros(shape)], dim)


def all_reduce(x: Tensor, mesh: DeviceMesh | AxisGroup, op: str = "sum") -> Tensor:
    """The reduction of `x` over the ranks ("sum", "max", "min", "avg"), in a new tensor."""
    return _run(_ops.all_reduce, x.contiguous(), op, axis_group(mesh).name)


def all_gather(x: Tensor, dim: int, mesh: DeviceMesh | AxisGroup, size: int | None = None) -> Tensor:
    """The shards of all ranks joined along `dim`. `size`: the whole dim's length where shards may be uneven."""
    group = axis_group(mesh)
    dim %= x.ndim
    whole = x.shape[dim] * group.ranks if size is None else size
    chunk = -(-whole // group.ranks)
    x = _pad(x, dim, chunk).contiguous()
    out = _run(_ops.all_gather_into_tensor, x, group.ranks, group.name)
    shape = (*x.shape[:dim], chunk * group.ranks, *x.shape[dim + 1 :])
    out = out.view(group.ranks, *x.shape).movedim(0, dim).reshape(shape).contiguous()  # shards of length 1 join as a view
    return out if whole == shape[dim] else out.narrow(dim, 0, whole).contiguous()


def reduce_scatter(x: Tensor, dim: int, mesh: DeviceMesh | AxisGroup) -> Tensor:
    """This rank's shard along `dim` of the sum over the ranks. `x`: the whole dim, on every rank."""
    group = axis_group(mesh)
    dim %= x.ndim
    whole = x.shape[dim]
    chunk = -(-whole // group.ranks)
    x = _pad(x, dim, chunk * group.ranks)
    x = x.unflatten(dim, (group.ranks, chunk)).movedim(dim, 0).flatten(0, 1) if dim else x
    out = _run(_ops.reduce_scatter_tensor, x.contiguous(), "sum", group.ranks, group.name)
    length = shard_size(whole, group.ranks, group.rank)[0]
    return out if length == chunk else out.narrow(dim, 0, length).contiguous()


def shard(x: Tensor, dim: int, mesh: DeviceMesh | AxisGroup) -> Tensor:
    """This rank's shard of `x` along `dim`: a copy, no communication."""
    group = axis_group(mesh)
    length, offset = shard_size(x.shape[dim], group.ranks, group.rank)
    return x.narrow(dim, offset, length).clone(memory_format=torch.contiguous_format)


def keep_first(x: Tensor, mesh: DeviceMesh | AxisGroup) -> Tensor:
    """`x` on the first rank and zeros elsewhere: a replicated value as a partial one."""
    return x.clone() if axis_group(mesh).rank == 0 else torch.zeros_like(x)


def exchange(
    x: Tensor, out_sizes: list[int] | None, in_sizes: list[int] | None, mesh: DeviceMesh | AxisGroup
) -> Tensor:
    """All-to-all along dim 0: `in_sizes[r]` rows go to rank r, `out_sizes[r]` come from it (None: equal parts)."""
    group = axis_group(mesh)
    if out_sizes is None or in_sizes is None:
        out_sizes = in_sizes = [x.shape[0] // group.ranks] * group.ranks
    return _run(_ops.all_to_all_single, x.contiguous(), out_sizes, in_sizes, group.name)


def all_to_all(x: Tensor, src_dim: int, dst_dim: int, mesh: DeviceMesh | AxisGroup, size: int | None = None) -> Tensor:
    """From a shard of `src_dim` to a shard of `dst_dim`. `size`: the whole length of `src_dim` where shards may be uneven."""
    group = axis_group(mesh)
    src_dim, dst_dim = src_dim % x.ndim, dst_dim % x.ndim
    if src_dim == dst_dim:
        return x
    whole = x.shape[src_dim] * group.ranks if size is None else size
    wide = x.shape[dst_dim]
    chunk = -(-wide // group.ranks)
    x = _pad(_pad(x, src_dim, -(-whole // group.ranks)), dst_dim, chunk * group.ranks)
    x = x.unflatten(dst_dim, (group.ranks, chunk)).movedim(dst_dim, 0).contiguous()
    out = exchange(x, None, None, group).movedim(0, src_dim).flatten(src_dim, src_dim + 1)
    length = shard_size(wide, group.ranks, group.rank)[0]
    return out.narrow(src_dim, 0, whole).narrow(dst_dim, 0, length).contiguous()


def _collect(op: str, x: Tensor, group: AxisGroup, src_dim: int, dst_dim: int, size: int | None) -> Tensor:
    """One conversion of `transition.CONVERSIONS`, on a local tensor."""
    if op == "identity":
        return x
    if op == "all_reduce":
        return all_reduce(x, group)
    if op == "all_gather":
        return all_gather(x, src_dim, group, size)
    if op == "reduce_scatter":
        return reduce_scatter(x, dst_dim, group)
    if op == "shard":
        return shard(x, dst_dim, group)
    if op == "all_to_all":
        return all_to_all(x, src_dim, dst_dim, group, size)
    if op == "keep_first":
        return keep_first(x, group)
    raise AssertionError(op)


class _Convert(torch.autograd.Function):
    """Forward `op` from src to dst, backward `grad_op` from the gradient's placement at dst to that at src."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        op: str,
        grad_op: str,
        name: str,
        ranks: int,
        rank: int,
        dims: tuple[int, int, int, int],
        size: int | None,
    ) -> Tensor:
        group = AxisGroup(name, ranks, rank)
        src_dim, dst_dim, grad_src, grad_dst = dims
        ctx.args = (grad_op, name, ranks, rank, grad_src, grad_dst)
        # The whole length of a dim that the backward has to gather: the forward saw it (it cut that dim).
        ctx.size = (
            x.shape[grad_src]
            if grad_op in ("all_gather", "all_to_all") and op in ("shard", "reduce_scatter", "all_to_all")
            else None
        )
        # A view made here would refuse later in-place operators (a router's input jitter, a sum of experts), and a hook on a plain view
        # is lost to them. Detached, it is the same memory under the same version counter.
        return _collect(op, x, group, src_dim, dst_dim, size).detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        grad_op, name, ranks, rank, src, dst = ctx.args
        out = _collect(grad_op, grad, AxisGroup(name, ranks, rank), src, dst, ctx.size)
        return out, None, None, None, None, None, None, None


def convert(
    x: Tensor,
    mesh: DeviceMesh | AxisGroup,
    op: str,
    grad_op: str = "identity",
    *,
    src_dim: int = 0,
    dst_dim: int = 0,
    grad_src_dim: int | None = None,
    grad_dst_dim: int | None = None,
    size: int | None = None,
) -> Tensor:
    """`op` forward and `grad_op` backward, each a name in `transition.CONVERSIONS`.

    src_dim, dst_dim: the dims that `op` joins and cuts; the gradient's are the same two, exchanged, unless given.
    size: the whole length of `src_dim` where its shards may be uneven (all_gather, all_to_all).
    """
    group = axis_group(mesh)
    dims = (
        src_dim,
        dst_dim,
        dst_dim if grad_src_dim is None else grad_src_dim,
        src_dim if grad_dst_dim is None else grad_dst_dim,
    )
    if op == "identity" and (grad_op == "identity" or not (x.requires_grad and torch.is_grad_enabled())):
        return x
    out: Tensor = _Convert.apply(x, op, grad_op, group.name, group.ranks, group.rank, dims, size)  # type: ignore[no-untyped-call]
    return out
