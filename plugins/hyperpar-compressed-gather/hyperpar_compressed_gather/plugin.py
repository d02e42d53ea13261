"""What this distribution offers to hyperpar."""

from __future__ import annotations

from hyperpar_core import hookimpl
from hyperpar_core.descriptors import CollectiveLowerer, PluginInfo

from .wire import ERROR, lower

__all__ = ["hyperpar_collective_lowerers", "hyperpar_plugin_info"]


@hookimpl
def hyperpar_plugin_info() -> PluginInfo:
    return PluginInfo(api="1.1", requires=("torch>=2.13,<2.14", "transformers>=5.24,<5.25"))


@hookimpl
def hyperpar_collective_lowerers() -> list[CollectiveLowerer]:
    return [
        CollectiveLowerer(
            "bf16_wire", lower, axes=("tp",), exact=False, error=ERROR,
            summary="float32 activations travel as bfloat16 and are summed in float32: half the bytes",
        )
    ]  # fmt: skip
