"""FSDP2's own options on a planned model: mixed precision, resharding, prefetching, float64, and nothing to shard over."""

import copy
from itertools import pairwise
from unittest import mock

import pytest
import torch
from core_tools import error_of, part, planned, raised, share, small, step, worst
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from hyperpar_core import apply_plan, build_plan, make_mesh, suggest_overrides
from hyperpar_core.testing import no_float32_casts, pool, replica_differences, tiny_batch
from hyperpar_core.train import data_parallel


def sharded(family, degrees, options, ep=1, prefetch=False):
    """A step under FSDP with some options: (error against one process, what differs between replicas after AdamW, placements)."""
    model = small(family, num_hidden_layers=3)
    single, mesh = copy.deepcopy(model), make_mesh(**degrees)
    overrides = suggest_overrides(model, mesh, ep_size=ep)
    applied = apply_plan(model, build_plan(model, mesh, ep_size=ep, overrides=overrides), mesh)
    applied.fully_shard(**options)
    layers = list(model.model.layers)
    if prefetch:
        for before, after in pairwise(layers):
            before.set_modules_to_forward_prefetch([after])
            after.set_modules_to_backward_prefetch([before])
    batch = tiny_batch(model, batch=2 * degrees.get("dp", 1), seq=16)
    mine, errors = applied.shard_batch(part(applied, batch)), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(2):
        optimizer.zero_grad()
        single.zero_grad()
        step(model, mine)
        step(single, batch)
        errors.append(error_of(applied, single))
        optimizer.step()
        with torch.no_grad():
            whole = applied.full_parameters()
            for name, parameter in single.named_parameters():
                parameter.copy_(whole[name])
    return max(errors), replica_differences(model), all(isinstance(p, DTensor) for p in model.parameters())


OPTIONS = {
    "reshard": {"reshard_after_forward": True},
    "keep": {"reshard_after_forward": False},
}


@pytest.mark.parametrize("prefetch", [False, True], ids=["", "prefetch"])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(
    ("family", "degrees", "ep"), [("qwen3", {"dp": 2, "tp": 2}, 1), ("qwen3_moe", {"dp": 4}, 2)], ids=["dense", "experts"]
)
def test_resharding_and_prefetching_change_no_gradient(family, degrees, ep, options, prefetch):
    for (error, name), differing, kinds in pool(4).run(sharded, family, degrees, OPTIONS[options], ep, prefetch):
        assert error < 1e-5, name
        assert differing == [] and kinds


def mixed(degrees, reduce_dtype):
    """Gradients under bfloat16 mixed precision, beside a bfloat16 model in one process; the dtypes of parameters and gradients."""
    model = small("qwen3")
    single, mesh = copy.deepcopy(model).bfloat16(), make_mesh(**degrees)
    applied = apply_plan(model, build_plan(model, mesh), mesh)
    applied.fully_shard(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype))
    batch = tiny_batch(model, batch=2 * degrees.get("dp", 1), seq=16)
    step(model, applied.shard_batch(part(applied, batch)))
    step(single, batch)
    ours = applied.full_gradients()
    dtypes = {str(p.dtype) for p in model.parameters()} | {str(g.dtype) for g in ours.values()}
    ratios = {n: float((ours[n] * p.grad.float()).sum() / p.grad.float().pow(2).sum()) for n, p in single.named_parameters()}
    return worst({n: p.grad.float() for n, p in single.named_parameters()}, ours), dtypes, ratios


@pytest.mark.parametrize("reduce_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("degrees", [{"dp": 2}, {"dp": 2, "tp": 2}], ids=str)
def test_bfloat16_mixed_precision_keeps_float32_parameters_and_gradients_of_the_right_size(degrees, reduce_dtype):
    ranks = pool(torch.tensor(list(degrees.values())).prod().item())
    for (error, name), dtypes, ratios in ranks.run(mixed, degrees, reduce_dtype):
        assert dtypes == {"torch.float32"}
        assert error < 0.1, name  # bfloat16 has 8 bits; a factor of 2 or 1/2 would be far outside
        assert all(0.9 < ratio < 1.1 for name, ratio in ratios.items() if "k_proj.bias" not in name), ratios


def double(degrees):
    applied, single, batch = planned("qwen3", dtype=torch.float64, seq=9, **degrees)
    applied.fully_shard()
    with no_float32_casts():
        applied.model(input_ids=part(applied, batch)["input_ids"], use_cache=False).logits.pow(2).sum().backward()
        single(input_ids=batch["input_ids"], use_cache=False).logits.pow(2).sum().backward()
    return error_of(applied, single)


@pytest.mark.parametrize("degrees", [{"dp": 2}, {"dp": 2, "tp": 2}], ids=str)
def test_float64_is_exact(degrees):
    ranks = pool(torch.tensor(list(degrees.values())).prod().item())
    for error, name in ranks.run(double, degrees):
        assert error < 1e-10, name


def routers_apart(family, degrees, ep, policy):
    """A model of float64 whose routers are float32: (error over two steps, the dtypes that they compute in, what differs)."""
    model = small(family, torch.float64, num_hidden_layers=2)
    odd = [name for name, p in model.named_parameters() if p.dtype is torch.float32]
    single, mesh = copy.deepcopy(model), make_mesh(**degrees)
    overrides = suggest_overrides(model, mesh, ep_size=ep)
    applied = apply_plan(model, build_plan(model, mesh, ep_size=ep, overrides=overrides), mesh)
    applied.fully_shard(**({"mp_policy": MixedPrecisionPolicy(param_dtype=torch.float64)} if policy else {}))
    seen = set()
    for name in odd:
        router = model.get_submodule(name.rpartition(".")[0])
        router.register_forward_pre_hook(lambda m, args: seen.update(p.dtype for p in m._parameters.values() if p is not None))
    batch = tiny_batch(model, batch=2 * degrees.get("dp", 1), seq=16)
    mine, errors = applied.shard_batch(part(applied, batch)), []
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-2) for m in (model, single)]
    for _ in range(2):
        for m, b, optimizer in zip((model, single), (mine, batch), optimizers, strict=True):
            optimizer.zero_grad()
            step(m, b)
        errors.append(error_of(applied, single))
        norms = [float(applied.clip_grad_norm_(1.0)), float(torch.nn.utils.clip_grad_norm_(single.parameters(), 1.0))]
        errors.append((abs(norms[0] / norms[1] - 1), "norm"))
        for optimizer in optimizers:
            optimizer.step()
    return max(errors), len(odd), seen, replica_differences(model)


