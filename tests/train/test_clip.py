"""The norm of all gradients: one number, equal on all ranks, that of one process, whatever the meshes and the kind of norm."""

import copy

import pytest
import torch
from core_tools import counted, error_of, part, raised, small, step
from torch.distributed.tensor import DTensor

from hyperpar_core import apply_plan, build_plan, make_mesh, suggest_overrides
from hyperpar_core.testing import pool, tiny_batch
from hyperpar_core.train.clip import clip_grad_norm


def stepped(family, degrees, ep=1, fsdp=False, dtype=torch.float32):
    """A planned model and one process, each after a backward."""
    model = small(family, dtype, num_hidden_layers=2)
    single, mesh = copy.deepcopy(model), make_mesh(**degrees)
    overrides = suggest_overrides(model, mesh, ep_size=ep)
    applied = apply_plan(model, build_plan(model, mesh, ep_size=ep, overrides=overrides), mesh)
    if fsdp:
        applied.fully_shard()
    batch = tiny_batch(model, batch=2 * degrees.get("dp", 1), seq=16)
    step(model, applied.shard_batch(part(applied, batch)))
    step(single, batch)
    return applied, single


def clipped(family, degrees, ep, fsdp, kind, factor):
    applied, single = stepped(family, degrees, ep, fsdp)
    reference = torch.nn.utils.get_total_norm([p.grad for p in single.parameters()], kind)
    limit = float(reference) * factor
    theirs = torch.nn.utils.clip_grad_norm_(single.parameters(), limit, kind)
    ours = applied.clip_grad_norm_(limit, kind)
    again = applied.clip_grad_norm_(1e9, kind)
    return float(ours), float(theirs), float(again), error_of(applied, single)


MESHES = {
    "tp2": ("qwen3", {"tp": 2}, 1, False),
    "dp2 x tp2": ("qwen3", {"dp": 2, "tp": 2}, 1, False),
    "dp2 x tp2, FSDP": ("qwen3", {"dp": 2, "tp": 2}, 1, True),
    "dp2 x tp2 x ep2": ("qwen3_moe", {"dp": 2, "tp": 2}, 2, False),
    "dp2 x tp2 x ep4, FSDP": ("qwen3_moe", {"dp": 2, "tp": 2}, 4, True),
    "dp4 x ep2, FSDP": ("qwen3_moe", {"dp": 4}, 2, True),
}


@pytest.mark.parametrize("kind", [1.0, 2.0, float("inf")])
@pytest.mark.parametrize("mesh", MESHES)
def test_every_kind_of_norm_is_that_of_one_process_and_equal_on_all_ranks(mesh, kind):
    family, degrees, ep, fsdp = MESHES[mesh]
    ranks = pool(torch.tensor(list(degrees.values())).prod().item())
    results = ranks.run(clipped, family, degrees, ep, fsdp, kind, 0.5)
    assert len({ours for ours, *_ in results}) == 1
    for ours, theirs, again, (error, name) in results:
        assert ours == pytest.approx(theirs, rel=1e-5) and again == pytest.approx(0.5 * ours, rel=1e-4)
        assert error < 1e-5, name


def test_gradients_within_the_limit_stay_bitwise():
    for ours, _, again, _ in pool(2).run(clipped, "qwen3", {"tp": 2}, 1, False, 2.0, 2.0):
        assert ours == again


def few_messages():
    """(norm here, in one process, collectives) where a gradient, a gate's of one row, is on the first dp rank alone."""
    applied, single = stepped("qwen2_moe", {"dp": 2, "tp": 2}, 1, True, torch.float64)
    reference = float(torch.nn.utils.get_total_norm([p.grad for p in single.parameters()]))
    norms = []
    messages = counted(lambda: norms.append(float(applied.clip_grad_norm_(1.0))))
    return norms[0], reference, messages


def test_ranks_that_hold_nothing_of_a_gradient_sum_in_its_dtype_and_all_of_one_kind_go_together():
    for ours, theirs, messages in pool(4).run(few_messages):
        assert ours == pytest.approx(theirs, rel=1e-7)  # its router knows float32 alone
        assert messages == {"all_reduce": 3}  # what is cut over dp and tp: two; over dp alone: one


def ways(degrees):
    """Norms of a generator, a list, and of parameters some of which this rank alone has no gradient for."""
    applied, _ = stepped("qwen3_moe", degrees, 2)
    whole = float(clip_grad_norm((p for p in applied.model.parameters()), 1e9))
    listed = float(clip_grad_norm(list(applied.model.parameters()), 1e9))
    experts = [p for n, p in applied.model.named_parameters() if ".experts." in n]
    first = applied.expert_mesh["ep"].get_local_rank() == 0
    rest = [p.grad.full_tensor().chunk(2)[0].pow(2).sum() for p in experts]  # the part that is left: the first rank's experts
    dense = [p.grad.full_tensor().pow(2).sum() for n, p in applied.model.named_parameters() if ".experts." not in n]
    expected = float(torch.stack([*rest, *dense]).sum().sqrt())
    if not first:
        for parameter in experts:
            parameter.grad = None
    return whole, listed, float(applied.clip_grad_norm_(1e9)), expected


def test_a_generator_will_do_and_a_rank_without_expert_gradients_joins_in():
    results = pool(2).run(ways, {"dp": 2})
    for whole, listed, without, expected in results:
        assert whole == listed and without == pytest.approx(expected, rel=1e-6) and without < whole
    assert len({r[2] for r in results}) == 1


def odd_cases():
    applied, _ = stepped("qwen3", {"dp": 2})
    kinds = [raised(lambda kind=kind: applied.clip_grad_norm_(1.0, kind)) for kind in (0.0, -1.0, float("nan"))]
    for name, parameter in applied.model.named_parameters():
        if "mlp" in name:
            parameter.grad._local_tensor.mul_(float("inf") if "up_proj" in name else 1.0)
    norm = float(applied.clip_grad_norm_(1.0))
    applied.model.zero_grad()
    with applied.no_sync():
        step(applied.model, applied.shard_batch(tiny_batch(applied.model)))
    partial = raised(lambda: applied.clip_grad_norm_(1.0))
    applied.model.zero_grad()
    return kinds, norm, partial, float(applied.clip_grad_norm_(1.0)), isinstance(next(applied.model.parameters()), DTensor)


def test_odd_kinds_and_partial_gradients_are_refused_and_a_norm_that_isnt_finite_is_returned_as_it_is():
    for kinds, norm, partial, empty, _ in pool(2).run(odd_cases):
        assert all(kind == "ApplyError" and "norm_type" in text for kind, text in kinds)
        assert not norm < float("inf") and partial[0] == "ApplyError" and "no_sync" in partial[1] and empty == 0.0
