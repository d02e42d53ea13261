"""FlexAttention over a sequence that is cut over cp: all keys on every rank (gathered), or all positions of some heads (Ulysses)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from hyperpar_cp_sdpa.extend import ContextParallel, Mask, Parts, checked, positions, sum_dtype, to_heads, to_sequence
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, flex_attention

from hyperpar_core.collectives.functional import AxisGroup, all_gather, reduce_scatter
from hyperpar_core.errors import ApplyError

from .block_masks import BLOCK, Tiles, tiles_of

__all__ = ["KERNELS", "FlexContextParallel", "attention"]

KERNELS = ("auto", "compiled", "unfused")


class FlexContextParallel(ContextParallel):
    """A module's forward with its attention over cp, on FlexAttention."""

    def compute(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, parts: Parts, scale: float | None, softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:  # fmt: skip
        return attention(
            q, k, v, mask, parts, scale=scale, softcap=softcap, sinks=sinks, kernel=self.kernel, where=f"{self.fqn}: "
        )


class _Gather(torch.autograd.Function):
    """The parts of all ranks joined along dim 2, in the order of the ranks; gradients travel in the dtype of sums."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: AxisGroup) -> Tensor:
        ctx.group = group
        return all_gather(x, 2, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter(grad.to(sum_dtype(grad)), 2, ctx.group).to(grad.dtype), None


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
    kernel: str = "auto",
    where: str = "",
) -> Tensor:
    """Attention of this rank's queries to the whole sequence: [B, H, local, Dv]. Every rank of `parts.group` calls it alike.

    q [B, H, local, D]   k [B, G, local, D]   v [B, G, local, Dv]   H a multiple of G   sinks [H], a further score in every row
    kernel: "compiled" (torch.compile), "unfused" (torch's own reference, a strip of queries at a time) or "auto". ApplyError where a
    gradient would be needed on a device that FlexAttention has no backward for.
    """
    _refuse_backward((q, k, v, sinks), where)
    if not torch.is_grad_enabled():  # torch looks at requires_grad alone
        q, k, v = q.detach(), k.detach(), v.detach()
    q, k, v = checked(q, k, v, parts)
    if sinks is not None and parts.ulysses > 1:
        sinks = sinks.chunk(parts.ulysses)[parts.seat]
    width = q.shape[-1]
    q, kv = to_heads(q, parts), to_heads(torch.cat([k, v], -1), parts)
    if parts.ring > 1:
        kv = _Gather.apply(kv, parts.group)  # type: ignore[no-untyped-call]
    k, v = kv[..., :width], kv[..., width:]
    tiles = _tiles(mask, parts, q.device)
    if kernel == "auto":
        kernel = "unfused" if q.device.type == "cpu" else "compiled"
    call = functools.partial(_call, score_mod=_score_mod(softcap), scale=scale, with_lse=sinks is not None)
    if kernel == "compiled":
        out, lse = call(_compiled(), q, k, v, tiles.block_mask())
    else:
        out, lse = _in_strips(call, q, k, v, tiles)
    if sinks is not None:  # one more key in every row, with a value of zero: all other weights are scaled by what is left to them
        left = torch.sigmoid(lse - sinks.to(lse.dtype)[None, :, None]).unsqueeze(-1)
        out = (out.to(lse.dtype) * left).to(q.dtype)
    return to_sequence(out, parts)


def _refuse_backward(tensors: tuple[Tensor | None, ...], where: str) -> None:
    learns = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    device = next(x.device.type for x in tensors if x is not None)
    if learns and device in ("cpu", "mps"):
        raise ApplyError(
            f"{where}FlexAttention has no backward on {device}, and this forward needs gradients.\n"
            f"  Run it under torch.no_grad(), on CUDA, or with hyperpar-cp-sdpa's wrappers (sdpa_hf and others)."
        )


def _tiles(mask: Mask, parts: Parts, device: torch.device) -> Tiles:
    """The tiles of this rank's queries and of the keys that it has; worked out once for all layers with this mask."""
    place = ("flex", parts)
    if place not in mask.kept:
        def held(member: int) -> Tensor:
            return positions(parts.spans(member), 0, parts.length, device)

        columns = torch.cat([held(member) for member in range(parts.ring)])
        mask.kept[place] = tiles_of(mask, held(parts.member), columns)
    tiles: Tiles = mask.kept[place]
    return tiles


def _score_mod(softcap: float | None) -> Callable[..., Tensor] | None:
    if softcap is None:
        return None
    cap = softcap

    def capped(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return capped


@functools.cache
def _compiled() -> Callable[..., Any]:
    return torch.compile(flex_attention)


def _call(
    flex: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, block_mask: Any, *, score_mod: Any, scale: float | None, with_lse: bool
) -> tuple[Tensor, Tensor]:
    """(out, natural log of each row's sum of exponentials, or nothing)."""
    aux = AuxRequest(lse=True) if with_lse else None
    result = flex(
        q, k, v, score_mod=score_mod, block_mask=block_mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1], return_aux=aux
    )
    return (result[0], result[1].lse) if with_lse else (result, result.new_empty(0))


def _in_strips(call: Callable[..., tuple[Tensor, Tensor]], q: Tensor, k: Tensor, v: Tensor, tiles: Tiles) -> tuple[Tensor, Tensor]:
    """BLOCK queries at a time: without a compiler, torch holds the scores of all queries that it is given."""
    strips = [
        call(flex_attention, q[:, :, start : start + BLOCK], k, v, tiles.block_mask(start, min(start + BLOCK, q.shape[2])))
        for start in range(0, q.shape[2], BLOCK)
    ]
    return torch.cat([out for out, _ in strips], 2), torch.cat([lse for _, lse in strips], -1)
