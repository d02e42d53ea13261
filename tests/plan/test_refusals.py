"""What is refused before anything changes: when a plan is made, and again for one that was edited by hand."""

from __future__ import annotations

import pytest
import torch
import yaml
from torch.distributed.tensor import Partial, Shard

from hyperpar_core import Override, Overrides, ShardingPlan, apply_plan, build_plan, make_mesh
from hyperpar_core.errors import HyperparError, OverrideError, PlanError, PluginError, Refused
from hyperpar_core.plan.refusals import refuse
from hyperpar_core.testing import tiny_model

ATTN = "model.layers.0.self_attn"
CP = {"match": "*.self_attn", "when": "cp", "inner_target": "self", "inner_wrapper": "demo_cp"}


def test_active_cp_without_a_wrapper_is_refused_with_an_entry_to_paste(meta, demo):
    with pytest.raises(PlanError) as caught:
        build_plan(meta("llama"), {"cp": 2})
    text = str(caught.value)
    assert text.startswith(
        "cp=2 is active, and attention boundary 'model.layers.{0-1}.self_attn' (2 in all) declares no"
    )
    assert "demo_cp" in text and "all keys and values on every rank" in text and "transformers 5" in text
    file = text[text.index("version: 1") :]
    entry = yaml.safe_load(file)["plan_overrides"][0]
    assert list(Overrides.from_yaml(file).entries) == [Override(**entry)] and "--write-overrides FILE" in text
    assert entry == {**CP, "inner_wrapper": entry["inner_wrapper"]}
    made = build_plan(meta("llama"), {"cp": 2}, overrides=[{**entry, "inner_wrapper": "demo_cp"}])
    assert (
        made.boundary(ATTN).inner_wrapper == "demo_cp"
        and made.providers["inner_wrapper demo_cp"] == "hyperpar-demo 1.0"
    )


def test_a_probe_doesnt_count_as_attention_over_cp_and_a_callable_does(meta, demo):
    probe = {**CP, "inner_wrapper": "demo_probe"}
    with pytest.raises(PlanError, match="declares no inner wrapper that works over cp"):
        build_plan(meta("llama"), {"cp": 2}, overrides=[probe])
    own = {**CP, "inner_wrapper": lambda *, target_module: print, "region_dispatch": False}
    assert build_plan(meta("llama"), {"cp": 2}, overrides=[Override(**own)])


def test_a_plan_for_cp_is_refused_where_only_some_layers_declare_a_wrapper(meta, demo):
    with pytest.raises(PlanError, match=r"layers\.1\.self_attn' \(1 in all\)"):
        build_plan(meta("llama"), {"cp": 2}, overrides=[{**CP, "match": ATTN}])


@pytest.mark.parametrize("norm", ["parametrizations.weight_norm", "parametrizations.spectral_norm", "weight_norm", "spectral_norm"])
@pytest.mark.parametrize("target", [f"{ATTN}.q_proj", f"{ATTN}.o_proj", "lm_head"])
def test_a_weight_that_is_computed_from_other_parameters_is_refused_over_tp_by_its_modules_name(norm, target, meta):
    model = tiny_model("llama")
    functions = torch.nn.utils.parametrizations if "." in norm else torch.nn.utils
    getattr(functions, norm.rpartition(".")[2])(model.get_submodule(target))
    with pytest.raises(Refused) as caught:
        build_plan(model, {"tp": 2})
    assert str(caught.value).startswith(f"{target}: its weight is computed") and "remove_parametrizations" in str(caught.value)


def made_by_hand(plan, change):
    """The plan's file, changed by `change(data, {fqn: boundary})`, read back."""
    data = plan.to_data()
    change(data, {b["fqn"]: b for b in data["boundaries"]})
    return ShardingPlan.from_yaml(yaml.safe_dump(data, sort_keys=False))


def set_(fqn, **fields):
    return lambda data, boundaries: boundaries[fqn].update(fields)


