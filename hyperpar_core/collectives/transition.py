"""The transition table: what one src -> dst step costs and does to the gradient.

One table of conversions serves both directions. Forward it takes a tensor from `src` to `dst`; backward it takes the gradient from
its placement at `dst` (`grad_in`) to the one it must have at `src` (`grad_out`):

    src -> dst                   forward          grad_in -> grad_out     backward
    Replicate -> Replicate       identity         Partial -> Replicate    all-reduce       replicated input of sharded compute
    Shard -> Replicate           all-gather       Partial -> Shard        reduce-scatter   sharded input gathered for sharded compute
    Shard -> Replicate           all-gather       Replicate -> Shard      shard            the same, for replicated compute
    Partial -> Replicate         all-reduce       Replicate -> Replicate  identity
    Partial -> Shard             reduce-scatter   Shard -> Replicate      all-gather
    Replicate -> Shard           shard            Shard -> Replicate      all-gather
    Shard(a) -> Shard(b)         all-to-all       Shard(b) -> Shard(a)    all-to-all
    Replicate -> Partial         keep-first       Replicate -> Replicate  identity         a row-wise bias, added once

The gradient of a Partial tensor is Replicate: the loss depends on the sum of the summands, with derivative 1 in each.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch.distributed.tensor import Partial, Replicate, Shard

from ..errors import PlanError
from ..placement import Layout, Placement, format_placement

__all__ = ["CONVERSIONS", "Transition", "gradient_placement", "transitions"]

CONVERSIONS = {
    ("R", "R"): "identity",
    ("S", "R"): "all_gather",
    ("P", "R"): "all_reduce",
    ("R", "S"): "shard",
    ("P", "S"): "reduce_scatter",
    ("S", "S"): "all_to_all",
    ("P", "P"): "identity",
    ("R", "P"): "keep_first",
}


def _kind(placement: Placement) -> str:
    return "S" if isinstance(placement, Shard) else "P" if isinstance(placement, Partial) else "R"


def conversion(src: Placement, dst: Placement) -> str:
    """The name of the operator that takes `src` to `dst`; PlanError when there is none."""
    for placement in (src, dst):
        if isinstance(placement, Partial) and placement.reduce_op != "sum":
            raise PlanError(f"{format_placement(placement)} has no transition: only sums are differentiated.")
    if src == dst:
        return "identity"
    op = CONVERSIONS.get((_kind(src), _kind(dst)))
    if op is None:
        raise PlanError(f"no transition from {format_placement(src)} to {format_placement(dst)}.")
    return op


def gradient_placement(placement: Placement) -> Placement:
    """The placement that the gradient of a tensor of this placement has: Partial's is Replicate, the others' their own."""
    return Replicate() if isinstance(placement, Partial) else placement


@dataclass(frozen=True)
class Transition:
    """One src -> dst step over one axis, with the gradient's placement on both sides."""

    axis: str
    src: Placement
    dst: Placement
    grad_in: Placement
    grad_out: Placement

    @property
    def forward(self) -> str:
        return conversion(self.src, self.dst)

    @property
    def backward(self) -> str:
        return conversion(self.grad_in, self.grad_out)

    @property
    def is_identity(self) -> bool:
        return self.forward == "identity" and self.backward == "identity"


def transitions(src: Layout, dst: Layout, grad: Layout, axes: Iterable[str]) -> tuple[Transition, ...]:
    """The steps from layout `src` to `dst` over `axes` (in mesh order), those that do nothing left out.

    `grad`: the gradient's layout at `dst`; an axis that it leaves out has `gradient_placement(dst)`.
    Cuts run in mesh order and gathers in reverse, so that an inner axis cuts what an outer one left.
    """
    ordered = list(axes)
    steps = []
    for axis in ordered:
        a, b = src.get(axis, Replicate()), dst.get(axis, Replicate())
        step = Transition(axis, a, b, grad.get(axis, gradient_placement(b)), gradient_placement(a))
        if not step.is_identity:
            steps.append(step)
    gathers = [s for s in steps if isinstance(s.src, Shard)]
    result = tuple(reversed(gathers)) + tuple(s for s in steps if not isinstance(s.src, Shard))
    _check_order(result, src, ordered)
    return result


def _check_order(steps: tuple[Transition, ...], src: Layout, axes: list[str]) -> None:
    """PlanError where a step joins or cuts a dim that an inner axis has cut at that time: the parts would come out permuted."""
    held = dict(src)
    for step in steps:
        for inner in axes[axes.index(step.axis) + 1 :]:
            dim = held.get(inner, Replicate())
            if isinstance(dim, Shard) and dim in (step.src, step.dst):
                raise PlanError(
                    f"no transition over {step.axis} from {format_placement(step.src)} to {format_placement(step.dst)} while the inner"
                    f" axis {inner} cuts that dim too; gather it over {inner} at a boundary before."
                )
        held[step.axis] = step.dst
