"""What this distribution offers to hyperpar."""

from __future__ import annotations

from hyperpar_core import hookimpl
from hyperpar_core.descriptors import InnerWrapper, PluginInfo, SpecialHandler

from . import norm, projection
from .sections import delta_channels, state_space_channels, state_space_projection

__all__ = ["hyperpar_inner_wrappers", "hyperpar_plugin_info", "hyperpar_special_handlers"]


@hookimpl
def hyperpar_plugin_info() -> PluginInfo:
    return PluginInfo(api="1.1", requires=("torch>=2.13,<2.14", "transformers>=5.24,<5.25"))


@hookimpl
def hyperpar_special_handlers() -> list[SpecialHandler]:
    return [
        SpecialHandler("delta_channels", delta_channels, "queries, keys, values of gated-delta heads, or their convolution"),
        SpecialHandler("state_space_projection", state_space_projection, "gate, x, B, C and time step of a state-space layer"),
        SpecialHandler("state_space_channels", state_space_channels, "x, B, C of a state-space layer: its convolution"),
    ]


@hookimpl
def hyperpar_inner_wrappers() -> list[InnerWrapper]:
    return [
        InnerWrapper(
            "gated_group_norm",
            factory=norm.gated_group_norm,
            needs_axis="tp",
            region_dispatch=False,
            summary="a gated norm whose groups span the tp ranks: one number per token is summed",
            check=norm.check,
        ),
        InnerWrapper(
            "summed_projection",
            factory=projection.summed_projection,
            needs_axis="tp",
            region_dispatch=False,
            summary="a projection of features that tp splits, whose output every rank reads whole",
            check=projection.check,
        ),
    ]
