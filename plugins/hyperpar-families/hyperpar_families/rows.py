"""Blocks that hand back rows [batch * sequence, hidden] for hidden states [batch, sequence, hidden]."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from hyperpar_core import original_forward
from hyperpar_core.descriptors import LocalComputeFactory

__all__ = ["LOCAL_COMPUTES", "in_sequences"]


def in_sequences() -> Callable[..., Any]:
    """The block's own forward, its first output in the input's shape: a boundary that gathers tokens has to see the sequence's dim."""
    return _in_sequences


def _in_sequences(module: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    out = original_forward(module, x, *args, **kwargs)
    return out.view(x.shape) if isinstance(out, Tensor) else (out[0].view(x.shape), *out[1:])


LOCAL_COMPUTES = (
    LocalComputeFactory(
        "in_sequences", in_sequences, expects=(), needs_axis=None, region_dispatch=False,
        summary="the block's own forward, rows given back as sequences",
    ),
)  # fmt: skip
