"""Dense decoders: what each family's projections are, and where its blocks part from Llama's."""

from __future__ import annotations

from hyperpar_core.descriptors import Limit

from .refused import REFUSED
from .rules import EXPERTS, GATED, LATENT, LATENT_ATTENTION, LLAMA, QKVO, after_sum, family, no_sp, roles, unless

__all__ = ["FAMILIES"]

SHARDED_QK_NORMS = {"*.self_attn.q_norm": "sharded_norm", "*.self_attn.k_norm": "sharded_norm"}
FC12 = roles(colwise="fc1", rowwise="fc2")
POSITIONS = roles(replicated="wpe embed_positions positions_embed")
# DTensor sums the gradients of xIELU's parameters inside its backward already, production at the end: a black box to validate mode.
XIELU_MLP = {"*.mlp": {"region_dispatch": False}}
XIELU = roles(replicated=".act_fn.alpha_p .act_fn.alpha_n")
FUSED_GATE = {**QKVO, **roles(packed="gate_up_proj", rowwise="down_proj")}
GPT2 = {**roles(packed="c_attn", colwise="c_fc", rowwise="c_proj"), **POSITIONS}
GPTJ = roles(colwise="q_proj k_proj v_proj fc_in", rowwise="out_proj fc_out")
NEOX = roles(colwise="query_key_value dense_h_to_4h", rowwise="dense dense_4h_to_h")
OPT = {**roles(colwise="q_proj k_proj v_proj", rowwise="out_proj"), **FC12, **POSITIONS}

