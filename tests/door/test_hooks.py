"""Every hook is documented with its signature and an example that runs, and every hook has a test here."""

from __future__ import annotations

import inspect
import logging
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from transformers import LlamaConfig, LlamaForCausalLM

from hyperpar_core import apply_plan, build_plan, hookspecs, make_mesh
from hyperpar_core.collectives.transition import transitions
from hyperpar_core.placement import Partial
from hyperpar_core.plugins import Registry, call_factory, check_factory, loader, plugin_report

DOCS = Path(__file__).resolve().parents[2] / "docs"
HOOKS = [name for name in vars(hookspecs) if name.startswith("hyperpar_")]
PAGE = (DOCS / "hooks.md").read_text()


def section(hook: str) -> str:
    return re.search(rf"(?ms)^## {hook}$(.*?)(?=^## |\Z)", PAGE).group(1)


def blocks(hook: str) -> list[str]:
    return re.findall(r"(?ms)^```python\n(.*?)^```", section(hook))


@pytest.fixture
def example(door, monkeypatch):
    """Loads the example of a hook as an installed plugin, with the core's own beside it."""

    def load(hook: str) -> Registry:
        registry = door.load(door.core(), door.plugin(blocks(hook)[1], "doc", "acme-doc"), STRICT_PLUGINS="1")
        process = loader._Process()
        process.registry = registry
        monkeypatch.setattr(loader, "_process", process)
        return registry

    return load


@pytest.fixture
def model():
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)
    )


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_is_documented_with_its_exact_signature_and_one_example_of_it(hook):
    specification = getattr(hookspecs, hook)
    signature, example = blocks(hook)
    assert signature.strip() == f"def {hook}{inspect.signature(specification)}".replace("'", "")
    assert f"@hookimpl\ndef {hook}():" in example
    assert inspect.getdoc(specification)


def test_the_page_documents_no_hook_that_is_not_there():
    assert re.findall(r"(?m)^## (hyperpar_\w+)$", PAGE) == HOOKS


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_has_a_test(hook):
    assert any(name.startswith(f"test_hook_{hook}_") for name in globals())


@pytest.mark.parametrize("hook", HOOKS[1:])
def test_the_example_of_a_hook_registers_one_descriptor_of_its_kind(example, hook):
    (report,) = [one for one in plugin_report(example(hook)) if one["name"] == "doc"]
    assert list(report["registers"]) == [hook.removeprefix("hyperpar_")]
    assert [note for note in report["notes"] if "private" in note] == []


def test_hook_hyperpar_plugin_info_states_versions(example, door):
    assert example("hyperpar_plugin_info").digest_items()[1:] == [("doc", "acme-doc", "1.0")]
    newer = blocks("hyperpar_plugin_info")[1].replace('"1.0"', '"1.7"')
    assert "core API 1.7" in door.only(newer).reason


def test_hook_hyperpar_inner_wrappers_changes_the_forward_of_a_planned_module(example, model, caplog):
    example("hyperpar_inner_wrappers")
    ids = torch.arange(6)[None]
    expected = model(ids).logits
    mesh = make_mesh()
    entry = {"match": "*.mlp", "inner_target": "self", "inner_wrapper": "log_norm", "options": {"digits": 1}}
    with_plan = apply_plan(model, build_plan(model, mesh, overrides=overrides(entry)), mesh)
    with caplog.at_level(logging.WARNING):
        assert torch.equal(model(ids).logits, expected)
    lines = [record.message for record in caplog.records if "norm" in record.message]
    assert [re.sub(r"\d+\.\d$", "#", line) for line in lines] == [f"model.layers.{i}.mlp: norm #" for i in range(2)]
    with_plan.undo()


def test_hook_hyperpar_local_compute_factories_replaces_the_compute_of_a_planned_module(example, model):
    example("hyperpar_local_compute_factories")
    ids = torch.arange(6)[None]
    expected = model(ids).logits
    seen = []
    model.model.layers[0].mlp.down_proj.register_forward_hook(lambda module, args, out: seen.append(tuple(out.shape)))
    mesh = make_mesh()
    entry = {"match": "*.mlp", "local_compute_fn": "chunked_mlp", "options": {"chunks": 3}}
    apply_plan(model, build_plan(model, mesh, overrides=overrides(entry)), mesh)
    torch.testing.assert_close(model(ids).logits, expected)
    assert seen == [(1, 2, 16)] * 3


def overrides(entry):
    from hyperpar_core import Override, Overrides

    return Overrides([Override(**entry)])


def test_hook_hyperpar_special_handlers_cuts_a_packed_parameter_into_sections(example):
    handler, _ = example("hyperpar_special_handlers").special_handler("packed_gate_up")
    sections = handler.sections((12, 4), module=None, param_name="weight", config=SimpleNamespace())
    assert [(one.name, one.dim, one.size, one.placement) for one in sections] == [
        ("gate", 0, 6, Shard(0)), ("up", 0, 6, Shard(0)),
    ]  # fmt: skip


def test_hook_hyperpar_collective_lowerers_lowers_its_own_transitions_and_leaves_the_rest_to_the_default(example):
    registry = example("hyperpar_collective_lowerers")
    lowerer, _ = registry.lowerer("my_all_reduce")
    default, provider = registry.lowerer("default")
    assert provider.distribution == "hyperpar-core"
    (reduce,) = transitions({"tp": Partial()}, {"tp": Replicate()}, {}, ["tp"])
    (gather,) = transitions({"tp": Shard(1)}, {"tp": Replicate()}, {}, ["tp"])
    assert lowerer.lower(reduce).__name__ == "my_all_reduce" and lowerer.lower(gather) is None
    assert default.lower(reduce) is not None and default.lower(gather) is not None


def test_hook_hyperpar_losses_makes_a_loss_that_a_model_of_transformers_calls(example, model):
    descriptor, _ = example("hyperpar_losses").loss("z_loss")
    check_factory(descriptor.factory, {"weight": 0.5}, "loss z_loss")
    labels = torch.tensor([[1, 2, 3, -100]])
    arguments = {"input_ids": torch.arange(4)[None], "labels": labels, "shift_labels": labels, "num_items_in_batch": 3}
    plain = model(**arguments)
    model.loss_function = call_factory(descriptor.factory, {"model": model}, {"weight": 0.5}, "loss z_loss")
    penalty = plain.logits[0, :3].logsumexp(-1).square().mean()
    torch.testing.assert_close(model(**arguments).loss, plain.loss + 0.5 * penalty)


def test_hook_hyperpar_model_families_is_what_the_planner_lists(example):
    ((family, provider),) = example("hyperpar_model_families").families()
    assert (family.name, family.matches, str(provider)) == ("acme", ("acme_lm",), "acme-doc 1.0")
    assert [limit.applies(None, {"cp": 2}) for limit in family.limits] == [True]
