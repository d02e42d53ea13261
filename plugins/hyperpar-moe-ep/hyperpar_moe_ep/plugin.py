"""What this distribution offers to hyperpar."""

from __future__ import annotations

from hyperpar_core import hookimpl
from hyperpar_core.descriptors import LocalComputeFactory, PluginInfo

from . import archetypes

__all__ = ["hyperpar_local_compute_factories", "hyperpar_plugin_info"]

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


@hookimpl
def hyperpar_local_compute_factories() -> list[LocalComputeFactory]:
    return [
        LocalComputeFactory(
            name,
            factory=getattr(archetypes, name),
            expects=("experts",) if name == "experts_dispatch" else ("gate", "experts"),
            needs_axis="ep",
            region_dispatch=False,
            summary=summary,
        )
        for name, summary in SUMMARIES.items()
    ]
