"""Whole models under expert parallelism: loss, logits and every gradient are those of one process."""

import copy

import pytest
import torch
from ep_grid import experts
from moe_tools import assert_equal

from hyperpar_core import apply_plan, build_plan, check_plan, make_mesh, suggest_overrides
from hyperpar_core.testing import pool, tiny_batch, tiny_model

FAMILIES = ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v3", "glm4_moe", "gpt_oss"]
OTHERS = [
    "flex_olmo", "mellum", "cohere2_moe", "phimoe", "granitemoe", "granitemoeshared", "granitemoe_swa", "minimax_m2",
    "ernie4_5_moe", "flint", "aria_text", "hunyuan_v1_moe", "hy_v3", "kolibri1", "dots1", "exaone_moe", "solar_open",
    "sarvam_moe", "glm4_moe_lite", "sarvam_mla", "axk1", "deepseek_v2", "afmoe", "dbrx", "llama4_text",
    "jamba", "qwen3_next",
]  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("degrees", [{"dp": 2, "ep": 2}, {"tp": 2, "ep": 2}], ids=str)
def test_two_ranks_compute_what_one_does(family, degrees):
    assert_equal(family, degrees)


@pytest.mark.parametrize("family", OTHERS)
def test_other_families_compute_what_one_process_does(family):
    assert_equal(family, {"tp": 2, "ep": 2})


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
        ("jetmoe", {"dp": 2, "ep": 2}),
        ("jetmoe", {"dp": 4, "ep": 2}),
        ("llama4_text", {"dp": 2, "tp": 2, "ep": 4}),
        ("dbrx", {"cp": 2, "ep": 2}),
    ],
    ids=str,
)
def test_other_ways_to_lay_experts_on_the_ranks(family, degrees):
    assert_equal(family, degrees)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_eight_ranks_of_every_axis_compute_what_one_process_does(family):
    assert_equal(family, {"dp": 2, "cp": 2, "tp": 2, "ep": 8}, experts(family, 8))


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "gpt_oss", "llama4_text"])
def test_without_sequence_parallel_tp_ranks_share_the_tokens_of_a_block(family):
    assert_equal(family, {"dp": 2, "tp": 2, "ep": 4}, sequence_parallel=False)


@pytest.mark.parametrize("seq", [2, 3])
@pytest.mark.parametrize("family", ["qwen3_moe", "llama4_text"])
def test_ranks_without_any_token_join_every_collective(family, seq):
    assert_equal(family, {"tp": 4, "ep": 4}, seq=seq)


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


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "deepseek_v3", "gpt_oss", "dbrx", "llama4_text"])
@pytest.mark.parametrize("options", [{}, {"sequence_parallel": False}], ids=str)
def test_tp_alone_cuts_the_features_of_experts(family, options):
    assert_equal(family, {"tp": 2}, **options)


def in_another_way(way):
    """The largest relative difference of a gradient (of the logits, for a copy) from one process, under tp2 x ep2."""
    model = tiny_model("qwen2_moe")
    single, batch = copy.deepcopy(model), tiny_batch(model, batch=2, seq=16)
    mesh = make_mesh(tp=2)
    applied = apply_plan(model, build_plan(model, mesh, ep_size=2, overrides=suggest_overrides(model, mesh, ep_size=2)), mesh)
    if way == "copied":
        twin = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        ours, theirs = (m(batch["input_ids"], use_cache=False).logits for m in (twin, single))
        return float((ours - theirs).abs().max() / theirs.abs().max())
    if way == "checkpointed":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if way == "compiled":
        model.model.layers[-1].mlp.compile(backend="aot_eager")
    model(**applied.shard_batch(batch), use_cache=False).loss.backward()
    single(**batch, use_cache=False).loss.backward()
    ours, floor = applied.full_gradients(), 1e-6 * max(p.grad.abs().max() for p in single.parameters())
    return max(float((ours[n] - p.grad).abs().max() / max(p.grad.abs().max(), floor)) for n, p in single.named_parameters())


@pytest.mark.parametrize("way", ["checkpointed", "compiled", "copied"])
def test_checkpointed_compiled_and_copied_models_compute_the_same(way):
    assert max(pool(2).run(in_another_way, way, timeout=100)) < 1e-5


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "gpt_oss", "llama4_text"])
def test_validate_mode_computes_what_production_does(family):
    assert_equal(family, {"tp": 2, "ep": 2}, mode="validate")


def stepped(family, degrees, ep):
    """The largest relative difference between three steps of fused AdamW on a planned model and in one process, gradients clipped."""
    model = tiny_model(family)
    single, batch = copy.deepcopy(model), tiny_batch(model, batch=4, seq=8)
    mesh = make_mesh(**degrees)
    applied = apply_plan(model, build_plan(model, mesh, ep_size=ep, overrides=suggest_overrides(model, mesh, ep_size=ep)), mesh)
    rows = {k: v.chunk(applied.data_parallel_size)[applied.data_parallel_rank] for k, v in batch.items()}
    share = applied.shard_batch(rows)
    # a large epsilon: where a gradient is noise, AdamW makes a whole step of it
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-2, fused=True) for m in (model, single))
    for _ in range(3):
        model(**share, use_cache=False).loss.backward()
        single(**batch, use_cache=False).loss.backward()
        applied.clip_grad_norm_(1.0)
        torch.nn.utils.clip_grad_norm_(single.parameters(), 1.0)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    found = applied.full_parameters()
    return max(float((found[n] - p).abs().max() / p.abs().max()) for n, p in single.named_parameters())


@pytest.mark.parametrize(("degrees", "ep"), [({"dp": 2}, 2), ({"dp": 2, "tp": 2}, 2)], ids=str)
def test_fused_adamw_steps_over_both_meshes_as_one_process_does(degrees, ep):
    for worst in pool(2 * len(degrees)).run(stepped, "qwen2_moe", degrees, ep):
        assert worst < 1e-5


@pytest.mark.parametrize(("family", "tp", "ep"), [("mixtral", 2, 4), ("gpt_oss", 2, 4), ("qwen2_moe", 2, 1), ("jetmoe", 1, 4)])
def test_a_plan_for_a_thousand_ranks_is_checked_offline(family, tp, ep):
    model, sizes = tiny_model(family), {"dp": 1024 // tp, "tp": tp}
    plan = build_plan(model, sizes, ep_size=ep, overrides=suggest_overrides(model, sizes, ep_size=ep))
    assert not check_plan(plan, model, world_size=1024).problems
