"""What every view of a plan starts from: its lines, repeated layers folded, with what each moves, and what stands beside them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from ..collectives.transition import transitions
from ..plan.contract import Contract
from ..plan.names import fold_names, listed
from ..plan.sharding_plan import ShardingPlan
from ..plan.stacks import as_held
from .cells import injection_name, inside_text, layout_text, placement_text
from .tables import fold, size
from .traffic import Movement, gradient_sums, held_parts, movements, sent_by_itself
from .words import collectives_text, count_text, percent_text

__all__ = ["Line", "Outline", "SumOver", "embedding_text", "loss_text", "moved_text", "outline", "remarks"]


@dataclass(frozen=True)
class Line:
    """One line: a boundary (one of all `contracts`, which are alike), or a header (no contracts) of `copies` layers.

    moved: what one of the boundaries moves; of a header, what all inside do. entry: the decoder stack's, in its first layer.
    """

    depth: int
    name: str
    copies: int
    contracts: tuple[Contract, ...]
    moved: tuple[Movement, ...]
    entry: bool = False

    @property
    def bytes(self) -> int:
        return sum(m.bytes for m in self.moved)


@dataclass(frozen=True)
class SumOver:
    """The gradient sums over one axis: how many buckets, their bytes, whose gradients."""

    axis: str
    buckets: int
    bytes: int
    of: str


@dataclass(frozen=True)
class Outline:
    """A plan with figures of one rank and one step of batch x sequence tokens per dp rank. kept, whole, sharded: elements."""

    plan: ShardingPlan
    batch: int
    sequence: int
    width: int
    dp: int
    kept: int
    whole: int
    sharded: int
    lines: tuple[Line, ...]
    sums: tuple[SumOver, ...]

    @property
    def degrees(self) -> dict[str, int]:
        """{axis: degree} of what is active, dp and ep too."""
        plan = self.plan
        return {**({"dp": self.dp} if self.dp > 1 else {}), **plan.sizes, **({"ep": plan.ep_size} if plan.ep_size > 1 else {})}

    @property
    def title(self) -> list[str]:
        """The parts of the first line."""
        plan = self.plan
        return [
            f"{plan.model} {count_text(self.whole)}",
            " x ".join(f"{axis} {degree}" for axis, degree in self.degrees.items()) or "one rank",
            *(["sequence parallel"] if plan.sequence_parallel else []),
            *([f"{plan.cp_order} order"] if "cp" in plan.sizes else []),
            f"{size(self.kept * self.width)} of {size(self.whole * self.width)} per rank"
            f" ({self.width}-byte parameters), {percent_text(self.sharded, self.whole)} of parameters sharded",
        ]

    @property
    def boundary_bytes(self) -> int:
        """What a rank hands to collectives at and inside boundaries in a step."""
        return sum(line.bytes * max(len(line.contracts), 1) for line in self.lines if line.contracts)


def outline(plan: ShardingPlan, batch: int, sequence: int, width: int, dp: int) -> Outline:
    """`batch` x `sequence`: a dp rank's tokens; `width`: bytes of an element; dp: degree of data parallelism."""
    plan = as_held(plan)

    def moved(contracts: Sequence[Contract]) -> tuple[Movement, ...]:
        return tuple(m for contract in contracts for m in movements(plan, contract, batch, sequence, width))

    lines = []
    named = [(c.fqn or "(model)", c) for c in plan.boundaries if c.template != "stack"]
    stacks = {c.fqn.rpartition(".")[0]: c for c in plan.boundaries if c.template == "stack" and c.in_src != c.in_dst}
    for row in fold(named, lambda c: _likeness(plan, c)):
        entry = stacks.pop(row.name.partition("{")[0].rstrip("."), None) if row.inside else None
        if entry is not None:
            lines.append(Line(row.depth, f"{entry.fqn} (stack)", 1, (entry,), moved((entry,)), entry=True))
        lines.append(Line(row.depth, row.name, row.copies, row.things, moved(row.things[:1] or row.inside)))
    return Outline(plan, batch, sequence, width, dp, *_held(plan), tuple(lines), _sums(plan, width, dp))


