"""Everything about a model, a plan and a mesh that can be wrong, said before anything is changed."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..errors import ApplyError
from ..plan.build import find_family, mesh_sizes
from ..plan.contract import Contract
from ..plan.injections import provided
from ..plan.refusals import refuse
from ..plan.sharding_plan import ShardingPlan
from ..plugins import get_registry
from .generated import state_of

__all__ = ["MODES", "other_versions", "preflight", "record"]

logger = logging.getLogger("hyperpar")

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
MODES = ("production", "validate")


def _check_model(model: nn.Module, plan: ShardingPlan) -> None:
    if any(state_of(module) is not None for module in model.modules()):
        raise ApplyError("this model has a plan on it already; call undo() on what apply_plan returned first.")
    if any(type(module).__name__.startswith("FSDP") and hasattr(module, "unshard") for module in model.modules()):
        raise ApplyError(
            "this model is sharded by FSDP already; apply the plan first, then applied.fully_shard() or fully_shard()."
        )
    have = {name: tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False)}
    for name in sorted({*have, *plan.parameters}):
        if name not in have:
            raise ApplyError(
                f"the plan was made for a model with {name!r}, which this one lacks; build the plan from this model."
            )
        if name not in plan.parameters:
            raise ApplyError(f"parameter {name!r} isn't in the plan; build the plan from this model as it is now.")
        if have[name] != tuple(plan.parameters[name]):
            raise ApplyError(f"{name} is {have[name]} here and {tuple(plan.parameters[name])} in the plan.")
    distributed = [name for name, p in model.named_parameters() if isinstance(p, DTensor)]
    if distributed:
        raise ApplyError(
            f"{distributed[0]} is a DTensor already ({len(distributed)} parameters are); apply_plan takes whole parameters."
        )
    devices = sorted({str(p.device) for p in model.parameters()})
    if len(devices) > 1:
        raise ApplyError(f"the parameters are on several devices ({', '.join(devices)}); move the model to one.")
    odd = [f"{name} is {p.dtype}" for name, p in model.named_parameters() if p.dtype not in DTYPES]
    if odd:
        raise ApplyError(f"the model is quantised ({odd[0]}); parameters must be {', '.join(map(str, DTYPES))}.")


def _check_forward(module: nn.Module, name: str) -> None:
    if "forward" in module.__dict__:
        raise ApplyError(
            f"{name}: its forward was replaced on the instance, so a boundary on its class would never run.\n"
            "  Undo that (del module.forward) before apply_plan, or put the replacement on the class."
        )


def _check_boundary(model: nn.Module, contract: Contract) -> None:
    try:
        module = model.get_submodule(contract.fqn)
    except AttributeError:
        raise ApplyError(f"the plan has a boundary at {contract.fqn!r}, and the model has no such module.") from None
    _check_forward(module, contract.fqn)


def preflight(
    model: nn.Module, plan: ShardingPlan, mesh: DeviceMesh, mode: str, data_parallel: str, weights: str
) -> None:
    """Raises ApplyError, PlanError or PluginError for anything that would fail, or make numbers wrong, later. Changes nothing."""
    if mode not in MODES:
        raise ApplyError(f"mode {mode!r}; known: {', '.join(MODES)}.")
    if data_parallel not in ("core", "external"):
        raise ApplyError(f"data_parallel {data_parallel!r}; known: core, external.")
    if weights not in ("check", "broadcast", "trust"):
        raise ApplyError(f"weights {weights!r}; known: check, broadcast, trust.")
    sizes = {axis: size for axis, size in mesh_sizes(mesh).items() if axis != "dp"}
    if sizes != dict(plan.sizes):
        raise ApplyError(f"the plan is for {_text(plan.sizes)}, and the mesh has {_text(sizes)}.")
    _check_model(model, plan)
    _check_forward(model, type(model).__name__)
    device = next((p.device.type for p in model.parameters()), mesh.device_type)
    if device not in (mesh.device_type, "meta"):
        raise ApplyError(f"the model is on {device}, and the mesh is for {mesh.device_type}; move the model first.")
    for contract in plan.boundaries:
        _check_boundary(model, contract)
    family, _ = find_family(model)
    if (family.name if family else None) != plan.family:
        raise ApplyError(
            f"the plan was made with family adapter {plan.family}, and here it is {family.name if family else None}."
        )
    refuse(model, plan, family)
    for sentence in other_versions(plan):
        if not dist.is_initialized() or dist.get_rank() == 0:
            logger.warning(sentence)


def other_versions(plan: ShardingPlan) -> list[str]:
    """One sentence for each plugin that the plan was made with in another version than is installed here."""
    now = provided(plan.boundaries)
    now.update({f"family {family.name}": str(provider) for family, provider in get_registry().families()})
    if plan.loss is not None:
        now[f"loss {plan.loss.name}"] = str(get_registry().loss(plan.loss.name)[1])
    moved: dict[tuple[str, str], list[str]] = {}
    for what, then in plan.providers.items():
        if what in now and now[what] != then:
            moved.setdefault((then, now[what]), []).append(what)
    return [
        f"the plan was made with {then}, and {today} is installed ({', '.join(what)}): compare it with a new plan by diff()"
        for (then, today), what in moved.items()
    ]


def record(
    plan: ShardingPlan, mesh: DeviceMesh, options: Mapping[str, Any], hashes: Mapping[str, str]
) -> dict[str, Any]:
    """What must be equal on all ranks."""
    import transformers

    return {
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "plugins": {plugin: f"{dist} {version}" for plugin, dist, version in get_registry().digest_items()},
        "mesh": f"{mesh.mesh_dim_names} {tuple(mesh.shape)}",
        "options": dict(options),
        "plan": plan.digest(),
        "weights": dict(hashes),
    }


def _text(sizes: Mapping[str, int]) -> str:
    return " x ".join(f"{axis}={size}" for axis, size in sizes.items()) or "one rank"
