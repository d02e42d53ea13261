"""What a plan says it moves is what the process groups see."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hyperpar_core import LossSpec, Override, Overrides, apply_plan, build_plan, make_mesh, suggest_overrides
from hyperpar_core.testing import tiny_batch, tiny_model
from hyperpar_core.view.traffic import predict

NAMES = {
    "all_reduce": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}


class Counted(TorchDispatchMode):
    """Counts collectives and the bytes at their input."""

    def __init__(self):
        super().__init__()
        self.total = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        space, _, name = func._schema.name.partition("::")
        if space in ("_c10d_functional", "c10d") and name not in ("wait_tensor",):
            key = NAMES.get(name, name)
            count, size = self.total.get(key, (0, 0))
            self.total[key] = (count + 1, size + args[0].numel() * args[0].element_size())
        return func(*args, **(kwargs or {}))


def counted(family, degrees, seq, changes, options, wrapper=None, ep=1, dtype=torch.float32):
    """(predicted, counted) of one step on this rank."""
    model = tiny_model(family, **changes).to(dtype)
    mesh = make_mesh(**degrees)
    overrides = suggest_overrides(model, mesh, ep_size=ep)
    if wrapper is not None:
        name, wrapper_options = wrapper
        own = Override(match="*.self_attn", when="cp", inner_target="self", inner_wrapper=name, options=wrapper_options)
        overrides = Overrides((own, *(entry for entry in overrides.entries if entry.when != ("cp",))))
    plan = build_plan(model, mesh, overrides=overrides, ep_size=ep, **options)
    applied = apply_plan(model, plan, mesh, checks=None)
    batch = applied.shard_batch(tiny_batch(model, batch=2, seq=seq))
    with Counted() as counter:
        model(**batch, use_cache=False).loss.backward()
    width = torch.finfo(dtype).bits // 8
    return predict(plan, 2, seq, bytes_per_element=width, dp=degrees.get("dp", 1)), counter.total


CASES = {
    "tp": ("llama", {"tp": 2}, 16, {}, {"sequence_parallel": False}),
    "sp": ("llama", {"tp": 2}, 16, {}, {}),
    "sp uneven": ("llama", {"tp": 2}, 15, {}, {}),
    "sp, uneven vocab": ("llama", {"tp": 2}, 16, {"vocab_size": 99}, {}),
    "loss parallel": ("llama", {"tp": 2}, 16, {}, {"loss_parallel": True}),
    "loss parallel, smoothed": (
        "llama", {"tp": 2}, 16, {},
        {"loss_parallel": LossSpec("vocab_parallel_cross_entropy", {"label_smoothing": 0.1})},
    ),
    "tied, q and k norms": ("qwen3", {"tp": 2}, 16, {"tie_word_embeddings": True}, {}),
    "row-wise biases": ("llama", {"tp": 2}, 16, {"attention_bias": True, "mlp_bias": True}, {}),
    "dp": ("llama", {"dp": 2}, 16, {}, {}),
    "cp, gathered": ("llama", {"cp": 2}, 16, {}, {}, ("sdpa_hf", {})),
    "cp, ring": ("qwen3", {"cp": 2}, 16, {}, {}, ("sdpa_hf_ring", {})),
    "cp, ring, packed": ("phi3", {"cp": 2}, 16, {}, {}, ("sdpa_hf_ring", {})),
    "cp, ring, bfloat16": ("llama", {"cp": 2}, 16, {}, {}, ("sdpa_hf_ring", {}), 1, torch.bfloat16),
    "cp, Ulysses": ("llama", {"cp": 2}, 16, {}, {}, ("sdpa_hf_ulysses", {})),
    "cp, Ulysses, one key head": ("llama", {"cp": 2}, 16, {"num_key_value_heads": 1}, {}, ("sdpa_hf_ulysses", {})),
    # every token goes to all experts, so that the rows that travel don't depend on the routing
    "ep": ("qwen3_moe", {"dp": 2}, 16, {"num_experts_per_tok": 4}, {}, None, 2),
    "ep, sequence parallel": ("qwen3_moe", {"tp": 2}, 16, {"num_experts_per_tok": 4}, {}, None, 2),
    "ep over cp": ("qwen3_moe", {"cp": 2}, 16, {"num_experts_per_tok": 4}, {}, ("sdpa_hf_ring", {}), 2),
}
FOUR = {
    "dp and tp": ("qwen3", {"dp": 2, "tp": 2}, 16, {}, {}),
    "cp and tp, ring": ("llama", {"cp": 2, "tp": 2}, 16, {}, {}, ("sdpa_hf_ring", {})),
    "cp, ring of four": ("llama", {"cp": 4}, 16, {}, {}, ("sdpa_hf_ring", {})),
    "cp, hybrid": ("llama", {"cp": 4}, 16, {}, {}, ("sdpa_hf_hybrid", {"ulysses_degree": 2})),
    "ep, cp and tp": ("qwen3_moe", {"cp": 2, "tp": 2}, 16, {"num_experts_per_tok": 4}, {}, ("sdpa_hf_ring", {}), 4),
}


@pytest.mark.parametrize("case", CASES)
def test_a_step_makes_the_predicted_collectives_with_the_predicted_bytes_on_every_rank(ranks2, case):
    for predicted, seen in ranks2.run(counted, *CASES[case]):
        assert seen == predicted and seen


@pytest.mark.parametrize("case", FOUR)
def test_several_axes_together_make_the_predicted_collectives(ranks4, case):
    for predicted, seen in ranks4.run(counted, *FOUR[case]):
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
