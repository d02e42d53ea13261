"""Parameters as DTensors: cut from a whole copy, joined to a whole copy."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from ..placement import Layout, Placement, layout_on, shard_size

__all__ = ["distribute", "gradient_placements", "held_placements", "whole"]


def held_placements(layout: Layout, mesh: DeviceMesh, ndim: int) -> tuple[Placement, ...]:
    """The placements of a parameter on `mesh` (data-parallel axes replicate), negative dims resolved."""
    placements = layout_on(layout, mesh.mesh_dim_names or ())
    return tuple(Shard(p.dim % ndim) if isinstance(p, Shard) else p for p in placements)


def gradient_placements(grad: Layout, mesh: DeviceMesh, ndim: int) -> tuple[Placement, ...]:
    """The placements of a parameter's gradient as a backward leaves it: Partial over dp, elsewhere as the contract says."""
    return held_placements({**grad, "dp": Partial()}, mesh, ndim)


def cut(tensor: Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> Tensor:
    """This rank's part of a whole tensor, a copy where anything is cut."""
    part = tensor
    for i, placement in enumerate(placements):
        if isinstance(placement, Shard):
            length, offset = shard_size(part.shape[placement.dim], mesh.size(i), mesh.get_local_rank(i))
            part = part.narrow(placement.dim, offset, length)
    return part if part is tensor else part.clone(memory_format=torch.contiguous_format)


def distribute(parameter: nn.Parameter, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> nn.Parameter:
    """A DTensor parameter with this rank's part of `parameter`, which every rank holds whole. No communication."""
    data = parameter.detach()
    local = cut(data, mesh, placements)
    made = DTensor.from_local(
        local, mesh, placements, run_check=False, shape=data.shape, stride=data.contiguous().stride()
    )
    return nn.Parameter(made, requires_grad=parameter.requires_grad)


def whole(tensor: Any) -> Tensor:
    """The whole tensor of a DTensor, sums done, on every rank of its mesh; a plain tensor is whole already. Detached."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()  # type: ignore[no-any-return]
    with torch.no_grad():
        full: Tensor = tensor.full_tensor().detach()
        return full.clone() if all(isinstance(p, Replicate) for p in tensor.placements) else full
