"""Archetypes and the blocks that they accept."""

import inspect

import pytest
import torch
from hyperpar_moe_ep import archetypes, plugin
from torch import nn

from hyperpar_core import Override, apply_plan, build_plan, make_mesh, suggest_overrides
from hyperpar_core.collectives.functional import AxisGroup
from hyperpar_core.descriptors import CONTEXT_NAMES
from hyperpar_core.errors import HyperparError, OverrideError, Refused
from hyperpar_core.testing import Degrees, check_parity, pool, tiny_batch, tiny_model

FITS = {  # family: the archetypes that accept its block
    "mixtral": {"experts_dispatch", "topk_router", "mixtral_topk_router"},
    "qwen3_moe": {"experts_dispatch", "topk_router"},
    "olmoe": {"experts_dispatch", "topk_router"},
    "qwen2_moe": {"experts_dispatch", "qwen2moe_shared_expert_gate"},
    "deepseek_v3": {"experts_dispatch", "deepseekv3_sigmoid_group_shared"},
    "glm4_moe": {"experts_dispatch", "deepseekv3_sigmoid_group_shared"},
    "gpt_oss": {"experts_dispatch"},
    "afmoe": {"experts_dispatch"},
    "dbrx": {"experts_dispatch"},
    "llama4_text": {"llama4_scaled_inputs"},
    "jetmoe": {"jetmoe_sorted_rows"},
}
NAMES = list(plugin.OFFERED)


def outcomes(family):
    """{archetype: "equal", what differs, or the refusal} on this family's block, under dp2 x ep2."""
    found = {}
    for name in NAMES:
        model = tiny_model(family)
        suggested = suggest_overrides(model, {"dp": 2}, ep_size=2).entries
        overrides = [Override(entry.match, local_compute_fn=name) for entry in suggested]
        try:
            batch = tiny_batch(model, batch=2, seq=8)
            report = check_parity(model, batch, Degrees(dp=2, ep=2, options={"overrides": overrides}))
            found[name] = "equal" if report.ok else report.text()
        except HyperparError as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


@pytest.mark.parametrize("family", FITS)
def test_each_archetype_is_right_on_a_block_or_refuses_it(family):
    for found in pool(2).run(outcomes, family):
        assert {name for name, outcome in found.items() if outcome == "equal"} == FITS[family], found
        for outcome in found.values():
            if outcome != "equal":
                refused = outcome.startswith("Refused: ") and "doesn't fit" in outcome
                assert refused or (outcome.startswith("OverrideError: ") and "has no" in outcome), outcome


TWO = AxisGroup("ep", 2, 0)  # as much of a mesh as a check needs


def test_a_refusal_lists_the_blocks_real_children():
    block = tiny_model("qwen2_moe").model.layers[1].mlp
    with pytest.raises(Refused) as refused:
        archetypes.topk_router(module=block, ep_mesh=TWO, fqn="layers.1.mlp")
    text = str(refused.value)
    assert "layers.1.mlp: topk_router doesn't fit Qwen2MoeSparseMoeBlock" in text
    for child in ("gate (Qwen2MoeTopKRouter)", "experts (Qwen2MoeExperts)", "shared_expert (", "shared_expert_gate (Linear)"):
        assert child in text
    assert len(text.splitlines()) <= 8


def test_jitter_is_refused_by_archetypes_that_know_nothing_of_it():
    block = tiny_model("mixtral", router_jitter_noise=0.1).model.layers[0].mlp
    with pytest.raises(Refused, match=r"jitter_noise=0\.1"):
        archetypes.topk_router(module=block, ep_mesh=TWO, fqn="mlp")


def test_experts_in_a_list_are_refused_with_what_they_are():
    block = nn.Module()
    block.gate, block.experts = nn.Linear(4, 2), nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    with pytest.raises(Refused, match="ModuleList"):
        archetypes.experts_dispatch(module=block, ep_mesh=TWO, fqn="mlp")


def test_an_unknown_dispatcher_lists_the_known_ones():
    block = tiny_model("mixtral").model.layers[0].mlp
    with pytest.raises(OverrideError, match=r"no dispatcher 'ring'.*all_to_all"):
        archetypes.experts_dispatch(module=block, ep_mesh=TWO, fqn="mlp", dispatcher="ring")


class StackedExperts(nn.Module):
    def __init__(self, count, hidden):
        super().__init__()
        self.num_experts = count
        self.weight = nn.Parameter(torch.randn(count, hidden, hidden) * 0.1)

    def forward(self, hidden_states, indices, weights):
        out = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            token, slot = torch.where(indices == expert)
            out.index_add_(0, token, (hidden_states[token] @ self.weight[expert]).tanh() * weights[token, slot, None])
        return out


class LinearGateBlock(nn.Module):
    """A block whose gate is a linear layer: the block itself makes its logits into weights."""

    def __init__(self, hidden=64, count=4):
        super().__init__()
        self.gate = nn.Linear(hidden, count, bias=False)
        self.experts = StackedExperts(count, hidden)

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        weights, indices = self.gate(flat).softmax(-1).topk(2)
        return self.experts(flat, indices, weights).view_as(x)


def own_block(name, options):
    torch.manual_seed(0)
    model = tiny_model("mixtral")
    for layer in model.model.layers:
        layer.mlp = LinearGateBlock()
    overrides = [Override("*.mlp", local_compute_fn=name, options=options)]
    degrees = Degrees(dp=2, ep=2, options={"overrides": overrides})
    report = check_parity(model, tiny_batch(model, batch=2, seq=8), degrees)
    return report.ok, report.text()


@pytest.mark.parametrize("name", ["routed_only_softmax_topk", "experts_dispatch"])
def test_a_block_of_ones_own_with_a_linear_gate_is_dispatched(name):
    for ok, text in pool(2).run(own_block, name, {}):
        assert ok, text


def counting_dispatcher():
    """A dispatcher of one's own: it keeps the tokens, and sends what the built-in one sends."""
    from hyperpar_moe_ep.dispatch import AllToAll

    calls = []

    def build(group, local_experts):
        inner = AllToAll(group, local_experts)

        def dispatch(experts, x, indices, weights):
            calls.append(len(x))
            return inner(experts, x, indices, weights)

        return dispatch

    model = tiny_model("mixtral")
    mesh = make_mesh(dp=2)
    def archetype(*, module, ep_mesh, fqn):
        return archetypes.mixtral_topk_router(module=module, ep_mesh=ep_mesh, fqn=fqn, dispatcher=build)

    overrides = [Override("*.mlp", local_compute_fn=archetype, region_dispatch=False)]
    apply_plan(model, build_plan(model, mesh, ep_size=2, overrides=overrides), mesh)
    model(input_ids=torch.arange(3, 9)[None], use_cache=False)
    return calls


def test_a_dispatcher_of_ones_own_runs_once_for_each_block():
    assert pool(2).run(counting_dispatcher) == [[6, 6], [6, 6]]


def test_the_plugin_offers_each_archetype_with_its_options():
    offered = {d.name: d for d in plugin.hyperpar_local_compute_factories()}
    assert set(offered) == set(NAMES)
    for name, descriptor in offered.items():
        options = set(inspect.signature(descriptor.factory).parameters) - CONTEXT_NAMES
        own = {"experts_dispatch": {"experts", "dispatcher"}, "jetmoe_sorted_rows": set()}
        assert options == own.get(name, {"dispatcher"})
        assert descriptor.needs_axis == "ep" and descriptor.region_dispatch is False and descriptor.summary
