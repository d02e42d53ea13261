"""Input that can't work: one clear error, before anything changes where it can be known then."""

import pytest
import torch
from hyperpar_moe_ep import archetypes, plugin
from test_archetypes import TWO, LinearGateBlock, StackedExperts
from torch import nn

from hyperpar_core import Override, apply_plan, build_plan, make_mesh
from hyperpar_core.errors import ApplyError, HyperparError, PlanError, Refused
from hyperpar_core.testing import pool, tiny_model


@pytest.mark.parametrize("name", plugin.OFFERED)
def test_an_archetype_without_an_ep_mesh_says_so(name):
    block = tiny_model("mixtral").model.layers[0].mlp
    with pytest.raises(Refused, match=rf"mlp: {name} needs ep_mesh, and ep is 1 here"):
        getattr(archetypes, name)(module=block, ep_mesh=None, fqn="mlp")


def state(model):
    return {name: (id(p), type(m).__name__) for m in model.modules() for name, p in m._parameters.items()}


def refused_at_apply(name):
    """(the error of an apply with an archetype that doesn't fit, whether the model is as it was)."""
    model = tiny_model("qwen2_moe", mlp_only_layers=[])
    mesh = make_mesh(dp=2)
    plan = build_plan(model, mesh, ep_size=2, overrides=[Override("*.mlp", local_compute_fn=name)])
    before, keys = state(model), list(model.state_dict())
    try:
        apply_plan(model, plan, mesh)
    except HyperparError as error:
        return f"{type(error).__name__}: {error}", before == state(model) and keys == list(model.state_dict())


@pytest.mark.parametrize("name", ["topk_router", "mixtral_topk_router", "deepseekv3_sigmoid_group_shared", "expert_modules"])
def test_the_wrong_archetype_leaves_the_model_as_it_was(name):
    for error, same in pool(2).run(refused_at_apply, name):
        assert error.startswith("Refused: model.layers.0.mlp: ") and name in error and same
        assert len(error.splitlines()) <= 8


class WeightsForAll(LinearGateBlock):
    """Hands its experts a weight for every expert, and the numbers of two."""

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        scores = self.gate(flat).softmax(-1)
        return self.experts(flat, scores.topk(2).indices, scores).view_as(x)


class OneTokenShort(LinearGateBlock):
    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        weights, indices = self.gate(flat[1:]).softmax(-1).topk(2)
        return self.experts(flat, indices, weights).view_as(x)


class Scores(LinearGateBlock):
    """Hands its experts weights where they want numbers."""

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        weights, indices = self.gate(flat).softmax(-1).topk(2)
        return self.experts(flat, weights, indices).view_as(x)


def wrong_router(kind):
    torch.manual_seed(0)
    model = tiny_model("mixtral")
    for layer in model.model.layers:
        layer.mlp = kind()
    mesh = make_mesh(dp=2)
    overrides = [Override("*.mlp", local_compute_fn="routed_only_softmax_topk")]
    apply_plan(model, build_plan(model, mesh, ep_size=2, overrides=overrides), mesh)
    try:
        model(torch.arange(3, 9)[None])
    except ApplyError as error:
        return str(error)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (WeightsForAll, "indices [6, 2] and weights [6, 4]"),
        (OneTokenShort, "indices [5, 2] and weights [5, 2] for 6 tokens"),
        (Scores, "indices [6, 2] of float32"),
    ],
)
def test_a_router_whose_output_has_another_form_is_an_error_with_both_forms(kind, text):
    for error in pool(2).run(wrong_router, kind):
        assert error.startswith("model.layers.0.mlp.experts: ") and text in error and "needed: " in error


class Uneven(StackedExperts):
    """One more expert in one of two parameters."""

    def __init__(self, count, hidden):
        super().__init__(count, hidden)
        self.other = nn.Parameter(torch.zeros(count + 2, hidden))


def test_parameters_that_count_different_numbers_of_experts_are_refused():
    block = LinearGateBlock()
    block.experts = Uneven(4, 64)
    with pytest.raises(Refused, match=r"first dims \[4, 6\]"):
        archetypes.experts_dispatch(module=block, ep_mesh=TWO, fqn="mlp")


def test_a_local_compute_that_lets_nothing_travel_is_no_declaration_for_experts():
    model = tiny_model("llama4_text")  # its family declares one that works over no axis
    with pytest.raises(PlanError, match=r"llama4_scaled_inputs") as raised:
        build_plan(model, {"dp": 2}, ep_size=2)
    assert "declare no local compute" in str(raised.value)
