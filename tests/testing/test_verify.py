"""check_parity and verify on real plans: right ones are equal, wrong declarations are named, errors keep their type."""

from __future__ import annotations

import pytest
import torch
import yaml
from torch.distributed.tensor import Replicate

from hyperpar_core import build_plan, make_mesh
from hyperpar_core.errors import HyperparError, Refused
from hyperpar_core.testing import (
    Degrees,
    check_parity,
    model_from,
    replica_differences,
    tiny_batch,
    tiny_config,
    tiny_model,
    verify,
)

GRADIENTS = 25  # parameters of the tiny qwen3


def on_ranks(overrides=None, dtype=torch.float32, steps=0, **options):
    model = tiny_model("qwen3", dtype)
    batch = tiny_batch(model, seq=15)
    return check_parity(model, batch, Degrees(tp=2, options={"overrides": overrides, **options}), steps=steps)


def with_padding(sequence_parallel):
    model = tiny_model("qwen3")
    batch = tiny_batch(model, seq=15)
    mask = torch.ones_like(batch["input_ids"])
    mask[0, :4] = mask[1, -3:] = 0
    batch |= {"attention_mask": mask, "labels": batch["labels"].masked_fill(mask == 0, -100)}
    return check_parity(model, batch, Degrees(tp=2, options={"sequence_parallel": sequence_parallel}))


def over_data_parallel_ranks(dtype):
    model = tiny_model("qwen3", dtype)
    batch = tiny_batch(model, batch=4, seq=9)
    batch["labels"][3, 2:] = -100  # ranks with different numbers of targets
    return check_parity(model, batch, Degrees(dp=2), steps=2)


def with_wrong_gradient_label():
    """The plan says that q_norm's gradient is whole on every rank, though each rank has only some of the heads."""
    model = tiny_model("qwen3")
    plan = build_plan(model, make_mesh(tp=2), sequence_parallel=False)
    plan.boundary("model.layers.1.self_attn").param_grad["q_norm.weight"]["tp"] = Replicate()
    return check_parity(model, tiny_batch(model), Degrees(tp=2), plan=plan)


def with_sums_said_to_be_whole():
    """The plan says that an MLP yields whole sums, though each rank has its summand."""
    model = tiny_model("qwen3")
    plan = build_plan(model, make_mesh(tp=2), sequence_parallel=False)
    del plan.boundary("model.layers.1.mlp").out_src["output"]["tp"]
    return check_parity(model, tiny_batch(model, seq=15), Degrees(tp=2), plan=plan)


def with_replicas_pushed_apart():
    model = torch.nn.Linear(3, 3)
    equal = replica_differences(model)
    with torch.no_grad():
        model.bias += 1e-7 * torch.distributed.get_rank()
    model.weight.grad = torch.ones(3, 3) if torch.distributed.get_rank() else None
    return equal, replica_differences(model)


def mlp_with(**fields):
    return yaml.safe_dump({"version": 1, "plan_overrides": [{"match": "model.layers.1.mlp", "when": "tp", **fields}]})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_a_right_plan_is_equal_on_every_rank_before_and_after_the_steps(ranks2, dtype, sequence_parallel):
    for report in ranks2.run(on_ranks, dtype=dtype, steps=3, sequence_parallel=sequence_parallel):
        assert report.ok, report.text()
        assert [c.rank for c in report.comparisons] == [0, 1]
        assert report.comparisons[0].total["gradient"] == report.comparisons[0].total["weight"] == GRADIENTS


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_left_and_right_padding_is_equal_where_tokens_count(ranks2, sequence_parallel):
    report = ranks2.run(with_padding, sequence_parallel)[0]
    assert report.ok, report.text()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_data_parallel_ranks_with_different_numbers_of_targets_are_equal(ranks2, dtype):
    report = ranks2.run(over_data_parallel_ranks, dtype)[0]
    assert report.ok, report.text()


