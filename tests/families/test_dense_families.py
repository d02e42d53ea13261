"""Every dense family: sharded, saved, and equal to one process in loss, logits, gradients and weights. Each in one mode or two;
the whole grid is `make parity`."""

from functools import cache

import pytest
from family_tools import MODES, Job, ranks_of, run_jobs
from hyperpar_families import dense
from hyperpar_families.refused import REFUSED

from hyperpar_core.testing import families, pool

SP = ("tp2 SP", "float64 SP", "dp2 tp2 SP", "tp4 SP")
NO_SP = ("tp2", "float64", "tp4")
WITHOUT_SP = ("opt", "nanochat", "openai-gpt", "gemma4_text", "ctrl", "dory")
# Matrices inside the layers that stay whole: latents, routers and experts (which ep cuts), inputs of single layers.
LATENTS = ("self_attn.q_a_proj.weight", "self_attn.kv_a_proj_with_mqa.weight")
SHARED = tuple(f"mlp.shared_experts.{name}_proj.weight" for name in ("gate", "up", "down"))
EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight", *SHARED)
WHOLE = {
    "minicpm3": LATENTS,
    "youtu": LATENTS,
    "deepseek_v2": (*LATENTS, *EXPERTS),
    "deepseek_v3": (*LATENTS, *EXPERTS),
    "gemma4_text": (
        "per_layer_input_gate.weight", "per_layer_projection.weight", "router.proj.weight", "experts.gate_up_proj",
        "experts.down_proj",
    ),
}  # fmt: skip
KEYS_AND_VALUES = ("self_attn.k_proj.weight", "self_attn.v_proj.weight")  # whole where they are fewer heads than ranks
NOT_AT_TP4 = ("olmo2", "olmo3")  # a norm across two key heads
ADAPTED = [family.name for family in dense.FAMILIES if family not in REFUSED and family.name in families()]


def _jobs():
    jobs, modes, plain = {}, 0, 0
    for name in ADAPTED:
        if name in WITHOUT_SP:
            mode, plain = NO_SP[plain % 2], plain + 1
        else:
            # four ranks for every eighth family: they take their time on two cores
            mode, modes = (SP[2 + modes // 8 % 2] if modes % 8 == 7 else SP[modes % 2]), modes + 1
            if mode == "tp4 SP" and name in NOT_AT_TP4:
                mode = "tp2 SP"
        jobs[name] = Job(name, mode, saved=True)
    for family in REFUSED:
        if family.summary.startswith("data parallel only"):
            jobs[family.name] = Job(family.name, "dp2", saved=True)
    jobs["llama at tp4"] = Job("llama", "tp4")
    jobs["gpt2 at tp2"] = Job("gpt2", "tp2")
    return jobs


JOBS = _jobs()


@cache
def outcome_of(name):
    """Run once for all tests of this file, on a pool that they share."""
    job = JOBS[name]
    return pool(ranks_of(job.mode)).run(run_jobs, [job], timeout=100)[0][0]


@pytest.mark.parametrize("name", JOBS)
def test_a_dense_family_is_equal_to_one_process_and_a_saved_folder_is_bitwise_the_original(name):
    outcome = outcome_of(name)
    assert outcome.status == "equal", outcome.text


@pytest.mark.parametrize("name", [name for name, job in JOBS.items() if job.mode != "dp2"])
def test_tp_cuts_every_matrix_of_attention_and_mlp_but_those_that_are_named(name):
    job, outcome = JOBS[name], outcome_of(name)
    allowed = WHOLE.get(job.family, ())
    if job.mode.startswith("tp4"):
        allowed += KEYS_AND_VALUES
    assert set(outcome.whole) <= set(allowed)
    assert {"attention"} <= set(outcome.kinds)
    assert {"mlp", "rowwise", "moe_mlp"} & set(outcome.kinds)
    assert outcome.sharded > (0.85 if not allowed or allowed == KEYS_AND_VALUES else 0.6)


def test_the_jobs_cover_every_mode_and_at_least_34_families_and_32_under_sequence_parallel():
    assert {job.mode for job in JOBS.values()} == set(MODES)
    assert len(ADAPTED) >= 34
    assert len([job for job in JOBS.values() if job.mode.endswith("SP")]) >= 32
