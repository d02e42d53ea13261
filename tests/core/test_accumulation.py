"""Gradients over micro-batches: summed once each, in one collective per axis and backward, whatever was there before."""

from collections import Counter

import pytest
import torch
from core_tools import collectives, counted, error_of, gradients, planned, share, step, worst
from torch.distributed.tensor import Partial

from hyperpar_core.apply import gradient_sums
from hyperpar_core.errors import ApplyError
from hyperpar_core.testing import pool, replica_differences, tiny_batch

MESHES = {"tp2": {"tp": 2}, "dp2": {"dp": 2}, "dp2 x tp2": {"dp": 2, "tp": 2}}
AXES = {"tp2": 1, "dp2": 1, "dp2 x tp2": 2}


def ranks_of(mesh):
    size = 1
    for degree in MESHES[mesh].values():
        size *= degree
    return pool(size)


def one_step(degrees, unsynced):
    applied, single, _ = planned("qwen3", seq=7, **degrees)
    rows = 2 * degrees.get("dp", 1)
    batches = [tiny_batch(single, batch=rows, seq=7, seed=seed) for seed in range(3)]
    size, rank = applied.data_parallel_size, applied.data_parallel_rank
    shares = applied.shard_batch([{n: v.chunk(size)[rank] for n, v in b.items()} for b in batches])
    for batch in batches:
        step(single, batch, num_items_in_batch=3 * rows * 6)
    seen, partial = [], []
    for number, micro in enumerate(shares):
        loss = applied.model(**micro, use_cache=False).loss
        counts = Counter()
        if number in unsynced:
            with applied.no_sync(), collectives(counts):
                loss.backward()
        else:
            with collectives(counts):
                loss.backward()
        seen.append(counts)
        labels = [any(isinstance(p, Partial) for p in g.placements) for g in gradients(applied.model).values()]
        partial.append(any(labels))
    return seen, partial, error_of(applied, single), replica_differences(applied.model)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("unsynced", [(), (0, 1), (1,), (0,)], ids=["synced", "no_sync", "mixed", "first"])
def test_micro_batches_add_up_to_one_process_and_each_axis_sums_once_per_synced_backward(mesh, unsynced):
    for seen, partial, (error, name), differing in ranks_of(mesh).run(one_step, MESHES[mesh], unsynced):
        assert error < 1e-5, (error, name)
        assert differing == []
        assert partial == [number in unsynced for number in range(3)]
        base = min(unsynced, default=None)
        total = [sum(v for k, v in counts.items() if k != "elements") for counts in seen]
        synced = [total[n] for n in range(3) if n not in unsynced]
        assert len(set(synced)) == 1  # the second and third cost what the first does: none per parameter
        if base is not None:
            assert synced[0] - total[base] == AXES[mesh]


def left_over(degrees):
    """A backward that died, then zero_grad, then a whole step: nothing of the dead one is left."""
    applied, single, batch = planned("qwen3", seq=7, **degrees)
    mine = share(applied, batch)
    step(applied.model, mine)
    step(applied.model, mine)
    norm = applied.model.model.layers[0].input_layernorm
    dead = norm.weight.register_hook(lambda grad: 1 / 0)
    try:
        step(applied.model, mine)
    except ZeroDivisionError:
        pass
    else:
        return "the backward didn't die"
    dead.remove()
    results = []
    for to_none in (True, False):
        applied.model.zero_grad(set_to_none=to_none)
        step(applied.model, mine)
        single.zero_grad()
        step(single, batch)
        results.append(error_of(applied, single))
    return results


@pytest.mark.parametrize("mesh", ["tp2", "dp2"])
def test_a_backward_that_died_leaves_nothing_behind_zero_grad(mesh):
    for results in ranks_of(mesh).run(left_over, MESHES[mesh]):
        assert max(results)[0] < 1e-5, results


