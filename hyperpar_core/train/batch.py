"""The share of a batch that one rank computes, and the loss that all shares add up to."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..apply.checks import compare_inputs
from ..apply.share import joined, multiple, taken
from ..collectives.functional import AxisGroup, all_gather, all_reduce
from ..errors import ApplyError, RankMismatch
from ..plan.build import find_family

__all__ = ["lengths", "reduce_loss", "shard_batch", "unshard"]

IGNORE = -100
# What has a value for each token, and what stands in its place on padding; the last two are read here and don't travel as they are.
PER_TOKEN = {
    "input_ids": 0, "inputs_embeds": 0, "position_ids": 0, "token_type_ids": 0, "labels": IGNORE, "shift_labels": IGNORE,
    "attention_mask": 0, "document_ids": 0,
}  # fmt: skip


def _shifted(labels: Tensor) -> Tensor:
    """The label of the token that follows each one: [batch, sequence], the last one ignored."""
    return torch.nn.functional.pad(labels[..., 1:], (0, 1), value=IGNORE)


def _first(batch: Mapping[str, Any]) -> Tensor:
    """The tokens themselves: [batch, sequence, ...]."""
    first: Any = next((batch[k] for k in ("input_ids", "inputs_embeds") if isinstance(batch.get(k), Tensor)), None)
    if first is None or first.ndim < 2:
        raise ApplyError("shard_batch: a batch is a mapping with input_ids (or inputs_embeds) of [batch, sequence].")
    tokens: Tensor = first
    return tokens


def _parts(batch: Any) -> list[Mapping[str, Any]]:
    """The micro-batches of one batch, or of a list of them; ApplyError for anything else."""
    if isinstance(batch, Mapping):
        return [batch]
    parts = list(batch) if isinstance(batch, Sequence) else [batch]
    for part in parts:
        if not isinstance(part, Mapping):
            raise ApplyError(f"shard_batch: a batch is a mapping with input_ids, or a list of such; given is a {type(part).__name__}.")
    return parts


def _check(batch: Mapping[str, Any]) -> tuple[int, int]:
    """(rows, tokens) of a batch."""
    rows, tokens = _first(batch).shape[:2]
    for name in ("labels", "shift_labels", "attention_mask", "position_ids", "document_ids", "token_type_ids"):
        value = batch.get(name)
        if isinstance(value, Tensor) and value.shape[-1] != tokens:
            raise ApplyError(f"shard_batch: {name} has {value.shape[-1]} tokens, and the batch {tokens}.")
    if "num_items_in_batch" in batch:
        raise ApplyError(
            "shard_batch counts num_items_in_batch itself, over all ranks and micro-batches; leave it out."
        )
    return rows, tokens


def shard_batch(
    model: nn.Module,
    batch: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    groups: Mapping[str, AxisGroup],
    order: str = "head_tail",
    check: bool = False,
) -> dict[str, Any] | list[dict[str, Any]]:
    """This rank's share of one batch, or of a step's list of micro-batches. Every rank calls it with its dp rank's whole sequences.

    Adds shift_labels (labels already shifted) and num_items_in_batch (the number of targets over all ranks and all micro-batches
    given), and position_ids [batch, sequence] where the model takes them and there is no padding mask to derive others from.

    Under cp the sequences are padded to a multiple of the ranks (2 * ranks in order "head_tail"; the padding is never attended to, and
    its labels are ignored), and ids, positions and labels are cut to this rank's tokens, [batch, local]. attention_mask stays whole,
    [batch, padded sequence]: 0 for padding, else the number of the token's document, from `document_ids` [batch, sequence] or, as in
    one process, from position_ids that restart where no attention_mask is given. ApplyError for what can't be cut rightly,
    RankMismatch on all ranks where some of dp have labels and others none, and on the other dp ranks where one is refused.
    check: whether ranks of cp compare what they were given first, RankMismatch where it differs.
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    shares: list[dict[str, Any]] = []
    refusal: Exception | None = None
    try:
        if check and "cp" in groups:
            _compare(batch, groups["cp"], device)
        parts = _parts(batch)
        if not parts:
            raise ApplyError("shard_batch: an empty list of micro-batches.")
        shares = [_share(model, part, groups.get("cp"), order) for part in parts]
    except Exception as error:
        if "dp" not in groups:
            raise
        refusal = error  # the other ranks of dp wait for this one's count
    _count(shares, groups, refusal, _first(shares[0]).device if shares else device)
    return shares[0] if isinstance(batch, Mapping) else shares