FAMILIES = (
    # as Llama: q, k, v and o projections, an MLP of gate, up and down (or up and down)
    family("llama", "Llama 1 to 3, and what is converted to it", LLAMA),
    family("mistral", "sliding window", LLAMA, window=True),
    family("ministral", "full and windowed layers", LLAMA, window=True),
    family("ministral3", "queries scaled by position", LLAMA),
    family("qwen2", "biases on q, k and v", LLAMA, window=True),
    family("qwen3", "norms on each head's queries and keys", LLAMA, window=True),
    family("smollm3", "layers without rotary positions", LLAMA, window=True),
    family("granite", "multipliers on embedding, residual, attention and logits", LLAMA),
    family("granite_swa", "a sink for each head", {**LLAMA, **roles(per_head=".self_attn.sinks")}, window=True, sinks=True),
    family("gemma", "scaled embedding", LLAMA),
    family("gemma2", "four norms a layer, soft caps on attention and logits", LLAMA, window=True, softcap=True),
    family("gemma3_text", "four norms a layer, norms on queries and keys", LLAMA, window=True),
    family("gemma4_unified_text", "heads of two widths, layers with values that are keys", LLAMA, window=True),
    family(
        "gemma4_text", "heads of two widths, inputs for each layer; its experts are whole on every rank",
        {
            **LLAMA, "*.embed_tokens_per_layer.*": "embed",
            **roles(replicated="per_layer_input_gate per_layer_projection per_layer_model_projection router experts"),
        },
        {
            "*.embed_tokens_per_layer": "embed",
            "*.experts": {"template": "replicated", "region_dispatch": False},
            "*.router": {
                "template": "replicated", "out_names": ["scores", "weights", "experts"],
                "out_src": {"scores": {}, "weights": {}, "experts": {}},
                "out_dst": {"scores": {}, "weights": {}, "experts": {}},
            },
        },
        window=True,
        limits=(
            no_sp(
                "its layers take further inputs along the sequence, or route tokens that they flatten themselves.",
                lambda config: config.hidden_size_per_layer_input or config.enable_moe_block,
            ),
        ),
    ),
    family("vaultgemma", "one norm before each block", LLAMA, window=True, softcap=True),
    family("seed_oss", "biases on q, k and v", LLAMA, after_sum("self_attn.o_proj", "mlp.down_proj")),
    family("ernie4_5", "interleaved rotary positions", LLAMA),
    family("helium", "interleaved rotary positions", LLAMA),
    family("arcee", "an MLP without a gate", LLAMA),
    family("nemotron", "norms that add one to their weight, an MLP without a gate", LLAMA),
    family("jais2", "layer norms and biases, an MLP without a gate", LLAMA),
    family("cwm", "full and windowed layers", LLAMA, window=True),
    family("emu3", "the text model", LLAMA),
    family("hunyuan_v1_dense", "norms on each head's queries and keys", LLAMA),
    family("hyperclovax", "norms behind the blocks, multipliers", LLAMA),
    family("exaone4", "norms behind the blocks, and on each head's queries and keys", LLAMA, window=True),
    family("olmo", "norms without parameters", LLAMA),
    family("olmo2", "norms behind the blocks, and across all heads' queries and keys", LLAMA, SHARDED_QK_NORMS),
    family("olmo3", "as olmo2, with windowed layers", LLAMA, SHARDED_QK_NORMS, window=True),
    family(
        "bitnet", "a norm before each block's last projection", LLAMA,
        {"*.attn_sub_norm": "sharded_norm", "*.ffn_sub_norm": "sharded_norm"},
    ),
    family(
        "cohere", "attention and MLP side by side, one norm for both",
        {**LLAMA, **roles(per_head=".self_attn.q_norm.weight .self_attn.k_norm.weight")},
    ),
    family("cohere2", "attention and MLP side by side, layers without positions", LLAMA, window=True),
    family("cohere_compass_text", "attention and MLP side by side", LLAMA, window=True),
    family(
        "stablelm", "partial rotary positions, layer norms", LLAMA,
        limits=(
            unless(
                "qk_layernorm gives every head a norm of its own, as modules in a list, which tp can't cut.",
                lambda config: config.qk_layernorm,
            ),
        ),
    ),
    family("apertus", "xIELU, which has parameters; norms on queries and keys", {**LLAMA, **XIELU}, XIELU_MLP),
    family("apertus1p5_text", "as apertus", {**LLAMA, **XIELU}, XIELU_MLP, window=True),
    family(
        "nanochat", "norms without parameters, soft-capped logits", {**QKVO, **FC12},
        limits=(no_sp("its final norm also runs in front of the layers, on whole sequences."),),
    ),
    family(
        "starcoder2", "layer norms and biases, an MLP without a gate", {**QKVO, **roles(colwise="c_fc", rowwise="c_proj")},
        after_sum("self_attn.o_proj", "mlp.c_proj"), window=True,
    ),
    family("phi", "attention and MLP side by side, biases", {**roles(colwise="q_proj k_proj v_proj", rowwise="dense"), **FC12}),
    # latent attention
    family("minicpm3", "latent attention, scaled residuals", LATENT, LATENT_ATTENTION),
    family("youtu", "latent attention", LATENT, LATENT_ATTENTION),
    family("deepseek_v2", "latent attention, experts", {**LATENT, **EXPERTS}, LATENT_ATTENTION, archetype="experts_dispatch"),
    family(
        "deepseek_v3", "latent attention, group-limited experts", {**LATENT, **EXPERTS}, LATENT_ATTENTION,
        archetype="deepseekv3_sigmoid_group_shared",
    ),
    # fused projections
    family("glm", "a fused gate", FUSED_GATE, handlers={"*.gate_up_proj.*": "halves"}),
    family("glm4", "a fused gate, norms behind the blocks", FUSED_GATE, handlers={"*.gate_up_proj.*": "halves"}),
    family(
        "phi3", "fused QKV and gate", {**FUSED_GATE, **roles(packed="qkv_proj")},
        {"*.self_attn": {"tp_divide_attrs": ["config.num_attention_heads"]}},
        handlers={"*.gate_up_proj.*": "halves", "*.qkv_proj.*": "query_key_value"}, window=True,
    ),
    family(
        "moshi", "the text decoder; a fused gate", {**QKVO, **roles(packed="fc1", rowwise="fc2")},
        {"*.self_attn": "attention"}, handlers={"*.fc1.*": "halves"}, window=True,
    ),
    family(
        "modernbert-decoder", "a fused gate; a dense layer before the head",
        {**roles(colwise="q_proj k_proj v_proj", rowwise="Wo", packed="Wi"), "lm_head.dense.*": "replicated"},
        after_sum("attn.Wo"), handlers={"*.Wi.*": "halves"}, attention="attn", window=True,
    ),
    family(
        "gpt2", "Conv1D, fused QKV, learned positions", GPT2,
        {"*.attn": {"tp_divide_attrs": ["split_size"]}, **after_sum("attn.c_proj", "mlp.c_proj")},
        handlers={"*.c_attn.*": "query_key_value"}, attention="attn", limits=(
            unless("cross attention needs hidden states of an encoder.", lambda config: config.add_cross_attention),
        ),
    ),
    family(
        "gpt_bigcode", "fused QKV with one key/value head", GPT2,
        {"*.attn": {"tp_divide_attrs": ["embed_dim"]}, **after_sum("attn.c_proj", "mlp.c_proj")},
        handlers={"*.c_attn.*": "query_key_value_or_heads"}, attention="attn", limits=(
            unless("cross attention needs hidden states of an encoder.", lambda config: config.add_cross_attention),
        ),
    ),
    family(
        "openai-gpt", "Conv1D, fused QKV, norms behind the blocks", GPT2,
        {"*.attn": {"tp_divide_attrs": ["split_size"]}, **after_sum("attn.c_proj", "mlp.c_proj")},
        handlers={"*.c_attn.*": "query_key_value"}, attention=None, isolates_documents=False,
    ),
    # other names
    family("gptj", "attention and MLP side by side", GPTJ, after_sum("attn.out_proj", "mlp.fc_out"), attention="attn"),
    family(
        "codegen", "as gptj, with a QKV fused in four blocks", {**GPTJ, **roles(colwise="qkv_proj")},
        after_sum("attn.out_proj", "mlp.fc_out"), attention="attn", limits=(
            Limit(
                "its QKV is fused in 4 blocks of heads, and tp cuts between them: tp=2 and tp=4 work.",
                lambda config, sizes: sizes["tp"] not in (1, 2, 4),
            ),
        ),
    ),
    family(
        "gpt_neo", "local and global layers, learned positions",
        {**roles(colwise="q_proj k_proj v_proj c_fc", rowwise="out_proj c_proj"), **POSITIONS},
        # A mask in a buffer: a black box to validate mode.
        {"*.attn.attention": {"region_dispatch": False}, **after_sum("attention.out_proj", "mlp.c_proj")}, attention=None,
    ),
    family("gpt_neox", "QKV fused head by head, attention and MLP side by side", NEOX, attention="attention"),
    family("persimmon", "QKV fused head by head, norms on queries and keys", NEOX),
    family(
        "bloom", "ALiBi; QKV fused head by head", NEOX,
        {
            "*.self_attention": {"when": "tp", "local_compute_fn": "own_head_biases", "options": {"arguments": ["alibi"]}},
            **after_sum("self_attention.dense", "mlp.dense_4h_to_h"),
        },
        attention=None, isolates_documents=False, limits=(
            unless(
                "pretraining_tp with slow_but_exact slices its projections' weights by itself.",
                lambda config: config.pretraining_tp > 1 and config.slow_but_exact,
            ),
        ),
    ),
    family(
        "falcon", "one key/value head, or QKV fused by groups; rotary positions or ALiBi",
        {**NEOX, **roles(packed="query_key_value")},
        {
            "*.self_attention": {
                "when": "tp", "local_compute_fn": "own_head_biases", "options": {"arguments": ["alibi", "attention_mask"]}
            },
        },
        handlers={"*.query_key_value.*": "query_key_value_or_heads"}, attention=None,
    ),
    family(
        "mpt", "ALiBi, fused QKV", {**roles(packed="Wqkv", rowwise="out_proj"), **GATED},
        {
            "*.attn": {"when": "tp", "local_compute_fn": "own_head_biases", "options": {"arguments": ["position_bias"]}},
            **after_sum("ffn.down_proj"),
        },
        handlers={"*.Wqkv.*": "query_key_value"}, attention=None, isolates_documents=False,
    ),
    family(
        "opt", "learned positions, an MLP in the layer itself", {**OPT, **roles(replicated="project_in project_out")},
        limits=(no_sp("its layers flatten rows and tokens into one dim, so a sequence shard isn't one any more."),),
        isolates_documents=False,
    ),
    family(
        "xglm", "an MLP in the layer itself", OPT, {"*.self_attn": {"tp_divide_attrs": ["embed_dim"]}},
        attention=None, isolates_documents=False,
    ),
    family("biogpt", "learned positions, an MLP in the layer itself", OPT, isolates_documents=False),
    family(
        "ctrl", "queries, keys and values from three inputs, an MLP that is a bare Sequential",
        {**roles(colwise="Wq Wk Wv ffn.0", rowwise="multi_head_attention.dense ffn.2")},
        {
            "*.multi_head_attention": {
                "when": "tp", "in_src": {"v": {}, "k": {}, "q": {}}, "in_dst": {"v": {}, "k": {}, "q": {}}
            },
        },
        attention=None, limits=(no_sp("its attention takes three inputs along the sequence."),),
    ),
    family(
        "dory", "weights on the unit sphere, norms over whole widths, layers that run again",
        {
            **LLAMA,
            **roles(colwise=".sqk .s_gate .suv_gate .suv_up", replicated=".lambda_1 .lambda_2"),
        },
        {"*.attn_sub_norm": "sharded_norm", "*.ffn_sub_norm": "sharded_norm"}, window=True,
        limits=(no_sp("its final norm also runs between the layers, some of which run again."),),
    ),
    *REFUSED,
)  # fmt: skip
