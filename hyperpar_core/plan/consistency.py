"""What must hold inside a plan, whatever made it: build_plan, a file, a hand."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch.distributed.tensor import Partial, Shard

from ..collectives.transition import transitions
from ..errors import OverrideError, PlanError
from ..placement import Layout, format_layout, format_placement
from .contract import Contract
from .names import listed

__all__ = ["check_layouts", "check_neighbours", "check_ownership", "check_tied", "layout_text"]

_MOST_DIMS = 5  # of what travels between boundaries


def layout_text(layout: Layout) -> str:
    """`shard(1) over tp`, or `replicate`."""
    cut = {axis: text for axis, text in format_layout(layout).items() if text != "replicate"}
    return ", ".join(f"{text} over {axis}" for axis, text in cut.items()) or "replicate"


def check_ownership(
    boundaries: Sequence[Contract], parameters: Mapping[str, Any], tied: Iterable[Sequence[str]] = ()
) -> None:
    """Every parameter belongs to exactly one boundary, every boundary stands once."""
    owned: dict[str, str] = {}
    seen = set()
    for contract in boundaries:
        if contract.fqn in seen:
            raise OverrideError(f"boundary {contract.fqn!r} stands twice in the plan.")
        seen.add(contract.fqn)
        for name in contract.params:
            fqn = f"{contract.fqn}.{name}" if contract.fqn else name
            if fqn in owned:
                raise OverrideError(
                    f"{fqn}: owned by two boundaries, {owned[fqn]} and {contract.fqn}; take it out of one."
                )
            if fqn not in parameters:
                raise OverrideError(f"{contract.fqn}: no parameter {name!r} among the plan's.")
            owned[fqn] = contract.fqn
        for field in ("param_use", "param_grad", "sections", "special_handlers"):
            stray = [name for name in getattr(contract, field) if name not in contract.params]
            if stray:
                raise OverrideError(f"{contract.fqn}.{field}: {stray[0]!r} isn't among the boundary's params.")
    orphans = [name for name in parameters if name not in owned]
    if orphans:
        raise OverrideError(f"no boundary owns {listed(orphans, 4)}.")
    unknown = [name for group in tied for name in group if name not in parameters]
    if unknown:
        raise OverrideError(f"plan.tied: no parameter {unknown[0]!r} among the plan's.")


def check_layouts(contract: Contract, shapes: Mapping[str, tuple[int, ...]], axes: Iterable[str], ep_size: int) -> None:
    """Every dim exists, in_dst and out_dst have their counterparts, every step is one that the table knows."""
    axes = tuple(axes)
    for name, layout in contract.params.items():
        fqn = f"{contract.fqn}.{name}" if contract.fqn else name
        for axis, placement in layout.items():
            if isinstance(placement, Partial):
                raise OverrideError(f"{fqn}: {axis}: partial: a parameter is held as replicate or shard(N).")
            _check_dim(placement, len(shapes[fqn]), f"{fqn}: {axis}", "of a parameter")
            if axis == "ep" and ep_size > 1 and isinstance(placement, Shard):
                path = next((path for path in contract.stacked if name.startswith(f"{path}.")), None)
                count = contract.stacked[path] if path else shapes[fqn][placement.dim]
                if count % ep_size:
                    raise OverrideError(f"{fqn}: ep={ep_size} doesn't divide {count}.")
                if path and placement.dim:
                    raise OverrideError(f"{fqn}: ep: {format_placement(placement)}: experts of a list are cut by their number, shard(0).")
    for kind, src, dst in (("in", contract.in_src, contract.in_dst), ("out", contract.out_src, contract.out_dst)):
        if set(src) != set(dst):
            name = sorted(set(src) ^ set(dst))[0]
            have, need = (f"{kind}_src", f"{kind}_dst") if name in src else (f"{kind}_dst", f"{kind}_src")
            raise OverrideError(f"{contract.fqn}: {have} declares {name!r}, and {need} doesn't; declare both.")
    unused = sorted(set(contract.in_grad) - set(contract.in_dst))
    if unused:
        raise OverrideError(f"{contract.fqn}.in_grad: no input {unused[0]!r} (inputs: {listed(contract.in_dst)}).")
    for field in ("in_src", "in_dst", "in_grad", "out_src", "out_dst"):
        for name, layout in getattr(contract, field).items():
            for axis, placement in layout.items():
                _check_dim(
                    placement, _MOST_DIMS, f"{contract.fqn}.{field}.{name}: {axis}", "where tensors have at most"
                )
    for name, layout in contract.in_dst.items():
        _steps(contract, f"input {name}", contract.in_src[name], layout, contract.in_grad.get(name, {}), axes)
    for name, layout in contract.out_dst.items():
        _steps(contract, f"output {name}", contract.out_src[name], layout, {}, axes)


def _check_dim(placement: Any, ndim: int, where: str, what: str) -> None:
    if isinstance(placement, Shard) and not -ndim <= placement.dim < ndim:
        with_dims = f"with {ndim} dims" if what.endswith("parameter") else f"{ndim} dims"
        raise OverrideError(f"{where}: {format_placement(placement)}, {what} {with_dims}.")


def _steps(contract: Contract, what: str, src: Layout, dst: Layout, grad: Layout, axes: tuple[str, ...]) -> None:
    try:
        for step in transitions(src, dst, grad, axes):
            assert step.forward and step.backward  # both raise where the table knows no way
    except PlanError as error:
        raise type(error)(f"{contract.fqn}: {what}: {error}") from None


def check_tied(boundaries: Sequence[Contract], tied: Iterable[Sequence[str]]) -> None:
    """Tied parameters are one tensor: every boundary holds it alike."""
    held = {
        f"{c.fqn}.{name}" if c.fqn else name: layout_text(layout)
        for c in boundaries
        for name, layout in c.params.items()
    }
    for group in tied:
        if len({held[name] for name in group}) > 1:
            text = "; ".join(f"{name} {held[name]}" for name in group)
            raise PlanError(f"tied parameters are one tensor and must be held alike: {text}.")


def check_neighbours(boundaries: Sequence[Contract]) -> None:
    """What one boundary hands on is what another takes: hidden states have one layout between the boundaries of a layer.

    A layer's outermost boundaries pass hidden states on, from the entry of the stack to the final norm. A layout that one of them
    takes must be the stack's, or what another of them yields; and what one yields must be the stack's, or what another takes.
    """
    stack = next((c for c in boundaries if c.template == "stack"), None)
    if stack is None or not stack.in_dst:
        return
    first = next(iter(stack.in_dst))
    hidden = layout_text(stack.in_dst[first])
    head = stack.fqn.rpartition(".")[0]
    layers: dict[str, list[Contract]] = {}
    outer: list[str] = []
    for contract in boundaries:
        if contract is stack or not contract.fqn.startswith(f"{head}.") or contract.fqn.startswith(tuple(outer)):
            continue
        outer.append(f"{contract.fqn}.")
        layers.setdefault(contract.fqn[len(head) + 1 :].partition(".")[0], []).append(contract)
    for inside in layers.values():
        takes = {c.fqn: _first(c.in_src) for c in inside}
        yields = {c.fqn: _first(c.out_dst) for c in inside}
        for contract in inside:
            _check_side(contract, "in_src", takes, {hidden, *_others(yields, contract)}, "yields", hidden)
            _check_side(contract, "out_dst", yields, {hidden, *_others(takes, contract)}, "takes", hidden)
    before = boundaries[: next(i for i, c in enumerate(boundaries) if c is stack)]
    taken = {layout_text(stack.in_src[first]), *(_first(c.in_src) for c in before if c.template != "embed")}
    for contract in before:
        given = _first(contract.out_dst)
        if contract.template == "embed" and given not in (None, *taken):
            raise OverrideError(
                f"{contract.fqn}: out_dst is {given}, and what follows takes {listed(sorted(t for t in taken if t))}.\n"
                "  Model-level code builds masks and positions from it, and must see the whole sequence."
            )


def _others(sides: Mapping[str, str | None], contract: Contract) -> list[str | None]:
    return [text for fqn, text in sides.items() if fqn != contract.fqn]


def _first(layouts: Mapping[str, Layout]) -> str | None:
    return layout_text(next(iter(layouts.values()))) if layouts else None


def _check_side(
    contract: Contract, field: str, sides: Mapping[str, str | None], fits: set[str | None], verb: str, hidden: str
) -> None:
    declared = sides[contract.fqn]
    if declared is not None and declared not in fits:
        raise OverrideError(
            f"{contract.fqn}: {field} is {declared}, and nothing else in its layer {verb} that: hidden states travel as {hidden}.\n"
            f"  Declare {field} {hidden}, or its neighbours alike."
        )
