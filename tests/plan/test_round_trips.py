"""A plan is plain data: the same input gives the same bytes, a file gives the same plan, and the model isn't touched."""

from __future__ import annotations

import copy
import json
import os
import pickle
import subprocess
import sys
import time

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from hyperpar_core import Override, ShardingPlan, build_plan, make_mesh
from hyperpar_core.errors import PlanError
from hyperpar_core.plugins import get_registry
from hyperpar_core.testing import families, tiny_model

MODES = {
    "one rank": ({}, {}),
    "dp": ({"dp": 2}, {}),
    "tp": ({"tp": 2}, {"sequence_parallel": False}),
    "sp": ({"tp": 2}, {}),
    "loss parallel": ({"dp": 2, "tp": 2}, {"loss_parallel": True}),
    "tp 4": ({"tp": 4}, {"sequence_parallel": False}),
}


def families_with_adapters():
    """Every family of the zoo that an installed adapter names."""
    named = {m for family, _ in get_registry().families() if isinstance(family.matches, tuple) for m in family.matches}
    return [name for name in families() if name in named]


@pytest.mark.parametrize("family", families_with_adapters())
def test_the_plans_of_a_family_are_read_back_as_they_were_written(family, meta):
    model = meta(family)
    plans = []
    for sizes, options in MODES.values():
        try:
            plans.append(build_plan(model, sizes, **options))
        except PlanError:
            continue
        again = ShardingPlan.from_data(json.loads(json.dumps(plans[-1].to_data())))
        assert again == plans[-1] and again.digest() == plans[-1].digest()
    if family in ("llama", "qwen3", "gemma2", "mixtral", "gpt2", "phi3"):
        text = plans[2].to_yaml()
        again = ShardingPlan.from_yaml(text)
        assert again == plans[2] and again.to_yaml() == text and again.digest() == plans[2].digest()
        assert build_plan(model, {"tp": 2}, sequence_parallel=False).to_yaml() == text


def test_plans_of_different_modes_have_different_digests(meta):
    digests = [build_plan(meta("llama"), sizes, **options).digest() for sizes, options in MODES.values()]
    assert len(set(digests)) == len(digests) - 1  # one rank and dp alone: dp stands in no plan


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "phi3"])
def test_a_meta_model_gives_the_same_plan_as_a_real_one(family, meta):
    options = {"sequence_parallel": False}
    assert build_plan(meta(family), {"tp": 2}, **options) == build_plan(tiny_model(family), {"tp": 2}, **options)


def test_a_device_mesh_and_its_sizes_give_the_same_plan_whatever_the_order(meta):
    assert build_plan(meta("llama"), make_mesh()) == build_plan(meta("llama"), {"dp": 1, "tp": 1})
    assert build_plan(meta("llama"), {"tp": 2, "dp": 2}) == build_plan(meta("llama"), {"dp": 2, "tp": 2})


def test_build_plan_touches_nothing_of_the_model_nor_the_random_state(untouched):
    for family in ("llama", "qwen3", "phi3"):
        model = tiny_model(family)
        values = {name: p.clone() for name, p in (*model.named_parameters(), *model.named_buffers())}
        before = untouched(model)
        for sizes, options in MODES.values():
            build_plan(model, sizes, **options)
        assert untouched(model) == before
        assert all(torch.equal(values[n], p) for n, p in (*model.named_parameters(), *model.named_buffers()))


def test_a_plan_can_be_pickled_and_copied(meta):
    plan = build_plan(meta("llama"), {"tp": 2})
    plan.owner("lm_head.weight")
    for again in (pickle.loads(pickle.dumps(plan)), copy.deepcopy(plan)):
        assert again == plan and again.digest() == plan.digest()


def test_a_plan_is_written_to_a_file_and_read_from_it(meta, tmp_path):
    plan = build_plan(meta("llama"), {"tp": 2})
    assert plan.to_yaml(tmp_path / "plan.yaml") == (tmp_path / "plan.yaml").read_text()
    assert ShardingPlan.from_yaml(tmp_path / "plan.yaml") == plan == ShardingPlan.from_yaml(str(tmp_path / "plan.yaml"))


def test_another_process_with_another_hash_seed_makes_the_same_bytes(meta):
    code = (
        "import torch\nfrom transformers import AutoModelForCausalLM\nfrom hyperpar_core import build_plan\n"
        "from hyperpar_core.testing import tiny_config\n"
        "with torch.device('meta'):\n    model = AutoModelForCausalLM.from_config(tiny_config('llama'))\n"
        "print(build_plan(model, {'tp': 2}).to_yaml(), end='')"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": "7"},
    )
    assert run.stdout == build_plan(meta("llama"), {"tp": 2}).to_yaml()


def test_a_model_of_405_billion_parameters_is_planned_in_two_seconds_of_cpu():
    config = LlamaConfig(
        vocab_size=128256, hidden_size=16384, intermediate_size=53248, num_hidden_layers=126, num_attention_heads=128,
        num_key_value_heads=8,
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    build_plan(model, {"dp": 128, "tp": 8})  # the first one also loads the plugins
    start = time.process_time()
    plan = build_plan(model, {"dp": 128, "tp": 8}, overrides=[Override(match="*.mlp", lowerer="default")])
    assert time.process_time() - start < 2.0
    assert len(plan.boundaries) == 126 * 4 + 4 and plan.sizes == {"tp": 8}
    assert sum(1 for c in plan.boundaries if c.lowerer == "default") == 126
