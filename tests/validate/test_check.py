"""The offline check: agrees with production, finds a fault anywhere, needs neither ranks nor memory."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from core_tools import memory_now, memory_peak, needs_peak_counter
from torch.distributed.tensor import Replicate, Shard
from transformers import AutoModelForCausalLM, LlamaConfig

from hyperpar_core import ShardingPlan, build_plan, check_plan
from hyperpar_core.errors import Refused
from hyperpar_core.plugins import get_registry
from hyperpar_core.testing.zoo import tiny_config, tiny_model

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm3", "granite", "olmo2", "gemma2")


def _with(plan: ShardingPlan, fqn: str, **fields: Any) -> ShardingPlan:
    contract = plan.boundary(fqn)
    values = {name: {**getattr(contract, name), **change} for name, change in fields.items()}
    return replace(plan, boundaries=tuple(replace(c, **values) if c.fqn == fqn else c for c in plan.boundaries))


@pytest.mark.parametrize("options", [{"sequence_parallel": False}, {}, {"loss_parallel": True}], ids=["tp", "tp+sp", "loss"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_plan_that_parity_accepts_passes(family: str, options: dict[str, Any]) -> None:
    model = tiny_model(family)
    report = check_plan(build_plan(model, {"tp": 2}, **options), model, world_size=8)
    assert report.ok, report.text()


@pytest.mark.parametrize("family", sorted({f.name for f, _ in get_registry().families()} - set(FAMILIES)))
def test_every_family_that_can_be_planned_passes(family: str) -> None:
    model = tiny_model(family)
    try:
        plan = build_plan(model, {"tp": 2})
    except Refused:
        try:
            plan = build_plan(model, {"tp": 2}, sequence_parallel=False)
        except Refused as refusal:
            assert family in str(refusal)
            return
    report = check_plan(plan, model)
    assert report.ok, report.text()


@pytest.mark.parametrize(
    ("fqn", "fields", "text"),
    [
        ("model.layers.3.mlp", {"out_src": {"output": {"tp": Replicate()}}}, "output 'output'"),
        ("model.layers.2.self_attn", {"out_src": {"output": {"tp": Shard(1)}}}, "output 'output'"),
        ("model.layers.4.mlp", {"in_grad": {"x": {"tp": Replicate()}}}, "in_grad"),
        ("model.layers.1.mlp", {"params": {"down_proj.weight": {"tp": Shard(0)}}}, "out_src"),
        ("model.layers.5.post_attention_layernorm", {"param_grad": {"weight": {"tp": Replicate()}}}, "param_grad"),
        ("model.norm", {"param_grad": {"weight": {"tp": Replicate()}}}, "param_grad"),
        ("lm_head", {"in_grad": {"input": {"tp": Replicate()}}}, "in_grad"),
        ("model.layers.2.mlp", {"in_dst": {"x": {"tp": Shard(1)}}}, ""),
    ],
)  # fmt: skip
def test_one_corrupted_contract_is_reported_at_its_boundary(fqn: str, fields: dict[str, Any], text: str) -> None:
    model = tiny_model("llama", num_hidden_layers=6)
    report = check_plan(_with(build_plan(model, {"tp": 2}), fqn, **fields), model)
    assert not report.ok
    assert report.problems[0].fqn == fqn and text in report.problems[0].what, report.text()


def test_a_model_with_dropout_passes() -> None:
    model = tiny_model("llama", attention_dropout=0.1)
    report = check_plan(build_plan(model, {"tp": 2}), model)
    assert report.ok, report.text()


def test_experts_that_look_at_which_token_goes_where_are_followed_and_a_fault_is_reported() -> None:
    model = tiny_model("dbrx")
    plan = build_plan(model, {"tp": 2}, sequence_parallel=False)
    assert check_plan(plan, model).ok
    fault = _with(plan, "transformer.blocks.1.ffn", out_src={"output": {"tp": Replicate()}})
    report = check_plan(fault, model)
    assert [p.fqn for p in report.problems] == ["transformer.blocks.1.ffn"], report.text()


def test_the_model_is_untouched() -> None:
    model = tiny_model("qwen3")
    before = {name: (id(p), p.clone()) for name, p in model.named_parameters()}
    classes = [type(m) for m in model.modules()]
    check_plan(build_plan(model, {"tp": 2}), model)
    assert [type(m) for m in model.modules()] == classes
    for name, parameter in model.named_parameters():
        assert id(parameter) == before[name][0] and torch.equal(parameter, before[name][1])


def test_a_meta_model_is_checked_like_a_real_one() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config("qwen3"))
    report = check_plan(build_plan(model, {"tp": 4, "dp": 2}), model, world_size=8)
    assert report.ok and report.ranks == 8, report.text()


@needs_peak_counter
def test_405_billion_parameters_are_planned_and_proven_for_1024_ranks_on_a_laptop() -> None:
    config = LlamaConfig(
        hidden_size=16384, intermediate_size=53248, num_hidden_layers=126, num_attention_heads=128,
        num_key_value_heads=8, vocab_size=128256,
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    before = memory_now()
    start = time.process_time()
    plan = build_plan(model, {"dp": 128, "tp": 8}, loss_parallel=True)
    planned = time.process_time() - start
    report = check_plan(plan, model, world_size=1024)
    checked = time.process_time() - start - planned
    assert report.ok and report.ranks == 1024, report.text()
    fault = check_plan(_with(plan, "model.layers.77.mlp", out_src={"output": {"tp": Replicate()}}), model)
    assert [p.fqn for p in fault.problems] == ["model.layers.77.mlp"], fault.text()
    assert planned < 2 and checked < 30  # seconds of this process's CPU time
    assert memory_peak() - before < 2**31
