"""Everything that a plugin can do. Hooks take no arguments and return lists of frozen descriptors.

A plugin is a module or object named by an entry point of group `hyperpar`; it marks its functions with `hookimpl`:

    from hyperpar_core import hookimpl
    from hyperpar_core.descriptors import InnerWrapper

    @hookimpl
    def hyperpar_inner_wrappers():
        return [InnerWrapper("my_attention", factory=make_my_attention, needs_axis="cp")]

All hooks are collected once, plugin by plugin, when something first asks for a plugin; none is `firstresult`, and all exist
since API 1.0. A plugin that raises, or offers anything malformed, is left out whole (docs/hooks.md has the laws). A name
that a plan doesn't mention runs nothing; only the embedding and the loss are chosen automatically.
"""

from __future__ import annotations

import pluggy

from .descriptors import (
    CollectiveLowerer,
    InnerWrapper,
    LocalComputeFactory,
    LossFactory,
    ModelFamily,
    PluginInfo,
    SpecialHandler,
)

PROJECT = "hyperpar"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def hyperpar_plugin_info() -> PluginInfo:  # type: ignore[empty-body]
    """The API version of the core that the plugin was written for, and the torch and transformers versions that it accepts."""


@hookspec
def hyperpar_inner_wrappers() -> list[InnerWrapper]:  # type: ignore[empty-body]
    """Context-parallel attention, kernels, probes: what may stand in an entry's `inner_wrapper`."""


@hookspec
def hyperpar_special_handlers() -> list[SpecialHandler]:  # type: ignore[empty-body]
    """Parameters that plain placements can't cut: what may stand in an entry's `special_handlers`."""


@hookspec
def hyperpar_local_compute_factories() -> list[LocalComputeFactory]:  # type: ignore[empty-body]
    """MoE archetypes and the vocab-parallel embedding: what may stand in an entry's `local_compute_fn`."""


@hookspec
def hyperpar_collective_lowerers() -> list[CollectiveLowerer]:  # type: ignore[empty-body]
    """Transitions into collectives: what may stand in an entry's `lowerer`. The default lowerer comes through this hook too."""


@hookspec
def hyperpar_losses() -> list[LossFactory]:  # type: ignore[empty-body]
    """Losses on sharded logits: what `build_plan(loss_parallel=...)` chooses."""


@hookspec
def hyperpar_model_families() -> list[ModelFamily]:  # type: ignore[empty-body]
    """Adapters for model families: what build_plan asks about a model's parameters and modules."""
