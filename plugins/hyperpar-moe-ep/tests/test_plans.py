"""Expert parallelism in plans: degrees, declarations, the expert mesh, saving."""

from fnmatch import fnmatchcase

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hyperpar_core import (
    Override,
    ShardingPlan,
    apply_plan,
    build_expert_mesh,
    build_plan,
    make_mesh,
    suggest_overrides,
)
from hyperpar_core.apply.expert_mesh import expert_groups
from hyperpar_core.errors import ApplyError, OverrideError, PlanError, Refused
from hyperpar_core.plan.experts import patterns_for
from hyperpar_core.testing import pool, tiny_model


def test_experts_that_ep_does_not_divide_are_refused_with_the_degrees_that_do():
    with pytest.raises(Refused, match=r"model\.layers\.0\.mlp\.experts\.gate_up_proj: 4 experts .* ep=3") as refused:
        build_plan(tiny_model("mixtral"), {"dp": 3}, ep_size=3)
    assert "2, 4" in str(refused.value)


def test_a_degree_that_does_not_divide_the_ranks_is_refused_with_those_that_do():
    with pytest.raises(Refused, match=r"ep_size=4.*which are 6") as refused:
        build_plan(tiny_model("mixtral"), {"dp": 3, "tp": 2}, ep_size=4)
    assert "1, 2, 3, 6" in str(refused.value)


@pytest.mark.parametrize("size", [0, -1, 2.0, True, "2"])
def test_a_degree_is_a_positive_whole_number(size):
    with pytest.raises(PlanError, match="ep_size"):
        build_plan(tiny_model("mixtral"), {"dp": 2}, ep_size=size)


def test_a_model_without_experts_is_refused():
    with pytest.raises(Refused, match="no boundary of this model holds experts"):
        build_plan(tiny_model("llama"), {"dp": 2}, ep_size=2)


def test_without_a_declaration_the_error_is_an_entry_to_paste():
    model = tiny_model("qwen3_moe", num_hidden_layers=3)  # the first layer is dense
    with pytest.raises(PlanError) as raised:
        build_plan(model, {"dp": 2}, ep_size=2)
    text = str(raised.value)
    assert "qwen3_moe suggests topk_router" in text and len(text.splitlines()) <= 8
    entry = text[text.index("version: 1") :]
    plan = build_plan(model, {"dp": 2}, ep_size=2, overrides=entry)
    assert [c.fqn for c in plan.boundaries if c.local_compute_fn == "topk_router"] == ["model.layers.1.mlp", "model.layers.2.mlp"]
    assert plan.digest() == build_plan(model, {"dp": 2}, ep_size=2, overrides=suggest_overrides(model, {"dp": 2}, ep_size=2)).digest()


@pytest.mark.parametrize(("ep", "why"), [(2, "boundary of kind mlp"), (1, "ep is 1")])
def test_an_archetype_where_no_experts_are_is_an_error(ep, why):
    match = "*.mlp" if ep > 1 else "model.layers.1.mlp"
    with pytest.raises(OverrideError, match=why):
        build_plan(tiny_model("qwen3_moe"), {"dp": 2}, ep_size=ep, overrides=[Override(match, local_compute_fn="topk_router")])


@settings(max_examples=60, deadline=None)
@given(st.sets(st.integers(0, 130), min_size=1), st.sets(st.integers(0, 130)))
def test_patterns_hit_exactly_the_blocks_of_experts(numbers, others):
    names = [f"model.layers.{i}.mlp" for i in sorted(numbers)]
    rest = [f"model.layers.{i}.mlp" for i in sorted(others - numbers)] + ["model.norm"]
    patterns = patterns_for(names, rest)
    for name in names:
        assert any(fnmatchcase(name, pattern) for pattern in patterns)
    for name in rest:
        assert not any(fnmatchcase(name, pattern) for pattern in patterns)


