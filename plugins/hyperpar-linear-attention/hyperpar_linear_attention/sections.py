"""Where the parts of packed projections and of depthwise convolutions begin, so that tp cuts inside each of them.

A convolution's channels are the rows of the projection in front of it, in the same order: both are cut alike, and each rank convolves
its own channels. G: groups, S: state size, H: heads, as configs count them.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.tensor import Replicate, Shard

from hyperpar_core.descriptors import Section
from hyperpar_core.errors import Refused

__all__ = ["delta_channels", "state_space_channels", "state_space_projection"]

_GROUPS = ("mamba_n_groups", "mamba_ngroups", "n_groups")
_STATE = ("mamba_d_state", "ssm_state_size", "state_size")
_HEADS = ("mamba_n_heads", "n_mamba_heads", "mamba_num_heads", "num_heads")


def delta_channels(shape: tuple[int, ...], *, module: nn.Module, param_name: str, config: Any) -> list[Section]:
    """All queries, all keys, all values of gated-delta heads: [2 * keys + values, ...]."""
    keys = _count(config, ("linear_num_key_heads",)) * _count(config, ("linear_key_head_dim",))
    sizes = {"q": keys, "k": keys, "v": shape[0] - 2 * keys}
    return [Section(name, 0, size, Shard(0)) for name, size in sizes.items()]


def state_space_projection(shape: tuple[int, ...], *, module: nn.Module, param_name: str, config: Any) -> list[Section]:
    """The gate, x, B, C and the time step of a state-space layer: [2 * inner + 2 * G * S + H, ...]."""
    heads = _count(config, _HEADS)
    inner = (shape[0] - heads - 2 * _state_rows(config)) // 2
    step = Section("dt", 0, heads, Shard(0))
    return [Section("gate", 0, inner, Shard(0)), *_x_b_c(inner, config), step]


def state_space_channels(shape: tuple[int, ...], *, module: nn.Module, param_name: str, config: Any) -> list[Section]:
    """x, B and C of a state-space layer: [inner + 2 * G * S, ...]."""
    return _x_b_c(shape[0] - 2 * _state_rows(config), config)


def _x_b_c(inner: int, config: Any) -> list[Section]:
    """One group is read by all heads, and whole on every rank; more than one go to the ranks with their heads."""
    shared = _count(config, _GROUPS) == 1
    rows = _state_rows(config)
    return [
        Section("x", 0, inner, Shard(0)),
        *(Section(name, 0, rows, Replicate() if shared else Shard(0)) for name in ("B", "C")),
    ]


def _state_rows(config: Any) -> int:
    return _count(config, _GROUPS) * _count(config, _STATE)


def _count(config: Any, names: tuple[str, ...]) -> int:
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    raise Refused(f"the config has no {' or '.join(names)}, which says where the parts of the projection begin.")
