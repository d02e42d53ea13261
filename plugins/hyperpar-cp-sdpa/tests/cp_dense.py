"""Dense attention in one process, and the same on the ranks of a pool."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from hyperpar_cp_sdpa.attention import attention
from hyperpar_cp_sdpa.exchange import Parts
from hyperpar_cp_sdpa.masks import Mask
from torch.distributed.device_mesh import init_device_mesh

from hyperpar_core.batch import spans
from hyperpar_core.collectives.functional import axis_group

FORMS = {  # name: (gather, ulysses degree for a given cp)
    "all-gather": (True, lambda cp: 1),
    "ring": (False, lambda cp: 1),
    "ulysses": (False, lambda cp: cp),
    "hybrid": (False, lambda cp: cp // 2 if cp > 2 else 2),
}


def cp_group(cp):
    world = dist.get_world_size()
    return axis_group(init_device_mesh("cpu", (world // cp, cp), mesh_dim_names=("dp", "cp"))["cp"])


def held(x, dim, order, group):
    """This rank's part of a whole tensor, and its inverse for gradients is `whole`."""
    pieces = [x.narrow(dim, start, size) for start, size in spans(order, group.ranks, group.rank, x.shape[dim])]
    return torch.cat(pieces, dim)


def whole(x, dim, order, group):
    parts = [None] * group.ranks
    dist.all_gather_object(parts, x, group=dist.distributed_c10d._resolve_process_group(group.name))
    length = x.shape[dim] * group.ranks
    out = [None] * length
    for rank, part in enumerate(parts):
        rows = iter(part.unbind(dim))
        for start, size in spans(order, group.ranks, rank, length):
            out[start : start + size] = [next(rows) for _ in range(size)]
    return torch.stack(out, dim)


def dense(q, k, v, seen, scale, softcap=None, sinks=None):
    """The formula, with the whole matrix of scores."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.transpose(-1, -2) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
    weights = torch.exp(scores - scores.amax(-1, keepdim=True).clamp_min(-1e30))
    weights = weights / weights.sum(-1, keepdim=True).clamp_min(1e-300)
    return weights[..., : k.shape[2]] @ v


def inputs(shape, dtype, seed=0, factor=1.0):
    """q, k, v, the gradient of the output, sinks. shape: batch, heads, key/value heads, length, head dim, v's head dim."""
    batch, heads, groups, length, width, v_width = shape
    generator = torch.Generator().manual_seed(seed)
    sizes = [(batch, heads, length, width), (batch, groups, length, width), (batch, groups, length, v_width),
             (batch, heads, length, v_width), (heads,)]  # fmt: skip
    made = [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]
    return [x.mul(factor if i < 2 else 1.0).to(dtype) for i, x in enumerate(made)]


def reference(tensors, mask, scale, softcap=None, with_sinks=False):
    """(out, gradients of q, k, v and sinks), computed in float64."""
    q, k, v, grad, sinks = (x.detach().double().clone() for x in tensors)
    leaves = [x.requires_grad_() for x in (q, k, v, sinks)]
    every = torch.arange(mask.length)
    out = dense(q, k, v, mask.seen(every, every), scale, softcap, sinks if with_sinks else None)
    out.backward(grad)
    return [out.detach(), *(x.grad for x in leaves[: 4 if with_sinks else 3])]


def on_ranks(group, form, tensors, mask, scale, softcap=None, with_sinks=False, kernel="auto"):
    """The same from the ranks of `group`, gathered."""
    gather, degree = FORMS[form]
    q, k, v, grad, sinks = tensors
    q, k, v, grad = (held(x, 2, mask.order, group) for x in (q, k, v, grad))
    leaves = [x.clone().requires_grad_() for x in (q, k, v, sinks)]
    parts = Parts(group, mask.order, mask.length, degree(group.ranks))
    out = attention(
        *leaves[:3], mask, parts, scale=scale, softcap=softcap, sinks=leaves[3] if with_sinks else None, gather=gather,
        kernel=kernel,
    )  # fmt: skip
    out.backward(grad)
    results = [whole(x, 2, mask.order, group) for x in (out.detach(), *(x.grad for x in leaves[:3]))]
    if with_sinks:
        total = leaves[3].grad.clone()
        dist.all_reduce(total, group=dist.distributed_c10d._resolve_process_group(group.name))
        results.append(total)
    return results


def differences(ours, theirs):
    """The largest difference of each pair, relative to the reference's largest value, or to a tenth of the largest of all."""
    floor = 0.1 * max(b.abs().max() for b in theirs)  # what is zero but for rounding has no scale of its own
    return [((a.double() - b).abs().max() / b.abs().max().clamp_min(floor)).item() for a, b in zip(ours, theirs, strict=True)]


def root_mean_squares(ours, theirs):
    """The root mean square of each difference."""
    return [(a.double() - b).square().mean().sqrt().item() for a, b in zip(ours, theirs, strict=True)]


def mask_of(rule, order, length, documents=None):
    several = documents is not None and bool((documents > 1).any())
    return Mask(rule, order, length, documents, several)
