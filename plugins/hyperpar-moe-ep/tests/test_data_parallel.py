"""Who sums the gradients of experts: the core over edp, FSDP, or the caller together with the core."""

import copy

import pytest
import torch
import torch.distributed as dist

from hyperpar_core import apply_plan, build_plan, make_mesh, suggest_overrides
from hyperpar_core.testing import pool, tiny_batch, tiny_model


def planned(family, degrees, ep, data_parallel="core"):
    model = tiny_model(family)
    single = copy.deepcopy(model)
    mesh = make_mesh(**degrees)
    plan = build_plan(model, mesh, ep_size=ep, overrides=suggest_overrides(model, mesh, ep_size=ep))
    applied = apply_plan(model, plan, mesh, data_parallel=data_parallel)
    batch = tiny_batch(model, batch=2 * degrees.get("dp", 1), seq=16)
    rows = {k: v.chunk(applied.data_parallel_size)[applied.data_parallel_rank] for k, v in batch.items()}
    return applied, single, batch, applied.shard_batch(rows)


def compared(applied, single, batch):
    """(names of gradients that differ, {expert parameter: its gradient's multiple of the reference})."""
    ours = applied.full_gradients()
    single(**batch, use_cache=False).loss.backward()
    theirs = {name: p.grad for name, p in single.named_parameters()}
    floor = 1e-6 * max(g.abs().max() for g in theirs.values())
    differ = [n for n, g in theirs.items() if (ours[n] - g).abs().max() > max(1e-5 * g.abs().max(), floor)]
    ratios = {n: float((ours[n] * g).sum() / (g * g).sum()) for n, g in theirs.items() if ".experts." in n}
    return differ, ratios


def under_fsdp(family, degrees, ep):
    applied, single, batch, share = planned(family, degrees, ep)
    applied.fully_shard()
    applied.model(**share, use_cache=False).loss.backward()
    differ, ratios = compared(applied, single, batch)
    norm = float(applied.clip_grad_norm_(1.0))
    reference = float(torch.nn.utils.clip_grad_norm_(single.parameters(), 1.0))
    optimizer = torch.optim.AdamW(applied.model.parameters(), lr=1e-3)
    optimizer.step()
    return differ, ratios, norm, reference


@pytest.mark.parametrize(
    ("family", "degrees", "ep"),
    [("qwen3_moe", {"dp": 2}, 2), ("qwen3_moe", {"dp": 4}, 2), ("qwen3_moe", {"dp": 2, "tp": 2}, 4), ("qwen3_moe", {"dp": 2, "tp": 2}, 2),
     ("qwen3_moe", {"dp": 2, "cp": 2}, 2), ("qwen2_moe", {"dp": 2, "tp": 2}, 4), ("deepseek_v3", {"dp": 2, "tp": 2}, 2)],
    ids=str,
)  # fmt: skip
def test_under_fsdp_expert_gradients_are_the_reference_times_one(family, degrees, ep):
    ranks = pool(torch.tensor(list(degrees.values())).prod().item())
    for differ, ratios, norm, reference in ranks.run(under_fsdp, family, degrees, ep):
        assert not differ
        assert ratios and all(abs(ratio - 1) < 1e-5 for ratio in ratios.values()), ratios
        assert norm == pytest.approx(reference, rel=1e-5)


def summed_by_the_caller(family, degrees, ep):
    """The caller sums dense gradients over dp; of experts, what is left of edp: ranks of other dp slices that hold the same ones."""
    applied, single, batch, share = planned(family, degrees, ep, "external")
    applied.model(**share, use_cache=False).loss.backward()
    slice_ranks = applied.mesh.size() // applied.data_parallel_size
    over = applied.mesh["dp"].get_group() if ep < slice_ranks else applied.expert_mesh["edp"].get_group()
    for name, parameter in applied.model.named_parameters():
        local = getattr(parameter.grad, "_local_tensor", parameter.grad)
        group = over if ".experts." in name else applied.mesh["dp"].get_group()
        if dist.get_world_size(group) > 1:
            dist.all_reduce(local, group=group)
    return compared(applied, single, batch)


@pytest.mark.parametrize(
    ("degrees", "ep"), [({"dp": 2, "tp": 2}, 2), ({"dp": 2, "tp": 2}, 4), ({"dp": 4}, 2), ({"dp": 2, "cp": 2}, 2)], ids=str
)
def test_with_external_data_parallelism_the_core_sums_the_rest_of_edp(degrees, ep):
    for differ, ratios in pool(4).run(summed_by_the_caller, "qwen2_moe", degrees, ep):
        assert not differ
        assert all(abs(ratio - 1) < 1e-5 for ratio in ratios.values()), ratios


def accumulated(ep):
    applied, single, batch, _ = planned("mixtral", {"dp": 2}, ep)
    rows = {k: v.chunk(2)[applied.data_parallel_rank] for k, v in batch.items()}
    micro = [{k: v[i : i + 1] for k, v in rows.items()} for i in range(2)]
    for share in applied.shard_batch(micro):
        applied.model(**share, use_cache=False).loss.backward()
    return compared(applied, single, batch)


def test_micro_batches_accumulate_once():
    for differ, _ in pool(2).run(accumulated, 2):
        assert not differ




def zero_gradients(implementation):
    """What the experts' gradients are on each rank when all tokens go to experts 0 and 1: {name: None or its largest value}."""
    model = tiny_model("gpt_oss")
    model.set_experts_implementation(implementation)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("router.bias"):
                parameter.copy_(torch.tensor([90.0, 80.0, 0.0, 0.0]))
    mesh = make_mesh(dp=2)
    applied = apply_plan(model, build_plan(model, mesh, ep_size=2, overrides=suggest_overrides(model, mesh, ep_size=2)), mesh)
    batch = applied.shard_batch(tiny_batch(model, batch=1, seq=8))
    model(**batch, use_cache=False).loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters() if ".experts." in n}
    return {n: None if g is None else float(g.to_local().abs().max()) for n, g in grads.items()}


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
def test_a_rank_whose_experts_get_no_token_has_zero_gradients_not_missing_ones(implementation):
    busy, idle = pool(2).run(zero_gradients, implementation)
    assert all(value for value in busy.values()), busy
    assert all(value == 0.0 for value in idle.values()), idle
