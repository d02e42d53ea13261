"""FlexAttention's block masks, from a rule over global positions.

A tile is BLOCK queries by BLOCK keys. Tiles of which nothing is seen aren't in the block mask, tiles that are seen whole need no mask;
in the others the kernel evaluates the rule itself. To tell them apart the rule is evaluated in areas of at most AREA x AREA.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from hyperpar_cp_sdpa.extend import Mask
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

__all__ = ["BLOCK", "Tiles", "tiles_of"]

BLOCK = 128  # an edge of a tile, as FlexAttention's own default
AREA = 8 * BLOCK


@dataclass(frozen=True, eq=False)
class Tiles:
    """Which tiles of queries at `rows` and keys at `columns` are computed.

    rule             over global positions, documents and padding included
    rows, columns    the global positions of this rank's queries, and of the keys that it has
    partial, whole   bool [batch or 1, 1, tiles of queries, tiles of keys]
    """

    rule: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    rows: Tensor
    columns: Tensor
    partial: Tensor
    whole: Tensor

    def block_mask(self, start: int = 0, stop: int | None = None) -> Any:
        """The BlockMask of the queries [start, stop), by default all of them; `start` is a multiple of BLOCK."""
        rule, rows, columns = self.rule, self.rows[start:stop], self.columns

        def mask_mod(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return rule(batch, head, rows[query], columns[key])

        strip = slice(start // BLOCK, None if stop is None else -(-stop // BLOCK))
        partial, whole = self.partial[:, :, strip], self.whole[:, :, strip]
        return BlockMask.from_kv_blocks(
            *_ordered(partial), *_ordered(whole), BLOCK_SIZE=BLOCK, mask_mod=mask_mod, seq_lengths=(len(rows), len(columns))
        )


def _ordered(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """(how many tiles of keys, their indices, those first) of each tile of queries."""
    number = tiles.sum(-1, dtype=torch.int32)
    return number, torch.argsort(tiles.int(), dim=-1, descending=True, stable=True).int()


def tiles_of(mask: Mask, rows: Tensor, columns: Tensor) -> Tiles:
    """The tiles of queries at the global positions `rows` against keys at `columns`."""
    found = [[_verdicts(mask.seen(q, k)) for k in columns.split(AREA)] for q in rows.split(AREA)]
    some, whole = (torch.cat([torch.cat([area[i] for area in areas], -1) for areas in found], -2) for i in (0, 1))
    return Tiles(mask.global_rule(), rows, columns, some & ~whole, whole)


def _verdicts(seen: Tensor) -> tuple[Tensor, Tensor]:
    """(tiles of which something is seen, tiles that are seen whole) of an area. A tile that is cut short is never whole."""
    height, width = seen.shape[-2:]
    padded = F.pad(seen, (0, -width % BLOCK, 0, -height % BLOCK))
    tiles = padded.unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK))
    return tiles.any(-1).any(-2), tiles.all(-1).all(-2)
