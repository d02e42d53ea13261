"""What is checked beside training: garbage becomes an error on every rank that names ranks, parameters or boundaries."""

import copy

import pytest
import torch
import torch.distributed as dist
from core_tools import error_of, part, planned, raised, share, small, step
from torch import nn
from torch.distributed.tensor import DTensor
from transformers.modeling_outputs import CausalLMOutput

from hyperpar_core import Checks, apply_plan, build_plan, make_mesh, suggest_overrides
from hyperpar_core.testing import pool, tiny_batch

# ---- inputs


def fed(odd, what, checks):
    """The error of each rank where rank `odd` is fed something else."""
    applied, _, batch = planned("llama", tp=4, seq=8, checks=checks, sequence_parallel=False)
    mine = share(applied, batch)
    if dist.get_rank() == odd:
        if what == "a token":
            mine["input_ids"] = mine["input_ids"].clone()
            mine["input_ids"][0, 3] += 1
        elif what == "two tokens exchanged":
            mine["input_ids"] = mine["input_ids"][:, [1, 0, *range(2, 8)]]
        elif what == "a label":
            mine["shift_labels"] = mine["shift_labels"].clone()
            mine["shift_labels"][1, 0] = -100
        elif what == "length":
            mine = {n: x[:, :-1] if x.ndim == 2 else x for n, x in mine.items()}
        else:
            mine = {"input_ids": mine["input_ids"]}
    return raised(lambda: applied.model(**mine, use_cache=False))


@pytest.mark.parametrize("what", ["a token", "two tokens exchanged", "a label", "length", "no labels"])
def test_tp_ranks_that_are_fed_different_batches_all_raise_and_name_the_odd_one(what):
    for kind, text in pool(4).run(fed, 2, what, Checks(), timeout=30):
        assert kind == "RankMismatch" and "on rank 2 differ from those on rank 0" in text
        assert ("shapes" if what in ("length", "no labels") else "values") in text


def test_the_check_of_inputs_can_be_turned_off():
    assert pool(4).run(fed, 2, "a token", None) == pool(4).run(fed, 2, "a token", Checks(inputs=0)) == [None] * 4


def fed_over_cp():
    model = small("llama")
    mesh = make_mesh(cp=2)
    applied = apply_plan(model, build_plan(model, mesh, overrides=suggest_overrides(model, mesh)), mesh)
    batch = tiny_batch(model, seq=8, seed=dist.get_rank())
    return raised(lambda: applied.shard_batch(batch))


def test_cp_ranks_that_bring_different_sequences_are_refused_as_they_are_cut():
    for kind, text in pool(2).run(fed_over_cp, timeout=30):
        assert kind == "RankMismatch" and "rank 1" in text


def test_how_often_to_check_is_a_whole_number():
    for bad in ({"inputs": -1}, {"replicas": 1.5}, {"replicas": True}, {"inputs": "always"}):
        kind, text = raised(lambda bad=bad: Checks(**bad))
        assert kind == "ApplyError" and next(iter(bad)) in text


# ---- replicas


def drifted(degrees, name, how):
    """A replica that one rank changed: the errors of an explicit check, and of the next forward that is due."""
    applied, _, batch = planned("qwen3", checks=Checks(replicas=2), **degrees)
    mine = share(applied, batch)
    first = raised(lambda: step(applied.model, mine))
    parameter = applied.model.get_parameter(name)
    local = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
    if dist.get_rank() == 1:
        with torch.no_grad():
            if how == "one bit":
                local.view(torch.int32).flatten()[-1] ^= 1
            else:
                local.flatten()[0] += 1
    explicit = raised(applied.check_replicas)
    not_due = raised(lambda: applied.model(**mine, use_cache=False))
    return first, explicit, not_due, raised(lambda: applied.model(**mine, use_cache=False))


