"""Everything that a model and a finished plan decide between them: said when the plan is made, and again before it is applied."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

from torch import nn

from ..descriptors import ModelFamily
from ..errors import OverrideError, PlanError, Refused
from ..plugins import check_factory, get_registry
from .consistency import check_layouts, check_neighbours, check_ownership, check_tied
from .contract import Contract
from .finalise import tied_groups
from .heads import check_counts
from .injections import check_convolutions, check_injection, provided, require_wrappers
from .names import listed, nearest
from .sharding_plan import ShardingPlan
from .shared_experts import check_shared_experts
from .stacks import check_stacks

__all__ = ["refuse"]


def refuse(model: nn.Module, plan: ShardingPlan, family: ModelFamily | None) -> None:
    """Raises PlanError (OverrideError, Refused) or PluginError for whatever would fail, do nothing, or make numbers wrong.

    Reads names, shapes and signatures; `model` may be on the meta device.
    """
    check_ownership(plan.boundaries, plan.parameters, plan.tied)
    sizes = {**plan.sizes, **({"ep": plan.ep_size} if plan.ep_size > 1 else {})}
    modules = dict(model.named_modules())
    for contract in plan.boundaries:
        if contract.fqn not in modules:
            raise OverrideError(f"the plan has a boundary at {contract.fqn!r}, and the model has no such module.")
        module = modules[contract.fqn]
        check_layouts(contract, plan.parameters, plan.sizes, plan.ep_size)
        _check_inputs(contract, module)
        check_counts(contract.fqn, module, contract.divide, contract.counts)
        check_injection(contract, module, model, sizes)
        _check_lowerer(contract, sizes)
    check_stacks(model, plan.boundaries, tied_groups(model))
    check_tied(plan.boundaries, plan.tied)
    check_neighbours(plan.boundaries)
    check_shared_experts(plan.boundaries)
    provided(plan.boundaries)
    require_wrappers(plan.boundaries, plan.sizes, family)
    check_convolutions(model, plan.boundaries, plan.sizes)
    _check_loss(plan)


def _check_inputs(contract: Contract, module: nn.Module) -> None:
    takes = list(inspect.signature(type(module).forward).parameters)[1:]
    for name in contract.in_src:
        if name not in takes:
            raise OverrideError(
                f"{contract.fqn}: declares input {name!r}, and {type(module).__name__}.forward takes {listed(takes)}.{nearest(name, takes)}"
            )


def _check_lowerer(contract: Contract, sizes: Mapping[str, int]) -> None:
    if contract.lowerer is None:
        return
    lowerer = get_registry().lowerer(contract.lowerer)[0]
    if lowerer.axes and not set(lowerer.axes) & set(sizes):
        raise OverrideError(
            f"{contract.fqn}: lowerer {contract.lowerer} works over {listed(lowerer.axes)}, and active are {listed(sizes)}."
        )


def _check_loss(plan: ShardingPlan) -> None:
    if plan.loss is None:
        return
    descriptor = get_registry().loss(plan.loss.name)[0]
    if descriptor.needs_axis is not None and descriptor.needs_axis not in plan.sizes:
        raise Refused(f"loss {plan.loss.name} works over {descriptor.needs_axis}, which is 1 here; leave it out.")
    head = next((c for c in plan.boundaries if c.template == "lm_head"), None)
    if head is None or not any(layout.get("tp") for layout in head.out_src.values()):
        raise PlanError(f"loss {plan.loss.name}: no output head of the plan yields sharded logits.")
    check_factory(descriptor.factory, plan.loss.options, f"loss {plan.loss.name}")
