"""A gated norm over groups of features, where a group spans the ranks: each rank adds the squares of its features.

out = weight * h / sqrt(mean(h^2 over the group) + eps), h = x * silu(gate), in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh

from hyperpar_core import original_forward
from hyperpar_core.collectives.functional import AxisGroup, axis_group, convert
from hyperpar_core.errors import ApplyError, Refused

__all__ = ["check", "gated_group_norm"]

_NEEDED = ("weight", "variance_epsilon", "group_size")


def check(*, target_module: Any, fqn: str, sizes: dict[str, int]) -> None:
    """Refused at plan time: another kind of norm, and groups that some of the ranks share."""
    missing = [name for name in _NEEDED if not hasattr(target_module, name)]
    if missing:
        raise Refused(
            f"{fqn}: gated_group_norm needs {', '.join(_NEEDED)}, and {type(target_module).__name__} has no {', '.join(missing)}."
        )
    groups = target_module.weight.numel() // target_module.group_size
    if groups != 1 and groups % sizes["tp"]:
        degrees = [d for d in range(2, groups + 1) if groups % d == 0]
        raise Refused(
            f"{fqn}: {groups} groups of its norm can't be split over tp={sizes['tp']}. Degrees of tp that work here: {degrees}."
        )


def gated_group_norm(*, target_module: Any, fqn: str, tp_mesh: DeviceMesh) -> Callable[..., Tensor]:
    """The forward of a gated norm whose weight is shard(0) over tp. Called on every rank of tp.

    Groups that lie on one rank keep the module's own forward. One that spans the ranks costs an all-reduce of one number per token
    in the forward and one in the backward.
    Raises ApplyError for a norm that computes something else.
    """
    if target_module.weight.numel() // target_module.group_size > 1:
        return original_forward
    _compare(target_module, fqn)
    return partial(_over_ranks, axis_group(tp_mesh))


def _over_ranks(tp: AxisGroup, module: nn.Module, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
    return _normed(module, hidden_states, gate, lambda squares: convert(squares, tp, "all_reduce", "all_reduce"))


def _normed(
    module: Any, hidden_states: Tensor, gate: Tensor | None, total: Callable[[Tensor], Tensor]
) -> Tensor:
    """`total`: the sum over the group of each rank's sum of squares [..., 1]."""
    x = hidden_states.to(torch.float32)
    if gate is not None:
        x = x * F.silu(gate.to(torch.float32))
    variance = total(x.pow(2).sum(-1, keepdim=True)) / module.group_size
    x = x * torch.rsqrt(variance + module.variance_epsilon)
    out: Tensor = module.weight * x.to(hidden_states.dtype)
    return out


@torch.no_grad()
def _compare(module: nn.Module, fqn: str) -> None:
    """The formula against the module's own forward, on numbers of its own: a norm that gates afterwards looks the same from outside."""
    weight: Tensor = module.weight  # type: ignore[assignment]
    if weight.is_meta or isinstance(weight, FakeTensor):  # no numbers to compare
        return
    ramp = torch.linspace(-2, 2, 2 * weight.numel(), dtype=weight.dtype, device=weight.device).view(2, -1)
    ours, own = (f(module, ramp, ramp.flip(-1)) for f in (_whole, original_forward))
    if not torch.allclose(ours, own, rtol=1e-2, atol=1e-2):
        raise ApplyError(
            f"{fqn}: {type(module).__name__} computes something else than gated_group_norm, which is"
            " weight * h / sqrt(mean(h^2) + eps) with h = x * silu(gate)."
        )


def _whole(module: nn.Module, hidden_states: Tensor, gate: Tensor) -> Tensor:
    return _normed(module, hidden_states, gate, lambda squares: squares)
