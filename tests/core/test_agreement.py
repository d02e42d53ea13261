"""Ranks that are about to apply different things all say so, within seconds, before anything changes."""

import time

import pytest
import torch
import torch.distributed as dist
from core_tools import planned, raised, share, small, snapshot, step

from hyperpar_core import apply_plan, build_plan, make_mesh
from hyperpar_core.testing import pool, replica_differences, tiny_batch


def different(case, odd):
    """(error, seconds, untouched) on each rank of four, of which `odd` differs."""
    mesh = make_mesh(dp=2, tp=2)
    rank, model, options = dist.get_rank(), small("llama"), {}
    plan = build_plan(model, mesh, sequence_parallel=not (case == "plan" and rank == odd))
    if case == "weights" and rank == odd:
        with torch.no_grad():
            model.model.norm.weight[3] += 1e-6
            model.lm_head.weight[0, :2] = model.lm_head.weight[0, :2].flip(0)
    if case == "options" and rank == odd:
        options["weights"] = "trust"
    if case == "versions":
        import transformers

        kept = transformers.__version__
        if rank == odd:
            transformers.__version__ = "9.9.9"
    if case == "plugins" and rank == odd:
        from hyperpar_core.apply import preflight

        class Fewer:
            def __init__(self, registry):
                self.registry = registry

            def __getattr__(self, name):
                return getattr(self.registry, name)

            def digest_items(self):
                return [(p, d, "0.0.9") for p, d, _ in self.registry.digest_items()]

        original = preflight.get_registry
        preflight.get_registry = lambda: Fewer(original())
    before = snapshot(model)
    dist.barrier()
    if case == "late" and rank == odd:
        time.sleep(2)
    if case in ("late", "refusal") and rank == (1 if case == "late" else odd):
        model.model.norm.forward = lambda x: x
        before = snapshot(model)
    start = time.monotonic()
    try:
        error = raised(lambda: apply_plan(model, plan, mesh, **options))
    finally:
        seconds = time.monotonic() - start
        if case == "versions":
            transformers.__version__ = kept
        if case == "plugins" and rank == odd:
            preflight.get_registry = original
    return error, seconds, snapshot(model) == before


SAYS = {
    "plan": ("plan: ",),
    "weights": ("weights differ in 2", "lm_head.weight", "model.norm.weight"),
    "options": ("options differ in 1: weights: ",),
    "versions": ("versions differ in 1: transformers: ", "9.9.9"),
    "plugins": ("plugins differ in", "0.0.9"),
}


@pytest.mark.parametrize("odd", [0, 3])
@pytest.mark.parametrize("case", SAYS)
def test_a_rank_that_differs_stops_all_ranks_within_seconds_with_its_number_and_the_difference(case, odd):
    for error, seconds, untouched in pool(4).run(different, case, odd):
        assert error is not None and error[0] == "RankMismatch", error
        assert f"rank {odd}" in error[1] or f"and {odd} " in error[1] or f"ranks {odd} and" in error[1]
        assert all(text in error[1] for text in SAYS[case]), error[1]
        assert seconds < 5 and untouched


@pytest.mark.parametrize("case", ["refusal", "late"])
def test_a_rank_that_refuses_stops_the_others_at_once_though_one_comes_late(case):
    refusing = 3 if case == "refusal" else 1
    for rank, (error, seconds, untouched) in enumerate(pool(4).run(different, case, 3)):
        assert error is not None and error[0] == ("ApplyError" if rank == refusing else "RankMismatch"), error
        assert "model.norm: its forward was replaced" in error[1]
        if rank != refusing:
            assert f"rank {refusing} refused" in error[1]
        assert seconds < 1.9 and untouched  # nobody waited for the late one


def after_a_mismatch():
    """A refused apply leaves the ranks in step: the next one works."""
    mesh, model = make_mesh(tp=2), small("llama")
    plan = build_plan(model, mesh)
    for _ in range(2):
        odd = build_plan(model, mesh, sequence_parallel=dist.get_rank() == 0)
        assert raised(lambda odd=odd: apply_plan(model, odd, mesh))[0] == "RankMismatch"
    applied = apply_plan(model, plan, mesh)
    return bool(step(model, share(applied, tiny_batch(model, seq=6))).isfinite())


def test_after_a_mismatch_the_next_apply_works():
    assert pool(2).run(after_a_mismatch) == [True, True]


def weights(how, differ):
    """(error, replicas that differ, whether rank 0's values won) when the ranks' copies differ."""
    model, mesh = small("llama"), make_mesh(dp=2, tp=2)
    first = {n: p.detach().clone() for n, p in model.named_parameters()}
    if differ:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(dist.get_rank())
            for _, buffer in model.named_buffers():
                buffer.add_(dist.get_rank())
    buffers = [b.clone() for _, b in small("llama").named_buffers()]
    plan = build_plan(model, mesh)
    holder = []
    error = raised(lambda: holder.append(apply_plan(model, plan, mesh, weights=how)))
    if error:
        return error, None, None
    whole = holder[0].full_parameters()
    same = all(torch.equal(whole[n], first[n]) for n in first)
    same_buffers = all(torch.equal(a, b) for a, (_, b) in zip(buffers, model.named_buffers(), strict=True))
    return None, replica_differences(model), same and same_buffers


def test_weights_that_differ_are_refused_when_checked_taken_from_the_first_rank_when_broadcast_and_kept_when_trusted():
    for error, _, _ in pool(4).run(weights, "check", True):
        assert error[0] == "RankMismatch" and "weights differ" in error[1]
        assert "Seed all ranks alike" in error[1] and 'weights="broadcast"' in error[1]
    for error, differing, same in pool(4).run(weights, "broadcast", True):
        assert error is None and differing == [] and same
    for error, differing, _ in pool(4).run(weights, "trust", True):
        assert error is None and "model.norm.weight" in differing
    for error, differing, same in pool(4).run(weights, "check", False):
        assert error is None and differing == [] and same


def test_a_checksum_sees_order_sign_and_the_last_bytes():
    from hyperpar_core.apply.weights import checksum

    x = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))
    swapped = x.clone()
    swapped[0, 0], swapped[6, 4] = x[6, 4], x[0, 0]
    rows = x.flip(0)
    negative = x.clone()
    negative[3, 3] *= -1
    bits = x.view(torch.int32).clone()
    bits[2, 2] ^= 1
    odd = torch.arange(7, dtype=torch.uint8)
    other = odd.clone()
    other[6] = 9
    sums = [checksum(t) for t in (x, swapped, rows, negative, bits.view(torch.float32), odd, other)]
    assert len(set(sums)) == len(sums)
    assert checksum(x.clone()) == checksum(x) == checksum(x.t().contiguous().t())
    assert checksum(torch.empty(2, 3, device="meta")) != checksum(torch.empty(3, 2, device="meta"))


def one_process_alone():
    """A mesh of one rank agrees with itself; the plan of one rank has no axes."""
    applied, _, batch = planned("llama", tp=2)
    return step(applied.model, share(applied, batch)).isfinite().item()


def test_ranks_that_agree_go_on():
    assert pool(2).run(one_process_alone) == [True, True]
