"""How much a step communicates, counted at the process group, and what runs inside a region."""

from collections import Counter

import pytest
import torch
from core_tools import DTensorOperators, collectives, planned, share, step
from torch.distributed.tensor import DTensor

from hyperpar_core import Override, original_forward
from hyperpar_core.testing import pool

HIDDEN, VOCAB = 64, 256


def cost(layers, batch, seq, steps, **options):
    """Collectives and elements of one step after a first."""
    applied, _, data = planned("llama", seq=seq, batch=batch, config={"num_hidden_layers": layers}, checks=None, **options)
    mine = share(applied, data)
    step(applied.model, mine)
    applied.model.zero_grad()
    seen = Counter()
    with collectives(seen):
        step(applied.model, mine)
    return seen


def per_layer(**options):
    """What one more layer costs."""
    one, two = cost(1, 2, 8, 1, **options), cost(2, 2, 8, 1, **options)
    return {name: two[name] - one[name] for name in two if two[name] != one[name]}, one, two


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"tp": 2, "sequence_parallel": False}, {"all_reduce": 4}),
        ({"tp": 2}, {"all_gather": 4, "reduce_scatter": 4}),
        ({"tp": 4, "sequence_parallel": False}, {"all_reduce": 4}),
        ({"tp": 4}, {"all_gather": 4, "reduce_scatter": 4}),
    ],
    ids=["tp2", "tp2+SP", "tp4", "tp4+SP"],
)
def test_a_layer_costs_four_collectives_a_step_and_eight_under_sequence_parallel(options, expected):
    ranks, rows, tokens = options["tp"], 2, 8
    block = rows * tokens * HIDDEN
    for seen, one, two in pool(ranks).run(per_layer, **options):
        elements = seen.pop("elements")
        assert seen == expected
        if "sequence_parallel" in options:  # four sums of whole hidden states
            assert elements == 4 * block
        else:  # gathers send a part, scatters the whole; two more norms and their marks travel in the bucket
            assert elements == 4 * block // ranks + 4 * block + 2 * HIDDEN + 2
        assert sum(one.values()) < sum(two.values())


def whole_step(**options):
    return cost(1, 2, 8, 1, **options)


@pytest.mark.parametrize(
    ("options", "sums"),
    [
        ({"tp": 2, "sequence_parallel": False}, 0),
        ({"tp": 2}, 1),
        ({"dp": 2}, 1),
        ({"dp": 2, "tp": 2, "sequence_parallel": False}, 1),
        ({"dp": 2, "tp": 2}, 2),
        ({"dp": 2, "tp": 2, "data_parallel": "external"}, 1),
    ],
    ids=str,
)
def test_beside_the_boundaries_a_backward_has_one_bucketed_sum_per_axis(options, sums):
    plain = {k: v for k, v in options.items() if k not in ("dp", "data_parallel")}
    ranks = options.get("dp", 1) * options.get("tp", 1)
    if "tp" in options:
        (alone, *_) = pool(2).run(whole_step, **plain)
        boundaries = alone["all_reduce"] - (1 if options.get("sequence_parallel", True) else 0)
    else:
        boundaries = 0
    for seen in pool(ranks).run(whole_step, **options):
        assert seen["all_reduce"] - boundaries == sums


def test_without_sequence_parallel_the_embedding_the_head_and_the_layers_are_all_that_communicates():
    for seen in pool(2).run(whole_step, tp=2, sequence_parallel=False):
        seen.pop("elements")
        # embedding's lookup; the head's logits gathered, its input's gradient summed; four of the layer
        assert seen == {"all_reduce": 1 + 1 + 4, "all_gather": 1}


def meddling(module, x):
    weight = module.up_proj._parameters["weight"]
    return original_forward(module, x) + 0 * weight.sum().full_tensor()


def make_meddling(*, module):
    return meddling


def operators(degrees, planted):
    """Operators on DTensors in a forward, and in the whole step."""
    overrides = [Override(match="*.mlp", local_compute_fn=make_meddling, region_dispatch=False)] if planted else []
    applied, _, batch = planned("qwen3", overrides=overrides, **degrees)
    mine = share(applied, batch)
    with DTensorOperators() as forward:
        loss = applied.model(**mine, use_cache=False).loss
    with DTensorOperators() as backward:
        loss.backward()
    return forward.seen, backward.seen


@pytest.mark.parametrize("degrees", [{"tp": 2}, {"tp": 2, "sequence_parallel": False}, {"dp": 2}], ids=str)
def test_no_operator_on_a_dtensor_runs_in_a_forward_and_none_but_autograds_detach_in_a_backward(degrees):
    for forward, backward in pool(2).run(operators, degrees, False):
        assert forward == [] and set(backward) <= {"aten.detach.default"}


def test_an_operator_on_a_dtensor_inside_a_region_is_seen():
    for forward, _ in pool(2).run(operators, {"tp": 2}, True):
        assert any("sum" in name for name in forward)


def counter_sees_dtensors_own():
    """DTensor's own collectives and plain ones are counted."""
    applied, _, _ = planned("llama", tp=2)
    weight = applied.model.lm_head.weight
    seen = Counter()
    with collectives(seen):
        weight.full_tensor()
        torch.distributed.all_reduce(torch.ones(3))
    return isinstance(weight, DTensor), seen


def test_the_counter_sees_what_dtensor_and_plain_calls_send():
    for is_dtensor, seen in pool(2).run(counter_sees_dtensors_own):
        assert is_dtensor and seen["all_gather"] == 1 and seen["all_reduce"] == 1
        assert seen["elements"] == VOCAB * HIDDEN // 2 + 3
