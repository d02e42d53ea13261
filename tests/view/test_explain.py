"""What people read: explain and diff say what is in the plan, repeated layers once."""

from __future__ import annotations

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from hyperpar_core import Override, ShardingPlan, build_plan, diff, explain
from hyperpar_core.errors import PlanError
from hyperpar_core.testing import tiny_config
from hyperpar_core.view.tables import align, fold, size
from hyperpar_core.view.traffic import movements

ATTN = "model.layers.0.self_attn"
_models = {}


def meta(family, **changes):
    key = (family, repr(changes))
    if key not in _models:
        with torch.device("meta"):
            _models[key] = AutoModelForCausalLM.from_config(tiny_config(family, **changes))
    return _models[key]


def row(text, name):
    """The cells of one line of the table."""
    line = next(line for line in text.splitlines() if line.strip().startswith(name))
    return [cell for cell in line.strip().split("  ") if cell]


def test_repeated_layers_are_one_row_each_with_what_one_layer_moves():
    text = explain(build_plan(meta("qwen3", num_hidden_layers=5), {"dp": 2, "tp": 2}), tokens=32, dp=2)
    lines = text.splitlines()
    assert lines[0].startswith("qwen3 ") and "dp 2 x tp 2   sequence parallel" in lines[0]
    assert len(lines) <= 22 and max(map(len, lines)) <= 160
    assert row(text, "model.layers.{0-4}")[1].strip() == "5 x"
    attention = row(text, "self_attn")
    assert [c.strip() for c in attention[2:4]] == ["S(1) -> replicate", "partial -> S(1)"]
    assert attention[4].strip() == "2 gather 2 scatter"
    assert "q_proj k_proj v_proj S(0)" in text and "q_norm k_norm R" in " ".join(text.split())
    assert "gradient sums over tp: 1 bucket" in text and "q_norm, k_norm, input_layernorm" in text
    assert "gradient sums over dp: 1 bucket" in text and "all parameters" in text
    assert "vocab_parallel_embedding (hyperpar-vocab-embedding" in text


