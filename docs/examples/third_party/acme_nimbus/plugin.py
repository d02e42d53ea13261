"""What this distribution offers to hyperpar."""

from __future__ import annotations

from hyperpar_core import hookimpl
from hyperpar_core.descriptors import (
    CollectiveLowerer,
    InnerWrapper,
    LocalComputeFactory,
    ModelFamily,
    PluginInfo,
    SpecialHandler,
)

from .context import whole_keys
from .experts import experts
from .family import NIMBUS
from .packed import kvq
from .sums import lower


@hookimpl
def hyperpar_plugin_info() -> PluginInfo:
    return PluginInfo(api="1.0", requires=("torch>=2.13,<2.14", "transformers>=5.24,<5.25"))


@hookimpl
def hyperpar_model_families() -> list[ModelFamily]:
    return [NIMBUS]


@hookimpl
def hyperpar_special_handlers() -> list[SpecialHandler]:
    return [SpecialHandler("nimbus_kvq", kvq, "keys, values and queries in one weight")]


@hookimpl
def hyperpar_inner_wrappers() -> list[InnerWrapper]:
    summary = "keys and values gathered over cp"
    return [InnerWrapper("nimbus_whole_keys", whole_keys, forward_style="qkv", needs_axis="cp", summary=summary)]


@hookimpl
def hyperpar_local_compute_factories() -> list[LocalComputeFactory]:
    summary = "tokens gathered over ep, each rank's experts on all of them"
    return [LocalComputeFactory("nimbus_experts", experts, expects=("router", "experts"), needs_axis="ep", summary=summary)]


@hookimpl
def hyperpar_collective_lowerers() -> list[CollectiveLowerer]:
    return [CollectiveLowerer("nimbus_ordered_sum", lower, axes=("tp",), summary="sums in the order of the ranks")]
