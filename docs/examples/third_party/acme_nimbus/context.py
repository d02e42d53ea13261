"""Nimbus's attention over cp: every rank's queries see the keys and values of all ranks."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from hyperpar_core import original_forward
from hyperpar_core.collectives.functional import AxisGroup, all_gather, axis_group, convert

__all__ = ["whole_keys"]


@dataclass(frozen=True)
class _WholeKeys:
    """The core's forward on gathered keys and values. Plain values: it is copied with the model."""

    group: AxisGroup

    def __call__(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, q_at: Tensor, k_at: Tensor) -> Tensor:
        k, v = (convert(x, self.group, "all_gather", "reduce_scatter", src_dim=2) for x in (k, v))
        out: Tensor = original_forward(module, q, k, v, q_at, all_gather(k_at, 1, self.group))
        return out


def whole_keys(*, cp_mesh: DeviceMesh) -> _WholeKeys:
    """Keys and values [B, K, S, D] gathered over cp; their gradients are summed on the way back.

    The core masks by positions, so the order in which the ranks hold the sequence doesn't matter. Every rank of cp calls it.
    """
    return _WholeKeys(axis_group(cp_mesh))