def test_the_bytes_of_a_row_are_those_of_the_transition_table():
    plan = build_plan(meta("llama"), {"tp": 2})
    contract = plan.boundary(ATTN)
    moved = movements(plan, contract, 1, 32, 2)
    whole = 32 * 64 * 2
    assert [(m.direction, m.collective, m.bytes) for m in moved] == [
        ("forward", "all_gather", whole // 2),
        ("backward", "reduce_scatter", whole),
        ("forward", "reduce_scatter", whole),
        ("backward", "all_gather", whole // 2),
    ]
    assert row(explain(plan, tokens=32), "self_attn")[-1].strip() == size(3 * whole) == "12 KiB"


def test_bytes_held_and_the_sharded_fraction_count_a_tied_weight_once():
    tied = build_plan(meta("llama", tie_word_embeddings=True), {"tp": 2})
    apart = build_plan(meta("llama"), {"tp": 2})
    elements = sum(p.numel() for p in meta("llama", tie_word_embeddings=True).parameters())
    assert f"of {size(elements * 2)} per rank" in explain(tied)
    assert explain(tied).splitlines()[0] != explain(apart).splitlines()[0]
    whole = build_plan(meta("llama"), {"dp": 2})
    assert ", 0% of parameters sharded" in explain(whole) and "one rank" in explain(whole)


def test_layers_that_differ_stand_apart():
    plan = build_plan(
        meta("llama", num_hidden_layers=4),
        {"tp": 2},
        overrides=[Override(match="model.layers.[13].mlp", lowerer="default")],
    )
    text = explain(plan)
    assert "model.layers.{0,2}" in text and "model.layers.{1,3}" in text and "lowerer default" in text


def test_a_packed_parameter_shows_its_sections_and_a_shared_head_its_gradient():
    packed = explain(build_plan(meta("phi3"), {"tp": 2}))
    assert "S(0)+" in packed
    shared = explain(build_plan(meta("llama"), {"tp": 4}, sequence_parallel=False))
    assert "k_proj v_proj R grad P" in " ".join(shared.split())


def test_one_boundary_is_shown_whole_also_by_the_name_of_its_parameter():
    plan = build_plan(meta("qwen3"), {"tp": 2})
    text = explain(plan, ATTN, tokens=32)
    assert text == explain(plan, f"{ATTN}.q_norm.weight", tokens=32)
    assert "q_norm.weight" in text and "in hidden_states: S(1) -> replicate, gradient at the compute partial" in text
    assert "over tp: forward all-gather, backward reduce-scatter (forward 2 KiB, backward 4 KiB, 32 tokens)" in text
    bias = build_plan(meta("llama", attention_bias=True), {"tp": 2})
    assert any("o_proj.bias" in line and "partial" in line for line in explain(bias, ATTN).splitlines())
    with pytest.raises(PlanError, match=r"no boundary or parameter 'model.layers.0.self_atn'\. Nearest: model.layers"):
        explain(plan, "model.layers.0.self_atn")


def test_equal_plans_differ_in_nothing():
    assert diff(build_plan(meta("llama"), {"tp": 2}), build_plan(meta("llama"), {"tp": 2})) == ""


def test_a_difference_is_named_once_for_all_layers():
    model = meta("llama", num_hidden_layers=4)
    plan, other = build_plan(model, {"tp": 2}), build_plan(model, {"tp": 2}, sequence_parallel=False)
    text = diff(plan, other)
    assert "sequence_parallel: true -> false" in text
    assert len(text.splitlines()) < 20 and "model.layers.{0-3}.mlp" in text
    assert "in_src.x: tp shard(1) -> replicate" in text
    assert diff(other, plan).count("\n") == text.count("\n")


def test_boundaries_and_parameters_of_one_plan_only_are_named():
    model = meta("llama")
    plan = build_plan(model, {"tp": 2})
    layout = {"input": {"tp": "replicate"}}
    cut = {"output": {"tp": "shard(-1)"}}
    entry = Override(
        match="model.layers.0.mlp.up_proj", params={"weight": {"tp": "shard(0)"}}, in_src=layout, in_dst=layout, out_src=cut, out_dst=cut
    )  # fmt: skip
    text = diff(plan, build_plan(model, {"tp": 2}, overrides=entry))
    assert "boundaries only in the second plan: model.layers.0.mlp.up_proj" in text
    assert "params.up_proj.weight: tp shard(0) -> absent" in text
    assert "parameters.model.embed_tokens.weight, lm_head.weight: 256, 64 -> 99, 64" in diff(
        plan, build_plan(meta("llama", vocab_size=99), {"tp": 2})
    )


def test_another_order_of_boundaries_is_a_difference():
    plan = build_plan(meta("llama"), {"tp": 2})
    data = plan.to_data()
    data["boundaries"].reverse()
    other = ShardingPlan.from_yaml(yaml.safe_dump(data, sort_keys=False))
    assert diff(plan, other) == "the boundaries stand in another order" and plan.digest() != other.digest()


def test_columns_line_up_and_long_cells_go_on_below():
    lines = align([["a", "b"], ["  one two three", "x"]], (9, 3))
    assert lines == ["a          b", "  one two  x", "    three"]


def test_folding_keeps_the_order_and_nests():
    names = ["a", *(f"l.{i}.{part}" for i in range(3) for part in ("x", "e.0.w", "e.1.w")), "z"]
    rows = [(r.depth, r.name, r.copies, len(r.things)) for r in fold([(n, n) for n in names], lambda name: name[-1])]
    assert rows == [
        (0, "a", 1, 1),
        (0, "l.{0-2}", 3, 0),
        (1, "x", 1, 3),
        (1, "e.{0-1}", 2, 0),
        (2, "w", 1, 6),
        (0, "z", 1, 1),
    ]