# {name: (change of the plan's file, error, what the message says)}: readable plans that can't be applied
HANDS = {
    "no such module": (lambda d, b: b["model.layers.0"].update(fqn="model.layers.9"), OverrideError, "no such module"),
    "an input that forward lacks": (
        set_("model.layers.0.mlp", in_src={"y": {}}, in_dst={"y": {}}, in_grad={}), OverrideError, "forward takes x",
    ),
    "a neighbour that disagrees": (
        set_("model.layers.0.mlp", in_src={"x": {}}), OverrideError, "nothing else in its layer yields",
    ),
    "an attribute that isn't there": (set_(ATTN, divide={"num_haeds": 2}), PlanError, "num_haeds"),
    "an attribute that doesn't divide": (set_(ATTN, divide={"head_dim": 3}), PlanError, "can't be split"),
    "a wrapper that isn't there": (
        set_(ATTN, inner_wrapper="demo_pc", inner_target="self", region_dispatch=False), PluginError, "demo_pc",
    ),
    "a wrapper without target": (
        set_(ATTN, inner_wrapper="demo_probe", region_dispatch=True), OverrideError, "without inner_target",
    ),
    "a target without wrapper": (set_(ATTN, inner_target="self"), OverrideError, "inner_target without inner_wrapper"),
    "a child without inner_out_src": (
        set_(ATTN, inner_wrapper="demo_probe", inner_target="q_proj", region_dispatch=True), OverrideError, "inner_out_src",
    ),
    "another region_dispatch": (
        set_(ATTN, inner_wrapper="demo_probe", inner_target="self", region_dispatch=False), OverrideError, "states true",
    ),
    "no region_dispatch": (
        set_(ATTN, inner_wrapper="demo_probe", inner_target="self"), OverrideError, "demo_probe states true",
    ),
    "region_dispatch without injection": (set_(ATTN, region_dispatch=True), OverrideError, "leave it out"),
    "options without injection": (set_(ATTN, options={"a": 1}), OverrideError, "would go to nothing"),
    "an unknown option": (set_("model.embed_tokens", options={"a": 1}), PluginError, "unknown option 'a'"),
    "a wrapper over an inactive axis": (
        set_(ATTN, inner_wrapper="demo_cp", inner_target="self", region_dispatch=False), OverrideError, "cp is 1",
    ),
    "a lowerer that isn't there": (set_(ATTN, lowerer="defualt"), PluginError, "Nearest: default"),
    "a handler that isn't there": (
        set_(ATTN, special_handlers={"q_proj.weight": "halvse"}), PluginError, "no special handler 'halvse'",
    ),
    "a loss that isn't there": (lambda d, b: d.update(loss={"name": "x"}), PluginError, "no loss 'x'"),
    "a loss on whole logits": (
        lambda d, b: (d.update(loss={"name": "demo_loss"}), b["lm_head"].update(out_src={"output": {}})),
        PlanError, "no output head of the plan yields sharded logits",
    ),
    "a wrapper taken away": (
        lambda d, b: d.update(sizes={"cp": 2, "tp": 2}), PlanError, "declares no inner wrapper that works over cp",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HANDS)
def test_a_plan_edited_by_hand_is_refused_again(name, meta, demo):
    change, error, says = HANDS[name]
    model = meta("llama")
    plan = made_by_hand(build_plan(model, {"tp": 2}), change)
    with pytest.raises(HyperparError) as caught:
        refuse(model, plan, None)
    assert isinstance(caught.value, error) and says in str(caught.value), (type(caught.value), caught.value)
    assert len(str(caught.value).splitlines()) <= 10


def test_a_right_plan_is_refused_nothing(meta, demo):
    model = meta("llama")
    refuse(model, build_plan(model, {"tp": 2}), None)
    refuse(model, build_plan(model, {"cp": 2, "tp": 2}, overrides=[CP]), None)


def test_apply_plan_refuses_what_build_plan_would_and_leaves_the_model_alone():
    model = tiny_model("llama")
    mesh = make_mesh()
    plan = made_by_hand(build_plan(model, mesh), set_("model.layers.0.mlp", region_dispatch=True))
    before = {name: p.clone() for name, p in model.named_parameters()}
    with pytest.raises(OverrideError, match="leave it out"):
        apply_plan(model, plan, mesh)
    assert all(torch.equal(before[n], p) and type(p) is torch.nn.Parameter for n, p in model.named_parameters())


def test_experts_over_ep_need_a_local_compute_and_get_an_entry_to_paste(meta, demo):
    with pytest.raises(PlanError) as caught:
        build_plan(meta("mixtral"), {"dp": 2}, ep_size=2)
    text = str(caught.value)
    assert "declare no local compute" in text and "suggest_overrides" in text
    (entry,) = Overrides.from_yaml(text[text.index("version: 1") :]).entries
    assert entry.local_compute_fn and entry.when == ("ep",)


def test_fused_neighbours_may_agree_on_another_layout_of_hidden_states(meta):
    whole = {"hidden_states": {"tp": "replicate"}}
    made = build_plan(
        meta("llama"),
        {"tp": 2},
        overrides=[
            {"match": "*.post_attention_layernorm", "out_dst": {"output": {"tp": "replicate"}}},
            {"match": "*.mlp", "in_src": {"x": {"tp": "replicate"}}},
        ],
    )
    assert made.boundary("model.layers.0.post_attention_layernorm").out_src == {"output": {"tp": Shard(1)}}
    assert made.boundary("model.layers.1.mlp").in_grad == {"x": {"tp": Partial()}}
    assert whole


def test_the_degrees_that_a_refusal_names_are_planned(meta):
    model = meta("llama", hidden_size=48, num_attention_heads=6, num_key_value_heads=2, head_dim=8, intermediate_size=48)
    with pytest.raises(Refused) as caught:
        build_plan(model, {"tp": 4})
    named = str(caught.value).partition("Degrees of tp that work here: ")[2].partition(";")[0]
    assert named == "2, 6"
    for degree in named.split(", "):
        assert build_plan(model, {"tp": int(degree)})
