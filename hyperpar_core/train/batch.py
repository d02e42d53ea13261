"""The share of a batch that one rank computes, and the loss that all shares add up to."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..collectives.functional import AxisGroup, all_reduce
from ..errors import ApplyError

__all__ = ["reduce_loss", "shard_batch"]

IGNORE = -100


def _shifted(labels: Tensor) -> Tensor:
    """The label of the token that follows each one: [batch, sequence], the last one ignored."""
    return torch.nn.functional.pad(labels[..., 1:], (0, 1), value=IGNORE)


def _check(batch: Mapping[str, Any]) -> tuple[int, int]:
    """(rows, tokens) of a batch."""
    first = next((batch[k] for k in ("input_ids", "inputs_embeds") if isinstance(batch.get(k), Tensor)), None)
    if first is None or first.ndim < 2:
        raise ApplyError("shard_batch: a batch is a mapping with input_ids (or inputs_embeds) of [batch, sequence].")
    rows, tokens = first.shape[:2]
    for name in ("labels", "shift_labels", "attention_mask", "position_ids"):
        value = batch.get(name)
        if isinstance(value, Tensor) and value.shape[-1] != tokens:
            raise ApplyError(f"shard_batch: {name} has {value.shape[-1]} tokens, and the batch {tokens}.")
    if "num_items_in_batch" in batch:
        raise ApplyError(
            "shard_batch counts num_items_in_batch itself, over all ranks and micro-batches; leave it out."
        )
    return rows, tokens


def shard_batch(
    model: nn.Module, batch: Mapping[str, Any] | Sequence[Mapping[str, Any]], groups: Mapping[str, AxisGroup]
) -> dict[str, Any] | list[dict[str, Any]]:
    """This rank's share of one batch, or of a step's list of micro-batches. Every rank calls it with its dp rank's whole sequences.

    Adds shift_labels (labels already shifted) and num_items_in_batch (the number of targets over all dp ranks and all micro-batches
    given), and position_ids [batch, sequence] where the model takes them and there is no padding mask to derive others from.
    """
    if not isinstance(batch, Mapping):
        parts = list(batch)
        if not parts:
            raise ApplyError("shard_batch: an empty list of micro-batches.")
        shares = [_share(model, part) for part in parts]
        _count(shares, groups)
        return shares
    share = _share(model, batch)
    _count([share], groups)
    return share


def _share(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
    rows, tokens = _check(batch)
    share = dict(batch)
    first = batch["input_ids"] if batch.get("input_ids") is not None else batch["inputs_embeds"]
    takes_positions = "position_ids" in inspect.signature(type(model).forward).parameters
    if takes_positions and share.get("position_ids") is None and share.get("attention_mask") is None:
        share["position_ids"] = torch.arange(tokens, device=first.device).expand(rows, tokens)
    if share.get("labels") is not None and share.get("shift_labels") is None:
        share["shift_labels"] = _shifted(share["labels"])
    return share


def _count(shares: list[dict[str, Any]], groups: Mapping[str, AxisGroup]) -> None:
    """One number of targets for all shares of all ranks."""
    with_labels = [s for s in shares if s.get("shift_labels") is not None]
    if not with_labels:
        return
    total = torch.stack([(s["shift_labels"] != IGNORE).sum() for s in with_labels]).sum()
    for axis in ("cp", "dp"):
        if axis in groups:
            total = all_reduce(total, groups[axis])
    for share in with_labels:
        share["num_items_in_batch"] = total


def reduce_loss(loss: Tensor, groups: Mapping[str, AxisGroup]) -> Tensor:
    """The mean over all tokens of all ranks, from each rank's share. Detached; every rank calls it and gets the same number."""
    total = loss.detach()
    for axis in ("cp", "dp"):
        if axis in groups:
            total = all_reduce(total, groups[axis])
    return total
