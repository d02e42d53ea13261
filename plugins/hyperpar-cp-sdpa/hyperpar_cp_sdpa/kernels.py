"""One block of attention, forward and backward, on the operator that fits the device.

    q [B, H, Lq, D]   k [B, G, Lk, D]   v [B, G, Lk, Dv]   H a multiple of G: keys and values are never expanded on the way here
    seen  bool [B or 1, 1, Lq, Lk], or None for all; `causal`: the lower triangle of a square block
    out [B, H, Lq, Dv]   lse [B, H, Lq]: the log of the sum of the exponentials of a row's scores, natural, float32 (float64 for float64)

A row that sees nothing of a block has out 0 and lse -inf. The backward takes the out and lse of the whole row, over all blocks (and
sinks), so that a block's weights are exp(score - lse): Dao et al., FlashAttention (2022), and Liu et al., Ring Attention (2023).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hyperpar_core.errors import ApplyError

__all__ = ["KERNELS", "Scores", "backward", "choose", "forward", "sum_dtype"]

KERNELS = ("auto", "math", "flash", "efficient", "cudnn")
_MATH_ELEMENTS = 1 << 26  # scores that the math path holds at once
_aten = torch.ops.aten


@dataclass(frozen=True)
class Scores:
    """How a score is made: q @ k * scale, then softcap * tanh(score / softcap) where there is one. `kernel`: one of KERNELS."""

    scale: float
    softcap: float | None = None
    kernel: str = "auto"


def sum_dtype(x: Tensor) -> torch.dtype:
    """What sums over blocks are kept in: float32, float64 for float64."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def choose(q: Tensor, masked: bool, scores: Scores) -> str:
    """The kernel for q's device and dtype; ApplyError when the one that was asked for can't do it."""
    device, asked = q.device.type, scores.kernel
    half = q.dtype in (torch.float16, torch.bfloat16)
    able = ["math"]
    if scores.softcap is None and device == "cpu":
        able = ["flash", "math"]
    elif scores.softcap is None and device == "cuda" and q.dtype != torch.float64:
        able = ["efficient", "math"]
        if half:
            able = [*(() if masked else ("flash",)), "efficient", "cudnn", "math"]
    if asked == "auto":
        return able[0]
    if asked == "flash" and masked and half and device == "cuda":
        return "efficient"  # flash has no masks: blocks with one go to the next best
    if asked not in able:
        cause = "a soft cap" if scores.softcap is not None else f"{q.dtype} on {device}"
        raise ApplyError(f"kernel {asked!r} can't compute {cause} (it can: {', '.join(able)}, auto).")
    return asked


