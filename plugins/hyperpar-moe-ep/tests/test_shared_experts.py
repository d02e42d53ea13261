"""Shared experts: cut over tp inside a block whose tokens tp ranks share, whether it hands them sequences or rows."""

import copy
import re

import pytest
from moe_tools import assert_equal
from torch.distributed.tensor import Partial, Replicate, Shard

from hyperpar_core import Override, apply_plan, build_plan, check_plan, make_mesh, suggest_overrides
from hyperpar_core.errors import ApplyError, OverrideError
from hyperpar_core.testing import pool, tiny_batch, tiny_model

# {family: its shared expert}: behind a gate, on sequences, in a block that adds to it in place
SHARED = {
    "qwen2_moe": "model.layers.1.mlp.shared_expert",
    "deepseek_v3": "model.layers.1.mlp.shared_experts",
    "llama4_text": "model.layers.1.feed_forward.shared_expert",
}
families = pytest.mark.parametrize("family", SHARED)


def planned(family, sizes=None, ep=2, config=None, overrides=(), **options):
    model, sizes = tiny_model(family, **(config or {})), sizes or {"tp": 2}
    suggested = suggest_overrides(model, sizes, ep_size=ep)
    entries = [*getattr(suggested, "entries", suggested), *overrides]
    return model, build_plan(model, sizes, ep_size=ep, overrides=entries, **options)


# ---- the plan


@families
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_a_shared_expert_is_a_boundary_of_its_own_that_gathers_the_blocks_tokens(family, sequence_parallel):
    model, plan = planned(family, sequence_parallel=sequence_parallel)
    contract = plan.boundary(SHARED[family])
    (x,) = contract.in_src
    assert contract.template == "shared_expert"
    assert contract.params["gate_proj.weight"] == {"tp": Shard(0)} and contract.params["down_proj.weight"] == {"tp": Shard(1)}
    assert (contract.in_src[x], contract.in_dst[x], contract.in_grad[x]) == ({"tp": Shard(1)}, {}, {"tp": Partial()})
    assert (contract.out_src["output"], contract.out_dst["output"]) == ({"tp": Partial()}, {"tp": Shard(1)})
    block = plan.boundary(SHARED[family].rpartition(".")[0])
    assert not [name for name in block.params if "shared" in name and "shared_expert_gate" not in name]
    report = check_plan(plan, model)
    assert report.ok, report.text()


def test_without_tp_or_where_tp_cuts_the_whole_block_there_is_none():
    for sizes, ep in (({"dp": 2}, 2), ({"tp": 2}, 1)):
        _, plan = planned("qwen2_moe", sizes, ep)
        assert not [c for c in plan.boundaries if c.template == "shared_expert"]


def test_one_whose_features_tp_doesnt_divide_stays_whole():
    _, plan = planned("qwen2_moe", config={"shared_expert_intermediate_size": 31})
    block = plan.boundary("model.layers.1.mlp")
    assert block.params["shared_expert.gate_proj.weight"] == {}
    assert not [c for c in plan.boundaries if c.template == "shared_expert"]


def test_one_that_takes_more_than_tokens_stays_whole():
    """What else it takes may have a value for each token, and isn't gathered with them."""
    model = tiny_model("qwen2_moe")
    shared = model.get_submodule(SHARED["qwen2_moe"])

    class Scaled(type(shared)):
        def forward(self, x, gammas=None):
            return super().forward(x) if gammas is None else super().forward(x) * gammas

    shared.__class__ = Scaled
    plan = build_plan(model, {"tp": 2}, ep_size=2, overrides=suggest_overrides(model, {"tp": 2}, ep_size=2))
    assert plan.boundary("model.layers.1.mlp").params["shared_expert.up_proj.weight"] == {}
    assert not [c for c in plan.boundaries if c.template == "shared_expert"]


