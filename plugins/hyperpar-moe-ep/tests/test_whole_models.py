"""Whole models under expert parallelism: loss, logits and every gradient are those of one process."""

import copy

import pytest
import torch
from moe_tools import assert_equal

from hyperpar_core import apply_plan, build_plan, make_mesh, suggest_overrides
from hyperpar_core.testing import pool, tiny_batch, tiny_model

FAMILIES = ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v3", "glm4_moe", "gpt_oss"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("degrees", [{"dp": 2, "ep": 2}, {"tp": 2, "ep": 2}], ids=str)
def test_two_ranks_compute_what_one_does(family, degrees):
    assert_equal(family, degrees)


@pytest.mark.parametrize("family", FAMILIES)
def test_expert_groups_take_a_tp_group_first_and_then_dp(family):
    assert_equal(family, {"dp": 2, "tp": 2, "ep": 4})


@pytest.mark.parametrize(
    ("family", "degrees"),
    [
        ("mixtral", {"dp": 2, "tp": 2, "ep": 2}),
        ("qwen2_moe", {"tp": 4, "ep": 2}),
        ("olmoe", {"dp": 4, "ep": 2}),
        ("deepseek_v3", {"dp": 4, "ep": 4}),
        ("gpt_oss", {"tp": 4, "ep": 4}),
        ("mixtral", {"cp": 2, "ep": 2}),
        ("qwen3_moe", {"cp": 2, "tp": 2, "ep": 4}),
    ],
    ids=str,
)
def test_other_ways_to_lay_experts_on_the_ranks(family, degrees):
    assert_equal(family, degrees)


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "gpt_oss"])
def test_without_sequence_parallel_tp_ranks_share_the_tokens_of_a_block(family):
    assert_equal(family, {"dp": 2, "tp": 2, "ep": 4}, sequence_parallel=False)


@pytest.mark.parametrize("seq", [2, 3])
def test_ranks_without_any_token_join_every_collective(seq):
    assert_equal("qwen3_moe", {"tp": 4, "ep": 4}, seq=seq)


def generated(sequence_parallel):
    """Greedy tokens of a planned model and of one process: after the prompt each forward has one token a row."""
    model = tiny_model("mixtral").eval()
    single = copy.deepcopy(model)
    mesh = make_mesh(tp=2)
    overrides = suggest_overrides(model, mesh, ep_size=2)
    plan = build_plan(model, mesh, ep_size=2, overrides=overrides, sequence_parallel=sequence_parallel)
    apply_plan(model, plan, mesh)
    ids = tiny_batch(model, batch=2, seq=5)["input_ids"]
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    return [m.generate(ids, attention_mask=torch.ones_like(ids), **options).tolist() for m in (model, single)]


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_generation_with_one_token_a_step_is_that_of_one_process(sequence_parallel):
    for ours, theirs in pool(2).run(generated, sequence_parallel):
        assert ours == theirs


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
def test_replicas_are_equal_after_three_steps_in_every_implementation_of_the_experts(implementation):
    assert_equal("olmoe", {"dp": 2, "tp": 2, "ep": 2}, implementation=implementation, steps=3)


@pytest.mark.parametrize("implementation", ["eager", "batched_mm"])
@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "olmoe", "gpt_oss"])
def test_float64_agrees_to_ten_digits(family, implementation):
    assert_equal(family, {"tp": 2, "ep": 2}, implementation=implementation, dtype="float64")


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_experts_that_no_token_chose_anywhere_do_no_harm(implementation):
    assert_equal("gpt_oss", {"dp": 2, "ep": 2}, implementation=implementation, bias=[90.0, 80.0, 0.0, 0.0])


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "deepseek_v3", "gpt_oss"])
@pytest.mark.parametrize("options", [{}, {"sequence_parallel": False}], ids=str)
def test_tp_alone_cuts_the_features_of_experts(family, options):
    assert_equal(family, {"tp": 2}, **options)
