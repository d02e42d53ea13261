"""Where keys, values and queries begin in their one weight."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.tensor import Shard

from hyperpar_core.descriptors import Section

__all__ = ["kvq"]


def kvq(shape: tuple[int, ...], *, module: nn.Module, param_name: str, config: Any) -> list[Section]:
    """Rows of all keys, then all values, then all queries; each is cut over tp between its heads."""
    width = config.hidden_size // config.num_heads
    rows = {"k": config.num_kv_heads, "v": config.num_kv_heads, "q": config.num_heads}
    return [Section(name, 0, heads * width, Shard(0)) for name, heads in rows.items()]