@pytest.mark.parametrize(
    ("degrees", "name", "axis"),
    [
        ({"tp": 2}, "model.layers.0.self_attn.q_norm.weight", "tp"),
        ({"dp": 2, "tp": 2}, "model.norm.weight", "tp"),
        ({"dp": 2}, "model.layers.0.mlp.up_proj.weight", "dp"),
    ],
    ids=["tp2", "dp2 x tp2", "dp2"],
)
@pytest.mark.parametrize("how", ["one bit", "a value"])
def test_a_replica_that_drifted_is_named_on_the_ranks_that_hold_it_and_stops_every_rank(degrees, name, axis, how):
    ranks = pool(torch.tensor(list(degrees.values())).prod().item())
    results = ranks.run(drifted, degrees, name, how)
    for first, explicit, not_due, due in results:
        assert first is None and not_due is None
        for kind, text in (explicit, due):
            assert kind == "RankMismatch" and "drifted apart in 1 parameters" in text
    assert f"{name} over {axis}" in results[0][1][1] and f"{name} over" in results[1][1][1]


def trained(checks):
    applied, _, batch = planned("qwen3", dp=2, tp=2, checks=checks)
    optimizer = torch.optim.AdamW(applied.model.parameters(), lr=1e-2)
    mine = share(applied, batch)
    for _ in range(4):
        optimizer.zero_grad()
        step(applied.model, mine)
        optimizer.step()
    return raised(applied.check_replicas)


def test_replicas_of_a_model_that_trains_stay_equal():
    assert pool(4).run(trained, Checks(replicas=1)) == [None] * 4


# ---- parameters that were replaced


def replaced(name, how, shard=False):
    """(the next training forward, check_replicas) after a parameter was replaced by a plain one; what evaluation says."""
    applied, single, batch = planned("llama", dp=2, config={"num_hidden_layers": 2})
    if shard:
        applied.fully_shard()
    mine = share(applied, batch)
    first = raised(lambda: step(applied.model, mine))
    if how == "assign":
        applied.model.load_state_dict(single.state_dict(), assign=True)
    else:
        owner, _, leaf = name.rpartition(".")
        setattr(applied.model.get_submodule(owner), leaf, nn.Parameter(single.get_parameter(name).detach().clone()))
    return first, raised(lambda: step(applied.model, mine)), raised(applied.check_replicas)


@pytest.mark.parametrize("how", ["assign", "one"])
def test_a_planned_parameter_that_was_replaced_is_named_at_the_next_training_forward_and_fails_the_check_of_replicas(how):
    for first, (kind, text), check in pool(2).run(replaced, "model.norm.weight", how):
        assert first is None and kind == "ApplyError" and "replaced after apply_plan" in text and "load_full_state_dict" in text
        assert (how == "assign" or "model.norm.weight" in text) and check[0] == "RankMismatch" and "replaced" in check[1]


def test_under_fsdp_a_replaced_parameter_is_named_too_and_the_ones_that_fsdp_swaps_are_not():
    for first, (kind, text), check in pool(2).run(replaced, "model.layers.1.mlp.up_proj.weight", "one", True):
        assert first is None and kind == "ApplyError" and "model.layers.1.mlp.up_proj.weight" in text
        assert check[0] == "RankMismatch"


def converted(degrees):
    """Gradients after .double(), which swaps what is inside the parameters, beside one process."""
    applied, single, batch = planned("llama", **degrees)
    step(applied.model, share(applied, batch))
    applied.model.zero_grad()
    applied.model.double()
    step(applied.model, share(applied, batch))
    step(single.double(), batch)
    return error_of(applied, single), raised(applied.check_replicas)


@pytest.mark.parametrize("degrees", [{"dp": 2}, {"tp": 2}], ids=str)
def test_gradients_are_still_summed_after_a_conversion_of_the_model(degrees):
    for (error, name), check in pool(2).run(converted, degrees):
        assert error < 1e-5 and check is None, name


# ---- gradients


