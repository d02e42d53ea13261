"""Adapters for transformers' own model families: what a third party would write, nothing more privileged."""

from __future__ import annotations

from hyperpar_core import hookimpl
from hyperpar_core.descriptors import ModelFamily, PluginInfo

from .dense import FAMILIES

__all__ = ["hyperpar_model_families", "hyperpar_plugin_info"]


@hookimpl
def hyperpar_plugin_info() -> PluginInfo:
    return PluginInfo(api="1.0", requires=("torch>=2.13,<2.14", "transformers>=5.24,<5.25"))


@hookimpl
def hyperpar_model_families() -> list[ModelFamily]:
    return list(FAMILIES)
