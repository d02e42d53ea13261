"""The last steps of a plan: gradients, and every refusal that needs the whole of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn
from torch.distributed.tensor import Shard

from ..collectives.transition import transitions
from ..errors import OverrideError, PlanError, Refused
from ..placement import Layout, format_layout
from .contract import Contract
from .gradients import with_gradients

__all__ = ["finalise", "tied_groups"]


def tied_groups(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Groups of parameter names that share one parameter."""
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return tuple(tuple(g) for g in groups.values() if len(g) > 1)


def _check_layouts(contract: Contract, shapes: Mapping[str, tuple[int, ...]], axes: Iterable[str]) -> None:
    """Every dim exists, in_dst and out_dst have their counterparts, every step is one that the table knows."""
    axes = tuple(axes)
    for name, layout in contract.params.items():
        ndim = len(shapes[f"{contract.fqn}.{name}" if contract.fqn else name])
        for axis, placement in layout.items():
            if isinstance(placement, Shard) and not -ndim <= placement.dim < ndim:
                raise OverrideError(
                    f"{contract.fqn}.{name}: {axis}: shard({placement.dim}) of a parameter with {ndim} dims."
                )
    for kind, src, dst in (("in", contract.in_src, contract.in_dst), ("out", contract.out_src, contract.out_dst)):
        if set(src) != set(dst):
            name = sorted(set(src) ^ set(dst))[0]
            have, need = (f"{kind}_src", f"{kind}_dst") if name in src else (f"{kind}_dst", f"{kind}_src")
            raise OverrideError(f"{contract.fqn}: {have} declares {name!r}, and {need} doesn't; declare both.")
    unused = sorted(set(contract.in_grad) - set(contract.in_dst))
    if unused:
        raise OverrideError(
            f"{contract.fqn}.in_grad: no input {unused[0]!r} (inputs: {', '.join(contract.in_dst) or 'none'})."
        )
    for name, layout in contract.in_dst.items():
        _steps(contract, f"input {name}", contract.in_src[name], layout, contract.in_grad.get(name, {}), axes)
    for name, layout in contract.out_dst.items():
        _steps(contract, f"output {name}", contract.out_src[name], layout, {}, axes)


def _steps(contract: Contract, what: str, src: Layout, dst: Layout, grad: Layout, axes: tuple[str, ...]) -> None:
    try:
        transitions(src, dst, grad, axes)
    except PlanError as error:
        raise type(error)(f"{contract.fqn}: {what}: {error}") from None


def _check_tied(
    contracts: Mapping[str, Contract], owners: Mapping[str, str | None], tied: tuple[tuple[str, ...], ...]
) -> None:
    for group in tied:
        held = {}
        for name in group:
            fqn = owners[name] or ""
            held[name] = format_layout(contracts[fqn].params[name[len(fqn) + 1 if fqn else 0 :]])
        if len({str(layout) for layout in held.values()}) > 1:
            text = "; ".join(f"{name} {layout or 'replicate'}" for name, layout in held.items())
            raise PlanError(f"tied parameters are one tensor and must be held alike: {text}.")


def finalise(
    contracts: Mapping[str, Contract],
    owners: Mapping[str, str | None],
    shapes: Mapping[str, tuple[int, ...]],
    roles: Mapping[str, str],
    tied: tuple[tuple[str, ...], ...],
    axes: Iterable[str],
) -> tuple[Contract, ...]:
    """The contracts with their gradients, after everything that only the whole plan can refuse."""
    axes = tuple(axes)
    orphans = [name for name, owner in owners.items() if owner is None or name not in roles]
    if orphans:
        raise Refused(
            f"{len(orphans)} parameters have no owner or no role: {', '.join(orphans[:4])}{', ...' if len(orphans) > 4 else ''}.\n"
            "  No installed family adapter knows this model, and the generic rules don't recognise these.\n"
            "  Give them roles in a family adapter (hook hyperpar_model_families), or insert boundaries for their modules."
        )
    for contract in contracts.values():
        _check_layouts(contract, shapes, axes)
    _check_tied(contracts, owners, tied)
    return tuple(with_gradients(contract, axes) for contract in contracts.values())
