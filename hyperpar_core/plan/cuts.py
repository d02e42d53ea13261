"""Whether an override's placements over tp agree: how weights are cut decides what the compute needs and what it yields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.distributed.tensor import Replicate, Shard

from ..errors import OverrideError
from ..placement import Layout, Placement, format_placement
from .contract import Contract
from .names import listed

__all__ = ["check_cuts", "kept_uses"]


def kept_uses(contract: Contract, params: Mapping[str, Layout]) -> dict[str, Layout]:
    """The uses of parameters that hold on when `params` replaces the field: where nothing is cut any more, nothing is summed or shared."""
    cut = [name for name, layout in contract.params.items() if isinstance(layout.get("tp"), Shard)]
    if cut and not any(isinstance(params[name].get("tp"), Shard) for name in cut if name in params):
        return {}
    return {n: use for n, use in contract.param_use.items() if _plain(params[n]) == _plain(contract.params.get(n, {}))}


def _plain(layout: Layout) -> dict[str, Placement]:
    return {axis: placement for axis, placement in layout.items() if not isinstance(placement, Replicate)}


def check_cuts(derived: Contract, contract: Contract, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """OverrideError unless `contract`, merged over `derived`, cuts its weights over tp as derived and takes and yields what was derived,
    or holds them all whole and yields what it takes.

    A boundary with an injection, with other parameters or handlers than derived, or that cuts where nothing was derived to be cut is
    left to check_plan.
    """
    fields = ("params", "in_dst", "out_src")
    if derived.injects or contract.injects or set(derived.params) != set(contract.params):
        return
    if contract.special_handlers and contract.special_handlers != derived.special_handlers:
        return
    if not contract.out_src or all(_over_tp(derived, f, shapes) == _over_tp(contract, f, shapes) for f in fields):
        return
    before, after = _over_tp(derived, "params", shapes), _over_tp(contract, "params", shapes)
    if before == after and before:
        for field in fields[1:]:
            given, needed = _first(contract, field), _first(derived, field)
            if given != needed:
                raise OverrideError(
                    f"{contract.fqn}.{field} is {_text(given)} over tp, and with its weights cut ({_cuts(before)}) the compute"
                    f" {'needs' if field == 'in_dst' else 'yields'} {_text(needed)}.\n"
                    f"  Declare {field} {_text(needed)} over tp, or hold every weight of it as replicate."
                )
        return
    if after:
        if before:
            raise OverrideError(
                f"{contract.fqn}.params: {_cuts(after)} over tp; these weights are cut together ({_cuts(before)}) or not at all.\n"
                "  Declare them so, or insert boundaries of their own for the projections that differ."
            )
        return
    if not before and not contract.in_dst:
        return
    taken, given = _first(contract, "in_dst"), _first(contract, "out_src")
    if contract.template == "attention" and isinstance(taken, Shard):
        raise OverrideError(
            f"{contract.fqn}.in_dst is {_text(taken)} over tp, and attention with whole weights needs replicate: it sees all tokens."
        )
    if given != taken:
        raise OverrideError(
            f"{contract.fqn}.out_src is {_text(given)} over tp, and with whole weights the compute yields {_text(taken)}, as in_dst says.\n"
            f"  Declare out_src {_text(taken)} over tp" + (f", or cut the weights: {_cuts(before)}." if before else ".")
        )
    if before and contract.divide:
        raise OverrideError(
            f"{contract.fqn}: its weights are whole, and {listed(contract.divide)} would be divided. Write tp_divide_attrs: none."
        )


def _over_tp(contract: Contract, field: str, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """{name: placement over tp} of what isn't replicated; a parameter's dims counted from the front."""
    found = {}
    for name, layout in getattr(contract, field).items():
        placement = layout.get("tp")
        if placement is None or isinstance(placement, Replicate):
            continue
        if field == "params" and isinstance(placement, Shard):
            placement = Shard(placement.dim % len(shapes[f"{contract.fqn}.{name}" if contract.fqn else name]))
        found[name] = placement
    return found


def _first(contract: Contract, field: str) -> Placement | None:
    layout: Layout = next(iter(getattr(contract, field).values()), {})
    placement = layout.get("tp")
    return None if isinstance(placement, Replicate) else placement


def _text(placement: Placement | None) -> str:
    return "replicate" if placement is None else format_placement(placement)


def _cuts(cuts: Mapping[str, Placement]) -> str:
    return listed([f"{name} {format_placement(placement)}" for name, placement in cuts.items()])
