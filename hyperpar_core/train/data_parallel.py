"""FSDP2 on a planned model: torch's fully_shard over dp (and cp), experts over edp, with sums instead of means.

Each rank's loss is its share of the global mean, so gradients are summed: on every FSDP module the reduction is forced to a sum and
its divide factor is 1, which is exact in float32, bfloat16 and float64. FSDP refuses parameters on meshes that overlap its own, so
the parameters are relabelled first, from all axes to the ones that the plan cuts them by. FSDP cuts another dim than tp does where
it can: torch's strided shards of one dim gather wrong when they are uneven.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard

from ..apply.generated import state_of
from ..errors import ApplyError

__all__ = ["Groups", "data_parallel_mesh", "no_sync", "relabel", "shard_model"]

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


def _expert_modules(module: nn.Module) -> list[nn.Module]:
    """The topmost modules that hold parameters on the expert mesh and no others: their code may read those of the modules inside."""
    held = list(module.parameters())
    if held and all(_on_ep(p) for p in held) and _is_called(module):
        return [module]
    inside = [found for child in module.children() for found in _expert_modules(child)]
    return [*inside, module] if any(_on_ep(p) for p in module._parameters.values()) else inside


def _on_ep(parameter: Any) -> bool:
    return isinstance(parameter, DTensor) and "ep" in (parameter.device_mesh.mesh_dim_names or ())


def _of_another_dtype(model: nn.Module, layers: tuple[str, ...]) -> list[nn.Module]:
    """The modules whose trainable parameters have another dtype than most of their layer, such as a router in float32 in a model of
    bfloat16. FSDP wants one dtype in a group, so each is a group of its own. ApplyError where a module holds two itself."""
    found: dict[nn.Module, None] = {}
    inside = {id(p) for name in layers for p in model.get_submodule(name).parameters()}
    for scope in (*layers, ""):
        held = {n: p for n, p in model.get_submodule(scope).named_parameters() if p.requires_grad and not _on_ep(p)}
        if not scope:
            held = {name: p for name, p in held.items() if id(p) not in inside}
        elements: Counter[torch.dtype] = Counter()
        for p in held.values():
            elements[p.dtype] += p.numel()
        most = elements.most_common(1)[0][0] if elements else None
        for name, p in held.items():
            if p.dtype is most:
                continue
            path = f"{scope}.{name}".lstrip(".").split(".")[:-1]
            owner = model.get_submodule(".".join(path))
            if _dtypes(owner) != {p.dtype}:
                others = ", ".join(sorted(str(d) for d in _dtypes(owner) - {p.dtype}))
                raise ApplyError(
                    f"fully_shard: {f'{scope}.{name}'.lstrip('.')} is {p.dtype}, and its module holds {others} beside it; FSDP shards"
                    " parameters of one dtype together.\n  Keep all weights in one dtype and let FSDP compute in another: model.float(),"
                    " and fully_shard(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))."
                )
            while len(path) > 1 and _dtypes(above := model.get_submodule(".".join(path[:-1]))) == {p.dtype} and _is_called(above):
                owner = above
                path.pop()
            found[owner] = None
    return list(found)


def _dtypes(module: nn.Module) -> set[torch.dtype]:
    return {p.dtype for p in module.parameters() if p.requires_grad}


def _is_called(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def _own_dtype(options: dict[str, Any]) -> dict[str, Any]:
    """The mixed precision of a module that computes in its own dtype."""
    policy = options.get("mp_policy")
    return {} if policy is None else {"mp_policy": replace(policy, param_dtype=None)}


@dataclass(frozen=True)
class Groups:
    """What FSDP shards over, and the modules that are groups of their own. Made before anything changes: it raises what can be raised.

    apart: modules of another dtype than their layer; they compute in it, whatever mp_policy says
    """

    over: DeviceMesh
    layers: tuple[str, ...]
    apart: tuple[nn.Module, ...]
    options: dict[str, Any]

    @classmethod
    def of(cls, model: nn.Module, mesh: DeviceMesh, layers: tuple[str, ...], options: dict[str, Any]) -> Groups:
        known = [name for name in inspect.signature(fully_shard).parameters if name not in ("module", *_OURS)]
        for name in options:
            if name in _OURS:
                raise ApplyError(f"fully_shard: {name} follows from the plan's mesh; leave it out.")
            if name not in known:
                raise ApplyError(f"fully_shard: torch's has no option {name} (options: {', '.join(known)}).")
        return cls(data_parallel_mesh(mesh), layers, tuple(_of_another_dtype(model, layers)), options)


def shard_model(
    model: nn.Module,
    mesh: DeviceMesh,
    plan_axes: tuple[str, ...],
    groups: Groups,
    expert_mesh: DeviceMesh | None = None,
) -> None:
    """Shards experts over edp, each decoder layer and then the whole model over dp (x cp), in place. Every rank of `mesh` calls it,
    before an optimizer is made. Experts that only one group holds (edp is 1) stay as they are: their gradients are whole already."""
    over, options = groups.over, groups.options
    relabel(model, mesh, tuple(axis for axis in plan_axes if axis != "cp"), expert_mesh)
    place = _placement(over.size())
    if expert_mesh is not None:
        edp = expert_mesh["edp"]
        if edp.size() > 1:
            for module in _expert_modules(model):
                fully_shard(module, mesh=edp, shard_placement_fn=_placement(edp.size()), **options)
        else:
            options = {**options, "ignored_params": {p for p in model.parameters() if _on_ep(p)}}
    for module in groups.apart:
        fully_shard(module, mesh=over, shard_placement_fn=place, **{**options, **_own_dtype(options)})
    for name in groups.layers:
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
