"""Adapters for transformers' own model families: what a third party would write, nothing more privileged."""

from __future__ import annotations

from hyperpar_core import hookimpl
from hyperpar_core.descriptors import LocalComputeFactory, ModelFamily, PluginInfo, SpecialHandler

from . import dense, head_bias, moe, packed, recurrent, rows

__all__ = [
    "hyperpar_local_compute_factories",
    "hyperpar_model_families",
    "hyperpar_plugin_info",
    "hyperpar_special_handlers",
]


@hookimpl
def hyperpar_plugin_info() -> PluginInfo:
    return PluginInfo(api="1.0", requires=("torch>=2.13,<2.14", "transformers>=5.24,<5.25"))


@hookimpl
def hyperpar_model_families() -> list[ModelFamily]:
    return [*dense.FAMILIES, *moe.FAMILIES, *recurrent.FAMILIES]


@hookimpl
def hyperpar_special_handlers() -> list[SpecialHandler]:
    return list(packed.HANDLERS)


@hookimpl
def hyperpar_local_compute_factories() -> list[LocalComputeFactory]:
    return [*head_bias.LOCAL_COMPUTES, *rows.LOCAL_COMPUTES]
