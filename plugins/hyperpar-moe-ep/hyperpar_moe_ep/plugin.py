"""What this distribution offers to hyperpar."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

from hyperpar_core import hookimpl
from hyperpar_core.descriptors import LocalComputeFactory, PluginInfo

from . import archetypes
from .dispatch import DISPATCHERS, Build

__all__ = ["archetypes_with", "hyperpar_local_compute_factories", "hyperpar_plugin_info"]

SUMMARIES = {
    "experts_dispatch": "any block that calls experts(hidden_states, indices, weights)",
    "routed_only_softmax_topk": "a linear gate and experts",
    "topk_router": "a router that returns logits, scores and indices, and experts",
    "mixtral_topk_router": "the same with input jitter",
    "qwen2moe_shared_expert_gate": "a shared expert behind a sigmoid gate",
    "deepseekv3_sigmoid_group_shared": "group-limited sigmoid routing with a correction bias, and shared experts",
}


@hookimpl
def hyperpar_plugin_info() -> PluginInfo:
    return PluginInfo(api="1.0", requires=("torch>=2.13,<2.14", "transformers>=5.24,<5.25"))


def archetypes_with(build: Build, suffix: str) -> list[LocalComputeFactory]:
    """Every archetype with another dispatcher, under its name and `suffix`: what a distribution of one's own hands to its hook.

    build: `(group, local_experts) -> dispatch`, see `dispatch`.
    """
    return [_offered(name, f"{name}{suffix}", _bound(getattr(archetypes, name), build), build) for name in SUMMARIES]


def _offered(name: str, own: str, factory: Callable[..., Any], build: Build) -> LocalComputeFactory:
    return LocalComputeFactory(
        own,
        factory=factory,
        expects=("experts",) if name == "experts_dispatch" else ("gate", "experts"),
        needs_axis="ep",
        region_dispatch=False,
        summary=SUMMARIES[name],
        traffic=getattr(build, "traffic", None),
    )


def _bound(factory: Callable[..., Any], build: Build) -> Callable[..., Any]:
    """The factory without its option `dispatcher`, which is `build`."""
    signature = inspect.signature(factory)
    kept = [parameter for name, parameter in signature.parameters.items() if name != "dispatcher"]

    @wraps(factory)
    def bound(**given: Any) -> Any:
        return factory(**given, dispatcher=build)

    bound.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
    return bound


@hookimpl
def hyperpar_local_compute_factories() -> list[LocalComputeFactory]:
    return [_offered(name, name, getattr(archetypes, name), DISPATCHERS["all_to_all"]) for name in SUMMARIES]