def forward(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, causal: bool, scores: Scores
) -> tuple[Tensor, Tensor]:
    """(out, lse) of one block."""
    if not q.numel() or not k.numel():  # operators kill the process on these
        return q.new_zeros(*q.shape[:3], v.shape[-1]), q.new_full(q.shape[:3], -math.inf, dtype=sum_dtype(q))
    kernel = choose(q, seen is not None, scores)
    if kernel == "math":
        out, lse = _math_forward(q, k, v, seen, causal, scores)
    else:
        width = v.shape[-1]
        q, k, v = _same_width(q, k, v)
        out, lse = _FORWARD[q.device.type, kernel](q, k, v, _bias(seen, q), causal, scores.scale)
        out = out[..., :width]
    if seen is not None:
        blind = ~seen.any(-1)
        out = out.masked_fill(blind.unsqueeze(-1), 0)
        lse = lse.masked_fill(blind, -math.inf)
    return out, lse


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, seen: Tensor | None, causal: bool, scores: Scores
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of one block. `grad`, `out`, `lse`: of the whole rows."""
    if not q.numel() or not k.numel():
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    lse = lse.masked_fill(lse == -math.inf, math.inf)  # a row that sees nothing anywhere: all its weights are 0, not NaN
    kernel = choose(q, seen is not None, scores)
    if kernel == "math":
        return _math_backward(grad, q, k, v, out, lse, seen, causal, scores)
    head, width = q.shape[-1], v.shape[-1]
    q, k, v, grad, out = _same_width(q, k, v, grad, out)
    dq, dk, dv = _BACKWARD[q.device.type, kernel](grad, q, k, v, out, lse, _bias(seen, q), causal, scores.scale)
    return dq[..., :head], dk[..., :head], dv[..., :width]


def _same_width(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Head dims padded with zeros to one width, which changes neither scores nor the columns that count."""
    width = max(x.shape[-1] for x in tensors)
    if tensors[0].device.type == "cuda":
        width = -(-width // 8) * 8
    return tuple(x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in tensors)


def _bias(seen: Tensor | None, q: Tensor) -> Tensor | None:
    """The mask as a summand, in q's dtype: operators take no other."""
    if seen is None:
        return None
    columns = seen.shape[-1]
    bias = q.new_zeros(*seen.shape[:-1], -(-columns // 16) * 16)[..., :columns]  # rows start on the boundaries that CUDA wants
    return bias.masked_fill_(~seen, -math.inf)


# ---- CPU


def _cpu_forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
    return out, lse


def _cpu_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return _aten._scaled_dot_product_flash_attention_for_cpu_backward(  # type: ignore[no-any-return]
        grad, q, k, v, out, lse, 0.0, causal, attn_mask=bias, scale=scale
    )


# ---- CUDA


def _flash_forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    out = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
    return out[0], out[1][..., : q.shape[2]]


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    seed = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of the dropout, which there is none of
    return _aten._scaled_dot_product_flash_attention_backward(  # type: ignore[no-any-return]
        grad, q, k, v, out, lse.contiguous(), None, None, q.shape[2], k.shape[2], 0.0, causal, seed, seed[:1].view(()), scale=scale
    )


def _expanded(x: Tensor, heads: int) -> Tensor:
    """Keys or values repeated for each query head, for an operator that knows no groups: here, after they have travelled."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def _grouped(grad: Tensor, groups: int) -> Tensor:
    return grad if grad.shape[1] == groups else grad.unflatten(1, (groups, -1)).sum(2, dtype=sum_dtype(grad)).to(grad.dtype)


def _efficient_forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    k, v = _expanded(k, q.shape[1]), _expanded(v, q.shape[1])
    bias = None if bias is None else bias.expand(q.shape[0], q.shape[1], -1, -1)
    out = _aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, 0.0, causal, scale=scale)
    return out[0], out[1][..., : q.shape[2]]


def _efficient_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    groups = k.shape[1]
    k, v = _expanded(k, q.shape[1]), _expanded(v, q.shape[1])
    bias = None if bias is None else bias.expand(q.shape[0], q.shape[1], -1, -1)
    lse = F.pad(lse, (0, -lse.shape[-1] % 32), value=math.inf).contiguous()  # the operator's own lse has this length
    seed = torch.zeros((), dtype=torch.int64, device=q.device)
    dq, dk, dv, _ = _aten._scaled_dot_product_efficient_attention_backward(
        grad, q, k, v, bias, out, lse, seed, seed, 0.0, [True, True, True, False], causal, scale=scale
    )
    return dq, _grouped(dk, groups), _grouped(dv, groups)


def _cudnn_forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    bias = None if bias is None else bias.expand(q.shape[0], q.shape[1], -1, -1)
    out = _aten._scaled_dot_product_cudnn_attention(q, k, v, bias, True, 0.0, causal, False, scale=scale)
    return out[0], out[1].reshape(q.shape[0], q.shape[1], -1)[..., : q.shape[2]]


def _cudnn_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    bias = None if bias is None else bias.expand(q.shape[0], q.shape[1], -1, -1)
    seed = torch.zeros((), dtype=torch.int64, device=q.device)
    return _aten._scaled_dot_product_cudnn_attention_backward(  # type: ignore[no-any-return]
        grad, q, k, v, out, lse.unsqueeze(-1).contiguous(), seed, seed, bias, None, None, q.shape[2], k.shape[2], 0.0, causal,
        scale=scale,
    )  # fmt: skip


_FORWARD = {
    ("cpu", "flash"): _cpu_forward, ("cuda", "flash"): _flash_forward,
    ("cuda", "efficient"): _efficient_forward, ("cuda", "cudnn"): _cudnn_forward,
}  # fmt: skip
_BACKWARD = {
    ("cpu", "flash"): _cpu_backward, ("cuda", "flash"): _flash_backward,
    ("cuda", "efficient"): _efficient_backward, ("cuda", "cudnn"): _cudnn_backward,
}  # fmt: skip


# ---- any device


def _math_scores(
    q: Tensor, k: Tensor, seen: Tensor | None, causal: bool, first: int, scores: Scores
) -> tuple[Tensor, Tensor | None]:
    """(scores [B, G, H / G, rows, Lk], tanh of the capped ones) of rows from `first` on; -inf where a row doesn't see."""
    s = q @ k.transpose(-1, -2) * scores.scale
    capped = None
    if scores.softcap is not None:
        capped = torch.tanh(s / scores.softcap)
        s = capped * scores.softcap
    if causal:
        seen = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril(first)[None, None]
    if seen is not None:
        s = s.masked_fill(~seen.unsqueeze(2), -math.inf)
    return s, capped


def _rows(q: Tensor, k: Tensor) -> int:
    return max(1, _MATH_ELEMENTS // (q.shape[0] * q.shape[1] * k.shape[2]))


def _math_forward(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, causal: bool, scores: Scores
) -> tuple[Tensor, Tensor]:
    dtype, groups, step = sum_dtype(q), k.shape[1], _rows(q, k)
    k5, v5 = k.to(dtype).unsqueeze(2), v.to(dtype).unsqueeze(2)
    outs, lses = [], []
    for first in range(0, q.shape[2], step):
        rows = q[:, :, first : first + step].to(dtype).unflatten(1, (groups, -1))
        part = None if seen is None else seen[:, :, first : first + step]
        s, _ = _math_scores(rows, k5, part, causal, first, scores)
        lse = s.logsumexp(-1)
        weights = torch.exp(s - lse.masked_fill(lse == -math.inf, math.inf).unsqueeze(-1))
        outs.append((weights @ v5).flatten(1, 2))
        lses.append(lse.flatten(1, 2))
    return torch.cat(outs, 2).to(q.dtype), torch.cat(lses, 2)


def _math_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, seen: Tensor | None, causal: bool, scores: Scores
) -> tuple[Tensor, Tensor, Tensor]:
    dtype, groups, step = sum_dtype(q), k.shape[1], _rows(q, k)
    k5, v5 = k.to(dtype).unsqueeze(2), v.to(dtype).unsqueeze(2)
    dqs, dk, dv = [], torch.zeros_like(k, dtype=dtype), torch.zeros_like(v, dtype=dtype)
    for first in range(0, q.shape[2], step):
        rows, g, o, total = (
            x[:, :, first : first + step].to(dtype).unflatten(1, (groups, -1)) for x in (q, grad, out, lse)
        )
        part = None if seen is None else seen[:, :, first : first + step]
        s, capped = _math_scores(rows, k5, part, causal, first, scores)
        weights = torch.exp(s - total.unsqueeze(-1))
        dv += (weights.transpose(-1, -2) @ g).sum(2)
        ds = weights * (g @ v5.transpose(-1, -2) - (g * o).sum(-1, keepdim=True)) * scores.scale
        if capped is not None:
            ds = ds * (1 - capped * capped)
        dqs.append((ds @ k5).flatten(1, 2))
        dk += (ds.transpose(-1, -2) @ rows).sum(2)
    return torch.cat(dqs, 2).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
