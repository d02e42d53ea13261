"""The expert mesh (edp, ep): the ranks of the dense region, dp x cp x tp flattened row by row, cut into expert groups.

A group is `ep` consecutive ranks, so it takes a whole tp group first, then cp, then dp. Each rank of a group holds its part of the
experts; edp counts the groups, which hold the same experts. With dp=2, tp=2 and ep=2 the mesh is [[0, 1], [2, 3]].
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..errors import ApplyError
from .meshes import submesh

__all__ = ["build_expert_mesh", "expert_groups", "parameter_mesh"]

_made: dict[tuple[DeviceMesh, int], tuple[Any, DeviceMesh]] = {}


def expert_groups(ranks: int, ep_size: int) -> list[list[int]]:
    """The ranks of each expert group, counted within the dense region: no process group is needed."""
    if ep_size < 1 or ranks % ep_size:
        degrees = ", ".join(str(d) for d in range(1, ranks + 1) if ranks % d == 0)
        raise ApplyError(
            f"ep_size={ep_size} doesn't divide dp x cp x tp = {ranks}. Degrees of ep that work here: {degrees}."
        )
    return [list(range(start, start + ep_size)) for start in range(0, ranks, ep_size)]


def build_expert_mesh(mesh: DeviceMesh, ep_size: int) -> DeviceMesh:
    """The mesh (edp, ep) over the ranks of `mesh` (dp, cp, tp). Every rank of `mesh` calls it; the same input gives the same mesh.

    Raises ApplyError where ep_size doesn't divide the number of ranks.
    """
    groups = len(expert_groups(mesh.size(), ep_size))
    job, made = _made.get((mesh, ep_size), (None, None))
    if made is None or job is not dist.group.WORLD:
        made = mesh._flatten()._unflatten(0, (groups, ep_size), ("edp", "ep"))
        _made[mesh, ep_size] = (dist.group.WORLD, made)
    return made


def parameter_mesh(mesh: DeviceMesh, ep_size: int, *, dp: bool) -> DeviceMesh:
    """The mesh that experts live on: (edp, ep), or ep alone where there is one group.

    dp=False: without the part of edp that is data parallel. What is left are the groups within a dp rank's own cp x tp ranks.
    """
    whole = build_expert_mesh(mesh, ep_size)
    if not dp:
        inner = submesh(mesh, dp=False)
        ranks = inner.size() if inner is not None else 1
        if inner is not None and ranks % ep_size == 0:
            whole = build_expert_mesh(inner, ep_size)
        elif ep_size % ranks == 0:
            return whole["ep"]
        else:
            raise ApplyError(
                f"data_parallel='external': an expert group of {ep_size} ranks lies across dp ranks of cp x tp = {ranks} without\n"
                f"  being a multiple of them, so no axis of their mesh is dp's. Choose ep from the divisors or multiples of {ranks}."
            )
    return whole if whole["edp"].size() > 1 else whole["ep"]