def frozen_and_unused(degrees):
    """A frozen norm, and a parameter that only one rank's backward reaches."""
    applied, single, batch = planned("qwen3", seq=7, **degrees)
    for model in (applied.model, single):
        model.model.layers[0].input_layernorm.weight.requires_grad_(False)
    mine = share(applied, batch)
    for _ in range(2):
        step(applied.model, mine)
        step(single, batch)
    frozen = applied.model.model.layers[0].input_layernorm.weight.grad
    first = error_of(applied, single)
    # only the first rank of dp uses the final norm's weight this time
    applied.model.zero_grad(), single.zero_grad()
    used = applied.data_parallel_rank == 0
    weight = applied.model.model.norm.weight
    for repeat in range(2):
        other = applied.model.model.layers[0].post_attention_layernorm.weight
        local = weight.to_local(grad_placements=[Partial()]) if used or repeat else other.to_local(grad_placements=[Partial()])
        local.sum().backward()
    alone = weight.grad.full_tensor()
    return frozen, first, alone.tolist(), other.grad.full_tensor().tolist()


def test_frozen_parameters_stay_without_gradient_and_one_that_a_single_rank_reaches_is_the_same_on_all():
    for frozen, (error, name), alone, other in pool(2).run(frozen_and_unused, {"dp": 2}):
        assert frozen is None and error < 1e-5, name
        assert alone == [3.0] * len(alone)  # one rank in the first backward, both in the second
        assert other == [1.0] * len(other)


def asked_for(degrees):
    """torch.autograd.grad gives gradients and leaves .grad alone."""
    applied, single, batch = planned("qwen3", seq=7, **degrees)
    step(applied.model, share(applied, batch))
    step(single, batch)
    before = {n: g.clone() for n, g in applied.full_gradients().items()}
    loss = applied.model(**share(applied, batch), use_cache=False).loss
    names, parameters = zip(*applied.model.named_parameters(), strict=True)
    found = {n: g.full_tensor() for n, g in zip(names, torch.autograd.grad(loss, parameters), strict=True)}
    return worst(gradients(single), found), worst(before, applied.full_gradients())


@pytest.mark.parametrize("mesh", ["tp2", "dp2"])
def test_autograd_grad_gives_partial_gradients_that_gather_right_and_leaves_the_stored_ones(mesh):
    for (error, name), (change, _) in ranks_of(mesh).run(asked_for, MESHES[mesh]):
        assert error < 1e-5, name
        assert change == 0


def reentrant(wrapper):
    applied, _, batch = planned("qwen3", tp=2, seq=7)
    if wrapper:
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper

        layers = applied.model.model.layers
        for i, layer in enumerate(layers):
            layers[i] = checkpoint_wrapper(layer, CheckpointImpl.REENTRANT)
    else:
        applied.model.gradient_checkpointing_enable({"use_reentrant": True})
        applied.model.enable_input_require_grads()
    try:
        step(applied.model, share(applied, batch))
    except ApplyError as error:
        return str(error)
    return None


@pytest.mark.parametrize("wrapper", [False, True])
def test_reentrant_checkpointing_is_refused_with_the_way_out(wrapper):
    for text in pool(2).run(reentrant, wrapper):
        assert text is not None and "use_reentrant" in text


def small_buckets():
    """Collectives of a step with one bucket and with buckets of 256 bytes, and the gradients of the latter."""
    applied, single, batch = planned("qwen3", tp=2, seq=7, checks=None)
    mine, before = share(applied, batch), gradient_sums.BUCKET_BYTES
    one = counted(lambda: step(applied.model, mine))
    applied.model.zero_grad()
    gradient_sums.BUCKET_BYTES = 256
    try:
        several = counted(lambda: step(applied.model, mine))
    finally:
        gradient_sums.BUCKET_BYTES = before
    step(single, batch)
    return error_of(applied, single), several["all_reduce"] - one["all_reduce"]


def test_a_bucket_has_a_largest_size_and_larger_sums_take_several():
    for (error, name), more in pool(2).run(small_buckets):
        assert error < 1e-5, name
        assert more >= 2
