"""How keys, values and heads travel over cp, on functional all-to-alls of the one cp group.

`Parts` says who holds what. With a Ulysses degree u, u neighbouring ranks exchange heads for positions and then act as one member of
a ring of ranks / u members: u = 1 is a plain ring (or an all-gather), u = ranks is plain Ulysses (Jacobs et al., 2023), what lies
between is the hybrid of Fang and Zhao (USP, 2024).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hyperpar_core.batch import spans
from hyperpar_core.collectives.functional import AxisGroup
from hyperpar_core.errors import Refused

from .kernels import sum_dtype
from .masks import Spans

__all__ = ["Parts", "Transfer", "check_heads", "to_heads", "to_sequence"]

_ops = torch.ops._c10d_functional


@dataclass(frozen=True)
class Parts:
    """The ranks of cp, the order of the sequence on them, and how many of them share their heads."""

    group: AxisGroup
    order: str
    length: int
    ulysses: int = 1

    @property
    def ring(self) -> int:
        """Members of the ring."""
        return self.group.ranks // self.ulysses

    @property
    def member(self) -> int:
        """This rank's place in the ring."""
        return self.group.rank // self.ulysses

    @property
    def seat(self) -> int:
        """This rank's place among those it exchanges heads with."""
        return self.group.rank % self.ulysses

    def spans(self, member: int) -> Spans:
        """The global positions that a member of the ring holds, once heads are exchanged."""
        return spans(self.order, self.ring, member, self.length)


class Transfer:
    """`x` on its way to the next member of the ring, while the one from the member before arrives. Waited for once."""

    def __init__(self, x: Tensor, parts: Parts) -> None:
        ranks, step = parts.group.ranks, parts.ulysses
        sent, received = [0] * ranks, [0] * ranks
        sent[(parts.group.rank + step) % ranks] = received[(parts.group.rank - step) % ranks] = x.numel()
        self.shape = x.shape
        self.flat = _ops.all_to_all_single(x.reshape(-1), received, sent, parts.group.name)

    def wait(self) -> Tensor:
        """What the member before sent."""
        return _ops.wait_tensor(self.flat).view(self.shape)  # type: ignore[no-any-return]


def _swap(x: Tensor, parts: Parts) -> Tensor:
    """`x[i]` goes to seat i, and `out[i]` comes from it: [ulysses, ...]."""
    sizes = [0] * parts.group.ranks
    first = parts.member * parts.ulysses
    sizes[first : first + parts.ulysses] = [x[0].numel()] * parts.ulysses
    flat: Tensor = _ops.wait_tensor(_ops.all_to_all_single(x.reshape(-1), sizes, sizes, parts.group.name))
    return flat.view(x.shape)


def check_heads(heads: int, groups: int, ulysses: int, where: str = "") -> None:
    """Refused unless `heads` query heads and `groups` key/value heads (of this tp rank) can be dealt to `ulysses` ranks."""
    degrees = [d for d in range(1, heads + 1) if heads % d == 0 and (groups % d == 0 or d % groups == 0)]
    if ulysses not in degrees:
        raise Refused(
            f"{where}{heads} attention heads with {groups} key/value heads (per tp rank) can't be dealt to {ulysses} ranks"
            f" (Ulysses).\n  Degrees that work here: {', '.join(map(str, degrees))}. The ring form has no such limit."
        )


def _head_places(heads: int, ulysses: int) -> list[int]:
    """For heads that are fewer than the seats: the one that each seat takes."""
    return [seat * heads // ulysses for seat in range(ulysses)]


def _gather_sequence(x: Tensor, parts: Parts) -> Tensor:
    """[B, heads, local, D] -> [B, this seat's heads, ulysses * local, D], positions ascending."""
    u, heads = parts.ulysses, x.shape[1]
    if heads % u:
        sent = x[:, _head_places(heads, u)].movedim(1, 0).unsqueeze(2)
    else:
        sent = x.unflatten(1, (u, heads // u)).movedim(1, 0)
    return torch.cat(_ascending(_swap(sent, parts), parts), 2)


def _ascending(x: Tensor, parts: Parts) -> list[Tensor]:
    """The pieces of [ulysses, B, heads, local, D] in ascending order of their positions."""
    if parts.order == "contiguous":
        return list(x)
    half = x.shape[3] // 2
    return [*x[:, :, :, :half], *reversed(list(x[:, :, :, half:]))]


def _scatter_sequence(x: Tensor, parts: Parts) -> Tensor:
    """The inverse: [B, this seat's heads, ulysses * local, D] -> [ulysses, B, seat's heads, local, D], of all seats' heads."""
    u = parts.ulysses
    if parts.order == "contiguous":
        sent = torch.stack(x.chunk(u, 2))
    else:
        pieces = x.chunk(2 * u, 2)
        sent = torch.stack([torch.cat([pieces[i], pieces[2 * u - 1 - i]], 2) for i in range(u)])
    return _swap(sent, parts)


def _join_heads(x: Tensor, heads: int) -> Tensor:
    """[ulysses, B, seat's heads, local, D] -> [B, heads, local, D]; seats that hold copies of one head are summed."""
    if heads % x.shape[0] == 0:
        return x.movedim(0, 1).flatten(1, 2)
    copies = x.squeeze(2).unflatten(0, (heads, -1))
    summed: Tensor = copies.sum(1, dtype=sum_dtype(x))
    return summed.to(x.dtype).movedim(0, 1)


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, parts: Parts) -> Tensor:
        ctx.parts, ctx.heads = parts, x.shape[1]
        return _gather_sequence(x, parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _join_heads(_scatter_sequence(grad, ctx.parts), ctx.heads), None


class _ToSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, parts: Parts) -> Tensor:
        ctx.parts = parts
        return _join_heads(_scatter_sequence(x, parts), x.shape[1] * parts.ulysses)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _gather_sequence(grad, ctx.parts), None


def to_heads(x: Tensor, parts: Parts) -> Tensor:
    """[B, heads, local, D] of all heads -> [B, heads / u, u * local, D] of this seat's; fewer heads than seats are sent to several."""
    return x if parts.ulysses == 1 else _ToHeads.apply(x, parts)  # type: ignore[no-untyped-call]


def to_sequence(x: Tensor, parts: Parts) -> Tensor:
    """The inverse of `to_heads`, for query heads."""
    return x if parts.ulysses == 1 else _ToSequence.apply(x, parts)  # type: ignore[no-untyped-call]
