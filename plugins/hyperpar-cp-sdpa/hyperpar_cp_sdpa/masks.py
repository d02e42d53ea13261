"""Which keys each query sees: a rule over global positions, evaluated block by block and never as a whole.

A block is a rectangle of this rank's queries and one source's keys. What a mask excludes entirely is not in the list of blocks, so
it is never computed; what it leaves whole needs no mask; a square that is plainly causal is left to the operator's own causal mode.
Only what remains is evaluated, when it is computed, at most LEAF x LEAF at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

__all__ = ["LEAF", "Block", "Mask", "Rule", "Spans", "bidirectional", "causal", "positions"]

LEAF = 1024  # an edge of the largest rectangle that is evaluated at once
_FINE = 16  # the smallest rectangle that a plainly causal mask is split into

Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # (batch, head, query, key) positions -> bool, as transformers writes them
Spans = tuple[tuple[int, int], ...]  # (start, length) of runs of global positions, ascending


def causal(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Each query sees itself and what is before it."""
    return key <= query


def bidirectional(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Each query sees every key."""
    return query >= 0


@dataclass(frozen=True)
class Block:
    """A rectangle to compute, in local coordinates: rows [q0, q1) of the queries, [k0, k1) of one source's keys."""

    q0: int
    q1: int
    k0: int
    k1: int
    kind: Literal["full", "causal", "partial"]

    @property
    def pairs(self) -> int:
        """Query-key pairs that the operator goes through; half of a causal square."""
        rows, columns = self.q1 - self.q0, self.k1 - self.k0
        return rows * (rows + 1) // 2 if self.kind == "causal" else rows * columns


@dataclass(frozen=True, eq=False)
class Mask:
    """The mask of one attention, for the whole sequence of which every rank holds a part.

    rule       evaluated at global positions; inside documents where `several`
    order      how the sequence lies on the ranks
    length     tokens of the whole sequence
    documents  [batch, length]: 0 for padding, else the number of the token's document; None: neither
    several    whether rows hold more than one document: tokens then see their own only, and the rule counts from its start
    kept       what was worked out from it, for the layers that come after
    """

    rule: Rule
    order: str
    length: int
    documents: Tensor | None = None
    several: bool = False
    kept: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def plainly_causal(self) -> bool:
        """Whether the order of positions alone decides."""
        return self.rule is causal and self.documents is None

    def global_rule(self) -> Rule:
        """The rule inside documents and without padding, as a rule over positions in the whole sequence."""
        if "rule" not in self.kept:
            self.kept["rule"] = self._global_rule()
        rule: Rule = self.kept["rule"]
        return rule

    def _global_rule(self) -> Rule:
        rule, documents = self.rule, self.documents
        if documents is None:
            return rule
        marks = documents

        def unpadded(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return rule(batch, head, query, key) & (marks[batch, key] != 0)

        if not self.several:
            return unpadded
        places = self._places()

        def inside(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            theirs = marks[batch, key]
            counted = rule(batch, head, places[batch, query], places[batch, key])
            return counted & (marks[batch, query] == theirs) & (theirs != 0)

        return inside

    def seen(self, queries: Tensor, keys: Tensor) -> Tensor:
        """bool [batch or 1, 1, queries, keys] for two vectors of global positions. Rows of padding see what their position may see."""
        batch = 1 if self.documents is None else self.documents.shape[0]
        rows = torch.arange(batch, device=queries.device)[:, None, None, None]
        head = torch.zeros(1, 1, 1, 1, dtype=torch.long, device=queries.device)
        out = self.global_rule()(rows, head, queries[None, None, :, None], keys[None, None, None, :])
        return out.expand(batch, 1, len(queries), len(keys))

    def _places(self) -> Tensor:
        """Positions counted from the start of each document: [batch, length]."""
        assert self.documents is not None
        index = torch.arange(self.length, device=self.documents.device).expand_as(self.documents)
        starts = torch.ones_like(self.documents, dtype=torch.bool)
        starts[:, 1:] = self.documents[:, 1:] != self.documents[:, :-1]
        return index - index.masked_fill(~starts, 0).cummax(1).values

    def blocks(self, queries: Spans, keys: Spans, device: torch.device) -> tuple[Block, ...]:
        """What has to be computed of queries at `queries` against keys at `keys`."""
        place = (queries, keys)
        if place not in self.kept:
            self.kept[place] = tuple(_Splitter(self, queries, keys, device).blocks())
        blocks: tuple[Block, ...] = self.kept[place]
        return blocks

    def block_mask(self, block: Block, queries: Spans, keys: Spans, device: torch.device) -> Tensor | None:
        """bool [batch or 1, 1, rows, columns] of a partial block; None for the others."""
        if block.kind != "partial":
            return None
        return self.seen(
            positions(queries, block.q0, block.q1, device), positions(keys, block.k0, block.k1, device)
        )


def positions(spans: Spans, start: int, stop: int, device: torch.device) -> Tensor:
    """The global positions of local rows [start, stop)."""
    pieces, offset = [], 0
    for first, size in spans:
        low, high = max(start, offset), min(stop, offset + size)
        if low < high:
            pieces.append(torch.arange(first + low - offset, first + high - offset, device=device))
        offset += size
    return torch.cat(pieces) if pieces else torch.arange(0, device=device)


def _position(spans: Spans, row: int) -> int:
    for first, size in spans:
        if row < size:
            return first + row
        row -= size
    raise IndexError(row)


class _Splitter:
    """Splits queries x keys into halves until each rectangle is empty, whole, causal or a leaf, and joins what fits again."""

    def __init__(self, mask: Mask, queries: Spans, keys: Spans, device: torch.device) -> None:
        self.mask, self.queries, self.keys, self.device = mask, queries, keys, device
        self.rows, self.columns = sum(size for _, size in queries), sum(size for _, size in keys)
        self.leaf = min(LEAF, *(size for _, size in (*queries, *keys))) or 1
        self.verdicts: dict[tuple[int, int, int, int], str] = {}

    def blocks(self) -> list[Block]:
        if not self.rows or not self.columns:
            return []
        if not self.mask.plainly_causal:
            self._evaluate()
        return self._split(0, self.rows, 0, self.columns)

    def _evaluate(self) -> None:
        """The verdict on every leaf, read back from the device at once."""
        leaves = list(self._leaves(0, self.rows, 0, self.columns))
        counts = []
        for q0, q1, k0, k1 in leaves:
            seen = self.mask.seen(positions(self.queries, q0, q1, self.device), positions(self.keys, k0, k1, self.device))
            lower = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool, device=self.device).tril()
            counts.append(torch.stack([seen.any(), seen.all(), (seen == lower).all()]))
        for leaf, (some, every, lower) in zip(leaves, torch.stack(counts).tolist(), strict=True):
            square = self._on_diagonal(*leaf) and leaf[1] - leaf[0] > 1
            self.verdicts[leaf] = "full" if every else "empty" if not some else "causal" if lower and square else "partial"

    def _leaves(self, q0: int, q1: int, k0: int, k1: int) -> list[tuple[int, int, int, int]]:
        if q0 == q1 or k0 == k1:
            return []
        if self._is_leaf(q0, q1, k0, k1):
            return [(q0, q1, k0, k1)]
        return [leaf for part in _quarters(q0, q1, k0, k1) for leaf in self._leaves(*part)]

    def _is_leaf(self, q0: int, q1: int, k0: int, k1: int) -> bool:
        return max(q1 - q0, k1 - k0) <= (_FINE if self.mask.plainly_causal else self.leaf)

    def _on_diagonal(self, q0: int, q1: int, k0: int, k1: int) -> bool:
        return self.queries == self.keys and q0 == k0 and q1 == k1

    def _verdict(self, q0: int, q1: int, k0: int, k1: int) -> str:
        """"split" where it isn't decided yet."""
        if not self.mask.plainly_causal:
            return self.verdicts.get((q0, q1, k0, k1), "split")
        if _position(self.keys, k0) > _position(self.queries, q1 - 1):
            return "empty"
        if _position(self.keys, k1 - 1) <= _position(self.queries, q0):
            return "full"
        if self._on_diagonal(q0, q1, k0, k1):
            return "causal"
        return "partial" if self._is_leaf(q0, q1, k0, k1) else "split"

    def _split(self, q0: int, q1: int, k0: int, k1: int) -> list[Block]:
        if q0 == q1 or k0 == k1:
            return []
        verdict = self._verdict(q0, q1, k0, k1)
        if verdict == "empty":
            return []
        if verdict != "split":
            return [Block(q0, q1, k0, k1, verdict)]  # type: ignore[arg-type]
        areas = _quarters(q0, q1, k0, k1)
        parts = [self._split(*area) for area in areas]
        whole = [_is(part, area, "full") for part, area in zip(parts, areas, strict=True)]
        if all(whole):
            return [Block(q0, q1, k0, k1, "full")]
        top_left, top_right, bottom_left, bottom_right = parts
        if (
            self._on_diagonal(q0, q1, k0, k1) and whole[2] and not top_right
            and _is(top_left, areas[0], "causal") and _is(bottom_right, areas[3], "causal")
        ):  # fmt: skip
            return [Block(q0, q1, k0, k1, "causal")]
        _, qm, _, km = areas[0]
        left, right = top_left + bottom_left, top_right + bottom_right
        if whole[0] and whole[2]:
            left = [Block(q0, q1, k0, km, "full")] if k0 < km else []
        if whole[1] and whole[3]:
            right = [Block(q0, q1, km, k1, "full")] if km < k1 else []
        if not (whole[0] and whole[2]) and not (whole[1] and whole[3]):
            if whole[0] and whole[1]:
                left, right = [Block(q0, qm, k0, k1, "full"), *bottom_left], bottom_right
            elif whole[2] and whole[3]:
                left, right = [*top_left, *top_right], [Block(qm, q1, k0, k1, "full")]
        return left + right


def _quarters(q0: int, q1: int, k0: int, k1: int) -> Sequence[tuple[int, int, int, int]]:
    """Top left, top right, bottom left, bottom right; an edge of 1 isn't halved."""
    qm = (q0 + q1) // 2 if q1 - q0 > 1 else q1
    km = (k0 + k1) // 2 if k1 - k0 > 1 else k1
    return (q0, qm, k0, km), (q0, qm, km, k1), (qm, q1, k0, km), (qm, q1, km, k1)


def _is(blocks: list[Block], area: tuple[int, int, int, int], kind: str) -> bool:
    """Whether `blocks` is one block of `kind` over all of `area`; an area of nothing is whole."""
    q0, q1, k0, k1 = area
    if q0 == q1 or k0 == k1:
        return kind == "full"
    return len(blocks) == 1 and blocks[0] == Block(q0, q1, k0, k1, kind)  # type: ignore[arg-type]