def overflowed(degrees, name, value):
    applied, _, batch = planned("llama", config={"num_hidden_layers": 2}, **degrees)
    step(applied.model, share(applied, batch))
    fine = raised(applied.check_gradients)
    grad = applied.model.get_parameter(name).grad
    if dist.get_rank() == dist.get_world_size() - 1:
        grad._local_tensor.flatten()[0] = value
    before = {n: p.grad._local_tensor.clone() for n, p in applied.model.named_parameters()}
    found = raised(applied.check_gradients), raised(lambda: applied.clip_grad_norm_(1.0, error_if_nonfinite=True))
    kept = all(torch.equal(p.grad._local_tensor, before[n]) or n == name for n, p in applied.model.named_parameters())
    return fine, found, kept


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("degrees", [{"tp": 2}, {"dp": 2}], ids=str)
def test_a_gradient_that_isnt_finite_on_one_rank_raises_on_all_and_names_the_boundary(degrees, value):
    name = "model.layers.1.mlp.up_proj.weight"
    for fine, found, kept in pool(2).run(overflowed, degrees, name, value):
        assert fine is None and kept
        for kind, text in found:
            assert kind == "ApplyError" and f"model.layers.1.mlp ({name})" in text


# ---- the loss


class OwnLoss(nn.Module):
    """A causal model whose forward computes a loss of its own: `how` says what it divides by."""

    def __init__(self, inner, how):
        super().__init__()
        self.inner, self.config, self.how = inner, inner.config, how

    def get_input_embeddings(self):
        return self.inner.get_input_embeddings()

    def get_output_embeddings(self):
        return self.inner.get_output_embeddings()

    def forward(self, input_ids, labels=None, shift_labels=None, position_ids=None, num_items_in_batch=None, **kwargs):
        logits = self.inner(input_ids=input_ids, position_ids=position_ids, use_cache=False).logits
        if labels is None:
            return CausalLMOutput(logits=logits)
        if shift_labels is None:
            shift_labels = nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
        total = nn.functional.cross_entropy(logits.flatten(0, 1), shift_labels.flatten(), reduction="sum")
        count = (shift_labels != -100).sum()
        if self.how == "tensor" and num_items_in_batch is not None:
            count = num_items_in_batch
        if self.how == "number" and num_items_in_batch is not None:
            count = int(num_items_in_batch)
        loss = total / count
        return (loss, logits) if kwargs.get("return_dict") is False else CausalLMOutput(loss=loss, logits=logits)


def own_loss(degrees, how, options):
    model = OwnLoss(small("llama"), how)
    single, batch = copy.deepcopy(model), tiny_batch(model, batch=2, seq=8)
    mesh = make_mesh(**degrees)
    applied = apply_plan(model, build_plan(model, mesh), mesh)
    mine = applied.shard_batch(part(applied, batch))
    out = []
    error = raised(lambda: out.append(model(**mine, **options)))
    if error:
        return error
    (out[0][0] if options else out[0].loss).backward()
    single(**batch).loss.backward()
    return error_of(applied, single)


@pytest.mark.parametrize("options", [{}, {"return_dict": False}], ids=["dict", "tuple"])
def test_a_loss_that_ignores_the_global_count_is_refused_at_the_first_forward(options):
    for kind, text in pool(2).run(own_loss, {"dp": 2}, "ignores", options):
        assert kind == "ApplyError" and "ignores num_items_in_batch" in text and "summed over dp" in text


@pytest.mark.parametrize("how", ["tensor", "number"])
def test_a_loss_that_divides_by_the_global_count_has_the_gradients_of_one_process(how):
    for error, name in pool(2).run(own_loss, {"dp": 2}, how, {}):
        assert error < 1e-5, name


def test_over_tp_alone_a_loss_of_ones_own_is_right_and_accepted():
    for error, name in pool(2).run(own_loss, {"tp": 2}, "ignores", {}):
        assert error < 1e-5, name
