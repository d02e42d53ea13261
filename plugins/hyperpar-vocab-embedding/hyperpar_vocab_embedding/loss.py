"""Cross entropy on logits that are sharded over the vocab; the whole logits exist on no rank.

T: tokens. V: vocab. n: this rank's part of the vocab, in torch.chunk sizes, possibly 0. Suffixes state
shapes: x_Tn is [T, n].

With m the maximum over V, x' = x - m, s = sum(exp(x')) and smoothing e, the loss of a token with target t is that of
torch.nn.functional.cross_entropy:

    loss = log(s) - (1 - e) x'[t] - e/V sum(x')
    d loss / d x[j] = exp(x'[j]) / s - e/V - (1 - e) [j = t]

Two all-reduces in the forward (the maximum; then all sums at once), none in the backward.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from hyperpar_core.collectives.functional import AxisGroup, all_reduce, axis_group
from hyperpar_core.errors import ApplyError, OverrideError, Refused
from hyperpar_core.placement import shard_size

__all__ = ["vocab_parallel_cross_entropy"]

NAME = "vocab_parallel_cross_entropy"


def vocab_parallel_cross_entropy(
    *, model: nn.Module, tp_mesh: DeviceMesh, label_smoothing: float = 0.0
) -> Callable[..., Tensor]:
    """transformers' causal-LM loss on logits that are DTensors sharded over tp on their last dim.

    Returns loss_function(logits, labels, vocab_size, num_items_in_batch=None, ignore_index=-100, shift_labels=None,
    **kwargs) with the meaning it has in transformers, which ignores further keyword arguments too. All ranks of tp call
    it. The loss is a scalar, equal on all of them; float64 for float64 logits, float32 otherwise.

    Raises Refused for a model whose own loss is another one, and, when called, for logits that arrive whole.
    """
    from transformers.loss.loss_utils import ForCausalLMLoss

    own = getattr(model, "loss_function", None)
    if own is not ForCausalLMLoss:
        named = "no loss_function" if own is None else f"the loss {getattr(own, '__name__', repr(own))}"
        raise Refused(
            f"{type(model).__name__} has {named}; {NAME} replaces transformers' ForCausalLMLoss only.\n"
            "  Plan it with loss_parallel=False."
        )
    if not 0 <= label_smoothing <= 1:
        raise OverrideError(f"{NAME}: label_smoothing={label_smoothing}, needed: a number from 0 to 1.")
    return partial(_causal_lm_loss, axis_group(tp_mesh), float(label_smoothing))


def _causal_lm_loss(
    tp: AxisGroup,
    label_smoothing: float,
    /,
    logits: Tensor,
    labels: Tensor | None,
    vocab_size: int | None = None,
    num_items_in_batch: Tensor | float | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    logits_Tn, vocab = _local_logits(logits, vocab_size, tp)
    if shift_labels is None:
        assert labels is not None, "neither labels nor shift_labels"
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    targets_T = shift_labels.reshape(-1).to(logits_Tn.device, torch.long)
    if len(targets_T) != len(logits_Tn):
        raise ValueError(f"Expected input batch_size ({len(logits_Tn)}) to match target batch_size ({len(targets_T)}).")
    _check_targets(targets_T, vocab, ignore_index)
    losses_T = _cross_entropy(logits_Tn, targets_T, tp, vocab, ignore_index, label_smoothing)
    if num_items_in_batch is None:
        return losses_T.sum() / (targets_T != ignore_index).sum()
    if isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(losses_T.device)
    return losses_T.sum() / num_items_in_batch


def _local_logits(logits: Tensor, vocab_size: int | None, tp: AxisGroup) -> tuple[Tensor, int]:
    """This rank's logits [T, n] and the vocab; Refused unless `logits` is sharded on its last dim."""
    last = logits.ndim - 1
    axes = []
    if isinstance(logits, DTensor):
        axes = [axis for axis, place in enumerate(logits.placements) if place.is_shard(last) or place.is_shard(-1)]
    if not isinstance(logits, DTensor) or len(axes) != 1 or any(place.is_partial() for place in logits.placements):
        what = f"a DTensor placed {logits.placements}" if isinstance(logits, DTensor) else "a plain tensor"
        raise Refused(
            f"{NAME}: logits of shape {list(logits.shape)} arrived as {what}.\n"
            f"  Needed: a DTensor that is shard(-1) over tp={tp.ranks}, as a plan with loss_parallel=True yields it.\n"
            "  Remove what gathers the logits between the head and the loss, or plan with loss_parallel=False."
        )
    vocab = logits.shape[-1]
    mesh, local = logits.device_mesh, logits.to_local()
    here = (mesh.size(axes[0]), mesh.get_local_rank(axes[0]), local.shape[-1])
    needed = (tp.ranks, tp.rank, shard_size(vocab, tp.ranks, tp.rank)[0])
    if here != needed:
        raise ApplyError(f"{NAME}: logits are sharded as (ranks, rank, columns) = {here}, needed: {needed}.")
    if vocab_size is not None and vocab_size != vocab:
        raise ApplyError(f"{NAME}: the logits have {vocab} columns, the model says vocab_size={vocab_size}.")
    return local.flatten(0, -2), vocab