def test_an_output_that_is_declared_whole_and_is_partial_is_named_as_the_first_part(ranks2):
    report = ranks2.run(with_sums_said_to_be_whole)[0]
    assert (report.first.phase, report.first.fqn) == ("forward", "model.layers.1.mlp")
    assert report.first.forward_equal == 8 and not report.ok
    where, what, says = report.text().splitlines()[-3:]
    assert where.startswith("  first part: forward of model.layers.1.mlp (")
    assert what.startswith("    output  relative difference ")
    assert says == "    contract says that the compute yields output replicate"


def test_an_input_gradient_that_is_declared_whole_and_is_partial_is_named_as_the_first_part(ranks2):
    wrong = mlp_with(in_grad={"x": {"tp": "replicate"}})
    report = ranks2.run(on_ranks, wrong, sequence_parallel=False)[0]
    assert not report.differing("loss") and not report.differing("logits")
    assert (report.first.phase, report.first.fqn) == ("backward", "model.layers.1.mlp")
    what, says = report.text().splitlines()[-2:]
    assert what.startswith("    gradient of x  relative difference ")
    assert says == "    contract says that the compute's input gradients are x replicate over tp"


def test_a_parameter_gradient_that_is_declared_whole_and_is_partial_is_named_with_its_contract(ranks2):
    report = ranks2.run(with_wrong_gradient_label)[0]
    name = "model.layers.1.self_attn.q_norm.weight"
    assert list(report.differing("gradient")) == [name]
    assert f"gradient of {name}" in report.replicas
    text = report.text()
    assert "first part: backward of model.layers.1.self_attn " in text
    assert "contract says gradient replicate over tp, and its replicas differ: it is partial" in text


def test_replicas_that_arent_bitwise_equal_are_found_also_a_gradient_that_only_one_rank_has(ranks2):
    for equal, apart in ranks2.run(with_replicas_pushed_apart):
        assert equal == []
        assert apart == ["gradient of weight", "bias"]


def test_verify_takes_a_family_and_reports_in_its_own_words():
    report = verify("llama", tp=2, sequence_parallel=False, steps=1)
    assert report.ok, report.text()
    assert report.text().startswith("llama   tp 2   float32, bound 1e-05\n  loss      equal (")


def test_verify_raises_the_error_of_the_ranks_as_it_was(tmp_path):
    config = tiny_config("llama", num_attention_heads=3, num_key_value_heads=3, hidden_size=48)
    config.save_pretrained(tmp_path)
    with pytest.raises(Refused, match=r"3 .*heads can't be split over tp=2"):
        verify(str(tmp_path), tp=2)


def test_a_dtype_without_bounds_is_an_error_before_any_rank_is_spawned():
    with pytest.raises(ValueError, match="no bounds"):
        verify("llama", tp=64, dtype="bfloat16")


def test_a_model_comes_from_a_family_a_config_a_checkpoint_or_a_function(tmp_path, monkeypatch):
    config = tiny_config("llama", num_hidden_layers=1)
    config.save_pretrained(tmp_path / "config")
    original = tiny_model("llama", num_hidden_layers=1)
    original.save_pretrained(tmp_path / "checkpoint")
    (tmp_path / "mine.py").write_text("import torch\ndef build():\n    return torch.nn.Linear(2, 2).eval()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert len(model_from("llama").model.layers) == 2
    for spec in (tmp_path / "config", tmp_path / "config" / "config.json"):
        model = model_from(str(spec), torch.float64)
        assert len(model.model.layers) == 1 and model.lm_head.weight.dtype == torch.float64 and model.training
    loaded = model_from(str(tmp_path / "checkpoint"))
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), original.parameters(), strict=True))
    assert model_from("mine:build", torch.float64).weight.dtype == torch.float64
    for unknown in ("no_such_family", "mine:missing", "no_such_module:f"):
        with pytest.raises(HyperparError, match=unknown.split(":")[-1]):
            model_from(unknown)
