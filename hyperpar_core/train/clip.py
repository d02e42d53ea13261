"""The norm of all gradients, right across meshes: what is replicated counts once, what is cut is summed over its shards."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from ..collectives.functional import all_reduce, axis_group
from ..errors import ApplyError

__all__ = ["clip_grad_norm"]


def _local(grad: Tensor) -> Tensor:
    return grad._local_tensor if isinstance(grad, DTensor) else grad


def _cut_over(grad: Tensor) -> tuple[Any, tuple[int, ...]]:
    """(mesh, its dims over which the gradient is cut)."""
    if not isinstance(grad, DTensor):
        return None, ()
    if any(isinstance(p, Partial) for p in grad.placements):
        raise ApplyError(
            "clip_grad_norm_: gradients are still Partial (a backward under no_sync); run the last one outside it."
        )
    return grad.device_mesh, tuple(i for i, p in enumerate(grad.placements) if not isinstance(p, Replicate))


def _norms(grads: list[Tensor], kind: float) -> Tensor:
    """The sum of |g|^kind over the local parts (for inf: their largest value), in at least float32, and in one dtype on all ranks: that
    of a rank whose parts are all empty is theirs too."""
    parts = [_local(g) for g in grads]
    dtype = torch.float64 if any(part.dtype == torch.float64 for part in parts) else torch.float32
    wide = [part.to(dtype) for part in parts if part.numel()]
    if not wide:
        return torch.zeros((), dtype=dtype, device=parts[0].device)
    norms = torch.stack(torch._foreach_norm(wide, kind))
    return norms.max() if math.isinf(kind) else norms.pow(kind).sum()


@torch.no_grad()
def clip_grad_norm(
    parameters: Iterable[nn.Parameter],
    max_norm: float,
    norm_type: float = 2.0,
    check: Callable[[Tensor], None] | None = None,
) -> Tensor:
    """Scales gradients in place so that their joint norm is at most `max_norm`; returns the norm before, equal on all ranks.

    Every rank of the mesh calls it with the same parameters (a generator will do); those without a gradient don't count.
    check: called with the norm, on every rank, before anything is scaled.
    """
    kind = float(norm_type)
    if not kind > 0:
        raise ApplyError(f"clip_grad_norm_: norm_type is {norm_type}; it must be positive, or inf.")
    groups: dict[tuple[Any, tuple[int, ...]], tuple[Any, list[Tensor]]] = {}  # equal meshes are one: FSDP makes one for each parameter
    for parameter in parameters:
        mesh, dims = _cut_over(parameter.grad if parameter.grad is not None else parameter.detach())
        entry = groups.setdefault((mesh if dims else None, dims), (mesh, []))
        if parameter.grad is not None:
            entry[1].append(parameter.grad)
        elif dims and isinstance(parameter, DTensor):
            entry[1].append(torch.zeros(0, dtype=parameter.dtype, device=parameter.device))  # this rank still joins the sum over its shards
    total: Tensor | None = None
    for (_, dims), (mesh, grads) in groups.items():
        part = _norms(grads, kind) if grads else None
        for dim in dims:
            assert part is not None
            part = all_reduce(part, axis_group(mesh[mesh.mesh_dim_names[dim]]), "max" if math.isinf(kind) else "sum")
        if part is not None:
            total = part if total is None else (torch.maximum(total, part) if math.isinf(kind) else total + part)
    if total is None:
        return torch.zeros(())
    norm = total if math.isinf(kind) else total.pow(1.0 / kind)
    if check is not None:
        check(norm)
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for _, grads in groups.values():
        locals_ = [_local(g) for g in grads if _local(g).numel()]
        if locals_:
            torch._foreach_mul_(locals_, scale.to(locals_[0].device))
    return norm
