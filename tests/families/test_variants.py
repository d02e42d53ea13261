"""Configs of a family that change how its parameters split; each was a wrong number or a crash somewhere."""

from functools import cache

import pytest
from family_tools import Job, ranks_of, run_jobs

from hyperpar_core import build_plan
from hyperpar_core.errors import Refused
from hyperpar_core.testing import pool, tiny_model

VARIANTS = {
    "llama with biases: row-wise ones count once": Job("llama", "tp2 SP", {"attention_bias": True, "mlp_bias": True}),
    "llama with 2 key/value heads on 4 ranks": Job("llama", "tp4 SP"),
    "llama with one key/value head": Job("llama", "tp2 SP", {"num_key_value_heads": 1}),
    "phi3 with one key/value head in a fused QKV": Job("phi3", "tp2 SP", {"num_key_value_heads": 1}),
    "falcon with QKV fused by groups": Job("falcon", "tp2 SP", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon with QKV fused by heads, one block after the other": Job(
        "falcon", "tp2 SP", {"multi_query": False, "parallel_attn": False, "bias": True}
    ),
    "falcon with ALiBi in the mask": Job("falcon", "tp2 SP", {"alibi": True}),
    "falcon with ALiBi beside the mask": Job("falcon", "tp2", {"alibi": True, "attn_implementation": "eager"}),
    "bloom with the residual behind the norm": Job(
        "bloom", "tp2 SP", {"apply_residual_connection_post_layernorm": True}
    ),
    "gpt_bigcode with QKV fused by heads": Job("gpt_bigcode", "tp2 SP", {"multi_query": False}),
    "gpt_neox with one block after the other": Job("gpt_neox", "tp2 SP", {"use_parallel_residual": False}),
    "cohere with a norm of its own for each head": Job("cohere", "tp2 SP", {"use_qk_norm": True}),
    "phi with norms on queries and keys": Job("phi", "tp2 SP", {"qk_layernorm": True}),
    "opt with a narrower embedding": Job("opt", "tp2", {"word_embed_proj_dim": 32}),
    "opt with norms behind the blocks": Job("opt", "tp2", {"do_layer_norm_before": False}),
    "stablelm with biases, attention and MLP side by side": Job(
        "stablelm", "tp2 SP", {"use_qkv_bias": True, "use_parallel_residual": True}
    ),
    "deepseek_v3 with whole queries and biases": Job(
        "deepseek_v3", "tp2 SP", {"q_lora_rank": None, "attention_bias": True}
    ),
    "gemma4_text without experts and without inputs for each layer": Job(
        "gemma4_text", "tp2 SP", {"enable_moe_block": False, "hidden_size_per_layer_input": 0}
    ),
    "gemma4_text whose last layers use other layers' keys and values, on more ranks than key/value heads": Job(
        "gemma4_text",
        "tp4",
        {
            "enable_moe_block": False,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
        },
    ),
    "an uneven sequence": Job("gpt2", "tp2 SP", seq=15),
    "one token for each rank": Job("gpt2", "tp2 SP", seq=2),
}
REFUSALS = {
    "llama, 4 heads on 3 ranks": ("llama", {"tp": 3}, {}, "4 attention heads can't be split over tp=3"),
    "phi3, 3 features": ("phi3", {"tp": 2}, {"intermediate_size": 3}, "3 intermediate features"),
    "falcon, 2 groups on 4 ranks": (
        "falcon", {"tp": 4}, {"new_decoder_architecture": True, "num_kv_heads": 2}, "2 key/value heads can't be split over tp=4",
    ),
    "olmo2, a norm across 2 heads on 4 ranks": ("olmo2", {"tp": 4}, {}, "its statistic spans 2 heads"),
    "stablelm, a norm for every head": ("stablelm", {"tp": 2}, {"qk_layernorm": True}, "every head a norm of its own"),
    "opt under sequence parallel": ("opt", {"tp": 2}, {}, "sequence_parallel=False"),
    "nanochat under sequence parallel": ("nanochat", {"tp": 2}, {}, "sequence_parallel=False"),
    "codegen, 4 blocks on 8 ranks": ("codegen", {"tp": 8}, {"n_head": 8}, "fused in 4 blocks"),
    "bloom under context parallel": ("bloom", {"cp": 2}, {}, "attention interface"),
}  # fmt: skip


@cache
def outcome_of(name):
    """Run once for all tests of this file, on a pool that they share."""
    job = VARIANTS[name]
    return pool(ranks_of(job.mode)).run(run_jobs, [job], timeout=100)[0][0]


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_is_equal_to_one_process(name):
    assert outcome_of(name).status == "equal", outcome_of(name).text


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_be_split_is_refused_with_the_number_and_leaves_the_model_alone(name):
    family, sizes, config, cause = REFUSALS[name]
    model = tiny_model(family, **config)
    before = dict(model.named_parameters())
    with pytest.raises(Refused) as refusal:
        build_plan(model, sizes)
    assert cause in str(refusal.value)
    assert len(str(refusal.value).splitlines()) <= 8
    assert all(before[name] is parameter for name, parameter in model.named_parameters())