def _share(model: nn.Module, batch: Mapping[str, Any], group: AxisGroup | None, order: str) -> dict[str, Any]:
    rows, tokens = _check(batch)
    share = dict(batch)
    if share.get("labels") is not None and share.get("shift_labels") is None:
        share["shift_labels"] = _shifted(share["labels"])
    if group is not None:
        return _cut(model, share, group, order)
    takes_positions = "position_ids" in inspect.signature(type(model).forward).parameters
    if takes_positions and share.get("position_ids") is None and share.get("attention_mask") is None:
        share["position_ids"] = torch.arange(tokens, device=_first(batch).device).expand(rows, tokens)
    return share


# ---- context parallel


def _cut(model: nn.Module, share: dict[str, Any], group: AxisGroup, order: str) -> dict[str, Any]:
    """This rank's tokens of whole sequences."""
    tokens = _first(share).shape[1]
    _refuse_uncuttable(model, share, tokens)
    documents = _documents(model, share)
    if share.get("position_ids") is None:
        share["position_ids"] = _positions(model, share, documents)
    mask = share.pop("attention_mask", None)
    share.pop("document_ids", None)
    marks = documents if mask is None else documents * (mask != 0)
    missing = -tokens % multiple(order, group.ranks)
    takes = inspect.signature(type(model).forward).parameters
    for name, filling in PER_TOKEN.items():
        value = share.get(name)
        if isinstance(value, Tensor):
            dim = 1 if name == "inputs_embeds" else value.ndim - 1
            share[name] = taken(_padded(value, dim, missing, _padding_id(model) if name == "input_ids" else filling), dim, order,
                                group.ranks, group.rank)  # fmt: skip
    marks = _padded(marks, 1, missing, 0)
    if "attention_mask" in takes:
        share["attention_mask"] = marks
    elif bool((marks != 1).any()):
        raise ApplyError(
            f"shard_batch: {type(model).__name__}.forward takes no attention_mask, so it can't be told of padding or documents.\n"
            f"  Give it whole rows whose length is a multiple of {multiple(order, group.ranks)}."
        )
    return share


def _padded(x: Tensor, dim: int, missing: int, filling: int) -> Tensor:
    if not missing:
        return x
    shape = list(x.shape)
    shape[dim] = missing
    return torch.cat([x, x.new_full(shape, filling)], dim)


def _padding_id(model: nn.Module) -> int:
    found = getattr(getattr(model, "config", None), "pad_token_id", None)
    return found if isinstance(found, int) and found >= 0 else 0


def _refuse_uncuttable(model: nn.Module, share: Mapping[str, Any], tokens: int) -> None:
    for name, value in share.items():
        if isinstance(value, Tensor) and value.numel() > 1 and name not in PER_TOKEN:
            raise ApplyError(
                f"shard_batch: how to cut {name!r} {tuple(value.shape)} over cp isn't known (known: {', '.join(PER_TOKEN)}).\n"
                "  Leave it out; packed documents are given as position_ids that restart, or as document_ids."
            )
    mask = share.get("attention_mask")
    if mask is not None and (not isinstance(mask, Tensor) or mask.ndim != 2):
        raise ApplyError("shard_batch: under cp, attention_mask is [batch, sequence], 0 for padding; other masks can't be cut.")
    if share.get("use_cache"):
        raise ApplyError("shard_batch: use_cache=True; a cache holds whole sequences, and cp cuts them.")
    limit = _fixed_rope_limit(getattr(model, "config", None))
    positions = share.get("position_ids")
    reached = tokens if positions is None else int(positions.max()) + 1
    if limit is not None and reached > limit:
        raise ApplyError(
            f"shard_batch: {reached} positions, and beyond {limit} this model's rotary frequencies depend on the longest position that a"
            f" forward sees, which differs over cp.\n  Up to {limit} positions work, or a config whose rope_type is neither"
            " dynamic nor longrope."
        )


def _fixed_rope_limit(config: Any) -> int | None:
    """Positions up to which rotary frequencies are constant, for the rope types that change them."""
    given = getattr(config, "rope_parameters", None)
    kinds = [given, *given.values()] if isinstance(given, Mapping) else []
    limits = [
        kind.get("original_max_position_embeddings") or getattr(config, "max_position_embeddings", None)
        for kind in kinds
        if isinstance(kind, Mapping) and str(kind.get("rope_type")) in ("dynamic", "longrope")
    ]
    return min((limit for limit in limits if isinstance(limit, int)), default=None)


