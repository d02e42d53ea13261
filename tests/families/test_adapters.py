"""The adapters as data, and the mechanisms that they name."""

import copy
import pickle

import pytest
import torch
from hyperpar_families import dense, moe
from hyperpar_families.head_bias import _OwnHeads, own_head_biases
from hyperpar_families.packed import HANDLERS
from hyperpar_families.refused import REFUSED
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from transformers import GPT2Config, LlamaConfig
from transformers.pytorch_utils import Conv1D

from hyperpar_core import build_plan
from hyperpar_core.apply.attributes import ConfigView, set_count
from hyperpar_core.apply.journal import Journal
from hyperpar_core.descriptors import ModelFamily
from hyperpar_core.errors import Refused
from hyperpar_core.plan.heads import Heads, count_heads
from hyperpar_core.testing import families, tiny_model

SECTIONS = {handler.name: handler.sections for handler in HANDLERS}


def sizes(handler, shape, module, config):
    return [(s.name, s.dim, s.size) for s in SECTIONS[handler](shape, module=module, param_name="weight", config=config)]


def test_no_model_type_has_two_adapters():
    names = [name for family in (*dense.FAMILIES, *moe.FAMILIES) for name in family.matches]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("family", REFUSED, ids=lambda family: family.name)
def test_a_family_that_tp_gets_wrong_is_refused_with_its_cause(family):
    model = tiny_model(family.name)
    with pytest.raises(Refused) as refusal:
        build_plan(model, {"tp": 2}, sequence_parallel=False)
    assert family.limits[0].cause in str(refusal.value)


def test_a_family_without_tp_is_planned_whole_for_data_parallelism_or_refused_there_too():
    for family in REFUSED:
        model = tiny_model(family.name)
        if family.summary.startswith("data parallel only"):
            (whole,) = (c for c in build_plan(model, {"dp": 2}).boundaries if c.template != "stack")
            assert (whole.fqn, set(whole.params)) == ("", {n for n, _ in model.named_parameters(remove_duplicate=False)})
        else:
            with pytest.raises(Refused):
                build_plan(model, {"dp": 2})


def test_every_refused_family_is_one_of_transformers():
    assert {family.name for family in REFUSED} <= set(families(include_excluded=True))


def test_a_fused_qkv_is_cut_into_queries_keys_and_values_of_their_own_sizes():
    config = LlamaConfig(num_attention_heads=4, num_key_value_heads=2)
    assert sizes("query_key_value", (128, 64), nn.Linear(64, 128), config) == [("q", 0, 64), ("k", 0, 32), ("v", 0, 32)]


def test_a_conv1d_is_cut_along_its_last_dim_and_its_bias_along_its_only_one():
    config, module = GPT2Config(n_head=4), Conv1D(192, 64)
    assert sizes("query_key_value", (64, 192), module, config) == [("q", 1, 64), ("k", 1, 64), ("v", 1, 64)]
    assert sizes("query_key_value", (192,), module, config) == [("q", 0, 64), ("k", 0, 64), ("v", 0, 64)]


def test_a_qkv_fused_head_by_head_is_one_section():
    config = GPT2Config(n_head=4)
    assert sizes("query_key_value_or_heads", (192, 64), nn.Linear(64, 192), config) == [("heads", 0, 192)]
    config.multi_query = True
    assert [s[2] for s in sizes("query_key_value_or_heads", (96, 64), nn.Linear(64, 96), config)] == [64, 16, 16]


def test_key_value_heads_that_are_fewer_than_ranks_are_held_whole_in_a_fused_parameter():
    plan = build_plan(tiny_model("phi3"), {"tp": 4})
    attention = next(c for c in plan.boundaries if c.template == "attention")
    q, k, v = attention.sections["qkv_proj.weight"]
    assert q.placement == Shard(0)
    assert repr(k.placement) == repr(v.placement) == "SharedShard(dim=0, copies=2)"
    assert attention.divide["num_key_value_heads"] == attention.divide["num_key_value_groups"] == 2


@pytest.mark.parametrize(
    ("rows", "whole", "blocks"),
    [(64, 4, 2), (32, 2, 2), (2 * 24, 2, 2), (4 * 48, None, 2), (7, None, None)],
    ids=["queries", "keys", "values of another width", "q, k and v of a group side by side", "no heads"],
)
def test_rows_are_counted_in_heads_of_known_widths_else_cut_between_groups(rows, whole, blocks):
    heads = Heads(query=4, key_value=2, dim=16, others=(24,))
    assert (heads.whole(rows), heads.blocks(rows)) == (whole, blocks)


def test_a_module_that_names_its_heads_in_several_ways_is_counted_the_same():
    attention = tiny_model("llama").model.layers[0].self_attn
    assert count_heads(attention) == Heads(query=4, key_value=2, dim=16)
    assert count_heads(tiny_model("mpt").transformer.blocks[0].attn) == Heads(query=4, key_value=4, dim=16)
    assert count_heads(tiny_model("gemma4_text").model.layers[1].self_attn).dim == 32


