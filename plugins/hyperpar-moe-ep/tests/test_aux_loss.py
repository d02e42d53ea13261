"""The auxiliary loss: exact within a dp slice, the mean over slices; value and gradients are those of one process."""

import pytest
import torch
from moe_tools import AUX, assert_equal

from hyperpar_core import apply_plan, build_plan, make_mesh, suggest_overrides
from hyperpar_core.testing import pool, tiny_batch, tiny_model


@pytest.mark.parametrize(
    ("degrees", "options"),
    [
        ({"tp": 2}, {}),
        ({"tp": 2}, {"sequence_parallel": False}),
        ({"tp": 2, "ep": 2}, {}),
        ({"tp": 2, "ep": 2}, {"sequence_parallel": False}),
        ({"dp": 2, "ep": 2}, {}),
        ({"cp": 2}, {}),
        ({"cp": 2, "ep": 2}, {}),
        ({"dp": 2, "tp": 2, "ep": 4}, {}),
        ({"cp": 2, "tp": 2, "ep": 2}, {}),
        ({"dp": 2, "cp": 2, "ep": 4}, {}),
    ],
    ids=str,
)
def test_value_and_gradients_are_those_of_one_process(degrees, options):
    assert_equal("mixtral", degrees, AUX, seq=15, **options)


def aux_losses(mask, bias, coefficient):
    """{name: number} in parallel and in one process: of gpt_oss, whose router has a bias, under tp2 x ep2."""
    config = {**AUX, "router_aux_loss_coef": coefficient}
    found = []
    for parallel in (False, True):
        model = tiny_model("gpt_oss", **config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("router.bias"):
                    parameter.copy_(torch.tensor(bias))
        batch = tiny_batch(model, batch=2, seq=9)
        if mask:
            batch["attention_mask"] = torch.tensor([[1] * 9, [1] * 6 + [0] * 3])
        if parallel:
            mesh = make_mesh(tp=2)
            overrides = suggest_overrides(model, mesh, ep_size=2)
            applied = apply_plan(model, build_plan(model, mesh, ep_size=2, overrides=overrides), mesh)
            batch = applied.shard_batch(batch)
        out = model(**batch, use_cache=False)
        found.append((out.aux_loss.item(), out.loss.item(), [x.shape for x in out.router_logits]))
        assert coefficient == model.router_aux_loss_coef
    return found


@pytest.mark.parametrize("mask", [False, True])
def test_balanced_and_collapsed_routing_differ_as_in_one_process(mask):
    balanced, collapsed = (
        pool(2).run(aux_losses, mask, bias, 0.1)[1] for bias in ([0.0] * 4, [90.0, 80.0, 0.0, 0.0])
    )
    for single, parallel in (balanced, collapsed):
        assert parallel[2] == single[2]
        assert parallel[0] == pytest.approx(single[0], rel=1e-5)
        assert parallel[1] == pytest.approx(single[1], rel=1e-5)
    assert collapsed[1][0] > 1.5 * balanced[1][0]


def wrong_without_gathering(gathers):
    """The relative error of the router's gradient, with or without what makes router logits whole."""
    from hyperpar_core.apply.router_logits import RouterLogits
    from hyperpar_core.testing import record_parallel, record_reference

    whole = RouterLogits._whole
    if not gathers:
        RouterLogits._whole = lambda self, logits, hidden: logits
    try:
        model, single = (tiny_model("mixtral", **{**AUX, "router_aux_loss_coef": 10.0}) for _ in range(2))
        batch, mesh = tiny_batch(model, seq=16), make_mesh(tp=2)
        plan = build_plan(model, mesh, ep_size=2, overrides=suggest_overrides(model, mesh, ep_size=2))
        record = record_parallel(apply_plan(model, plan, mesh), batch)
        reference = record_reference(single, batch)
    finally:
        RouterLogits._whole = whole
    name = "model.layers.0.mlp.gate.weight"
    return float((record.gradients[name] - reference.gradients[name]).norm() / reference.gradients[name].norm())


def test_without_the_gathered_logits_the_comparison_fails():
    assert pool(2).run(wrong_without_gathering, True)[0] < 1e-5
    assert pool(2).run(wrong_without_gathering, False)[0] > 1e-2
