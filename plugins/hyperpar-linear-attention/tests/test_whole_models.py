"""Whole models with gated-delta and state-space layers: loss, logits and every gradient are those of one process."""

import copy

import pytest
import torch
from linear_tools import applied_on_ranks, assert_equal, model, planned

from hyperpar_core import check_plan
from hyperpar_core.errors import Refused
from hyperpar_core.testing import pool

FAMILIES = [
    "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid", "mamba2", "bamba", "nemotron_h", "granitemoehybrid",
    "jamba", "mamba", "falcon_mamba",
]  # fmt: skip
EXPERTS = ["qwen3_next", "nemotron_h", "granitemoehybrid", "jamba"]


@pytest.mark.parametrize("family", FAMILIES)
def test_two_tensor_parallel_ranks_compute_what_one_process_does(family):
    assert_equal(family, {"tp": 2})


@pytest.mark.parametrize("family", ["qwen3_5_text", "bamba", "jamba"])
def test_without_sequence_parallel_too(family):
    assert_equal(family, {"tp": 2}, sequence_parallel=False)


@pytest.mark.parametrize("family", ["olmo_hybrid", "mamba2", "bamba", "mamba"])
def test_in_float64_the_difference_is_rounding(family):
    assert_equal(family, {"tp": 2}, dtype=torch.float64)


@pytest.mark.parametrize(
    ("family", "config"),
    [("bamba", {"num_key_value_heads": 4}), ("mamba2", {"n_groups": 4}), ("mamba", {}), ("olmo_hybrid", {"num_key_value_heads": 4})],
    ids=str,
)
def test_four_ranks(family, config):
    assert_equal(family, {"tp": 4}, config=config)


@pytest.mark.parametrize("family", ["qwen3_next", "bamba"])
def test_beside_data_parallel_ranks_and_at_a_length_that_tp_does_not_divide(family):
    assert_equal(family, {"dp": 2, "tp": 2}, seq=15)


@pytest.mark.parametrize("family", ["qwen3_5_text", "mamba2", "jamba"])
def test_left_padding(family):
    assert_equal(family, {"tp": 2}, padded=True)


@pytest.mark.parametrize("family", EXPERTS)
@pytest.mark.parametrize("sizes", [{"dp": 2, "ep": 2}, {"tp": 2, "ep": 2}], ids=str)
def test_experts_between_recurrent_layers(family, sizes):
    # near ties of a router make weights in float32 part by rounding; nemotron_h keeps its router in float32
    assert_equal(family, sizes, dtype=torch.float32 if family == "nemotron_h" else torch.float64)


def saved(family):
    made, applied = applied_on_ranks(family, 2)
    original = model(family).state_dict()
    whole, parameters = applied.full_state_dict(), applied.full_parameters()
    mixer = next(m for m in made.modules() if hasattr(m, "conv1d"))
    local = {name: getattr(mixer, name) for name in ("conv_dim", "num_heads", "n_groups", "key_dim") if hasattr(mixer, name)}
    applied.undo()
    restored = {name: getattr(mixer, name) for name in local}
    same = all(torch.equal(whole[name], value) for name, value in original.items())
    back = all(torch.equal(made.state_dict()[name], value) for name, value in original.items())
    return list(whole) == list(original), same, back, set(parameters) <= set(original), local, restored


@pytest.mark.parametrize("family", ["qwen3_5_text", "bamba", "mamba2"])
def test_parameters_keep_their_names_and_values_and_undo_restores_the_counts(family):
    for names, same, back, known, local, restored in pool(2).run(saved, family):
        assert names and same and back and known
        assert all(local[name] < restored[name] for name in local if not (family == "bamba" and name == "n_groups"))


def generated(family):
    torch.manual_seed(0)
    made, _ = applied_on_ranks(family, 2)
    prompt = torch.arange(3, 12).view(1, -1)
    with torch.no_grad():
        ours = made.generate(prompt, max_new_tokens=8, do_sample=False)
        own = model(family).generate(prompt, max_new_tokens=8, do_sample=False)
    return ours, own


@pytest.mark.parametrize("family", ["qwen3_5_text", "bamba", "jamba"])
def test_greedy_generation_with_convolution_and_recurrent_states_is_that_of_one_process(family):
    for ours, own in pool(2).run(generated, family):
        assert torch.equal(ours, own)


@pytest.mark.parametrize("family", ["qwen3_next", "mamba2", "bamba", "jamba"])
def test_the_offline_check_passes(family):
    made = model(family)
    plan = planned(family, {"tp": 2})
    report = check_plan(plan, copy.deepcopy(made), world_size=2)
    assert report.ok, report


@pytest.mark.parametrize(
    ("family", "sizes", "config", "says"),
    [
        ("qwen3_5_text", {"tp": 4}, {"num_key_value_heads": 4}, "num_k_heads"),
        ("mamba2", {"tp": 4}, {"n_groups": 2}, "groups"),
        ("nemotron_h", {"tp": 4}, {"num_key_value_heads": 4}, "n_groups"),
        ("bamba", {"tp": 16}, {"num_key_value_heads": 16, "num_attention_heads": 16}, "dt_bias"),
        ("falcon_h1", {"tp": 2}, {}, "buffer"),
        ("qwen3_5_text", {"cp": 2}, {}, "linear attention"),
        ("mamba2", {"cp": 2}, {}, "state along the sequence"),
    ],
    ids=str,
)
def test_what_cannot_be_split_is_refused_with_its_name(family, sizes, config, says):
    with pytest.raises(Refused, match=says):
        planned(family, sizes, **config)
