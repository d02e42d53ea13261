"""Low-rank adapters that are on a model before the plan are planned with it; their gradients are those of one process."""

import copy

import pytest
import torch
from core_tools import error_of, raised, share, small, step
from peft import LoraConfig, get_peft_model

from hyperpar_core import apply_plan, build_plan, make_mesh
from hyperpar_core.errors import Refused
from hyperpar_core.testing import pool, replica_differences, tiny_batch

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def with_adapters(family, targets=ALL, dropout=0.0, **options):
    """A model with adapters on `targets`, both of whose matrices are far from zero."""
    torch.manual_seed(0)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=targets, lora_dropout=dropout, task_type="CAUSAL_LM", **options)
    wrapped = get_peft_model(small(family, num_hidden_layers=2), config)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.2 * torch.randn_like(parameter))
    return wrapped.train()


def trained(family, degrees, inner, options, plan_options):
    wrapped = with_adapters(family, **options)
    single = copy.deepcopy(wrapped)
    model = wrapped.base_model.model if inner else wrapped
    mesh = make_mesh(**degrees)
    applied = apply_plan(model, build_plan(model, mesh, **plan_options), mesh)
    batch = tiny_batch(wrapped, batch=2 * degrees.get("dp", 1), seq=9)
    reference = single.base_model.model if inner else single
    step(wrapped, share(applied, batch))
    step(single, batch)
    error = error_of(applied, reference)
    with_gradient = [n for n, p in wrapped.named_parameters() if p.grad is not None]
    optimizer = torch.optim.AdamW([p for p in wrapped.parameters() if p.requires_grad], lr=1e-3)
    for _ in range(3):
        optimizer.step()
        optimizer.zero_grad()
        step(wrapped, share(applied, batch))
    return error, all("lora_" in n for n in with_gradient) and len(with_gradient), replica_differences(model)


OPTIONS = {"plain": {}, "a bias beside B": {"lora_bias": True}, "rank stabilised": {"use_rslora": True}}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("sp", [False, True], ids=["tp2", "tp2+SP"])
def test_adapters_on_every_projection_have_the_gradients_of_one_process(sp, options):
    results = pool(2).run(trained, "llama", {"tp": 2}, True, OPTIONS[options], {"sequence_parallel": sp})
    for (error, name), count, differing in results:
        assert error < 1e-5, name
        assert count >= 2 * 2 * len(ALL) and differing == []


@pytest.mark.parametrize("inner", [False, True], ids=["the wrapper", "the model in it"])
@pytest.mark.parametrize("degrees", [{"dp": 2}, {"dp": 2, "tp": 2}], ids=str)
def test_the_wrapper_and_the_model_in_it_can_be_planned(degrees, inner):
    ranks = pool(torch.tensor(list(degrees.values())).prod().item())
    for (error, name), _, differing in ranks.run(trained, "qwen3", degrees, inner, {}, {}):
        assert error < 1e-5 and differing == [], name


def test_key_value_heads_that_ranks_share_have_adapters_too():
    for (error, name), _, differing in pool(4).run(trained, "llama", {"tp": 4}, True, {}, {}):
        assert error < 1e-5 and differing == [], name


def late():
    model = small("llama")
    mesh = make_mesh(tp=2)
    apply_plan(model, build_plan(model, mesh), mesh)
    wrapped = raised(lambda: get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"])))
    return wrapped or raised(lambda: model(**tiny_batch(model), use_cache=False))


def test_adapters_that_are_put_on_after_the_plan_are_refused_at_the_first_forward():
    for kind, text in pool(2).run(late):
        assert kind == "ApplyError" and "lora_" in text and "before build_plan" in text


@pytest.mark.parametrize("options", [{"use_dora": True}, {"targets": ["lm_head"]}, {"targets": ["embed_tokens"]}], ids=str)
def test_adapters_without_a_rule_are_refused_by_name(options):
    with pytest.raises(Refused, match="lora_"):
        build_plan(with_adapters("llama", **options), {"tp": 2})


@pytest.mark.parametrize("kept", ["lm_head", "down_proj"])
@pytest.mark.parametrize("sizes", [{"tp": 2}, {"dp": 2}], ids=str)
def test_a_trained_copy_of_a_module_is_refused_by_its_name(kept, sizes):
    with pytest.raises(Refused, match=rf"{kept}: an adapter's trained copy .*modules_to_save"):
        build_plan(with_adapters("llama", ["q_proj"], modules_to_save=[kept]), sizes)