def _held(plan: ShardingPlan) -> tuple[int, int, int]:
    """Elements: held by the first rank, of the whole model, of parameters that are sharded. Tied ones once."""
    later = {name for group in plan.tied for name in group[1:]}
    kept = whole = sharded = 0
    for contract in plan.boundaries:
        for name in contract.params:
            fqn = _full(contract, name)
            if fqn in later:
                continue
            mine, all_ = sum(elements for elements, _ in held_parts(plan, contract, name)), prod(plan.parameters[fqn])
            kept, whole, sharded = kept + mine, whole + all_, sharded + (all_ if mine < all_ else 0)
    return kept, whole, sharded


def _full(contract: Contract, name: str) -> str:
    return f"{contract.fqn}.{name}" if contract.fqn else name


def _likeness(plan: ShardingPlan, contract: Contract) -> Any:
    """Equal for boundaries of repeated layers."""
    data = {**contract.to_data(), "fqn": "", "shapes": [plan.parameters[_full(contract, n)] for n in contract.params]}
    return json.dumps(data, sort_keys=True, default=str)


def moved_text(plan: ShardingPlan, moved: Sequence[Movement]) -> str:
    """`2 gather 2 scatter`; with the axis where the plan has several."""
    return collectives_text([(m.collective, m.axis) for m in moved], len(plan.sizes) > 1)


# ---- beside the lines


def _sums(plan: ShardingPlan, width: int, dp: int) -> tuple[SumOver, ...]:
    by_axis: dict[str, list[tuple[tuple[str, ...], int]]] = {}
    for one in gradient_sums(plan, width, dp):
        by_axis.setdefault(one.axis, []).append((one.parameters, one.bytes))
    found = []
    for axis, buckets in by_axis.items():
        names = list(dict.fromkeys(name for parameters, _ in buckets for name in parameters))
        everything = len(names) + sum(len(group) - 1 for group in plan.tied) == len(plan.parameters)
        everything = everything or (axis == "dp" and plan.ep_size > 1)
        leaves = dict.fromkeys(
            ".".join(name.removesuffix(".weight").split(".")[-2 if ".bias" in name else -1 :]) for name in names
        )
        whole = "all parameters" if plan.ep_size == 1 else "all parameters but experts"
        found.append(SumOver(axis, len(buckets), sum(b for _, b in buckets), whole if everything else listed(leaves, 8)))
    return tuple(found)


def embedding_text(plan: ShardingPlan) -> str:
    """What looks up the ids."""
    found = [inside_text(c) or "the model's own" for c in plan.boundaries if c.template == "embed"]
    return found[0] if found else "none"


def loss_text(plan: ShardingPlan) -> str:
    """What computes the loss."""
    if plan.loss is None:
        return "the model's own, on whole logits"
    options = f" {dict(plan.loss.options)}" if plan.loss.options else ""
    return f"{plan.loss.name}{options}, on logits sharded over tp"


def remarks(shown: Outline) -> list[str]:
    """What the figures rest on, and what isn't in them."""
    plan = shown.plan
    used = [f"{name} ({provider})" for name, provider in plan.providers.items()]
    lines = [f"from plugins: {', '.join(used)}"] if used else []
    unknown = fold_names(
        f"{_full(c, name)} {a} -> {b}"
        for c in plan.boundaries
        for src, dst in ((c.in_src, c.in_dst), (c.out_src, c.out_dst))
        for name, layout in src.items()
        if name not in c.features and transitions(layout, dst.get(name, {}), {}, plan.sizes)
        for a, b in [[layout_text(side, plan.sizes, "replicate", placement_text) for side in (layout, dst.get(name, {}))]]
    )
    lines += [f"not counted, only where a module returns it: {', '.join(unknown)}"] if unknown else []
    if any(m.axis == "ep" for line in shown.lines for m in line.moved):
        lines.append("over ep: counted as if every expert were as likely as any other")
    senders = [injection_name(named) for c in plan.boundaries for named in sent_by_itself(plan, c, 1, 1, 1)[1]]
    lines += [f"not counted, if they communicate: {', '.join(dict.fromkeys(senders))}"] if senders else []
    return [*lines, *(f"note: {note}" for note in plan.notes)]
