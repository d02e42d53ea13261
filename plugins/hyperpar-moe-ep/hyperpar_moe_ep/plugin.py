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
from .traffic import of_pairs, of_sorted_rows

__all__ = ["archetypes_with", "hyperpar_local_compute_factories", "hyperpar_plugin_info"]

# {archetype: (attributes that a block must have, what it is)}
OFFERED = {
    "experts_dispatch": (("experts",), "any block that calls experts(hidden_states, indices, weights)"),
    "routed_only_softmax_topk": (("gate", "experts"), "a linear gate and experts"),
    "topk_router": (("gate", "experts"), "a router that returns logits, scores and indices, and experts"),
    "mixtral_topk_router": (("gate", "experts"), "the same with input jitter"),
    "qwen2moe_shared_expert_gate": (("gate", "experts"), "a shared expert behind a sigmoid gate"),
    "deepseekv3_sigmoid_group_shared": (("gate", "experts"), "group-limited sigmoid routing with a correction bias, and shared experts"),
    "expert_modules": (("experts",), "experts that are modules of a list, called one after the other"),
    "llama4_scaled_inputs": (("router", "experts"), "routing weights that scale the experts' inputs, and a shared expert"),
    "jetmoe_sorted_rows": (("router", "input_linear", "output_linear"), "rows sorted by expert, and experts in two layers"),
}

# A row for each pair of a token and an expert travels, not one for each rank.
SENDS_PAIRS = ("expert_modules", "llama4_scaled_inputs")


@hookimpl
def hyperpar_plugin_info() -> PluginInfo:
    return PluginInfo(api="1.1", requires=("torch>=2.13,<2.14", "transformers>=5.24,<5.25"))


def archetypes_with(build: Build, suffix: str) -> list[LocalComputeFactory]:
    """Every archetype with another dispatcher, under its name and `suffix`: what a distribution of one's own hands to its hook.

    build: `(group, local_experts) -> dispatch`, see `dispatch`.
    """
    factories = {name: getattr(archetypes, name) for name in OFFERED}
    return [
        _offered(name, f"{name}{suffix}", _bound(factory, build), build)
        for name, factory in factories.items()
        if "dispatcher" in inspect.signature(factory).parameters
    ]


def _offered(name: str, own: str, factory: Callable[..., Any], build: Build) -> LocalComputeFactory:
    traffic = getattr(build, "traffic", None)
    if name in SENDS_PAIRS and traffic is not None:
        traffic = of_pairs(traffic)
    elif name == "jetmoe_sorted_rows":  # it takes no dispatcher
        traffic = of_sorted_rows
    return LocalComputeFactory(
        own,
        factory=factory,
        expects=OFFERED[name][0],
        needs_axis="ep",
        region_dispatch=False,
        summary=OFFERED[name][1],
        traffic=traffic,
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
    return [_offered(name, name, getattr(archetypes, name), DISPATCHERS["all_to_all"]) for name in OFFERED]
