"""Families with gated-delta or state-space layers. Their handlers and their norm come from hyperpar-linear-attention."""

from __future__ import annotations

from hyperpar_core.descriptors import Limit

from .moe import EXPERTS, SHARDED_QK_NORMS, SHARED_HALVES, SHARED_MLP
from .rules import LLAMA, family, roles

__all__ = ["FAMILIES"]

HEADS = roles(colwise=".A_log .D .dt_bias")
# Gated-delta layers: a norm for each head's values is one for all heads.
DELTA = {**LLAMA, **HEADS, **roles(packed="conv1d", rowwise="linear_attn.out_proj", replicated="linear_attn.norm linear_attn.o_norm")}
DELTA_CHANNELS = {"*.conv1d.*": "delta_channels"}
SPLIT = roles(packed="in_proj_qkv", colwise="in_proj_z in_proj_b in_proj_a")
# State-space layers: the norm behind the scan has a weight for each feature.
STATE_SPACE = {**LLAMA, **HEADS, **roles(packed="in_proj conv1d", colwise="mamba.norm mixer.norm", rowwise="mamba.out_proj mixer.out_proj")}
STATE_SPACE_PARTS = {"*.in_proj.*": "state_space_projection", "*.conv1d.*": "state_space_channels"}


# Selective state spaces: B, C and the step are projected from all channels, between the convolution and the scan.
SELECTIVE = {
    **LLAMA,
    **roles(colwise=".A_log .D conv1d dt_proj", packed="in_proj", rowwise="x_proj mixer.out_proj mamba.out_proj",
            replicated="dt_layernorm b_layernorm c_layernorm"),
}
HALVES = {"*.in_proj.*": "halves"}


def _over_ranks(block: str, child: str, wrapper: str) -> dict[str, object]:
    """The child of a block that has to add something over tp."""
    inner = {"when": "tp", "inner_target": child, "inner_wrapper": wrapper}
    layout = "first_input" if child == "norm" else {"output": {}}
    return {f"*.{block}": {"template": "linear_attention", **inner, "inner_out_src": layout}}


NORM_OVER_RANKS = _over_ranks("mamba", "norm", "gated_group_norm")
_state = Limit(
    "its layers carry a state along the sequence, which cp cuts.\n  Plan without cp.", lambda config, sizes: sizes["cp"] > 1
)
_multiplied = Limit(
    "its state-space layers scale their projection by a buffer that counts all its rows, which tp splits.",
    lambda config, sizes: sizes["tp"] > 1,
)

FAMILIES = (
    family(
        "qwen3_next", "gated-delta layers, a shared expert behind a sigmoid gate",
        {**DELTA, **roles(colwise="in_proj_qkvz in_proj_ba"), **EXPERTS}, handlers=DELTA_CHANNELS,
        archetype="qwen2moe_shared_expert_gate",
    ),
    family(
        "qwen3_5_text", "gated-delta layers", {**DELTA, **SPLIT},
        handlers={**DELTA_CHANNELS, "*.in_proj_qkv.*": "delta_channels"},
    ),
    family(
        "qwen3_5_moe_text", "gated-delta layers, a shared expert behind a sigmoid gate", {**DELTA, **SPLIT, **EXPERTS},
        handlers={**DELTA_CHANNELS, "*.in_proj_qkv.*": "delta_channels"}, archetype="qwen2moe_shared_expert_gate",
    ),
    family(
        "olmo_hybrid", "gated-delta layers, norms across all heads' queries and keys",
        {**DELTA, **roles(colwise="a_proj b_proj g_proj")}, SHARDED_QK_NORMS, handlers=DELTA_CHANNELS,
    ),
    family(
        "mamba2", "state-space layers alone", STATE_SPACE, _over_ranks("mixer", "norm", "gated_group_norm"),
        handlers=STATE_SPACE_PARTS, attention=None, limits=(_state,),
    ),
    family("bamba", "state-space layers between attention", STATE_SPACE, NORM_OVER_RANKS, handlers=STATE_SPACE_PARTS),
    family(
        "granitemoehybrid", "state-space layers between attention, experts, a shared MLP", {**STATE_SPACE, **EXPERTS, **SHARED_MLP},
        {**NORM_OVER_RANKS, "*.shared_mlp": "mlp"},
        handlers={**STATE_SPACE_PARTS, **SHARED_HALVES}, archetype="experts_dispatch", block="block_sparse_moe",
    ),
    family(
        "nemotron_h", "state-space, attention, MLP and expert layers",
        {**STATE_SPACE, **roles(moe_gate="gate", moe_expert="experts", shared_expert="shared_experts")},
        handlers=STATE_SPACE_PARTS, attention="mixer", archetype="experts_dispatch", block="mixer",
    ),
    family(
        "jamba", "selective state-space layers between attention, experts",
        {**SELECTIVE, **roles(moe_gate="router", moe_expert="experts")}, _over_ranks("mamba", "x_proj", "summed_projection"),
        handlers=HALVES, archetype="experts_dispatch", block="feed_forward",
    ),
    family(
        "mamba", "selective state-space layers alone", SELECTIVE, _over_ranks("mixer", "x_proj", "summed_projection"),
        handlers=HALVES, attention=None, limits=(_state,),
    ),
    family(
        "falcon_mamba", "the same with norms of the step, B and C", SELECTIVE,
        _over_ranks("mixer", "x_proj", "summed_projection"), handlers=HALVES, attention=None, limits=(_state,),
    ),
    family("falcon_h1", "state-space layers beside attention", STATE_SPACE, handlers=STATE_SPACE_PARTS, limits=(_multiplied,)),
)  # fmt: skip
