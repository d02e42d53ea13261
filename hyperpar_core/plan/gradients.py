"""The gradient law of a contract: is this gradient partial or replicated?

Over an axis, a region computes on parts (heads, features, tokens) when an input reaches its compute as a shard, or when it holds a
parameter as a shard. Then whatever is replicated in it, input or parameter, gets from each rank only its part of the gradient:
Partial. Otherwise every rank computes the same, and the gradient is Replicate. A shard's gradient is the same shard. A parameter
that the region sees as Partial (a row-wise bias) enters a sum whose gradient every rank holds whole: Replicate.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from torch.distributed.tensor import Partial, Replicate, Shard

from ..descriptors import Section
from ..placement import Layout, Placement
from .contract import Contract

__all__ = ["computes_on_parts", "section_contract", "with_gradients"]


def computes_on_parts(contract: Contract, axis: str) -> bool:
    """Whether the region's compute differs over `axis`."""
    layouts = [*contract.in_dst.values(), *contract.params.values()]
    return any(isinstance(layout.get(axis), Shard) for layout in layouts)


def _derive(layout: Layout, use: Layout, parts: Mapping[str, bool]) -> dict[str, Placement]:
    if "ep" in layout:  # on the expert mesh: every token that these experts computed counts, whichever rank it came from
        return {"ep": layout["ep"]}
    grad: dict[str, Placement] = {}
    for axis, on_parts in parts.items():
        held, seen = layout.get(axis, Replicate()), use.get(axis)
        if isinstance(held, Shard):
            grad[axis] = held
        elif isinstance(seen, Partial):
            grad[axis] = Replicate()
        else:
            grad[axis] = Partial() if on_parts else Replicate()
    return grad


def section_contract(contract: Contract, parameter: str, section: Section) -> tuple[Layout, Layout]:
    """(how a section of a packed parameter is held, placement of its gradient), on every axis of the parameter's own gradient."""
    held: Layout = {"tp": section.placement} if isinstance(section.placement, Shard) else {}
    axes = contract.param_grad[parameter]
    return held, _derive(held, {}, {axis: computes_on_parts(contract, axis) for axis in axes})


def with_gradients(contract: Contract, axes: Iterable[str]) -> Contract:
    """The contract with `param_grad` and `in_grad` filled for every axis; what is declared already stays."""
    parts = {axis: computes_on_parts(contract, axis) for axis in axes}
    params = {
        name: {**_derive(layout, contract.param_use.get(name, {}), parts), **contract.param_grad.get(name, {})}
        for name, layout in contract.params.items()
    }
    inputs = {
        name: {**_derive(layout, {}, parts), **contract.in_grad.get(name, {})}
        for name, layout in contract.in_dst.items()
    }
    return replace(contract, param_grad=params, in_grad=inputs)
