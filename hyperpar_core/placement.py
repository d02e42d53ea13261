"""Placements and layouts: how one tensor lies on the axes of a mesh.

A placement says what one axis does to a tensor: `replicate`, `shard(N)` (cut along dim N, in `torch.chunk` sizes; negative
dims count from the end) or `partial` (each rank holds a summand; `partial(max)` and the like reduce otherwise).
A layout maps axis names to placements. An axis that a layout leaves out replicates.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from .errors import OverrideError

__all__ = [
    "PLAN_AXES",
    "Layout",
    "Placement",
    "SharedShard",
    "format_layout",
    "format_placement",
    "layout_on",
    "parse_layout",
    "parse_placement",
    "shard_size",
    "short",
]

Layout = Mapping[str, Placement]


class SharedShard(Placement):
    """How a region sees a replicated parameter of which runs of `copies` neighbouring ranks use the same slice along `dim`:
    key/value heads that are fewer than the ranks. Written `shard(dim, copies)`; only a parameter's use has it.
    """

    def __init__(self, dim: int, copies: int) -> None:
        self.dim, self.copies = dim, copies

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SharedShard) and (self.dim, self.copies) == (other.dim, other.copies)

    def __hash__(self) -> int:
        return hash((self.dim, self.copies))

    def __reduce__(self) -> tuple[type[SharedShard], tuple[int, int]]:
        return SharedShard, (self.dim, self.copies)  # torch's base class can't be pickled by its state

    def __repr__(self) -> str:
        return f"SharedShard(dim={self.dim}, copies={self.copies})"


PLAN_AXES = ("cp", "tp", "ep")
_PARTIAL_OPS = ("sum", "max", "min", "avg")
_PLACEMENT = re.compile(r"(replicate|partial|shard)(?:\(\s*(-?\w+)\s*(?:,\s*(\d+)\s*)?\))?")


def parse_placement(text: str | Placement) -> Placement:
    """Reads `replicate`, `partial`, `partial(max)` or `shard(N)`; raises OverrideError on anything else."""
    if isinstance(text, Placement):
        return text
    found = _PLACEMENT.fullmatch(text.strip().lower()) if isinstance(text, str) else None
    if found:
        kind, argument, copies = found.groups()
        if copies is not None:
            if kind == "shard" and argument.isdigit() and int(copies) > 1:
                return SharedShard(int(argument), int(copies))
            kind = ""
        if kind == "replicate" and argument is None:
            return Replicate()
        if kind == "partial" and (argument is None or argument in _PARTIAL_OPS):
            return Partial(argument or "sum")
        if kind == "shard" and argument is not None and re.fullmatch(r"-?\d+", argument):
            return Shard(int(argument))
    raise OverrideError(f"{text!r} is no placement: write replicate, partial, partial(max) or shard(N).")


def format_placement(placement: Placement) -> str:
    """The text that `parse_placement` reads back."""
    if isinstance(placement, SharedShard):
        return f"shard({placement.dim}, {placement.copies})"
    if isinstance(placement, Shard):
        return f"shard({placement.dim})"
    if isinstance(placement, Partial):
        return "partial" if placement.reduce_op == "sum" else f"partial({placement.reduce_op})"
    return "replicate"


def short(placement: Placement) -> str:
    """The form for reports: R, S(0), P."""
    if isinstance(placement, Shard):
        return f"S({placement.dim})"
    return "P" if isinstance(placement, Partial) else "R"


def parse_layout(value: object, where: str = "layout") -> dict[str, Placement]:
    """Reads `{axis: placement}`; an unknown axis or a data-parallel one is an OverrideError that starts with `where`."""
    if not isinstance(value, Mapping):
        raise OverrideError(
            f"{where}: expected a mapping of axis to placement, such as {{tp: shard(0)}}, got {value!r}."
        )
    layout = {}
    for axis, placement in value.items():
        if axis in ("dp", "edp"):
            raise OverrideError(
                f"{where}: axis '{axis}' can't stand in a plan: a plan describes one data-parallel slice (axes: cp, tp, ep)."
            )
        if axis not in PLAN_AXES:
            raise OverrideError(f"{where}: unknown axis {axis!r} (axes of a plan: cp, tp, ep).")
        try:
            layout[axis] = parse_placement(placement)
        except OverrideError as error:
            raise OverrideError(f"{where}: {error}") from None
    return layout


def format_layout(layout: Layout) -> dict[str, str]:
    """`{axis: text}`, in the order of the axes."""
    return {axis: format_placement(layout[axis]) for axis in PLAN_AXES if axis in layout}


def layout_on(layout: Layout, axes: Iterable[str]) -> tuple[Placement, ...]:
    """The placements of `layout` for each of `axes`, as DTensor takes them."""
    return tuple(layout.get(axis, Replicate()) for axis in axes)


def shard_size(size: int, ranks: int, rank: int) -> tuple[int, int]:
    """(length, offset) of `rank`'s shard of a dim of `size` cut over `ranks`, in the sizes of `torch.chunk`."""
    chunk = -(-size // ranks)
    offset = min(rank * chunk, size)
    return min(chunk, size - offset), offset
