"""build_plan: from a model and a mesh to a ShardingPlan. Reads shapes only; the model may be on the meta device."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..descriptors import InnerWrapper, LocalComputeFactory, ModelFamily
from ..errors import PlanError, PluginError, Refused
from ..plugins import get_registry
from .boundaries import find_boundaries, find_structure, owners
from .contract import Contract
from .finalise import finalise, tied_groups
from .overrides import Override, Overrides, apply_overrides
from .roles import assign_roles
from .sharding_plan import Loss, ShardingPlan
from .templates import VOCAB_EMBEDDING, PlanContext, contract_from

__all__ = ["LossSpec", "build_plan", "mesh_sizes", "suggest_overrides"]

LossSpec = Loss
VOCAB_LOSS = "vocab_parallel_cross_entropy"
MESH_AXES = ("dp", "cp", "tp")


def mesh_sizes(mesh: DeviceMesh | Mapping[str, int]) -> dict[str, int]:
    """{axis: degree} in the order dp, cp, tp, those of size 1 left out. PlanError for an axis that hyperpar doesn't know."""
    if isinstance(mesh, DeviceMesh):
        sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
        if not sizes:
            raise PlanError(
                "the mesh has no axis names; make it with make_mesh(dp=..., cp=..., tp=...) or name its dims."
            )
    else:
        sizes = dict(mesh)
    if "pp" in sizes:
        raise Refused(
            "the mesh has a pp axis; a plan describes one pipeline stage. Split the mesh by stage (mesh['dp', 'cp', 'tp'] on the"
            " ranks of a stage), and plan each stage's part of the model with its own mesh."
        )
    for axis, size in sizes.items():
        if axis not in MESH_AXES:
            raise PlanError(
                f"unknown mesh axis {axis!r} (known: {', '.join(MESH_AXES)}; the expert mesh is derived from them)."
            )
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise PlanError(f"mesh axis {axis}: a degree is a positive whole number, got {size!r}.")
    if list(sizes) != [axis for axis in MESH_AXES if axis in sizes]:
        if isinstance(mesh, DeviceMesh):
            raise PlanError(f"the mesh's axes are ordered {tuple(sizes)}; the order must be dp, cp, tp (tp innermost).")
        sizes = {axis: sizes[axis] for axis in MESH_AXES if axis in sizes}
    return {axis: size for axis, size in sizes.items() if size > 1}


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
    Raises PlanError (OverrideError, Refused) before anything changes. The same input gives the same plan, on any rank.
    """
    all_sizes = mesh_sizes(mesh_or_sizes)
    sizes = {axis: size for axis, size in all_sizes.items() if axis != "dp"}
    if cp_order not in ("head_tail", "contiguous"):
        raise PlanError(f"cp_order is {cp_order!r}; known: head_tail, contiguous.")
    if not derive:
        raise PlanError("derive=False isn't supported by this version.")
    tp = sizes.get("tp", 1)
    sequence_parallel = bool(sequence_parallel) and tp > 1
    family, family_provider = find_family(model)
    _refuse_limits(family, model, {**sizes, "ep": ep_size}, sequence_parallel)
    if ep_size != 1:
        raise Refused(f"ep_size={ep_size}: no boundary of this model holds experts over ep.")

    roles = assign_roles(model, family.roles if family else {})
    structure = find_structure(model)
    if sequence_parallel and (not structure.layers or structure.final_norm is None):
        raise Refused(
            "sequence parallel needs one list of decoder layers with a norm behind it, and this model has "
            f"{len(structure.layers)} layers and {'no final norm' if structure.layers else 'no list'}. Pass sequence_parallel=False."
        )
    tied = tied_groups(model)
    ctx = PlanContext(
        model=model, sizes=sizes, sequence_parallel=sequence_parallel, loss_parallel=bool(loss_parallel),
        vocab_embedding=get_registry().find(LocalComputeFactory, VOCAB_EMBEDDING) is not None, roles=roles,
        handlers=family.handlers if family else {}, structure=structure,
        tied=any({f"{structure.embed}.weight", f"{structure.head}.weight"} <= set(group) for group in tied),
    )  # fmt: skip
    found = find_boundaries(model, roles, structure, family.boundaries if family else {})
    owner_of = owners(model, {fqn for fqn, (template, _) in found.items() if template != "stack"})
    contracts = {}
    for fqn, (template, declared) in found.items():
        module = model.get_submodule(fqn)
        prefix = f"{fqn}." if fqn else ""
        owned = {
            name[len(prefix) :]: parameter
            for name, parameter in model.named_parameters(remove_duplicate=False)
            if owner_of.get(name) == fqn and name in roles
        }
        contract = contract_from(template, ctx, fqn, module, owned)
        if declared:
            contract = apply_overrides({fqn: contract}, Overrides((Override(match=fqn, **declared),)), {*sizes}, [fqn])[
                fqn
            ]
        contracts[fqn] = contract
    conditions = {*sizes, *(("sp",) if sequence_parallel else ())}
    contracts = apply_overrides(
        contracts, Overrides.of(overrides), conditions, (name for name, _ in model.named_modules()), trusted_modules
    )
    contracts = {fqn: _complete(contract, tp) for fqn, contract in contracts.items()}
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False)}
    boundaries = finalise(contracts, owner_of, shapes, roles, tied, sizes)
    _require_wrappers(boundaries, sizes, family)
    loss = _choose_loss(loss_parallel, ctx, boundaries)
    providers = _providers(boundaries, loss, family, family_provider)
    notes = []
    if tp > 1 and structure.embed and not ctx.vocab_embedding:
        notes.append(
            f"the embedding{' and the head tied to it are' if ctx.tied else ' is'} replicated: hyperpar-vocab-embedding isn't installed"
        )
    return ShardingPlan(
        model=getattr(getattr(model, "config", None), "model_type", None) or type(model).__name__,
        family=family.name if family else None, sizes=sizes, ep_size=ep_size, sequence_parallel=sequence_parallel,
        cp_order=cp_order, loss=loss, boundaries=boundaries, parameters=shapes, tied=tied, providers=providers, notes=tuple(notes),
    )  # fmt: skip


def _complete(contract: Contract, tp: int) -> Contract:
    """The defaults that an entry may leave open: attributes to divide by tp, and what a registered name's descriptor states."""
    from dataclasses import replace

    divide = {name: by or tp for name, by in contract.divide.items() if (by or tp) > 1}
    dispatch = contract.region_dispatch
    for kind, name in (("inner_wrapper", contract.inner_wrapper), ("local_compute", contract.local_compute_fn)):
        if isinstance(name, str):
            stated = getattr(get_registry(), kind)(name)[0].region_dispatch
            if dispatch is not None and dispatch != stated:
                raise PlanError(
                    f"{contract.fqn}: region_dispatch is {dispatch}, and {name}'s descriptor states {stated}; leave it out."
                )
            dispatch = stated
        elif name is not None and dispatch is None:
            raise PlanError(
                f"{contract.fqn}: a callable as {kind} needs region_dispatch: false if it communicates or runs custom kernels, else true."
            )
    if dispatch is True and not contract.injects:
        raise PlanError(
            f"{contract.fqn}: region_dispatch: true without an injection is what every boundary has; leave it out."
        )
    if contract.inner_wrapper is not None and contract.inner_target is None:
        raise PlanError(
            f"{contract.fqn}: inner_wrapper without inner_target; write inner_target: self, or a child's name."
        )
    if contract.inner_target is not None and contract.inner_wrapper is None:
        raise PlanError(f"{contract.fqn}: inner_target without inner_wrapper.")
    if contract.inner_wrapper is not None and contract.local_compute_fn is not None:
        raise PlanError(f"{contract.fqn}: inner_wrapper and local_compute_fn exclude each other.")
    if contract.inner_target not in (None, "self") and contract.inner_out_src is None:
        raise PlanError(
            f"{contract.fqn}: a child as inner_target needs inner_out_src: first_input, or a layout of its output."
        )
    if contract.options and not contract.injects:
        raise PlanError(
            f"{contract.fqn}: options {sorted(contract.options)} would go to nothing: no wrapper and no local compute."
        )
    return replace(contract, divide=divide, region_dispatch=dispatch)


