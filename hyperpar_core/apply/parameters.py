"""Parameters as DTensors: cut from a whole copy, joined to a whole copy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from ..collectives.functional import AxisGroup
from ..placement import Layout, Placement, layout_on, shard_size
from ..plan.contract import Contract
from ..plan.gradients import section_contract

__all__ = ["BoundView", "SharedSlice", "distribute", "gradient_placements", "held_placements", "pieces", "whole"]


def held_placements(layout: Layout, mesh: DeviceMesh, ndim: int) -> tuple[Placement, ...]:
    """The placements of a parameter on `mesh` (data-parallel axes replicate), negative dims resolved."""
    placements = layout_on(layout, mesh.mesh_dim_names or ())
    return tuple(Shard(p.dim % ndim) if isinstance(p, Shard) else p for p in placements)


def gradient_placements(grad: Layout, mesh: DeviceMesh, ndim: int) -> tuple[Placement, ...]:
    """The placements of a parameter's gradient as a backward leaves it: Partial over dp (experts: edp), elsewhere as the contract says."""
    return held_placements({**grad, "dp": Partial(), "edp": Partial()}, mesh, ndim)


def cut(tensor: Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> Tensor:
    """This rank's part of a whole tensor, a copy where anything is cut."""
    part = tensor
    for i, placement in enumerate(placements):
        if isinstance(placement, Shard):
            length, offset = shard_size(part.shape[placement.dim], mesh.size(i), mesh.get_local_rank(i))
            part = part.narrow(placement.dim, offset, length)
    if part is tensor and not tensor.storage_offset():
        return tensor
    return part.clone(memory_format=torch.contiguous_format)


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


def pieces(
    contract: Contract, parameter: str, name: str, value: nn.Parameter
) -> Iterator[tuple[str, nn.Parameter, Layout, Layout]]:
    """(registered name, whole value, how it is held, its gradient) of a parameter, or of each section of a packed one."""
    sections = contract.sections.get(parameter)
    if not sections:
        yield name, value, contract.params[parameter], contract.param_grad[parameter]
        return
    offset = 0
    for section in sections:
        held, grad = section_contract(contract, parameter, section)
        part = value.detach().narrow(section.dim, offset, section.size).clone(memory_format=torch.contiguous_format)
        yield f"{name}_{section.name}", nn.Parameter(part, requires_grad=value.requires_grad), held, grad
        offset += section.size


@dataclass(frozen=True)
class SharedSlice:
    """A region's view of a parameter that every rank holds whole: the slice that this rank shares with its neighbours."""

    dim: int
    slices: int
    index: int

    def __call__(self, local: Tensor) -> Tensor:
        size = local.shape[self.dim] // self.slices
        return local.narrow(self.dim, self.index * size, size)


@dataclass(frozen=True)
class BoundView:
    """A region's view of a parameter through one step of the transition table."""

    step: Callable[[Tensor, AxisGroup], Tensor]
    group: AxisGroup

    def __call__(self, local: Tensor) -> Tensor:
        return self.step(local, self.group)
