"""A projection in the middle of a state-space layer: it reads all features, of which each rank has a part, and all heads read it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from hyperpar_core.collectives.functional import AxisGroup, axis_group, convert
from hyperpar_core.errors import Refused

__all__ = ["check", "summed_projection"]


def check(*, target_module: nn.Module, fqn: str) -> None:
    """Refused at plan time: what isn't a Linear without a bias, which every rank would add."""
    if not isinstance(target_module, nn.Linear) or target_module.bias is not None:
        raise Refused(f"{fqn}: summed_projection needs an nn.Linear without a bias, not {target_module}.")


def summed_projection(*, target_module: nn.Module, fqn: str, tp_mesh: DeviceMesh) -> Callable[..., Tensor]:
    """The forward of an nn.Linear whose weight is shard(1) over tp: x [..., features of this rank] -> [..., out], whole on every rank.

    One all-reduce in the forward. What follows works on parts, so the gradient is partial: one all-reduce in the backward.
    Called on every rank of tp.
    """
    return partial(_summed, axis_group(tp_mesh))


def _summed(tp: AxisGroup, module: Any, input: Tensor) -> Tensor:
    return convert(F.linear(input, module.weight), tp, "all_reduce", "all_reduce")
