"""Dropout on ranks: equal masks where tp ranks hold the same values, different ones everywhere else, and the same again from one seed."""

import copy
import random

import numpy
import pytest
import torch
from core_tools import gradients, planned, raised, share, small, step, worst
from torch import nn
from torch.overrides import TorchFunctionMode

from hyperpar_core import apply_plan, build_plan, make_mesh, set_seed
from hyperpar_core.apply.streams import declares_randomness
from hyperpar_core.testing import pool, replica_differences, tiny_batch

HALF = {"attn_pdrop": 0.5, "resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_implementation": "eager"}


class Masks(TorchFunctionMode):
    """What every dropout of a forward has dropped, in order."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.nn.functional.dropout and not torch.equal(out, args[0]):
            self.seen.append((out == 0) & (args[0] != 0))
        return out


def dropped(degrees, config, steps=1, seed=5):
    """(coordinates, masks of the first forward, losses of all steps, what differs between replicas) of a GPT-2."""
    applied, _, batch = planned("gpt2", config={**HALF, **config}, seq=8, **degrees)
    set_seed(seed, applied.mesh)
    optimizer = torch.optim.AdamW(applied.model.parameters(), lr=1e-2)
    mine, losses, masks = share(applied, batch), [], Masks()
    with masks:
        losses.append(step(applied.model, mine))
    for _ in range(steps - 1):
        optimizer.step()
        optimizer.zero_grad()
        losses.append(step(applied.model, mine))
    optimizer.step()
    at = {axis: applied.mesh[axis].get_local_rank() for axis in applied.mesh.mesh_dim_names}
    return at, masks.seen, [float(x) for x in losses], replica_differences(applied.model)


# A layer of GPT-2 drops: the embedding, attention weights, what attention adds, what the MLP adds.
PLACES = ("embedding", "attention weights", "attention's output", "the MLP's output")


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp2", "tp2+SP"])
def test_masks_are_equal_where_data_is_replicated_and_differ_where_it_is_cut(sequence_parallel):
    results = pool(4).run(dropped, {"dp": 2, "tp": 2, "sequence_parallel": sequence_parallel}, {}, 3)
    masks = {(at["dp"], at["tp"]): seen for at, seen, _, _ in results}
    assert {len(seen) for seen in masks.values()} == {len(PLACES)}
    cut = {"attention weights"} | ({"attention's output", "the MLP's output"} if sequence_parallel else set())
    for place, name in enumerate(PLACES):
        for dp in (0, 1):
            assert torch.equal(masks[dp, 0][place], masks[dp, 1][place]) is (name not in cut), name
            share = float(masks[dp, 0][place].float().mean())
            assert share > 0.1, name
        assert not torch.equal(masks[0, 0][place], masks[1, 0][place]), name
        assert not torch.equal(masks[0, 1][place], masks[1, 1][place]), name
    seen = masks[0, 0]
    assert not torch.equal(seen[2], seen[3])  # two places of one layer
    assert all(differing == [] for _, _, _, differing in results)


def test_masks_differ_over_cp():
    results = pool(2).run(dropped_over_cp)
    (first, same), (second, _) = results
    assert same and not torch.equal(first, second)


def dropped_over_cp():
    from hyperpar_core import suggest_overrides

    model = small("gpt2", embd_pdrop=0.5)
    mesh = make_mesh(cp=2)
    applied = apply_plan(model, build_plan(model, mesh, overrides=suggest_overrides(model, mesh)), mesh)
    set_seed(3, mesh)
    masks = Masks()
    with masks:
        step(model, applied.shard_batch(tiny_batch(model, seq=8)))
    return masks.seen[0], len(masks.seen) == 1


def test_a_rerun_from_the_same_seed_repeats_bitwise_and_another_seed_doesnt():
    options = {"dp": 2, "tp": 2}
    first, again, other = (pool(4).run(dropped, options, {}, 3, seed) for seed in (5, 5, 6))
    for (_, a, losses, _), (_, b, same, _), (_, c, differ, _) in zip(first, again, other, strict=True):
        assert losses == same and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
        assert losses != differ and not any(torch.equal(x, y) for x, y in zip(a, c, strict=True))
        assert len(set(losses)) == 3


def residual_only(degrees):
    """Gradients of a step in which only replicated values are dropped."""
    model = small("gpt2", resid_pdrop=0.5, embd_pdrop=0.5)
    mesh = make_mesh(**degrees)
    applied = apply_plan(model, build_plan(model, mesh, sequence_parallel=False), mesh)
    set_seed(1, mesh)
    step(model, applied.shard_batch(tiny_batch(model, seq=8)))
    return applied.full_gradients()


def test_where_only_replicated_values_are_dropped_two_and_four_ranks_compute_the_same():
    two, four = pool(2).run(residual_only, {"tp": 2})[0], pool(4).run(residual_only, {"tp": 4})[0]
    error, name = worst(two, four)
    assert error < 1e-5, name


def replayed(sequence_parallel, kind):
    """(the largest difference that checkpointing makes to a gradient, whether it computed again, whether what is drawn outside
    stays the same)."""
    found = []
    for checkpointing in (False, True):
        applied, _, batch = planned("gpt2", tp=2, sequence_parallel=sequence_parallel, config={**HALF, "num_hidden_layers": 2})
        set_seed(2, applied.mesh)
        recomputed = []
        block = applied.model.transformer.h[1].mlp
        block.register_forward_pre_hook(lambda *_, seen=recomputed: seen.append(torch._C._current_graph_task_id() != -1))
        if checkpointing and kind == "layer":
            applied.model.gradient_checkpointing_enable({"use_reentrant": False})
        elif checkpointing:
            from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

            for layer in applied.model.transformer.h:
                layer.attn, layer.mlp = checkpoint_wrapper(layer.attn), checkpoint_wrapper(layer.mlp)
        step(applied.model, share(applied, batch))
        found.append((applied.full_gradients(), any(recomputed), torch.rand(4)))
    (plain, _, before), (again, recomputed, after) = found
    return worst(plain, again)[0], recomputed, torch.equal(before, after)


@pytest.mark.parametrize("kind", ["layer", "block"])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp2", "tp2+SP"])
def test_activation_checkpointing_draws_the_same_masks_again(sequence_parallel, kind):
    for error, again, outside in pool(2).run(replayed, sequence_parallel, kind):
        assert error == 0.0 and again and outside


class Hidden(nn.Module):
    """An MLP that drops inside, between its projections; the rate is hard-coded, or an attribute."""

    def __init__(self, inner, declared):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = inner.gate_proj, inner.up_proj, inner.down_proj
        if declared:
            self.dropout = 0.5

    def forward(self, x):
        inner = self.gate_proj(x).sigmoid() * self.up_proj(x)
        out = self.down_proj(nn.functional.dropout(inner, 0.5, self.training))
        return nn.functional.dropout(out, 0.5, self.training)


def hidden(declared, dtype):
    model = small("llama")
    for layer in model.model.layers:
        layer.mlp = Hidden(layer.mlp, declared)
    mesh = make_mesh(tp=2)
    applied = apply_plan(model, build_plan(model, mesh), mesh)
    set_seed(4, mesh)
    mine, masks = applied.shard_batch(tiny_batch(model, seq=8)), Masks()
    with masks:
        error = raised(lambda: step(model, mine))
    return error, masks.seen, replica_differences(model)


def test_inside_a_region_what_is_between_projections_differs_and_a_dropped_sum_is_one():
    (error, first, differing), (_, second, _) = pool(2).run(hidden, True, None)
    assert error is None and differing == []
    assert not torch.equal(first[0], second[0])  # features that are cut
    assert torch.equal(first[1], second[1])  # summands: dropped alike, their sum is a dropped sum


def test_a_model_that_draws_without_declaring_a_rate_is_refused_at_its_first_training_forward():
    for (kind, text), _, _ in pool(2).run(hidden, False, None):
        assert kind == "ApplyError" and "dropout" in text and "float attribute" in text


def unequal_seeds():
    applied, _, batch = planned("gpt2", tp=2, config=HALF)
    torch.manual_seed(applied.mesh.get_local_rank())
    error = raised(lambda: step(applied.model, share(applied, batch)))
    applied.model.eval()
    fine = bool(applied.model(**share(applied, batch), use_cache=False).loss.isfinite())
    return error, fine


def test_tp_ranks_with_different_seeds_are_refused_in_training_on_every_rank():
    for (kind, text), fine in pool(2).run(unequal_seeds):
        assert kind == "ApplyError" and "set_seed" in text and fine


def apart_later():
    applied, _, batch = planned("gpt2", tp=2, config=HALF)
    set_seed(0, applied.mesh)
    mine = share(applied, batch)
    first = raised(lambda: step(applied.model, mine))
    torch.manual_seed(applied.mesh.get_local_rank())
    return first, raised(lambda: step(applied.model, mine))


def test_tp_ranks_that_are_seeded_apart_after_the_first_forward_are_refused_on_every_rank():
    for first, (kind, text) in pool(2).run(apart_later):
        assert first is None and kind == "ApplyError" and "set_seed" in text


def raised_rate():
    applied, _, batch = planned("gpt2", tp=2, config={"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0})
    mine = share(applied, batch)
    first = [raised(lambda: step(applied.model, mine)) for _ in range(2)]
    for module in applied.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.3
    return first, raised(lambda: step(applied.model, mine))


def test_a_dropout_that_is_raised_from_0_after_apply_is_refused_at_the_next_training_forward():
    for first, (kind, text) in pool(2).run(raised_rate):
        assert first == [None, None] and kind == "ApplyError" and "was raised since" in text


def unchanged(family, config):
    """Whether a forward leaves the caller's random numbers as one in one process would leave them alone."""
    applied, _, batch = planned(family, tp=2, config=config)
    applied.model.eval()
    torch.manual_seed(9)
    before = torch.rand(3)
    torch.manual_seed(9)
    applied.model(**share(applied, batch), use_cache=False)
    twin = copy.deepcopy(applied.model)
    return torch.equal(before, torch.rand(3)), gradients(twin).keys() == gradients(applied.model).keys()


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_evaluation_draws_nothing(family):
    for same, copied in pool(2).run(unchanged, family, HALF if family == "gpt2" else {}):
        assert same and copied


