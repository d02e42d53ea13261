"""What this distribution offers to hyperpar."""

from __future__ import annotations

from hyperpar_core import hookimpl
from hyperpar_core.descriptors import LocalComputeFactory, LossFactory, PluginInfo

from .embedding import vocab_parallel_embedding
from .loss import vocab_parallel_cross_entropy
from .traffic import sends_nothing, sent_by_the_loss

__all__ = ["hyperpar_local_compute_factories", "hyperpar_losses", "hyperpar_plugin_info"]


@hookimpl
def hyperpar_plugin_info() -> PluginInfo:
    return PluginInfo(api="1.1", requires=("torch>=2.13,<2.14", "transformers>=5.24,<5.25"))


@hookimpl
def hyperpar_local_compute_factories() -> list[LocalComputeFactory]:
    return [
        LocalComputeFactory(
            "vocab_parallel_embedding",
            factory=vocab_parallel_embedding,
            expects=("weight", "num_embeddings"),
            needs_axis="tp",
            region_dispatch=False,
            summary="looks up the ids of this rank's vocab shard; the rows of other ranks are zero (out: partial)",
            traffic=sends_nothing,
        )
    ]


@hookimpl
def hyperpar_losses() -> list[LossFactory]:
    return [
        LossFactory(
            "vocab_parallel_cross_entropy",
            factory=vocab_parallel_cross_entropy,
            needs_axis="tp",
            summary="cross entropy on logits that stay sharded over the vocab; option label_smoothing",
            traffic=sent_by_the_loss,
        )
    ]
