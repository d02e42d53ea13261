"""Attention over a sequence that is cut over cp: blocks, merged by their log-sum-exp.

Each rank keeps its queries; keys and values come past, gathered at once or along a ring. The backward holds nothing of the forward
but q, k, v, out and lse: it lets keys and values come past again, and the sums of their gradients travel with them (ring) or are
reduce-scattered (all-gather).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hyperpar_core.collectives.functional import all_gather, reduce_scatter
from hyperpar_core.errors import ApplyError

from . import kernels
from .exchange import Parts, Transfer, check_heads, to_heads, to_sequence
from .kernels import Scores, sum_dtype
from .masks import Block, Mask, Spans

__all__ = ["attention", "checked"]


@dataclass(frozen=True)
class _Job:
    """What is not a tensor: plain values and the mask."""

    mask: Mask
    parts: Parts
    scores: Scores
    gather: bool
    width: int  # head dim of q and k; v's is the rest of kv

    def blocks(self, source: int, device: torch.device) -> tuple[Spans, Spans, tuple[Block, ...]]:
        ours, theirs = self.parts.spans(self.parts.member), self.parts.spans(source)
        return ours, theirs, self.mask.blocks(ours, theirs, device)


class _Softmax:
    """The running result of rows whose keys come block by block, in float32 or float64."""

    def __init__(self, q: Tensor, width: int) -> None:
        dtype = sum_dtype(q)
        self.out = q.new_zeros(*q.shape[:3], width, dtype=dtype)
        self.lse = q.new_full(q.shape[:3], -math.inf, dtype=dtype)

    def add(self, block: Block, out: Tensor, lse: Tensor) -> None:
        """Merges a block's result into its rows."""
        rows = slice(block.q0, block.q1)
        before = self.lse[:, :, rows]
        after = torch.logaddexp(before, lse)
        finite = after.masked_fill(after == -math.inf, 0.0)
        old, new = torch.exp(before - finite).unsqueeze(-1), torch.exp(lse - finite).unsqueeze(-1)
        self.out[:, :, rows] = self.out[:, :, rows] * old + out * new
        self.lse[:, :, rows] = after


def _forward_source(job: _Job, total: _Softmax, q: Tensor, kv: Tensor, source: int) -> None:
    """Adds what this rank's queries get from the keys of one member of the ring."""
    ours, theirs, blocks = job.blocks(source, q.device)
    k, v = kv[..., : job.width], kv[..., job.width :]
    for b in blocks:
        seen = job.mask.block_mask(b, ours, theirs, q.device)
        keys = slice(b.k0, b.k1)
        total.add(b, *kernels.forward(q[:, :, b.q0 : b.q1], k[:, :, keys], v[:, :, keys], seen, b.kind == "causal", job.scores))


def _backward_source(
    job: _Job, grad: Tensor, q: Tensor, kv: Tensor, out: Tensor, lse: Tensor, dq: Tensor, source: int
) -> Tensor:
    """Adds to `dq`, and returns the gradient of `kv`, of one member of the ring, in the dtype of sums."""
    ours, theirs, blocks = job.blocks(source, q.device)
    k, v = kv[..., : job.width], kv[..., job.width :]
    dkv = torch.zeros_like(kv, dtype=sum_dtype(kv))
    for b in blocks:
        seen = job.mask.block_mask(b, ours, theirs, q.device)
        rows, keys = slice(b.q0, b.q1), slice(b.k0, b.k1)
        gq, gk, gv = kernels.backward(
            grad[:, :, rows], q[:, :, rows], k[:, :, keys], v[:, :, keys], out[:, :, rows], lse[:, :, rows], seen,
            b.kind == "causal", job.scores,
        )  # fmt: skip
        dq[:, :, rows] += gq
        dkv[:, :, keys, : job.width] += gk
        dkv[:, :, keys, job.width :] += gv
    return dkv


