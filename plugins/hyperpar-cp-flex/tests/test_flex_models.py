"""transformers' models with FlexAttention over cp, against one process: logits and loss, without gradients."""

import inspect
from importlib.metadata import entry_points

import pytest
import torch
from hyperpar_cp_flex import plugin
from torch.nn.attention import flex_attention

from hyperpar_core import apply_plan, build_plan, make_mesh
from hyperpar_core.descriptors import CONTEXT_NAMES
from hyperpar_core.errors import HyperparError
from hyperpar_core.testing import pool, tiny_batch, tiny_model

RANKS = 4
WRAPPERS = ("flex_hf", "flex_hf_ulysses")


def planned(model, wrapper, mesh):
    entry = {"match": "*.self_attn", "when": "cp", "inner_target": "self", "inner_wrapper": wrapper}
    return apply_plan(model, build_plan(model, mesh, overrides=[entry]), mesh)


# ---- on the ranks


def difference(family, wrapper, degrees, extra=None, seq=32, batch=None, traced=False):
    """(of the logits, of the loss), relative; rows of padding left out. Tracing takes a second for each new mask."""
    flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = not traced
    model, single = tiny_model(family, **(extra or {})), tiny_model(family, **(extra or {}))
    applied = planned(model, wrapper, make_mesh(**degrees))
    given = {**tiny_batch(single, seq=seq), **(batch or {})}
    with torch.no_grad():
        expected = single(**given, use_cache=False)
        part = {n: t.chunk(applied.data_parallel_size)[applied.data_parallel_rank] for n, t in given.items()}
        found = model(**applied.shard_batch(part))
        loss = applied.reduce_loss(found.loss)
    flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = False
    theirs = expected.logits.chunk(applied.data_parallel_size)[applied.data_parallel_rank]
    rows = part.get("attention_mask", torch.ones_like(part["input_ids"])).bool()
    error = (applied.unshard(found.logits) - theirs)[rows].abs().max() / theirs.abs().max()
    return error.item(), abs(loss.item() / expected.loss.item() - 1)


def training():
    model = tiny_model("llama")
    applied = planned(model, "flex_hf", make_mesh(cp=RANKS))
    batch = applied.shard_batch(tiny_batch(model))
    try:
        model(**batch)
    except HyperparError as error:
        return type(error).__name__, str(error)
    return "no error", ""


# ---- tests


@pytest.mark.parametrize("degrees", [{"dp": 2, "cp": 2}, {"cp": 4}, {"cp": 2, "tp": 2}], ids=str)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_llama_is_that_of_one_process(wrapper, degrees):
    for errors in pool(RANKS).run(difference, "llama", wrapper, degrees, {"num_key_value_heads": 4}, traced=degrees == {"cp": 4}):
        assert max(errors) <= 1e-5


@pytest.mark.parametrize(
    ("family", "wrapper"),
    [
        ("mistral", "flex_hf"), ("gemma2", "flex_hf_ulysses"), ("gemma3_text", "flex_hf"), ("gpt_oss", "flex_hf"),
        ("gpt_oss", "flex_hf_ulysses"), ("deepseek_v3", "flex_hf"), ("llama4_text", "flex_hf"),
    ],
)  # fmt: skip
def test_windows_chunks_soft_caps_sinks_and_values_of_another_width_are_those_of_one_process(family, wrapper):
    extra = {"attn_temperature_tuning": False} if family == "llama4_text" else {}  # counts positions by itself
    for errors in pool(RANKS).run(difference, family, wrapper, {"dp": 2, "cp": 2}, extra):
        assert max(errors) <= 1e-5


def test_padded_rows_and_packed_documents_are_those_of_one_process():
    mask = torch.ones(2, 30, dtype=torch.long)
    mask[0, :7] = mask[1, 25:] = 0
    padded = {"attention_mask": mask, "labels": tiny_batch(tiny_model("llama"), seq=30)["labels"].masked_fill(mask == 0, -100)}
    positions = torch.stack([torch.cat([torch.arange(7), torch.arange(23)]), torch.cat([torch.arange(20), torch.arange(10)])])
    for batch in (padded, {"position_ids": positions}):
        for errors in pool(RANKS).run(difference, "mistral", "flex_hf", {"cp": 4}, seq=30, batch=batch):
            assert max(errors) <= 1e-5


def test_a_training_forward_on_the_cpu_is_refused_by_the_name_of_the_layer():
    for kind, text in pool(RANKS).run(training):
        assert kind == "ApplyError" and text.startswith("model.layers.0.self_attn: FlexAttention has no backward on cpu"), text


@pytest.mark.parametrize(
    ("sizes", "wrapper", "options", "extra", "words"),
    [
        ({"cp": 3}, "flex_hf_ulysses", {}, {}, "4 attention heads"),
        ({"cp": 2}, "flex_hf", {}, {"attention_dropout": 0.1}, "attention dropout is 0.1"),
        ({"cp": 2}, "flex_hf", {"kernel": "triton"}, {}, "kernel 'triton'; known: auto, compiled, unfused"),
    ],
)
def test_what_it_cannot_do_is_refused_when_the_plan_is_made(sizes, wrapper, options, extra, words):
    entry = {"match": "*.self_attn", "when": "cp", "inner_target": "self", "inner_wrapper": wrapper, "options": options}
    with pytest.raises(HyperparError) as error:
        build_plan(tiny_model("llama", **extra), sizes, overrides=[entry])
    assert str(error.value).startswith("model.layers.0.self_attn: ") and words in str(error.value)


def test_the_entry_point_leads_to_two_forms_in_two_styles():
    (entry,) = entry_points(group="hyperpar", name="cp_flex")
    assert entry.load() is plugin
    offered = {wrapper.name: wrapper for wrapper in plugin.hyperpar_inner_wrappers()}
    assert {name: wrapper.forward_style for name, wrapper in offered.items()} == {
        "flex_hf": "hf", "flex_hf_ulysses": "hf", "flex_qkv": "qkv", "flex_qkv_ulysses": "qkv",
    }  # fmt: skip
    for wrapper in offered.values():
        assert wrapper.needs_axis == "cp" and not wrapper.region_dispatch
        assert set(inspect.signature(wrapper.factory).parameters) - CONTEXT_NAMES == {"kernel"}
