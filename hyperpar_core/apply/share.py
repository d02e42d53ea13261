"""How a sequence lies on the ranks of cp, and what the running forward holds of it.

Each rank holds one or two spans of the global positions, in ascending order. "contiguous" gives rank r the r-th of `ranks` equal
parts; "head_tail" gives it the r-th and the r-th last of `2 * ranks` parts, so that each rank has the same share of causal work:

    contiguous, 4 ranks    | 0 0 | 1 1 | 2 2 | 3 3 |
    head_tail,  4 ranks    | 0 | 1 | 2 | 3 | 3 | 2 | 1 | 0 |
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..collectives.functional import AxisGroup
from ..errors import ApplyError

__all__ = ["ORDERS", "Share", "activate", "current_share", "joined", "multiple", "spans", "taken"]

ORDERS = ("head_tail", "contiguous")

_running = threading.local()


def multiple(order: str, ranks: int) -> int:
    """What the length of a sequence must be a multiple of."""
    return 2 * ranks if order == "head_tail" else ranks


def spans(order: str, ranks: int, rank: int, length: int) -> tuple[tuple[int, int], ...]:
    """The (start, length) of each run of global positions that `rank` holds, ascending. `length`: the whole, a `multiple`."""
    if order not in ORDERS or length % multiple(order, ranks):
        raise ApplyError(f"a sequence of {length} can't lie on {ranks} ranks in order {order!r} ({', '.join(ORDERS)}).")
    if order == "contiguous" or ranks == 1:
        size = length // ranks
        return ((rank * size, size),)
    size = length // (2 * ranks)
    head, tail = (rank * size, size), (length - (rank + 1) * size, size)
    return (head, tail) if head[0] + size < tail[0] else ((head[0], 2 * size),)


def taken(x: Tensor, dim: int, order: str, ranks: int, rank: int) -> Tensor:
    """The part of a whole tensor that `rank` holds, cut along `dim`: a copy."""
    parts = [x.narrow(dim, start, size) for start, size in spans(order, ranks, rank, x.shape[dim])]
    return torch.cat(parts, dim)


def joined(parts: Sequence[Tensor], dim: int, order: str) -> Tensor:
    """The whole from the parts of all ranks, in the order of the ranks; the inverse of `taken`."""
    if order == "contiguous":
        return torch.cat(list(parts), dim)
    halves = [part.chunk(2, dim) for part in parts]
    return torch.cat([h[0] for h in halves] + [h[1] for h in reversed(halves)], dim)


@dataclass(frozen=True, eq=False)
class Share:
    """What this rank's forward holds of the sequences that shard_batch cut.

    group      the ranks of cp
    order      "head_tail" or "contiguous"
    length     tokens of the whole sequence, padding included
    marks      [batch, length]: 0 for padding, else the number of the token's document; None where the model takes no attention_mask
    """

    group: AxisGroup
    order: str
    length: int
    marks: Tensor | None

    @property
    def local_length(self) -> int:
        """Tokens of this rank's part."""
        return self.length // self.group.ranks

    @cached_property
    def kinds(self) -> tuple[bool, bool]:
        """(whether there is padding, whether a row has several documents)."""
        if self.marks is None or not self.marks.numel():
            return False, False
        low, high = torch.stack(self.marks.aminmax()).tolist()
        return low == 0, high > 1

    @property
    def documents(self) -> Tensor | None:
        """`marks` where they say anything: None for one document a row without padding."""
        return self.marks if any(self.kinds) else None

    @property
    def several_documents(self) -> bool:
        """Whether a row holds more than one document, which don't see each other."""
        return self.kinds[1]


def current_share() -> Share | None:
    """The share of the planned model whose forward runs in this thread; None outside, and while a layer is computed again in a backward."""
    return getattr(_running, "share", None)


@contextmanager
def activate(share: Share) -> Iterator[None]:
    """`current_share()` inside."""
    before, _running.share = current_share(), share
    try:
        yield
    finally:
        _running.share = before
