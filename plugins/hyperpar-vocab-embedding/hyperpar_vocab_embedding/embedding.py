"""The vocab-parallel embedding: each rank looks up the ids of its own vocab shard; the sum over tp is the whole lookup.

n: rows of this rank's shard, in torch.chunk sizes, possibly 0. D: embedding_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn, where
from torch.distributed.device_mesh import DeviceMesh

from hyperpar_core import original_forward
from hyperpar_core.errors import ApplyError, Refused
from hyperpar_core.placement import shard_size

from .own_forward import InterceptLookup, check_only_scales

__all__ = ["vocab_parallel_embedding"]


@dataclass(frozen=True)
class VocabShard:
    """Rows [offset, offset + length) of a table of `vocab` rows."""

    fqn: str
    vocab: int
    length: int
    offset: int


def vocab_parallel_embedding(
    *, module: nn.Module, tp_mesh: DeviceMesh, fqn: str = "embedding"
) -> Callable[..., Tensor]:
    """The compute of an nn.Embedding whose weight is cut along the vocab over tp.

    Returns fn(module, ids) -> [*ids.shape, D], partial over tp: zero where an id belongs to another rank. It doesn't
    communicate. An id outside the vocab fails on every rank as it does in one process. A subclass whose forward scales
    the rows keeps its own forward. Called on every rank of tp.

    Raises Refused for max_norm, scale_grad_by_freq, sparse, parameters other than `weight`, and a forward that does
    more to the rows than scale them.
    """
    if not isinstance(module, nn.Embedding):
        raise Refused(f"{fqn}: vocab_parallel_embedding needs an nn.Embedding, not {type(module).__name__}.")
    for option in ("max_norm", "scale_grad_by_freq", "sparse"):
        if getattr(module, option):
            raise Refused(
                f"{fqn}: {option}={getattr(module, option)} needs the whole table on every rank.\n"
                f"  Embed without {option}, or keep the weight replicated (local_compute_fn: none)."
            )
    length, offset = shard_size(module.num_embeddings, tp_mesh.size(), tp_mesh.get_local_rank())
    shard = VocabShard(fqn, module.num_embeddings, length, offset)
    if type(module).forward is nn.Embedding.forward:
        return partial(_look_up, shard)
    check_only_scales(module, fqn)
    return partial(_own_forward, shard)


def _look_up(shard: VocabShard, module: nn.Embedding, input: Tensor) -> Tensor:
    return masked_lookup(shard, input, module.weight, module.padding_idx)


def _own_forward(shard: VocabShard, module: nn.Embedding, *args: Any, **kwargs: Any) -> Any:
    lookups = InterceptLookup(partial(masked_lookup, shard))
    with lookups:
        out = original_forward(module, *args, **kwargs)
    if lookups.count != 1:
        raise ApplyError(
            f"{shard.fqn}: the forward of {type(module).__name__} looked up its table {lookups.count} times, "
            "vocab_parallel_embedding needs exactly one.\n  Keep its weight replicated (local_compute_fn: none)."
        )
    return out


def masked_lookup(shard: VocabShard, ids: Tensor, weight: Tensor, padding_idx: int | None) -> Tensor:
    """`weight` [n, D], this rank's rows -> [*ids.shape, D]; zero where another rank holds the row."""
    n, offset, vocab = shard.length, shard.offset, shard.vocab
    if weight.shape[0] != n:
        raise ApplyError(
            f"{shard.fqn}: vocab_parallel_embedding found {weight.shape[0]} rows, this rank's shard of {vocab} has {n}."
            "\n  The weight must be shard(0) over tp."
        )
    if padding_idx is not None:
        padding_idx = (padding_idx + vocab if padding_idx < 0 else padding_idx) - offset
        padding_idx = padding_idx if 0 <= padding_idx < n else None
    # An empty shard looks up one zero row, which ties the output to the weight: its gradient is [0, D], not missing.
    table = weight if n else weight.sum(0, keepdim=True)
    mine = (ids >= offset) & (ids < offset + n)
    # Ids outside the vocab stay outside the table: torch itself raises, or asserts on the device, without a sync.
    index = where(mine, ids - offset, ids.masked_fill((ids >= 0) & (ids < vocab), 0))
    return F.embedding(index, table, padding_idx).masked_fill_(~mine.unsqueeze(-1), 0)