def layerdrop():
    model = small("llama")
    model.model.layerdrop = 0.5
    mesh = make_mesh(tp=2)
    refused = raised(lambda: apply_plan(model, build_plan(model, mesh), mesh))
    applied = apply_plan(model, build_plan(model, mesh, sequence_parallel=False), mesh)
    return refused, bool(step(model, applied.shard_batch(tiny_batch(model))).isfinite())


def test_layerdrop_is_refused_where_ranks_would_skip_other_layers():
    for (kind, text), fine in pool(2).run(layerdrop):
        assert "layerdrop" in text and fine, (kind, text)


def seeded(seed):
    mesh = make_mesh(dp=2, tp=2)
    set_seed(seed, mesh)
    return mesh["dp"].get_local_rank(), float(torch.rand(())), float(numpy.random.rand()), random.random()


def test_set_seed_seeds_python_numpy_and_torch_alike_within_a_slice_and_differently_over_dp():
    first, again = pool(4).run(seeded, 7), pool(4).run(seeded, 7)
    assert first == again
    by_slice = {dp: {rest for at, *rest in map(list, first) for rest in [tuple(rest)] if at == dp} for dp in (0, 1)}
    assert len(by_slice[0]) == len(by_slice[1]) == 1 and by_slice[0] != by_slice[1]


def test_a_rate_counts_where_it_is_above_zero_and_named_as_one():
    plain = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.0))
    assert not declares_randomness(plain)
    plain.hidden_dropout_prob = 0.0
    plain.dropped = 0.5  # no rate: a word that only begins like one
    assert not declares_randomness(plain)
    for name in ("dropout", "attention_dropout", "attn_pdrop", "hidden_dropout_prob", "router_jitter_noise", "drop_path_rate"):
        model = nn.Sequential(nn.Linear(2, 2))
        setattr(model, name, 0.1)
        assert declares_randomness(model), name
    assert declares_randomness(nn.Sequential(nn.Dropout(0.1)))