def test_a_rank_takes_its_heads_of_a_bias_whatever_its_shape():
    own = _OwnHeads((), heads=4, ranks=2, rank=1)
    bias = torch.arange(4.0)
    assert torch.equal(own._own(bias.view(4, 1, 1)).flatten(), bias[2:])
    assert torch.equal(own._own(bias.view(4, 1, 1).repeat(3, 1, 1)).flatten(), bias[2:].repeat(3))
    assert torch.equal(own._own(bias.view(1, 4, 1, 1).expand(3, 4, 2, 2))[0, :, 0, 0], bias[2:])
    mask = torch.zeros(3, 1, 2, 2)
    assert own._own(mask) is mask
    assert own._own(None) is None


def test_a_bias_argument_that_is_not_there_is_refused():
    with pytest.raises(Refused, match="no argument 'alibi'"):
        own_head_biases(module=tiny_model("mpt").transformer.blocks[0].attn, tp_mesh=None, arguments=["alibi"])


def test_a_count_in_a_config_is_divided_for_one_module_alone():
    model = tiny_model("phi3")
    attention, journal = model.model.layers[0].self_attn, Journal()
    config = attention.config
    set_count(journal, attention, "config.num_attention_heads", divide=2)
    assert (attention.config.num_attention_heads, config.num_attention_heads) == (2, 4)
    assert attention.config.hidden_size == config.hidden_size
    assert model.model.layers[1].self_attn.config is config
    journal.roll_back()
    assert attention.config is config


def test_a_config_view_survives_copies_and_pickling_and_passes_writes_on():
    config = LlamaConfig(num_attention_heads=4)
    view = ConfigView(config, {"num_attention_heads": 2})
    for copied in (copy.deepcopy(view), pickle.loads(pickle.dumps(view))):
        assert isinstance(copied, ConfigView)
        assert (copied.num_attention_heads, copied.hidden_size) == (2, config.hidden_size)
    view._attn_implementation = "eager"
    assert config._attn_implementation == "eager"
    with pytest.raises(AttributeError):
        view.nothing_of_that_name  # noqa: B018


def test_a_projection_in_the_layer_itself_is_a_boundary_and_the_layer_is_not():
    plan = build_plan(tiny_model("opt"), {"tp": 2}, sequence_parallel=False)
    templates = {c.fqn.removeprefix("model.decoder.layers.0."): c.template for c in plan.boundaries}
    assert (templates["fc1"], templates["fc2"]) == ("colwise", "rowwise")
    assert "model.decoder.layers.0" not in {c.fqn for c in plan.boundaries if c.template != "stack"}


def test_a_block_that_goes_on_after_its_last_projection_sees_whole_sums():
    plan = build_plan(tiny_model("gpt2"), {"tp": 2})
    contracts = {c.fqn: c for c in plan.boundaries}
    assert contracts["transformer.h.0.attn.c_proj"].out_dst["output"] == {"tp": Shard(1)}
    assert contracts["transformer.h.0.attn"].out_src["output"] == {"tp": Shard(1)}
    assert contracts["transformer.h.0.attn"].divide["c_attn.nf"] == 2


def test_a_layer_that_owns_parameters_is_whole_without_sequence_parallel_and_refused_with_it():
    model = tiny_model("dory")
    plan = build_plan(model, {"tp": 2}, sequence_parallel=False)
    layer = next(c for c in plan.boundaries if c.fqn == "model.layers.0")
    assert (layer.template, set(layer.params)) == ("replicated", {"lambda_1", "lambda_2"})
    with pytest.raises(Refused, match="sequence_parallel=False"):
        build_plan(model, {"tp": 2})


def test_parameters_that_every_rank_uses_on_its_own_heads_have_partial_gradients():
    plan = build_plan(tiny_model("apertus"), {"tp": 2})
    contracts = {c.fqn: c for c in plan.boundaries}
    assert "partial" in str(contracts["model.layers.0.mlp"].to_data()["param_grad"]["act_fn.alpha_p"])
    latent = next(c for c in build_plan(tiny_model("youtu"), {"tp": 2}).boundaries if c.template == "attention")
    assert "partial" in str(latent.to_data()["param_grad"]["kv_a_proj_with_mqa.weight"])
    assert latent.params["kv_a_proj_with_mqa.weight"].get("tp", Replicate()) == Replicate()


def test_the_adapters_say_which_kinds_of_attention_context_parallel_cannot_take_over():
    adapted = [family for family in dense.FAMILIES if family not in REFUSED]
    without = {family.name for family in adapted if "cp" not in family.suggestions}
    assert without == {"openai-gpt", "gpt_neo", "bloom", "falcon", "mpt", "xglm", "ctrl"}
    assert all(isinstance(family, ModelFamily) for family in dense.FAMILIES)