def test_a_plan_over_ep_survives_yaml_and_says_where_experts_lie():
    model = tiny_model("mixtral")
    sizes = {"dp": 2, "tp": 2}
    plan = build_plan(model, sizes, ep_size=4, overrides=suggest_overrides(model, sizes, ep_size=4))
    assert ShardingPlan.from_yaml(plan.to_yaml()) == plan
    block = plan.boundary("model.layers.0.mlp")
    assert block.to_data()["params"] == {
        "gate.weight": {}, "experts.gate_up_proj": {"ep": "shard(0)"}, "experts.down_proj": {"ep": "shard(0)"},
    }  # fmt: skip
    assert block.to_data()["param_grad"]["gate.weight"] == {"tp": "partial"}
    assert dict(block.divide) == {"experts.num_experts": 4}


def test_expert_groups_are_consecutive_ranks():
    assert expert_groups(8, 4) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(ApplyError, match="Degrees of ep that work here: 1, 2, 3, 6"):
        expert_groups(6, 4)


def meshes():
    mesh = make_mesh(dp=2, tp=2)
    made = {ep: build_expert_mesh(mesh, ep) for ep in (1, 2, 4)}
    assert all(build_expert_mesh(mesh, ep) is expert for ep, expert in made.items())
    return {ep: (expert.mesh_dim_names, expert.mesh.tolist()) for ep, expert in made.items()}


def test_the_expert_mesh_is_the_dense_one_flattened_and_made_once():
    for found in pool(4).run(meshes):
        assert found[1] == (("edp", "ep"), [[0], [1], [2], [3]])
        assert found[2] == (("edp", "ep"), [[0, 1], [2, 3]])
        assert found[4] == (("edp", "ep"), [[0, 1, 2, 3]])


def layouts_and_undo():
    model = tiny_model("mixtral")
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    mesh = make_mesh(dp=2, tp=2)
    plan = build_plan(model, mesh, ep_size=2, overrides=suggest_overrides(model, mesh, ep_size=2))
    applied = apply_plan(model, plan, mesh)
    experts = model.model.layers[0].mlp.experts
    placements, on = applied.source_layouts["model.layers.0.mlp.experts.down_proj"]
    facts = (
        experts.num_experts, tuple(experts.down_proj.to_local().shape), str(placements), on.mesh_dim_names,
        applied.expert_mesh.mesh.tolist(), experts.down_proj.device_mesh.mesh_dim_names,
    )  # fmt: skip
    whole = applied.full_parameters()
    same = all(torch.equal(whole[n], value) for n, value in before.items())
    applied.undo()
    back = {n: p.detach() for n, p in model.named_parameters()}
    restored = all(torch.equal(back[n], value) for n, value in before.items()) and list(back) == list(before)
    return facts, same, restored, experts.num_experts


def test_experts_live_on_the_expert_mesh_and_undo_brings_them_back():
    for facts, same, restored, count in pool(4).run(layouts_and_undo):
        assert facts == (2, (2, 64, 128), "(Shard(dim=0),)", ("ep",), [[0, 1], [2, 3]], ("edp", "ep"))
        assert same and restored and count == 4


def saved(folder):
    """(whether a saved folder has one tensor an expert, whether plain transformers loads the same weights)."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    model = tiny_model("mixtral")
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    mesh = make_mesh(dp=2)
    applied = apply_plan(model, build_plan(model, mesh, ep_size=2, overrides=suggest_overrides(model, mesh, ep_size=2)), mesh)
    applied.save_pretrained(folder)
    names = set(load_file(f"{folder}/model.safetensors"))
    loaded = AutoModelForCausalLM.from_pretrained(folder)  # per-expert tensors are stacked again
    again = dict(loaded.named_parameters())
    return sorted(n for n in names if ".experts." in n), all(torch.equal(again[n], value) for n, value in before.items())


def test_experts_are_saved_under_the_checkpoints_own_names(tmp_path):
    for names, same in pool(2).run(saved, str(tmp_path)):
        assert "model.layers.0.block_sparse_moe.experts.3.w2.weight" in names
        assert len(names) == 2 * 4 * 3
        assert same
