"""build_plan: from a model and a mesh to a ShardingPlan. Reads shapes only; the model may be on the meta device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..descriptors import LocalComputeFactory, ModelFamily
from ..errors import PlanError, PluginError, Refused
from ..plugins import get_registry
from .adapters import refuse_copies
from .boundaries import Structure, find_boundaries, find_structure, owners
from .contract import Contract
from .cuts import check_cuts
from .degrees import MESH_AXES, mesh_sizes
from .experts import check_expert_degree, require_archetypes, suggested_archetypes
from .finalise import finalise, refuse_orphans, tied_groups
from .injections import completed, provided
from .merging import Merger
from .overrides import Override, Overrides
from .parametrised import refuse_parametrised
from .refusals import refuse
from .roles import assign_roles
from .sharding_plan import CP_ORDERS, Loss, ShardingPlan
from .shared_experts import with_shared_experts
from .templates import VOCAB_EMBEDDING, PlanContext, contract_from, cut_sections
from .yaml_files import plain_data, shown

__all__ = ["MESH_AXES", "LossSpec", "build_plan", "find_family", "mesh_sizes", "suggest_overrides"]

LossSpec = Loss
VOCAB_LOSS = "vocab_parallel_cross_entropy"


def find_family(model: nn.Module) -> tuple[ModelFamily | None, str]:
    """(the one installed adapter that knows this model, or None, its provider)."""
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    found = [
        (family, str(provider))
        for family, provider in get_registry().families()
        if (family.matches(model) if callable(family.matches) else model_type in family.matches)
    ]
    if len(found) > 1:
        names = " and ".join(f"{family.name} ({provider})" for family, provider in found)
        raise PluginError(f"two adapters know this model: {names}. Disable one with HYPERPAR_DISABLE_PLUGINS.")
    return found[0] if found else (None, "")


def _refuse_limits(
    family: ModelFamily | None, model: nn.Module, sizes: Mapping[str, int], sequence_parallel: bool
) -> None:
    if family is None:
        return
    degrees = {**{axis: 1 for axis in (*MESH_AXES, "ep")}, **sizes, "sp": int(sequence_parallel)}
    for limit in family.limits:
        if limit.applies(getattr(model, "config", None), degrees):
            raise Refused(f"{family.name}: {limit.cause}")


def build_plan(
    model: nn.Module,
    mesh_or_sizes: DeviceMesh | Mapping[str, int],
    *,
    overrides: Any = None,
    ep_size: int = 1,
    sequence_parallel: bool = True,
    loss_parallel: bool | Loss = False,
    cp_order: str = "head_tail",
    derive: bool = True,
    trusted_modules: Sequence[str] = (),
) -> ShardingPlan:
    """Plans `model` (real or meta; never touched) for a mesh or `{axis: degree}`, with tp, sp and cp as the degrees say.

    overrides: Override entries, a YAML file or text. loss_parallel: keep logits sharded on the vocab in the loss.
    derive=False: only what the overrides insert. trusted_modules: modules that YAML may name as `module:object`.
    Raises PlanError (OverrideError, Refused) or PluginError before anything changes. The same input gives the same plan, on any rank.
    """
    if not isinstance(model, nn.Module):
        raise PlanError(f"build_plan takes a torch.nn.Module, got {shown(model)}.")
    all_sizes = mesh_sizes(mesh_or_sizes)
    _check_arguments(cp_order, sequence_parallel, derive, trusted_modules)
    check_expert_degree(ep_size, all_sizes)
    sizes = {axis: size for axis, size in all_sizes.items() if axis != "dp"}
    tp = sizes.get("tp", 1)
    sequence_parallel = sequence_parallel and tp > 1
    family, family_provider = find_family(model)
    _refuse_limits(family, model, {**sizes, "ep": ep_size}, sequence_parallel)
    refuse_parametrised(model, sizes)
    refuse_copies(model)
    _refuse_shared_modules(model)
    roles = assign_roles(model, family.roles if family else {})
    structure = find_structure(model)
    if sequence_parallel and derive:
        if not overrides:  # which could insert owners
            refuse_orphans([name for name, _ in model.named_parameters() if name not in roles])
        _require_stack(structure)
    tied = tied_groups(model)
    ctx = PlanContext(
        model=model, sizes=sizes, sequence_parallel=sequence_parallel, loss_parallel=loss_parallel is not False,
        vocab_embedding=get_registry().find(LocalComputeFactory, VOCAB_EMBEDDING) is not None, roles=roles,
        handlers=family.handlers if family else {}, structure=structure,
        tied=any({f"{structure.embed}.weight", f"{structure.head}.weight"} <= set(group) for group in tied),
        ep=ep_size,
    )  # fmt: skip
    conditions = {*sizes, *(("sp",) if sequence_parallel else ()), *(("ep",) if ep_size > 1 else ())}
    merger = Merger(
        model, frozenset(conditions), tp, tuple(trusted_modules), lambda name, handler: cut_sections(ctx, name, handler)
    )
    derived = _derived(ctx, family, merger) if derive else {}
    contracts, owner_of = merger.apply(derived, Overrides.of(overrides))
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False)}
    completed_ = [completed(contract) for contract in contracts.values()]
    boundaries = finalise(completed_, owner_of, shapes, sizes, ep_size)
    require_archetypes(boundaries, ep_size, family)
    loss = _choose_loss(loss_parallel, ctx, boundaries)
    plan = ShardingPlan(
        model=getattr(getattr(model, "config", None), "model_type", None) or type(model).__name__,
        family=family.name if family else None, sizes=sizes, ep_size=ep_size, sequence_parallel=sequence_parallel,
        cp_order=cp_order, loss=loss, boundaries=boundaries, parameters=shapes, tied=tied, notes=_notes(ctx),
    )  # fmt: skip
    refuse(model, plan, family)
    for contract in boundaries:
        if tp > 1 and contract.fqn in derived:
            check_cuts(derived[contract.fqn], contract, shapes)
    providers = provided(boundaries)
    if family is not None:
        providers[f"family {family.name}"] = family_provider
    if loss is not None:
        providers[f"loss {loss.name}"] = str(get_registry().loss(loss.name)[1])
    return replace(plan, providers=dict(sorted(providers.items())))


def _check_arguments(cp_order: Any, sequence_parallel: Any, derive: Any, trusted_modules: Any) -> None:
    if cp_order not in CP_ORDERS:
        raise PlanError(f"cp_order is {shown(cp_order)}; known: {', '.join(CP_ORDERS)}.")
    for name, value in (("sequence_parallel", sequence_parallel), ("derive", derive)):
        if not isinstance(value, bool):
            raise PlanError(f"{name} is {shown(value)}; expected True or False.")
    if isinstance(trusted_modules, str) or not all(isinstance(name, str) for name in trusted_modules):
        raise PlanError(f"trusted_modules is {shown(trusted_modules)}; expected a list of module names.")


def _refuse_shared_modules(model: nn.Module) -> None:
    """Refused where one module with parameters stands in two places: its boundary would have two layouts."""
    first: dict[int, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        known = first.setdefault(id(module), name)
        if known != name and any(True for _ in module.parameters()):
            raise Refused(
                f"{known} and {name} are one module, and a boundary stands in one place.\n"
                "  Give each place a module of its own; their parameters may be tied (one Parameter under both names)."
            )


def _require_stack(structure: Structure) -> None:
    if not structure.layers or structure.final_norm is None:
        raise Refused(
            "sequence parallel needs one list of decoder layers with a norm behind it, and this model has "
            f"{len(structure.layers)} layers and {'no final norm' if structure.layers else 'no list'}. Pass sequence_parallel=False."
        )


def _derived(ctx: PlanContext, family: ModelFamily | None, merger: Merger) -> dict[str, Contract]:
    """The contracts that roles, templates and the family give, by module."""
    modules = dict(ctx.model.named_modules())
    found = find_boundaries(ctx.model, ctx.roles, ctx.structure, family.boundaries if family else {})
    owner_of = owners(ctx.model, {fqn for fqn, (template, _) in found.items() if template != "stack"})
    owned: dict[str, dict[str, nn.Parameter]] = {fqn: {} for fqn in found}
    for name, parameter in ctx.model.named_parameters(remove_duplicate=False):
        owner = owner_of[name]
        if owner is not None and name in ctx.roles:
            owned[owner][name[len(owner) + 1 if owner else 0 :]] = parameter
    contracts: dict[str, Contract] = {}
    for fqn, (template, declared) in found.items():
        contract = contract_from(template, ctx, fqn, modules[fqn], owned[fqn])
        contract = merger.declared(contract, declared, list(owned[fqn])) if declared else contract
        if contract.template == "moe_mlp":
            contracts.update(with_shared_experts(ctx, contract, modules[fqn], owned[fqn]))
        else:
            contracts[fqn] = contract
    return contracts


def _notes(ctx: PlanContext) -> tuple[str, ...]:
    if ctx.tp == 1 or not ctx.structure.embed or ctx.vocab_embedding:
        return ()
    what = "the embedding and the head tied to it are" if ctx.tied else "the embedding is"
    return (f"{what} replicated: hyperpar-vocab-embedding isn't installed",)


def _choose_loss(loss_parallel: bool | Loss, ctx: PlanContext, boundaries: Sequence[Contract]) -> Loss | None:
    if loss_parallel is False:
        return None
    if loss_parallel is not True and not isinstance(loss_parallel, Loss):
        raise PlanError(f"loss_parallel is {shown(loss_parallel)}; expected True, False or LossSpec(name, options).")
    loss = loss_parallel if isinstance(loss_parallel, Loss) else Loss(VOCAB_LOSS)
    head = next((c for c in boundaries if c.fqn == ctx.structure.head), None)
    if ctx.tp == 1:
        raise Refused("loss_parallel: tp is 1, so the logits aren't sharded; leave it out.")
    if head is None or not any(layout.get("tp") for layout in head.out_src.values()):
        raise Refused(
            "loss_parallel: the output head is replicated, so the logits aren't sharded."
            + (" It is tied to the embedding: pip install hyperpar-vocab-embedding." if ctx.tied else "")
        )
    return Loss(loss.name, plain_data(loss.options, f"loss {loss.name}"))


def suggest_overrides(model: nn.Module, mesh: DeviceMesh | Mapping[str, int], *, ep_size: int = 1) -> Overrides:
    """What the model's family suggests to declare for the active cp and ep: to read, and to pass to build_plan."""
    family, _ = find_family(model)
    entries = family.suggestions.get("cp", ()) if family and "cp" in mesh_sizes(mesh) else ()
    suggested = tuple(Override.from_data(entry, "suggestion") for entry in entries)
    if ep_size > 1:
        roles = assign_roles(model, family.roles if family else {})
        found = find_boundaries(model, roles, find_structure(model), family.boundaries if family else {})
        blocks = [fqn for fqn, (template, _) in found.items() if template == "moe_mlp"]
        suggested += suggested_archetypes(family, blocks, [fqn for fqn in found if fqn not in blocks])
    return Overrides(suggested)