def _require_wrappers(boundaries: Sequence[Contract], sizes: Mapping[str, int], family: ModelFamily | None) -> None:
    missing = [c.fqn for c in boundaries if c.template == "attention" and c.inner_wrapper is None]
    if "cp" not in sizes or not missing:
        return
    pattern = re.sub(r"\.\d+\.", ".*.", missing[0])
    registry = get_registry()
    installed = [wrapper.name for wrapper, _ in registry.offered(InnerWrapper) if wrapper.needs_axis == "cp"]
    suggested = [
        entry["inner_wrapper"]
        for entry in (family.suggestions.get("cp", ()) if family else ())
        if "inner_wrapper" in entry
    ]
    name = next((s for s in suggested if s in installed), installed[0] if installed else "sdpa_hf_ring")
    hint = f"{family.name} suggests {suggested[0]}; " if family and suggested else ""
    raise PlanError(
        f"cp={sizes['cp']} is active, and attention boundary {pattern!r} ({len(missing)} layers) declares no inner wrapper.\n"
        f"  {hint}installed: {', '.join(installed) or 'none (pip install hyperpar-cp-sdpa)'}\n"
        f'  plan_overrides:\n    - match: "*.{pattern.rpartition(".")[2]}"\n      when: cp\n      inner_target: self\n'
        f"      inner_wrapper: {name}"
    )


