"""The last steps of a contract: one form for equal layouts, and the placements of gradients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from torch.distributed.tensor import Replicate

from ..errors import Refused
from ..placement import Layout, Placement
from .consistency import check_layouts
from .contract import Contract
from .gradients import with_gradients

__all__ = ["finalise", "refuse_orphans", "tied_groups"]


def tied_groups(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Groups of parameter names that share one parameter."""
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return tuple(tuple(g) for g in groups.values() if len(g) > 1)


def finalise(
    contracts: Sequence[Contract],
    owners: Mapping[str, str | None],
    shapes: Mapping[str, tuple[int, ...]],
    axes: Iterable[str],
    ep_size: int,
) -> tuple[Contract, ...]:
    """The contracts with their gradients. Refused for a parameter that no boundary owns."""
    axes = tuple(axes)
    held = {f"{c.fqn}.{name}" if c.fqn else name for c in contracts for name in c.params}
    orphans = [name for name in owners if name not in held]
    refuse_orphans(orphans)
    active = {*axes, *(("ep",) if ep_size > 1 else ())}
    plain = [_canonical(contract, active) for contract in contracts]
    for contract in plain:
        check_layouts(contract, shapes, axes, ep_size)
    return tuple(with_gradients(contract, axes) for contract in plain)


def refuse_orphans(orphans: Sequence[str]) -> None:
    """Refused where there are parameters that no boundary owns."""
    if orphans:
        raise Refused(
            f"{len(orphans)} parameters have no owner or no role: {', '.join(orphans[:4])}{', ...' if len(orphans) > 4 else ''}.\n"
            "  No installed family adapter knows this model, and the generic rules don't recognise these.\n"
            "  Give them roles in a family adapter (hook hyperpar_model_families), or insert boundaries for their modules."
        )


def _canonical(contract: Contract, active: set[str]) -> Contract:
    """Axes that aren't active, replication said aloud and divisors of 1 left out: equal contracts are then equal."""
    fields = ("params", "in_src", "in_dst", "out_src", "out_dst")
    made: dict[str, Any] = {f: {n: _plain(layout, active) for n, layout in getattr(contract, f).items()} for f in fields}
    grads = {n: {a: p for a, p in layout.items() if a in active} for n, layout in contract.in_grad.items()}
    divide = {name: by for name, by in contract.divide.items() if by > 1}
    return replace(contract, **made, in_grad=grads, divide=divide)


def _plain(layout: Layout, active: set[str]) -> dict[str, Placement]:
    return {axis: p for axis, p in layout.items() if axis in active and not isinstance(p, Replicate)}