@pytest.mark.parametrize("policy", [False, True], ids=["", "policy"])
@pytest.mark.parametrize(
    ("family", "degrees", "ep"),
    [("deepseek_v3", {"dp": 2, "tp": 2}, 2), ("hunyuan_v1_moe", {"dp": 2}, 2), ("ernie4_5_moe", {"dp": 2, "tp": 2}, 1)],
    ids=str,
)
def test_a_router_of_another_dtype_is_sharded_by_itself_and_computes_in_its_own(family, degrees, ep, policy):
    ranks = pool(torch.tensor(list(degrees.values())).prod().item())
    for (error, name), odd, seen, differing in ranks.run(routers_apart, family, degrees, ep, policy):
        assert odd and error < 1e-5, name  # the routers' own dtype
        assert seen == {torch.float32} and differing == []


def two_dtypes_in_a_module():
    model = small("olmo_hybrid", torch.bfloat16, num_hidden_layers=2)
    mesh = make_mesh(dp=2)
    applied = apply_plan(model, build_plan(model, mesh), mesh)
    before = [id(p) for p in model.parameters()]
    refused = raised(applied.fully_shard)
    untouched = before == [id(p) for p in model.parameters()]
    model.float()
    return refused, untouched


def test_a_module_that_holds_two_dtypes_is_refused_by_its_parameters_name():
    for (kind, text), untouched in pool(2).run(two_dtypes_in_a_module):
        assert kind == "ApplyError" and untouched
        assert "A_log is torch.float32, and its module holds torch.bfloat16 beside it" in text and "model.float()" in text


def refused(options):
    """(the error, the largest difference of a gradient afterwards) of a call with options that FSDP can't have."""
    applied, single, batch = planned("qwen3", dp=2)
    error = raised(lambda: applied.fully_shard(**options))
    step(applied.model, share(applied, batch))
    step(single, batch)
    return error, error_of(applied, single)


@pytest.mark.parametrize(
    ("options", "words"),
    [({"mesh": None}, "mesh follows from the plan"), ({"reshard": True}, "no option reshard (options: reshard_after_forward, ")],
    ids=str,
)
def test_a_refused_call_leaves_the_gradients_sums_on(options, words):
    for (kind, text), (error, name) in pool(2).run(refused, options):
        assert kind == "ApplyError" and words in text
        assert error < 1e-5, name


def experts_inside(around):
    """Experts that read the parameters of a module inside them, which isn't called: (error of a step, or what was raised)."""
    model = small("dbrx", num_hidden_layers=1)
    single, mesh = copy.deepcopy(model), make_mesh(dp=4)
    applied = apply_plan(model, build_plan(model, mesh, ep_size=2, overrides=suggest_overrides(model, mesh, ep_size=2)), mesh)
    if not around:  # as a caller might
        inside = model.transformer.blocks[0].ffn.experts.mlp
        with mock.patch.object(data_parallel, "_expert_modules", lambda model: [inside]):
            applied.fully_shard()
    else:
        applied.fully_shard()
    batch = tiny_batch(model, batch=4, seq=8)
    mine = applied.shard_batch(part(applied, batch))
    if not around:
        return raised(lambda: step(model, mine))
    step(model, mine)
    step(single, batch)
    return error_of(applied, single)


def test_fsdp_gathers_what_experts_read_of_modules_inside_them():
    for error, name in pool(4).run(experts_inside, True):
        assert error < 1e-5, name


def test_parameters_that_fsdp_holds_in_parts_are_never_read_as_if_they_were_whole():
    for kind, text in pool(4).run(experts_inside, False):
        assert kind == "ApplyError" and "transformer.blocks.0.ffn: its code reads" in text and "fully_shard the module" in text


def nothing_to_shard():
    applied, single, batch = planned("qwen3", tp=2)
    refused = raised(applied.fully_shard)
    step(applied.model, share(applied, batch))
    step(single, batch)
    return refused, error_of(applied, single)


def test_a_mesh_without_dp_has_nothing_to_shard_over_and_goes_on_without():
    for (kind, text), (error, name) in pool(2).run(nothing_to_shard):
        assert kind == "ApplyError" and "nothing to shard over" in text
        assert error < 1e-5, name


def owned(option):
    applied, _, _ = planned("qwen3", dp=2)
    return raised(lambda: applied.fully_shard(**{option: None})), raised(applied.fully_shard), raised(applied.fully_shard)


@pytest.mark.parametrize("option", ["mesh", "shard_placement_fn", "ignored_params"])
def test_options_that_follow_from_the_plan_are_refused_and_so_is_a_second_call(option):
    for (kind, text), first, (again, said) in pool(2).run(owned, option):
        assert kind == "ApplyError" and option in text
        assert first is None and again == "ApplyError" and "already" in said