def _choose_loss(loss_parallel: bool | Loss, ctx: PlanContext, boundaries: Sequence[Contract]) -> Loss | None:
    if not loss_parallel:
        return None
    loss = loss_parallel if isinstance(loss_parallel, Loss) else Loss(VOCAB_LOSS)
    head = next((c for c in boundaries if c.fqn == ctx.structure.head), None)
    if ctx.tp == 1:
        raise Refused("loss_parallel: tp is 1, so the logits aren't sharded; leave it out.")
    if head is None or not any(layout.get("tp") for layout in head.out_src.values()):
        raise Refused(
            "loss_parallel: the output head is replicated, so the logits aren't sharded."
            + (" It is tied to the embedding: pip install hyperpar-vocab-embedding." if ctx.tied else "")
        )
    get_registry().loss(loss.name)
    return loss


def _providers(
    boundaries: Sequence[Contract], loss: Loss | None, family: ModelFamily | None, family_provider: str
) -> dict[str, str]:
    registry = get_registry()
    used: dict[str, str] = {}
    if family is not None:
        used[f"family {family.name}"] = family_provider
    for contract in boundaries:
        for kind, name in (
            ("inner_wrapper", contract.inner_wrapper),
            ("local_compute", contract.local_compute_fn),
            ("lowerer", contract.lowerer),
            *(("special_handler", handler) for handler in contract.special_handlers.values()),
        ):
            if isinstance(name, str):
                used[f"{kind} {name}"] = str(getattr(registry, kind)(name)[1])
    if loss is not None:
        used[f"loss {loss.name}"] = str(registry.loss(loss.name)[1])
    return dict(sorted(used.items()))


def suggest_overrides(model: nn.Module, mesh: DeviceMesh | Mapping[str, int], *, ep_size: int = 1) -> Overrides:
    """What the model's family suggests to declare for the active cp and ep: to read, and to pass to build_plan."""
    family, _ = find_family(model)
    active = [*(("cp",) if "cp" in mesh_sizes(mesh) else ()), *(("ep",) if ep_size > 1 else ())]
    entries = [entry for axis in active for entry in (family.suggestions.get(axis, ()) if family else ())]
    return Overrides(tuple(Override.from_data(entry, "suggestion") for entry in entries))
