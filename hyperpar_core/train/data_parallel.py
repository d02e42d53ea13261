"""FSDP2 on a planned model: torch's fully_shard over dp (and cp), experts over edp, with sums instead of means.

Each rank's loss is its share of the global mean, so gradients are summed: on every FSDP module the reduction is forced to a sum and
its divide factor is 1, which is exact in float32, bfloat16 and float64. FSDP refuses parameters on meshes that overlap its own, so
the parameters are relabelled first, from all axes to the ones that the plan cuts them by. FSDP cuts another dim than tp does where
it can: torch's strided shards of one dim gather wrong when they are uneven.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard

from ..apply.generated import state_of
from ..errors import ApplyError

__all__ = ["data_parallel_mesh", "no_sync", "relabel", "shard_model"]

_OURS = ("mesh", "shard_placement_fn", "ignored_params", "dp_mesh_dims")


def data_parallel_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that FSDP shards over: dp, folded with cp where both are active."""
    axes = tuple(axis for axis in ("dp", "cp") if axis in (mesh.mesh_dim_names or ()) and mesh[axis].size() > 1)
    if not axes:
        raise ApplyError("fully_shard: dp (x cp) is 1, so there is nothing to shard over; leave it out.")
    if len(axes) == 1:
        return mesh[axes[0]]
    return mesh[axes]._flatten("dp_cp")


def _kept(parameter: DTensor, axes: tuple[str, ...]) -> list[int]:
    """Positions of the mesh dims that stay: those of `axes`."""
    names = parameter.device_mesh.mesh_dim_names or ()
    return [i for i, name in enumerate(names) if name in axes]


def relabel(model: nn.Module, mesh: DeviceMesh, axes: tuple[str, ...], expert_mesh: DeviceMesh | None = None) -> None:
    """Every dense parameter as a DTensor on `axes` of `mesh` alone, or as a plain one when there are none; experts on ep alone. The data
    stays in place."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        state = state_of(module)
        for name, parameter in list(module._parameters.items()):
            if parameter is None or not isinstance(parameter, DTensor):
                continue
            expert = expert_mesh is not None and "ep" in (parameter.device_mesh.mesh_dim_names or ())
            kept = _kept(parameter, ("ep",) if expert else axes)
            if id(parameter) not in made:
                local = parameter._local_tensor
                value: Any = local
                if kept:
                    placements = [parameter.placements[i] for i in kept]
                    on = expert_mesh["ep"] if expert and expert_mesh is not None else mesh[axes]
                    value = DTensor.from_local(
                        local, on, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
                    )
                made[id(parameter)] = nn.Parameter(value.detach(), requires_grad=parameter.requires_grad)
            if state is not None and name in state.local:
                gradient, view = state.local[name]
                state.local[name] = (tuple(gradient[i] for i in kept), view)
            module._parameters[name] = made[id(parameter)]


def _placement(ranks: int) -> Any:
    """shard_placement_fn: the first dim that tp leaves alone and that divides, else FSDP's own choice."""

    def choose(parameter: nn.Parameter) -> Shard | None:
        if not isinstance(parameter, DTensor):
            return None
        cut = {p.dim for p in parameter.placements if isinstance(p, Shard)}
        if 0 not in cut:
            return None
        free = [d for d in range(parameter.ndim) if d not in cut and parameter.shape[d] % ranks == 0]
        return Shard(free[0]) if free else None

    return choose


def _expert_modules(model: nn.Module) -> list[nn.Module]:
    """The modules that directly hold parameters on the expert mesh."""
    return [m for m in model.modules() if any(_on_ep(p) for p in m._parameters.values())]


def _on_ep(parameter: Any) -> bool:
    return isinstance(parameter, DTensor) and "ep" in (parameter.device_mesh.mesh_dim_names or ())


def shard_model(
    model: nn.Module,
    mesh: DeviceMesh,
    plan_axes: tuple[str, ...],
    layers: tuple[str, ...],
    options: dict[str, Any],
    expert_mesh: DeviceMesh | None = None,
) -> None:
    """Shards experts over edp, each decoder layer and then the whole model over dp (x cp), in place. Every rank of `mesh` calls it,
    before an optimizer is made. Experts that only one group holds (edp is 1) stay as they are: their gradients are whole already."""
    for name in _OURS:
        if name in options:
            raise ApplyError(f"fully_shard: {name} follows from the plan's mesh; leave it out.")
    over = data_parallel_mesh(mesh)
    relabel(model, mesh, tuple(axis for axis in plan_axes if axis != "cp"), expert_mesh)
    place = _placement(over.size())
    if expert_mesh is not None:
        edp = expert_mesh["edp"]
        if edp.size() > 1:
            for module in _expert_modules(model):
                fully_shard(module, mesh=edp, shard_placement_fn=_placement(edp.size()), **options)
        else:
            options = {**options, "ignored_params": {p for p in model.parameters() if _on_ep(p)}}
    for name in layers:
        fully_shard(model.get_submodule(name), mesh=over, shard_placement_fn=place, **options)
    fully_shard(model, mesh=over, shard_placement_fn=place, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Backwards inside accumulate locally; the first one outside reduces them too."""
    root: Any = model
    root.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        root.set_requires_gradient_sync(True)
