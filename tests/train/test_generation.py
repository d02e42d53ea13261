"""model.generate with a key/value cache on a planned model: the tokens of one process, and the same ones on all ranks of a slice."""

import copy

import pytest
import torch
from core_tools import raised, small

from hyperpar_core import apply_plan, build_plan, make_mesh, set_seed, suggest_overrides
from hyperpar_core.testing import pool, tiny_batch


def planned_for_generation(family, degrees, ep, **options):
    model = small(family, num_hidden_layers=2).eval()
    single, mesh = copy.deepcopy(model), make_mesh(**degrees)
    overrides = suggest_overrides(model, mesh, ep_size=ep)
    applied = apply_plan(model, build_plan(model, mesh, ep_size=ep, overrides=overrides, **options), mesh)
    return applied, single, tiny_batch(model, batch=2, seq=5)["input_ids"]


def generated(family, degrees, ep, padded, options):
    applied, single, ids = planned_for_generation(family, degrees, ep, **options)
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :2] = 0
    tokens = []
    for model in (applied.model, single):
        with torch.no_grad():
            out = model.generate(ids, attention_mask=mask, max_new_tokens=7, do_sample=False, pad_token_id=0, use_cache=True)
        tokens.append(out.tolist())
    return tokens[0] == tokens[1], len(tokens[0][0])


PLANS = {
    "llama, tp4": ("llama", {"tp": 4}, 1, {}),
    "llama, tp2, no SP": ("llama", {"tp": 2}, 1, {"sequence_parallel": False}),
    "qwen3_moe, tp2": ("qwen3_moe", {"tp": 2}, 1, {}),
    "qwen3_moe, tp2 x ep2": ("qwen3_moe", {"tp": 2}, 2, {}),
    "qwen3_moe, dp2 x tp2 x ep4": ("qwen3_moe", {"dp": 2, "tp": 2}, 4, {}),
    "olmoe, dp2 x ep2": ("olmoe", {"dp": 2}, 2, {}),
}


@pytest.mark.parametrize("padded", [False, True], ids=["whole rows", "padded"])
@pytest.mark.parametrize("plan", PLANS)
def test_greedy_generation_with_a_cache_gives_the_tokens_of_one_process(plan, padded):
    family, degrees, ep, options = PLANS[plan]
    ranks = pool(torch.tensor(list(degrees.values())).prod().item())
    for same, length in ranks.run(generated, family, degrees, ep, padded, options):
        assert same and length > 5


def uneven(degrees, ep, **options):
    """(this slice's tokens, those of one process) where the prompts, and where they end, differ over dp."""
    applied, single, _ = planned_for_generation("qwen3_moe", degrees, ep)
    slice_ = applied.data_parallel_rank
    ids = torch.arange(3, 6 + 3 * slice_).unsqueeze(0)
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0, "max_new_tokens": 3 + 4 * slice_, **options}
    refused = raised(lambda: applied.model.generate(ids, synced_gpus=False, **options))
    return refused, applied.model.generate(ids, **options).tolist(), single.generate(ids, **options).tolist()


@pytest.mark.parametrize(("degrees", "ep"), [({"dp": 2}, 2), ({"dp": 2, "tp": 2}, 4)], ids=str)
@pytest.mark.parametrize("cache", [True, False], ids=["cache", "no cache"])
def test_slices_that_share_experts_may_end_at_different_lengths(degrees, ep, cache):
    ranks = pool(torch.tensor(list(degrees.values())).prod().item())
    results = ranks.run(uneven, degrees, ep, use_cache=cache, timeout=60)
    assert len({len(ours[0]) for _, ours, _ in results}) == 2
    for (kind, text), ours, one in results:
        assert ours == one and kind == "ApplyError" and "synced_gpus" in text


def sampled(degrees, ep, seed):
    applied, _, ids = planned_for_generation("qwen3_moe", degrees, ep)
    set_seed(seed, applied.mesh)
    out = applied.model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, min_new_tokens=8, do_sample=True, pad_token_id=0
    )
    return applied.data_parallel_rank, out.tolist()


@pytest.mark.parametrize(("degrees", "ep"), [({"tp": 2}, 1), ({"dp": 2, "tp": 2}, 4)], ids=str)
def test_sampling_gives_all_ranks_of_a_slice_the_same_tokens_and_slices_their_own(degrees, ep):
    ranks = pool(torch.tensor(list(degrees.values())).prod().item())
    found = {}
    for dp, tokens in ranks.run(sampled, degrees, ep, 3):
        found.setdefault(dp, []).append(tokens)
    assert all(tokens == of_slice[0] for of_slice in found.values() for tokens in of_slice)
    assert len({str(of_slice[0]) for of_slice in found.values()}) == len(found)
    assert ranks.run(sampled, degrees, ep, 4)[0][1] != found[0][0]


def sampled_apart():
    applied, _, ids = planned_for_generation("llama", {"tp": 2}, 1)
    torch.manual_seed(applied.mesh.get_local_rank())
    mask = torch.ones_like(ids)
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": True, "pad_token_id": 0}
    return raised(lambda: applied.model.generate(ids, attention_mask=mask, temperature=5.0, **options))


def test_tp_ranks_that_sample_different_tokens_are_stopped_at_the_next_one():
    for kind, text in pool(2).run(sampled_apart, timeout=40):
        assert kind == "RankMismatch" and "different batches" in text


def over_cp():
    applied, _, ids = planned_for_generation("llama", {"cp": 2}, 1)
    return raised(lambda: applied.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=2))


def test_generation_under_context_parallel_is_refused():
    for kind, text in pool(2).run(over_cp):
        assert kind == "ApplyError" and ("generate()" in text or "wasn't cut for cp" in text)