def _documents(model: nn.Module, share: Mapping[str, Any]) -> Tensor:
    """[batch, sequence]: the number of each token's document in its row, from 1."""
    first = _first(share)
    given, positions = share.get("document_ids"), share.get("position_ids")
    changes = torch.zeros(first.shape[:2], dtype=torch.long, device=first.device)
    if given is not None:
        changes[:, 1:] = given[:, 1:] != given[:, :-1]
    elif positions is not None and positions.ndim == 2 and share.get("attention_mask") is None:
        changes[:, 1:] = positions.expand(first.shape[:2]).diff() != 1
    if bool(changes.any()):
        family, _ = find_family(model)
        if family is None or family.facts.get("isolates_documents") is not True:
            who = f"family {family.name}" if family else f"{type(model).__name__} (no family adapter)"
            raise ApplyError(
                f"shard_batch: several documents in a row, and {who} isn't known to keep documents apart in one process.\n"
                "  Put one document in a row; position_ids that restart count as several unless attention_mask is given."
            )
        starts = changes.new_ones(changes.shape)
        starts[:, 1:] = changes[:, 1:]
        chunked = getattr(getattr(model, "config", None), "attention_chunk_size", None)
        if chunked and given is None and positions is not None and bool((positions.expand_as(starts)[starts == 1] != 0).any()):
            raise ApplyError(
                "shard_batch: a document starts at another position than 0, and this model attends in chunks that are counted from there."
            )
    return changes.cumsum(1) + 1


def _positions(model: nn.Module, share: Mapping[str, Any], documents: Tensor) -> Tensor:
    """[batch, sequence]: what the model would take by itself, counted anew in each given document."""
    index = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    mask = share.get("attention_mask")
    rotary = hasattr(getattr(model, "config", None), "rope_parameters")
    if mask is not None and not rotary and bool((mask[:, :1] == 0).any()):
        raise ApplyError(
            "shard_batch: rows are padded on the left, and a model without rotary positions may count from the first token that isn't"
            " padding.\n  Pass position_ids, or pad on the right."
        )
    starts = torch.ones_like(documents, dtype=torch.bool)
    starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return index - index.masked_fill(~starts, 0).cummax(1).values


def _compare(batch: Mapping[str, Any] | Sequence[Mapping[str, Any]], group: AxisGroup, device: torch.device) -> None:
    """Raises RankMismatch unless all ranks of cp were given the same whole sequences."""
    for part in _parts(batch):
        compare_inputs((), part, group, device)


def lengths(batch: Any, shares: Any) -> dict[int, int]:
    """{tokens of a share: tokens of its whole sequences}; the longest where several sequences give shares of one length."""
    found: dict[int, int] = {}
    for whole, share in [(batch, shares)] if isinstance(batch, Mapping) else zip(batch, shares, strict=True):
        local, tokens = _first(share).shape[1], _first(whole).shape[1]
        found[local] = max(tokens, found.get(local, 0))
    return found


def unshard(x: Tensor, dim: int, group: AxisGroup | None, order: str, tokens: int | None) -> Tensor:
    """The whole sequence from every rank's part, cut along `dim`, in its original order; `tokens`: its length without padding."""
    if group is None:
        return x
    parts = all_gather(x.detach().unsqueeze(0), 0, group).unbind(0)
    whole = joined(parts, dim % x.ndim, order)
    return whole if tokens is None else whole.narrow(dim % x.ndim, 0, tokens)


# ---- the loss


def _count(
    shares: list[dict[str, Any]], groups: Mapping[str, AxisGroup], refusal: Exception | None, device: torch.device
) -> None:
    """One number of targets for all shares of all ranks. Every rank of dp takes part, with labels or without, and where its batch was
    refused: then all of them raise."""
    with_labels = [s for s in shares if s.get("shift_labels") is not None]
    total = sum(((s["shift_labels"] != IGNORE).sum() for s in with_labels), torch.zeros((), dtype=torch.long, device=device))
    if "dp" in groups:
        group = groups["dp"]
        mine = torch.stack([total, torch.full_like(total, bool(with_labels)), torch.full_like(total, refusal is not None)])
        total, ranks, refused = all_reduce(mine, group).unbind()
        if refusal is not None:
            raise refusal
        if refused:
            raise RankMismatch(f"shard_batch: the batch of {int(refused)} of {group.ranks} dp ranks was refused; the error there says why.")
        if int(ranks) not in (0, group.ranks):
            raise RankMismatch(
                f"shard_batch: {int(ranks)} of {group.ranks} dp ranks brought labels, and this one {'did' if with_labels else 'none'}.\n"
                "  Labels of -100 leave a rank without targets; give all ranks labels, or none."
            )
    if not with_labels:
        return
    if "cp" in groups:
        total = all_reduce(total, groups["cp"])
    for share in with_labels:
        share["num_items_in_batch"] = total


def reduce_loss(loss: Tensor, groups: Mapping[str, AxisGroup]) -> Tensor:
    """The mean over all tokens of all ranks, from each rank's share. Detached; every rank calls it and gets the same number."""
    total = loss.detach()
    for axis in ("cp", "dp"):
        if axis in groups:
            total = all_reduce(total, groups[axis])
    return total
