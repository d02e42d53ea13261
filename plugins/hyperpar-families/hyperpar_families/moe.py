"""Mixtures of experts: what each family's router, experts and attention are, and the archetype that fits its block."""

from __future__ import annotations

from hyperpar_core.descriptors import Limit

from .rules import LATENT, LLAMA, family, roles

__all__ = ["FAMILIES"]

# Families with recurrent layers (qwen3_next, nemotron_h, ...) stand in recurrent.py.
# A router and stacked experts; what else stands in their block. Shared experts are cut over tp by the names of their projections.
EXPERTS = {
    **roles(moe_gate="gate router", moe_expert="experts"),
    **{f"*.{name}*": "shared_expert" for name in ("mlp.shared_expert", "mlp.shared_mlp")},
}
MOE = {**LLAMA, **EXPERTS}
LATENT_MOE = {**LATENT, **EXPERTS}
# q_norm and k_norm span all heads: their statistic needs the whole width.
SHARDED_QK_NORMS = {"*.self_attn.q_norm": "sharded_norm", "*.self_attn.k_norm": "sharded_norm"}
SINKS = roles(per_head=".self_attn.sinks")
# A boundary that reads rows where a block hands back [batch * sequence, hidden].
ROWS = {"*.feed_forward": {"local_compute_fn": "in_sequences"}}
SHARED_MLP = roles(packed="input_linear", rowwise="output_linear")
SHARED_HALVES = {"*.input_linear.*": "halves"}
GROUPED = "deepseekv3_sigmoid_group_shared"

FAMILIES = (
    # a softmax router and experts
    family("mixtral", "jitter before the router", MOE, archetype="mixtral_topk_router", window=True),
    family("qwen3_moe", "norms on each head's queries and keys", MOE, archetype="topk_router", window=True),
    family("olmoe", "norms across all heads' queries and keys", MOE, SHARDED_QK_NORMS, archetype="topk_router"),
    family("flex_olmo", "as olmoe, norms behind the blocks", MOE, SHARDED_QK_NORMS, archetype="topk_router"),
    family("mellum", "windowed layers, dense layers between", MOE, archetype="topk_router", window=True),
    family("cohere2_moe", "attention and experts side by side", MOE, archetype="topk_router", window=True),
    family("phimoe", "two routings in one, which draw in training", MOE, archetype="experts_dispatch", draws=True),
    family("granitemoe", "multipliers", MOE, archetype="experts_dispatch", block="block_sparse_moe"),
    family(
        "granitemoeshared", "a shared MLP beside the block", {**MOE, **SHARED_MLP}, {"*.shared_mlp": "mlp"},
        handlers=SHARED_HALVES, archetype="experts_dispatch", block="block_sparse_moe",
    ),
    family(
        "granitemoe_swa", "the same with windowed layers and a sink for each head", {**MOE, **SINKS, **SHARED_MLP},
        {"*.shared_mlp": "mlp"}, handlers=SHARED_HALVES, archetype="experts_dispatch", block="block_sparse_moe",
        window=True, sinks=True,
    ),
    family("minimax_m2", "a correction bias", MOE, SHARDED_QK_NORMS, archetype="experts_dispatch"),
    # a shared expert
    family("qwen2_moe", "a shared expert behind a sigmoid gate", MOE, archetype="qwen2moe_shared_expert_gate", window=True),
    family("ernie4_5_moe", "a softmax router with a correction bias", MOE, archetype="experts_dispatch"),
    family("flint", "a shared expert, a sink for each head", {**MOE, **SINKS}, archetype="experts_dispatch", sinks=True),
    family("aria_text", "transposed experts, shared experts", MOE, archetype="experts_dispatch"),
    family("hunyuan_v1_moe", "a shared MLP", MOE, archetype="experts_dispatch"),
    family("hy_v3", "a sigmoid router with a correction bias", MOE, archetype="experts_dispatch"),
    family("kolibri1", "shared experts", MOE, archetype="experts_dispatch"),
    # group-limited sigmoid routing, shared experts
    family("glm4_moe", "dense layers first", MOE, archetype=GROUPED),
    family("dots1", "norms on each head's queries and keys", MOE, archetype=GROUPED, window=True),
    family("exaone_moe", "windowed layers", MOE, archetype=GROUPED, window=True),
    family("solar_open", "every layer sparse", MOE, archetype=GROUPED),
    family("sarvam_moe", "norms on each head's queries and keys", MOE, archetype=GROUPED),
    family("glm4_moe_lite", "latent attention", LATENT_MOE, archetype=GROUPED),
    family("sarvam_mla", "latent attention without a query latent", LATENT_MOE, archetype=GROUPED),
    family("axk1", "latent attention, a norm behind the experts", LATENT_MOE, archetype="experts_dispatch"),
    family("afmoe", "gated attention, a correction bias in the block", {**MOE, "*.mlp.expert_bias": "moe_gate"},
           archetype="experts_dispatch", window=True),
    # experts that are called in another way
    family(
        "llama4_text", "routing weights that scale the experts' inputs, chunked attention",
        {**MOE, "*.feed_forward.shared_expert*": "shared_expert"}, ROWS,
        archetype="llama4_scaled_inputs", block="feed_forward", limits=(
            Limit("its layers without rotary positions scale queries by the position in what they are given"
                  " (attn_temperature_tuning), which cp cuts.", lambda config, sizes: sizes["cp"] > 1 and config.attn_temperature_tuning),
        ),
    ),
    family(
        "dbrx", "fused QKV with clipping, experts one below the other in two dims",
        {**roles(packed="Wqkv", rowwise="out_proj", moe_gate="router", moe_expert="experts.mlp"), "*.experts.mlp.??": "moe_expert"},
        {"*.attn": {"tp_divide_attrs": ["hidden_size"]}, "*.ffn": "moe_mlp"}, handlers={"*.Wqkv.*": "query_key_value"},
        attention="attn", archetype="experts_dispatch", block="ffn",
    ),
    family(
        "jetmoe", "rows sorted by expert; attention whose projections are experts",
        {**roles(replicated="self_attention", moe_gate="mlp.router", moe_expert="mlp.input_linear mlp.output_linear"),
         "*.mlp.bias": "moe_gate"},
        {
            "*.self_attention": {
                "template": "replicated", "out_names": ["output", "attn_weights", "router_logits"],
                "out_src": {"output": {}, "attn_weights": {}, "router_logits": {}},
                "out_dst": {"output": {}, "attn_weights": {}, "router_logits": {}},
            },
            "*.self_attention.*": None,
        }, attention=None,
        archetype="jetmoe_sorted_rows", limits=(
            Limit("its attention's projections are experts of their own, which each token chooses.", lambda config, sizes: sizes["tp"] > 1),
        ),
    ),
    # biases and clamps in the experts
    family(
        "gpt_oss", "transposed experts with biases and clamps, a sink for each head",
        {**MOE, **SINKS}, archetype="experts_dispatch", window=True, sinks=True,
        isolates_documents=False,
    ),
)  # fmt: skip
