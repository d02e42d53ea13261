"""What a plan says it moves is what the process groups see."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hyperpar_core import apply_plan, build_plan, make_mesh
from hyperpar_core.testing import tiny_batch, tiny_model
from hyperpar_core.view.traffic import predict

NAMES = {
    "all_reduce": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}


class Counted(TorchDispatchMode):
    """Counts collectives and the bytes at their input; `paused`: what a loss sends by itself isn't the plan's."""

    def __init__(self):
        super().__init__()
        self.total, self.paused = {}, False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        space, _, name = func._schema.name.partition("::")
        if space in ("_c10d_functional", "c10d") and name not in ("wait_tensor",) and not self.paused:
            key = NAMES.get(name, name)
            count, size = self.total.get(key, (0, 0))
            self.total[key] = (count + 1, size + args[0].numel() * args[0].element_size())
        return func(*args, **(kwargs or {}))


def counted(family, degrees, seq, changes, options):
    """(predicted, counted) of one step on this rank."""
    model = tiny_model(family, **changes)
    mesh = make_mesh(**degrees)
    plan = build_plan(model, mesh, **options)
    applied = apply_plan(model, plan, mesh)
    batch = applied.shard_batch(tiny_batch(model, batch=2, seq=seq))
    counter = Counted()
    loss_function = copy.copy(model.loss_function)

    def quietly(*args, **kwargs):
        counter.paused = True
        try:
            return loss_function(*args, **kwargs)
        finally:
            counter.paused = False

    model.loss_function = quietly
    with counter:
        model(**batch).loss.backward()
    return predict(plan, 2, seq, bytes_per_element=4, dp=degrees.get("dp", 1)), counter.total


CASES = {
    "tp": ("llama", {"tp": 2}, 16, {}, {"sequence_parallel": False}),
    "sp": ("llama", {"tp": 2}, 16, {}, {}),
    "sp uneven": ("llama", {"tp": 2}, 15, {}, {}),
    "sp, uneven vocab": ("llama", {"tp": 2}, 16, {"vocab_size": 99}, {}),
    "loss parallel": ("llama", {"tp": 2}, 16, {}, {"loss_parallel": True}),
    "tied, q and k norms": ("qwen3", {"tp": 2}, 16, {"tie_word_embeddings": True}, {}),
    "row-wise biases": ("llama", {"tp": 2}, 16, {"attention_bias": True, "mlp_bias": True}, {}),
    "dp": ("llama", {"dp": 2}, 16, {}, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_step_makes_the_predicted_collectives_with_the_predicted_bytes_on_every_rank(ranks2, case):
    for predicted, seen in ranks2.run(counted, *CASES[case]):
        assert seen == predicted and seen


def test_dp_and_tp_together_make_the_predicted_collectives(ranks4):
    for predicted, seen in ranks4.run(counted, "qwen3", {"dp": 2, "tp": 2}, 16, {}, {}):
        assert seen == predicted and seen


def test_the_counter_sees_a_collective_that_no_plan_predicts(ranks2):
    for seen in ranks2.run(one_all_reduce):
        assert seen == {"all_reduce": (1, 12)}


def one_all_reduce():
    from hyperpar_core.collectives.functional import all_reduce

    mesh = make_mesh(tp=2)
    counter = Counted()
    with counter:
        all_reduce(torch.ones(3), mesh)
    return counter.total