def test_a_rank_holds_its_part_of_it():
    whole = planned("deepseek_v3", {"dp": 2}, 2)[1].parameters[SHARED["deepseek_v3"] + ".up_proj.weight"]
    for shape in pool(2).run(held, "deepseek_v3"):
        assert shape == [whole[0] // 2, whole[1]]


def held(family):
    mesh = make_mesh(tp=2)
    model, plan = planned(family, mesh)
    apply_plan(model, plan, mesh)
    return list(model.get_parameter(SHARED[family] + ".up_proj.weight").to_local().shape)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"match": "*.mlp.shared_expert", "in_src": {"x": {"tp": Replicate()}}}, "in_src is replicate"),
        ({"match": "*.mlp.shared_expert", "out_dst": {"output": {"tp": Replicate()}}}, "out_dst is replicate"),
    ],
    ids=["in", "out"],
)
def test_one_that_takes_or_yields_other_tokens_than_its_block_has_is_an_error(entry, message):
    with pytest.raises(OverrideError, match=rf"model\.layers\.1\.mlp\.shared_expert: {message}.*shard\(1\) over tp"):
        planned("qwen2_moe", overrides=[Override(**entry)])


def test_so_is_a_block_that_hands_it_others():
    entry = Override(match="model.layers.1.mlp", in_dst={"hidden_states": {"tp": Replicate()}})
    with pytest.raises(OverrideError, match=re.escape("shared_expert: in_src is shard(1) over tp, and in model.layers.1.mlp")):
        planned("qwen2_moe", overrides=[entry])


# ---- the numbers


@families
@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sp", "no sp"])
@pytest.mark.parametrize("seq", [9, 3])
def test_uneven_sequences_compute_what_one_process_does(family, sequence_parallel, seq):
    """Two rows of 9 are 10 and 8 tokens on two ranks, not 9 and 9; of 3 tokens, four ranks have 1, 1, 1 and 0."""
    assert_equal(family, {"tp": 2 if seq == 9 else 4, "ep": 2}, seq=seq, sequence_parallel=sequence_parallel)


@pytest.mark.parametrize("family", ["qwen2_moe", "llama4_text"])  # deepseek_v3's own router knows float32 only
def test_float64_agrees_to_ten_digits(family):
    assert_equal(family, {"dp": 2, "tp": 2, "ep": 4}, seq=7, dtype="float64")


def test_with_the_sequence_cut_twice():
    assert_equal("qwen2_moe", {"cp": 2, "tp": 2, "ep": 4}, seq=14)


@families
def test_validate_mode_finds_every_placement_as_declared(family):
    assert_equal(family, {"tp": 2, "ep": 2}, seq=9, mode="validate")


def recomputed(family):
    """Largest difference of a gradient, where two forwards of other lengths are outstanding under checkpointing."""
    mesh = make_mesh(tp=2)
    model, plan = planned(family, mesh)
    single = copy.deepcopy(model)
    applied = apply_plan(model, plan, mesh, checks=None)
    model.gradient_checkpointing_enable()
    batches = [tiny_batch(single, batch=2, seq=seq, seed=seq) for seq in (9, 5)]
    for run, shares in ((model, [applied.shard_batch(b) for b in batches]), (single, batches)):
        losses = [run.train()(**b, use_cache=False).loss for b in shares]
        for loss in losses:
            loss.backward()
    wanted = {name: p.grad for name, p in single.named_parameters()}
    found = applied.full_gradients()
    return max(float((found[n] - g).abs().max() / g.abs().max()) for n, g in wanted.items() if g is not None and g.abs().max())


@families
def test_recomputing_with_another_forward_outstanding(family):
    assert max(pool(2).run(recomputed, family)) <= 1e-5


def called_with_part():
    """What a shared expert says that gets other rows than its block has."""
    mesh = make_mesh(tp=2)
    model, plan = planned("qwen2_moe", mesh)
    applied = apply_plan(model, plan, mesh)
    block = model.model.layers[1].mlp
    shared = block.shared_expert
    forward = type(shared).forward
    block.shared_expert.forward = lambda x: forward(shared, x[:-1])
    try:
        model(**applied.shard_batch(tiny_batch(model, batch=2, seq=8)))
    except ApplyError as error:
        return str(error)
    return ""


def test_other_rows_than_the_blocks_are_an_error():
    for text in pool(2).run(called_with_part):
        assert text == "model.layers.1.mlp.shared_expert: got 7 rows, and the block around it has 2 x 4 tokens on this rank."
