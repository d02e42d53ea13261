"""The conformance suites find a fault of every kind in a plugin of every kind, by the test that is there for it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from kit_tools import Outcomes, environment, outcomes

WRONG = Path(__file__).parent / "wrong"
NUMBERS = "test_loss_and_logits_are_those_of_one_process"
GRADIENTS = "test_every_gradient_is_that_of_one_process"
UNDO = "test_undo_leaves_nothing_behind_and_no_code_of_its_own_in_torch_or_transformers"
OPTIONS = "test_no_option_is_swallowed"
LOADED = "test_none_of_its_code_stands_in_torch_or_transformers_once_it_is_loaded"
TWO_RANKS = "test_two_ranks_compute_what_the_default_computes_forward_and_backward"
RULES = "test_every_rule_hits_a_parameter_or_a_module"
WHOLE = "test_whole_parameters_are_the_original_s"

# {suite: {test that finds the fault: what it says}}. A special handler sums no gradients: it only cuts, and can cut wrongly.
CAUGHT = {
    "TestWrapperGradient": {GRADIENTS: "gate_proj.weight"},
    "TestWrapperPlacement": {NUMBERS: "of model.layers.0.mlp"},
    "TestWrapperState": {UNDO: "model.layers.0.mlp.wrapped_by_acme is new"},
    "TestWrapperOption": {OPTIONS: "option scale=2.0 changes nothing that can be seen"},
    "TestWrapperPatch": {UNDO: "patches: torch.nn.functional.silu"},
    "TestComputeGradient": {GRADIENTS: "gate_proj.weight"},
    "TestComputePlacement": {NUMBERS: "of model.layers.0.mlp"},
    "TestComputeState": {UNDO: "model.layers.0.mlp.calls is new"},
    "TestComputeOption": {OPTIONS: "option scale=2.0 changes nothing that can be seen"},
    "TestComputePatch": {LOADED: "torch.nn.modules.linear.Linear.forward"},
    "TestHandlerPlacement": {NUMBERS: "of model.layers.0.mlp"},
    "TestHandlerState": {UNDO: "planning: model.layers.0.mlp.gate_up.cut_by_acme is new"},
    "TestHandlerPatch": {UNDO: "patches: torch.chunk"},
    "TestLowererGradient": {TWO_RANKS: "replicate -> replicate, gradient partial -> replicate", GRADIENTS: "gradients"},
    "TestLowererPlacement": {TWO_RANKS: "shard(1) -> replicate"},
    "TestLowererRounded": {TWO_RANKS: "partial -> replicate"},
    "TestLowererState": {UNDO: "torch.get_float32_matmul_precision()"},
    "TestLowererPatch": {UNDO: "patches: torch.distributed"},
    "TestFamilyGradient": {GRADIENTS: "gradients"},
    "TestFamilyPlacement": {NUMBERS: "of model.layers.0.mlp"},
    "TestFamilyState": {UNDO: "config.seen_by_acme is new"},
    "TestFamilyRule": {RULES: "role '*.qkv.weight'"},
    "TestFamilyPatch": {UNDO: "patches: transformers.modeling_utils.PreTrainedModel.greet"},
}
# What is right all the same in each: the fault is found by the test that is there for it.
RIGHT = {
    "TestWrapperGradient": [NUMBERS],
    "TestWrapperState": [NUMBERS],
    "TestComputeGradient": [NUMBERS],
    "TestHandlerPlacement": [WHOLE],
    "TestFamilyGradient": [NUMBERS],
}


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """What became of the chosen tests of every wrong plugin, all installed in one environment."""
    site = tmp_path_factory.mktemp("site")
    modules = sorted(path.stem for path in WRONG.glob("*.py") if path.stem != "suites")
    info = site / "acme_wrong-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-wrong\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("\n".join(["[hyperpar]", *(f"{name} = {name}" for name in modules)]))
    for path in WRONG.glob("*.py"):
        shutil.copy(path, site)
    (site / "conftest.py").write_text("from hyperpar_core.testing.pytest_plugin import *\n")
    chosen = [f"suites.py::{suite}::{test}" for suite, tests in CAUGHT.items() for test in [*tests, *RIGHT.get(suite, [])]]
    return outcomes(site, chosen, environment(site, "acme-wrong"))


@pytest.mark.limit(600)
@pytest.mark.parametrize("suite", CAUGHT)
def test_the_suite_finds_the_fault_and_says_where_it_is(wrong: Outcomes, suite: str) -> None:
    for test, text in CAUGHT[suite].items():
        assert text in wrong[suite][test], f"{test}: {wrong[suite][test]}"
    for test in RIGHT.get(suite, []):
        assert wrong[suite][test] == "passed", f"{test}: {wrong[suite][test]}"
