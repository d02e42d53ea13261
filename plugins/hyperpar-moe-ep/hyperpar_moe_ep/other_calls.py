"""Experts that their block calls in another way than experts(hidden_states, indices, weights)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from hyperpar_core import original_forward
from hyperpar_core.collectives.functional import AxisGroup, exchange
from hyperpar_core.errors import ApplyError

from .dispatch import Dispatcher, nothing
from .travel import Way, back, out

__all__ = ["ScaledInputs", "SortedRows"]


@dataclass(frozen=True)
class ScaledInputs:
    """experts(rows [E * T, H]): every token once for each expert, times its routing weight, which is 0 for experts it didn't choose.

    Only rows that aren't 0 travel. A row of zeros yields zeros, and gets a gradient of zeros: the experts have no biases, and gate what
    they project. The experts' own forward wants as many rows for each: theirs are filled up with zeros.
    """

    fqn: str
    experts: int  # of the whole block
    local: int  # of this rank
    dispatch: Dispatcher

    def __call__(self, module: nn.Module, rows: Tensor) -> Tensor:
        x = rows.reshape(-1, rows.shape[-1])
        if isinstance(x, FakeTensor):
            return x + nothing(module).to(x.dtype)
        tokens = len(x) // self.experts
        chosen = (x.detach() != 0).any(1).nonzero().squeeze(1)
        expert = torch.div(chosen, max(tokens, 1), rounding_mode="floor").unsqueeze(1)
        y = self.dispatch(_Filled(module, self.local), x.index_select(0, chosen), expert, x.new_ones(len(chosen), 1))
        return torch.zeros_like(x).index_copy(0, chosen, y)


@dataclass(frozen=True)
class _Filled:
    module: nn.Module
    experts: int

    def __call__(self, x_NH: Tensor, expert_N1: Tensor, weight_N1: Tensor) -> Tensor:
        module, expert_N = self.module, expert_N1.squeeze(1)
        counts = torch.bincount(expert_N, minlength=self.experts)
        order = expert_N.argsort(stable=True)
        first = counts.cumsum(0) - counts
        place_N = torch.empty_like(order)
        place_N[order] = torch.arange(len(order), device=order.device) - first[expert_N[order]]
        most = int(counts.max())
        at_N = expert_N * most + place_N
        filled = x_NH.new_zeros(len(counts) * most, x_NH.shape[1]).index_copy(0, at_N, x_NH)
        y: Tensor = original_forward(module, filled) if most else filled + nothing(module).to(filled.dtype)
        return y.index_select(0, at_N) * weight_N1.to(y.dtype)


@dataclass(frozen=True)
class SortedRows:
    """layer(rows, sizes): rows sorted by expert, sizes[e] of them for expert e. Rows travel once, through all layers of the experts.

    The first layer sends its rows to the experts' ranks and leaves what it yields there, the last one brings the rows back. Between
    them the block may only do what works row by row.
    """

    fqn: str
    group: AxisGroup
    sends: bool
    returns: bool

    def __call__(self, module: nn.Module, rows: Tensor, sizes: Sequence[int]) -> Tensor:
        ranks = self.group.ranks
        if isinstance(rows, FakeTensor):  # which rows go where is data
            return original_forward(module, rows, [len(rows), *[0] * (len(sizes) // ranks - 1)])  # type: ignore[no-any-return]
        sizes_E = torch.as_tensor(sizes, device=rows.device)
        if len(sizes_E) % ranks:
            raise ApplyError(f"{self.fqn}: the block counts rows for {len(sizes_E)} experts, which {ranks} ranks can't share.")
        sizes_RN = exchange(sizes_E, None, None, self.group).view(ranks, -1)  # of each rank's rows for these experts
        way = Way(self.group, tuple(sizes_E.view(ranks, -1).sum(1).tolist()), tuple(sizes_RN.sum(1).tolist()))
        if self.sends:
            (rows,) = out(way, rows)
        # what comes lies by rank, then by expert; the layer wants it by expert
        ranks_first = torch.arange(sizes_RN.numel(), device=rows.device).repeat_interleave(sizes_RN.flatten())
        by_expert = (ranks_first % sizes_RN.shape[1]).argsort(stable=True)
        if self.sends:
            rows = rows.index_select(0, by_expert)
        y: Tensor = original_forward(module, rows, sizes_RN.sum(0).tolist())
        if self.returns:
            (y,) = back(way, torch.zeros_like(y).index_copy(0, by_expert, y))
        return y

