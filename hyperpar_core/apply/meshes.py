"""Meshes: made by name, and sliced to the axes that are active."""

from __future__ import annotations

import atexit
import os
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from ..collectives.functional import AxisGroup, axis_group
from ..errors import ApplyError
from ..plan.build import MESH_AXES, mesh_sizes

__all__ = ["axis_groups", "make_mesh", "submesh"]

# {(device, degrees): (the job that it is of, the mesh)}; weakly, as gloo's threads end with the last reference to a job
_made: dict[tuple[str, tuple[tuple[str, int], ...]], tuple[weakref.ref[Any], DeviceMesh]] = {}


def make_mesh(*, dp: int = 1, cp: int = 1, tp: int = 1, device_type: str | None = None) -> DeviceMesh:
    """The mesh (dp, cp, tp) over all ranks of the job, axes of size 1 left out; every rank calls it.

    Starts the process group where none is: from torchrun's environment, or, without it, for this one process alone. A mesh of one
    process keeps the axis dp. device_type: "cuda" where it is available, else "cpu". A gloo group that it started is destroyed when the
    process ends.
    """
    degrees = {"dp": dp, "cp": cp, "tp": tp}
    for axis, size in degrees.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ApplyError(f"make_mesh: {axis}={size!r}; a degree is a positive whole number.")
    device_type = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    if not dist.is_initialized():
        backend = "nccl" if device_type == "cuda" else "gloo"
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            if device_type == "cuda":
                torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
            _join(backend)
        else:
            dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
        if backend == "gloo":  # its threads may otherwise abort a process that ends; nccl's end waits for kernels, which a failed job can't
            atexit.register(_leave, weakref.ref(dist.group.WORLD))
    world = dist.get_world_size()
    if dp * cp * tp != world:
        raise ApplyError(
            f"make_mesh: dp={dp} x cp={cp} x tp={tp} is {dp * cp * tp} ranks, and the job has {world}."
            f" {'Start it with torchrun --nproc-per-node ' + str(dp * cp * tp) + '.' if world == 1 else ''}"
        )
    active = {axis: size for axis, size in degrees.items() if size > 1} or {"dp": 1}
    key = (device_type, tuple(active.items()))
    if any(job() is not dist.group.WORLD for job, _ in _made.values()):
        _forget_meshes()
    mesh = _made[key][1] if key in _made else None
    if mesh is None:  # the same degrees in the same job share their communicators
        mesh = init_device_mesh(device_type, tuple(active.values()), mesh_dim_names=tuple(active))
        _made[key] = (weakref.ref(dist.group.WORLD), mesh)
    return mesh


def _leave(job: weakref.ref[Any]) -> None:
    """Destroys the process group, where it is still the one that make_mesh started."""
    if dist.is_initialized() and dist.group.WORLD is job():
        dist.destroy_process_group()


def _forget_meshes() -> None:
    """Drops what torch and we keep of the meshes of a job whose process groups are destroyed. torch labels a DTensor from a cache
    in which equal meshes are one: in the next job of this process it would hand out groups that are gone."""
    _made.clear()
    _clear_sharding_prop_cache()


def _join(backend: str) -> None:
    """Joins torchrun's job. After a restart on one node under keys of its own: torchrun keeps its store, and gloo would connect to the
    addresses of ranks that are dead."""
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if restart == "0" or os.environ.get("LOCAL_WORLD_SIZE") != os.environ["WORLD_SIZE"]:
        dist.init_process_group(backend)
        return
    store, rank, ranks = next(rendezvous("env://"))
    store.set_timeout(default_pg_timeout)
    dist.init_process_group(backend, store=PrefixStore(f"restart_{restart}", store), rank=rank, world_size=ranks)


def submesh(mesh: DeviceMesh, *, dp: bool) -> DeviceMesh | None:
    """The mesh's active axes, in its own order, with or without dp; None when none is left."""
    axes = tuple(axis for axis in mesh_sizes(mesh) if dp or axis != "dp")
    if not axes:
        return None
    return mesh if axes == tuple(mesh.mesh_dim_names or ()) else mesh[axes]


def axis_groups(mesh: DeviceMesh) -> dict[str, AxisGroup]:
    """{axis: its ranks} for every active axis of the mesh."""
    return {axis: axis_group(mesh[axis]) for axis in MESH_AXES if axis in mesh_sizes(mesh)}
