"""Nimbus's experts over ep: a rank holds some of them, and computes what they add for the tokens of all ranks.

T: this rank's tokens, M: the most that a rank has, R: ranks, k: experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from hyperpar_core.collectives.functional import AxisGroup, all_gather, all_reduce, axis_group, convert
from hyperpar_core.errors import Refused

__all__ = ["experts"]


@dataclass(frozen=True)
class _Experts:
    """The block's forward. Plain values: it is copied with the model."""

    group: AxisGroup

    def __call__(self, module: Any, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        numbers, weights = module.route(flat)
        most = int(all_reduce(torch.tensor(len(flat), device=x.device), self.group, "max"))
        missing = (0, 0, 0, most - len(flat))
        flat, weights = (nn.functional.pad(one, missing) for one in (flat, weights))
        numbers = nn.functional.pad(numbers, missing, value=-1)  # no expert's
        x_RMH, w_RMk = (convert(one, self.group, "all_gather", "reduce_scatter") for one in (flat, weights))
        n_RMk = all_gather(numbers, 0, self.group) - self.group.rank * module.experts.num_experts
        y_RMH = module.experts(x_RMH, n_RMk, w_RMk)
        y_MH = convert(y_RMH, self.group, "reduce_scatter", "all_gather")
        return y_MH[: x.shape[0] * x.shape[1]].view_as(x)


def experts(*, module: nn.Module, ep_mesh: DeviceMesh, fqn: str) -> _Experts:
    """Tokens of all ranks gathered over ep, this rank's experts on them, and sums back to the ranks that have the tokens.

    Every rank of ep calls it. Raises Refused for a block without `route`.
    """
    if not hasattr(module, "route"):
        raise Refused(f"{fqn}: nimbus_experts needs a block with a method route(x), and {type(module).__name__} has none.")
    return _Experts(axis_group(ep_mesh))
