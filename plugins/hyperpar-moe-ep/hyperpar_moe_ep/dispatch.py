"""How tokens travel to experts and back: the dispatchers.

A dispatcher is a callable

    dispatch(experts, x_TH, indices_TK, weights_TK) -> out_TH

where x_TH are this rank's tokens, indices_TK the global numbers of the K experts of each and weights_TK their routing weights; out_TH
is the weighted sum of what the experts yield. It calls `experts` exactly once, on every rank and for any number of tokens, 0 too:

    experts(x_NH, expert_N1, weight_N1) -> y_NH        expert_N1: this rank's own experts, counted from 0

Every rank of the group calls it as often as the others, and its backward is theirs too. Experts that got no row, on any rank, have
zero gradients. A builder `(group, local_experts) -> dispatch` makes one at apply time; it may have `traffic`, which tells what it sends
(see LocalComputeFactory). An archetype's option `dispatcher` takes a builder, or the name of one in DISPATCHERS; a distribution of
one's own offers all archetypes with its dispatcher: see `archetypes_with`.

T: tokens of this rank. K: experts per token. R: ranks of the group. P: rows sent. Q: rows received. N: pairs of a received row and one
of this rank's experts. H: hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import comb
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hyperpar_core.collectives.functional import AxisGroup, exchange

from .travel import Way, back, out

__all__ = ["DISPATCHERS", "AllToAll", "Build", "Dispatcher", "Experts", "nothing"]

Experts = Callable[[Tensor, Tensor, Tensor], Tensor]


class Dispatcher(Protocol):
    def __call__(self, experts: Experts, x: Tensor, indices: Tensor, weights: Tensor, /) -> Tensor: ...


@dataclass(frozen=True)
class AllToAll:
    """Each token travels once to each rank that holds one of its experts, together with its weights, and one row comes back.

    Collectives: the counts (a few numbers) and the rows out, the weighted sums back; in the backward one each way. A rank reads the
    counts on the host, so torch.compile breaks the graph here. Sums are taken in the wider of the weights' and the tokens' dtypes.
    """

    group: AxisGroup
    local_experts: int

    @staticmethod
    def traffic(
        *, contract: Any, shapes: Mapping[str, Sequence[int]], tokens: int, ranks: int, width: int
    ) -> list[tuple[str, str, int]] | None:
        """What a rank hands to collectives in a step, if every expert is as likely as any other. None where the plan doesn't know K."""
        hidden, chosen = next(iter(contract.features.values())), contract.features.get("experts_per_token")
        if chosen is None:
            return None
        first = next(shapes[name][0] for name, layout in contract.params.items() if "ep" in layout)
        experts = next(iter(contract.stacked.values()), first)
        here = experts // ranks
        rows = round(tokens * ranks * (1 - comb(experts - here, chosen) / comb(experts, chosen)))
        row, beside = hidden * width, chosen * width
        return [
            ("forward", "all_to_all", ranks * 8),
            ("forward", "all_to_all", rows * (row + beside + chosen * _number(here).itemsize)),
            ("forward", "all_to_all", rows * row),
            ("backward", "all_to_all", rows * row),
            ("backward", "all_to_all", rows * (row + beside)),
        ]

    def __call__(self, experts: Experts, x_TH: Tensor, indices_TK: Tensor, weights_TK: Tensor, /) -> Tensor:
        n, ranks = self.local_experts, self.group.ranks
        owner_TK = indices_TK // n
        goes_TR = torch.zeros(len(x_TH), ranks, dtype=torch.bool, device=x_TH.device).scatter_(1, owner_TK, True)
        rank_P, token_P = goes_TR.T.nonzero(as_tuple=True)  # by rank, then in the order of the tokens
        sent_R = goes_TR.sum(0)
        sent, received = torch.stack([sent_R, exchange(sent_R, None, None, self.group)]).tolist()
        way = Way(self.group, tuple(sent), tuple(received))

        rank_P1 = rank_P.unsqueeze(1)
        expert_PK = torch.where(owner_TK[token_P] == rank_P1, indices_TK[token_P] - rank_P1 * n, n).to(_number(n))  # n: not there
        x_PH, weights_PK = x_TH.index_select(0, token_P), weights_TK.index_select(0, token_P)
        x_QH, weights_QK, expert_QK = out(way, x_PH, weights_PK, expert_PK)

        row_N, slot_N = (expert_QK < n).nonzero(as_tuple=True)
        expert_N1, weight_N1 = expert_QK[row_N, slot_N].long().unsqueeze(1), weights_QK[row_N, slot_N].unsqueeze(1)
        y_NH = experts(x_QH.index_select(0, row_N), expert_N1, weight_N1)
        y_QH = _sum_rows(y_NH, row_N, len(x_QH), weights_TK.dtype).to(x_TH.dtype)
        (y_PH,) = back(way, y_QH)
        return _sum_rows(y_PH, token_P, len(x_TH), weights_TK.dtype).to(x_TH.dtype)


def nothing(module: nn.Module) -> Tensor:
    """0, by way of every parameter of a module: with it in a sum, parameters that did nothing have zero gradients, not none."""
    weights = [getattr(owner, name) for owner in module.modules() for name, p in owner._parameters.items() if p is not None]
    return torch.stack([weight.flatten()[:0].sum() for weight in weights]).sum()


def _number(experts: int) -> torch.dtype:
    """The narrowest dtype for the numbers 0 to `experts`."""
    return torch.uint8 if experts < 256 else torch.int16 if experts < 32768 else torch.int32


class _SumRows(torch.autograd.Function):
    """index_add, which keeps the indices for its backward and not the rows too, as torch's own does."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, count: int, wide: torch.dtype) -> Tensor:
        ctx.save_for_backward(index)
        ctx.dtype = rows.dtype
        return torch.zeros(count, rows.shape[1], dtype=wide, device=rows.device).index_add_(0, index, rows.to(wide))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (index,) = ctx.saved_tensors
        return grad.index_select(0, index).to(ctx.dtype), None, None, None


def _sum_rows(rows: Tensor, index: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """[count, H]: the sum of the rows of each index, in the wider dtype."""
    wide = torch.promote_types(rows.dtype, dtype)
    return _SumRows.apply(rows, index, count, wide)  # type: ignore[no-any-return, no-untyped-call]


Build = Callable[[AxisGroup, int], Dispatcher]
DISPATCHERS: dict[str, Build] = {"all_to_all": AllToAll}