def _check_targets(targets_T: Tensor, vocab: int, ignore_index: int) -> None:
    """Before any collective, on every rank: the error of one process, without a sync on other devices than the CPU."""
    right_T = (targets_T == ignore_index) | ((targets_T >= 0) & (targets_T < vocab))
    if type(targets_T) is not Tensor or targets_T.device.type != "cpu" or torch.compiler.is_compiling():
        torch._assert_async(right_T.all(), "Target is out of bounds.")
    elif not right_T.all():
        raise IndexError(f"Target {int(targets_T[~right_T][0])} is out of bounds.")


class _CrossEntropy(torch.autograd.Function):
    """Per-token losses [T], zero where the target is `ignore_index`; equal on every rank.

    Keeps the logits themselves and a few numbers per token: forward and backward make one [T, n] buffer each.
    """

    @staticmethod
    def forward(
        ctx: Any, logits_Tn: Tensor, targets_T: Tensor, tp: AxisGroup, vocab: int, ignore_index: int, smoothing: float
    ) -> Tensor:
        n, offset = shard_size(vocab, tp.ranks, tp.rank)
        dtype = torch.float64 if logits_Tn.dtype == torch.float64 else torch.float32
        empty_T = logits_Tn.new_full(targets_T.shape, -torch.inf)
        max_T = all_reduce((logits_Tn.amax(-1) if n else empty_T).to(dtype), tp, "max")
        shifted_Tn = logits_Tn - max_T[:, None]
        valid_T = targets_T != ignore_index
        mine_T = valid_T & (targets_T >= offset) & (targets_T < offset + n)
        column_T = (targets_T - offset).masked_fill(~mine_T, 0)
        picked_T = torch.zeros_like(max_T)
        if n:
            picked_T = shifted_Tn.gather(1, column_T[:, None])[:, 0].masked_fill_(~mine_T, 0)
        sums = [picked_T, shifted_Tn.sum(-1)] if smoothing else [picked_T]
        picked_T, *smooth, sum_T = all_reduce(torch.stack([*sums, shifted_Tn.exp_().sum(-1)]), tp)
        log_sum_T = sum_T.log()
        ctx.save_for_backward(logits_Tn, max_T, sum_T, column_T, mine_T, valid_T)
        ctx.vocab, ctx.smoothing = vocab, smoothing
        losses_T: Tensor = log_sum_T - (1 - smoothing) * picked_T
        if smoothing:
            losses_T -= smoothing / vocab * smooth[0]
        return losses_T.masked_fill_(~valid_T, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_T: Tensor) -> tuple[Tensor | None, ...]:
        logits_Tn, max_T, sum_T, column_T, mine_T, valid_T = ctx.saved_tensors
        if isinstance(grad_T, DTensor):  # another term of the loss was computed from the DTensor of logits
            grad_T = grad_T.full_tensor()
        grad_T = grad_T.masked_fill(~valid_T, 0)
        grad_Tn = (logits_Tn - max_T[:, None]).exp_().mul_((grad_T / sum_T)[:, None])
        if ctx.smoothing:
            grad_Tn.sub_((grad_T * (ctx.smoothing / ctx.vocab))[:, None])
        if grad_Tn.shape[1]:
            at_target_T = (grad_T * (ctx.smoothing - 1)).masked_fill_(~mine_T, 0)
            grad_Tn.scatter_add_(1, column_T[:, None], at_target_T[:, None].to(grad_Tn.dtype))
        return grad_Tn.to(logits_Tn.dtype), None, None, None, None, None


_cross_entropy: Callable[..., Tensor] = _CrossEntropy.apply