def _gathered(kv: Tensor, parts: Parts) -> tuple[Tensor, ...]:
    return all_gather(kv.unsqueeze(0), 0, parts.group).unbind(0)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, kv: Tensor, sinks: Tensor | None, job: _Job) -> Tensor:
        parts = job.parts
        total = _Softmax(q, kv.shape[-1] - job.width)
        if job.gather:
            for source, part in enumerate(_gathered(kv, parts)):
                _forward_source(job, total, q, part, source)
        else:
            current = kv
            for step in range(parts.ring):
                coming = Transfer(current, parts) if step + 1 < parts.ring else None
                _forward_source(job, total, q, current, (parts.member - step) % parts.ring)
                if coming is not None:
                    current = coming.wait()
        out, lse = total.out, total.lse
        if sinks is not None:  # one more key in every row, with a value of zero
            sunk = torch.logaddexp(lse, sinks.to(lse.dtype)[None, :, None])
            out = out * torch.exp(lse - sunk).unsqueeze(-1)
            lse = sunk
        out = out.to(q.dtype)
        ctx.job = job
        ctx.save_for_backward(q, kv, sinks, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, kv, sinks, out, lse = ctx.saved_tensors
        job: _Job = ctx.job
        parts = job.parts
        grad = grad.contiguous()
        dq = torch.zeros_like(q, dtype=sum_dtype(q))
        if job.gather:
            dkvs = [
                _backward_source(job, grad, q, part, out, lse, dq, source)
                for source, part in enumerate(_gathered(kv, parts))
            ]
            dkv = reduce_scatter(torch.stack(dkvs), 0, parts.group).squeeze(0)
        else:
            dkv = _ring_backward(job, grad, q, kv, out, lse, dq)
        dsinks = None
        if sinks is not None:
            # d score = weight * (d weight - sum over the row of grad * out), and the sink's value is zero
            weight = torch.exp(sinks.to(lse.dtype)[None, :, None] - lse)
            dsinks = -(weight * (grad.to(lse.dtype) * out).sum(-1)).sum((0, 2)).to(sinks.dtype)
        return dq.to(q.dtype), dkv.to(kv.dtype), dsinks, None


def _ring_backward(job: _Job, grad: Tensor, q: Tensor, kv: Tensor, out: Tensor, lse: Tensor, dq: Tensor) -> Tensor:
    """Keys and values go round again; the sum of a member's gradients follows them one step behind, and goes home last."""
    parts = job.parts
    current, own = kv, None
    travelling: Transfer | None = None
    for step in range(parts.ring):
        coming = Transfer(current, parts) if step + 1 < parts.ring else None
        dkv = _backward_source(job, grad, q, current, out, lse, dq, (parts.member - step) % parts.ring)
        if step == 0:
            own = dkv  # never leaves
        else:
            if travelling is not None:
                dkv += travelling.wait()
            travelling = Transfer(dkv, parts)
        if coming is not None:
            current = coming.wait()
    assert own is not None
    return own if travelling is None else own + travelling.wait()


def checked(q: Tensor, k: Tensor, v: Tensor, parts: Parts) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v in autocast's dtype, where it is on; ApplyError where they don't fit each other or the batch."""
    if torch.is_autocast_enabled(q.device.type):  # as torch's own attention does
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = (x if x.dtype == torch.float64 else x.to(dtype) for x in (q, k, v))
    if not q.dtype == k.dtype == v.dtype:
        raise ApplyError(f"attention: queries are {q.dtype}, keys {k.dtype}, values {v.dtype}; they must have one dtype.")
    if q.shape[2] != k.shape[2] or q.shape[2] * parts.group.ranks != parts.length:
        raise ApplyError(
            f"attention: {q.shape[2]} queries and {k.shape[2]} keys on each of {parts.group.ranks} ranks, where the batch has"
            f" {parts.length} positions in all."
        )
    check_heads(q.shape[1], k.shape[1], parts.ulysses)
    return q, k, v


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    parts: Parts,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    gather: bool = False,
    kernel: str = "auto",
) -> Tensor:
    """Attention of this rank's queries to the whole sequence: [B, H, local, Dv]. Every rank of `parts.group` calls it alike.

    q [B, H, local, D]   k [B, G, local, D]   v [B, G, local, Dv]   H a multiple of G   sinks [H], a further score in every row
    scale: 1 / sqrt(D) by default. gather: keys and values all at once instead of along the ring (only without Ulysses).
    """
    q, k, v = checked(q, k, v, parts)
    scores = Scores(q.shape[-1] ** -0.5 if scale is None else scale, softcap or None, kernel)
    job = _Job(mask, parts, scores, gather and parts.ulysses == 1, q.shape[-1])
    if sinks is not None and parts.ulysses > 1:
        sinks = sinks.chunk(parts.ulysses)[parts.seat]
    q, kv = to_heads(q, parts), to_heads(torch.cat([k, v], -1), parts)
    out: Tensor = _Attention.apply(q, kv, sinks, job)  # type: ignore[no-untyped-call]
    return to_sequence(out, parts)
