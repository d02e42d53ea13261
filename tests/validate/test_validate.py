"""Validate mode: the same numbers as production, and every wrong placement named at its boundary."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch.distributed.tensor import Replicate, Shard

from hyperpar_core import ShardingPlan, apply_plan, build_plan, make_mesh, suggest_overrides
from hyperpar_core.errors import PlacementMismatch
from hyperpar_core.testing.zoo import tiny_batch, tiny_model

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm3", "granite", "olmo2", "gemma2")


def _step(family: str, mode: str, options: dict[str, Any], plan: ShardingPlan | None = None) -> tuple[float, dict[str, Any]]:
    model = tiny_model(family)
    mesh = make_mesh(tp=2)
    plan = plan or build_plan(model, mesh, overrides=suggest_overrides(model, mesh), **options)
    applied = apply_plan(model, plan, mesh, mode=mode)
    ids = tiny_batch(model, batch=2, seq=16)["input_ids"]
    loss = model(**applied.shard_batch({"input_ids": ids, "labels": ids}), use_cache=False).loss
    loss.backward()
    return loss.item(), applied.full_gradients()


def _worst(family: str, options: dict[str, Any]) -> float:
    """The largest relative difference of loss and gradients between the two modes."""
    (loss_a, grads_a), (loss_b, grads_b) = (_step(family, mode, options) for mode in ("production", "validate"))
    worst = abs(loss_a - loss_b) / abs(loss_a)
    top = max(g.abs().max().item() for g in grads_a.values())
    for name, grad in grads_a.items():
        scale = max(grad.abs().max().item(), 1e-1 * top)
        worst = max(worst, (grad - grads_b[name]).abs().max().item() / scale)
    return worst


def all_families(options: dict[str, Any]) -> dict[str, float]:
    return {family: _worst(family, options) for family in FAMILIES}


@pytest.mark.parametrize(
    "options", [{"sequence_parallel": False}, {}, {"loss_parallel": True}], ids=["tp", "tp+sp", "tp+sp+loss"]
)
def test_validate_computes_what_production_computes(ranks2: Any, options: dict[str, Any]) -> None:
    for result in ranks2.run(all_families, options, timeout=110):
        assert result == {family: pytest.approx(0.0, abs=1e-5) for family in FAMILIES}


def latent_attention(options: dict[str, Any]) -> float:
    """The same where a head's keys are longer than its values, and filled in part by part."""
    return _worst("axk1", options)


@pytest.mark.parametrize("options", [{"sequence_parallel": False}, {}], ids=["tp", "tp+sp"])
def test_latent_attention_is_followed(ranks2: Any, options: dict[str, Any]) -> None:
    assert ranks2.run(latent_attention, options, timeout=110) == [pytest.approx(0.0, abs=1e-5)] * 2


LAYER = "model.layers.1"
FAULTS = {
    "output": (f"{LAYER}.mlp", {"out_src": {"output": {"tp": Replicate()}}}, "output 'output' is partial"),
    "partial sum": (f"{LAYER}.self_attn.o_proj", {}, "output 'output' is shard(2)"),
    "parameter gradient": (
        f"{LAYER}.self_attn",
        {"param_grad": {"q_norm.weight": {"tp": Replicate()}}},
        "gradient of parameter 'q_norm.weight' is partial",
    ),
    "input gradient": (
        f"{LAYER}.mlp",
        {"in_grad": {"x": {"tp": Replicate()}}},
        "gradient of input 'x' is partial",
    ),
    "norm": (f"{LAYER}.input_layernorm", {"param_grad": {"weight": {"tp": Replicate()}}}, "gradient of parameter 'weight'"),
}


def faulty(fault: str) -> str:
    fqn, fields, _ = FAULTS[fault]
    model = tiny_model("qwen3")
    plan = build_plan(model, {"tp": 2})
    if fault == "partial sum":  # the row-wise weight cut by rows: the products are shards, where a sum is declared
        fqn = fqn.rpartition(".")[0]
        contract = plan.boundary(fqn)
        fields = {"params": {**contract.params, "o_proj.weight": {"tp": Shard(0)}}}
    contract = plan.boundary(fqn)
    values = {
        name: {**getattr(contract, name), **{k: {**getattr(contract, name).get(k, {}), **v} for k, v in change.items()}}
        for name, change in fields.items()
    }
    changed = replace(contract, **values)
    plan = replace(plan, boundaries=tuple(changed if c.fqn == fqn else c for c in plan.boundaries))
    try:
        _step("qwen3", "validate", {}, plan)
    except PlacementMismatch as error:
        return str(error)
    return "nothing was raised"


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_raised_at_its_boundary_on_every_rank(ranks2: Any, fault: str) -> None:
    fqn, _, text = FAULTS[fault]
    for message in ranks2.run(faulty, fault, timeout=60):
        assert message.startswith(fqn.removesuffix(".o_proj")) and text in message, message


