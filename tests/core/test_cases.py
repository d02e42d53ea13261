"""Tensor and sequence parallelism against one process: loss, logits, every gradient, weights after SGD, replicas after AdamW."""

import copy
from contextlib import nullcontext

import pytest
import torch
from core_tools import BOUND, error_of, small, worst

from hyperpar_core import apply_plan, build_plan, make_mesh
from hyperpar_core.testing import Degrees, check_parity, no_float32_casts, pool, replica_differences, tiny_batch

TP2, SP2 = Degrees(tp=2, options={"sequence_parallel": False}), Degrees(tp=2)
TP4, SP4 = Degrees(tp=4, options={"sequence_parallel": False}), Degrees(tp=4)
DEGREES = {"tp2": TP2, "tp2+SP": SP2, "tp4": TP4, "tp4+SP": SP4}
DTYPES = [torch.float32, torch.float64]


def padded(batch, side):
    """The batch with 3 and 5 tokens of padding in its rows; labels there are ignored."""
    mask = torch.ones_like(batch["input_ids"])
    for row, missing in enumerate((3, 5)):
        mask[row, slice(0, missing) if side == "left" else slice(-missing, None)] = 0
    return {**batch, "labels": batch["labels"].masked_fill(mask == 0, -100), "attention_mask": mask}


def parity(family, degrees, dtype, config=None, seq=12, side=None, steps=0, bias=None):
    """The report's text where something differs, None where all is equal."""
    model = small(family, dtype, **(config or {}))
    batch = tiny_batch(model, seq=seq)
    if side:
        batch = padded(batch, side)
    if bias:  # so large that a bias which is added twice, or half, can't pass
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith(".bias"):
                    parameter.add_(bias)
    report = check_parity(model, batch, degrees, steps=steps)
    return None if report.ok else report.text()


def on(name, *args, **kwargs):
    degrees = DEGREES[name]
    texts = pool(degrees.world_size).run(parity, args[0], degrees, *args[1:], **kwargs)
    assert texts == [None] * degrees.world_size, texts[0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("degrees", DEGREES)
def test_a_row_wise_bias_is_added_once_and_its_gradient_is_neither_half_nor_double(degrees, dtype):
    on(degrees, "llama", dtype, {"attention_bias": True, "mlp_bias": True}, steps=2, bias=0.5)


@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize("degrees", ["tp2", "tp2+SP", "tp4+SP"])
def test_norms_on_each_heads_queries_and_keys_have_whole_gradients_equal_on_all_ranks(degrees, side):
    on(degrees, "qwen3", torch.float32, side=side, steps=1)


@pytest.mark.parametrize("degrees", ["tp2", "tp2+SP"])
def test_norms_on_each_heads_queries_and_keys_are_exact_in_float64(degrees):
    on(degrees, "qwen3", torch.float64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seq", [2, 3, 15, 18])
def test_a_sequence_of_any_length_is_cut_over_two_ranks(seq, dtype):
    on("tp2+SP", "llama", dtype, seq=seq)


@pytest.mark.parametrize("seq", [3, 6])
def test_a_sequence_shorter_than_or_uneven_over_four_ranks_is_cut_too(seq):
    on("tp4+SP", "llama", torch.float32, {"num_hidden_layers": 2}, seq=seq)


def one_token(degrees, dtype):
    """A sequence of one token has no target, so the loss here is one of the logits; most ranks have no token at all."""
    model = small("llama", dtype)
    single, batch = copy.deepcopy(model), {"input_ids": torch.tensor([[7], [9]])}
    mesh = make_mesh(tp=degrees.tp)
    applied = apply_plan(model, build_plan(model, mesh), mesh)
    logits = []
    with no_float32_casts() if dtype == torch.float64 else nullcontext():
        for m in (single, model):
            logits.append(m(**batch).logits)
            logits[-1].pow(2).sum().backward()
    return worst({"logits": logits[0].detach()}, {"logits": logits[1].detach()}), error_of(applied, single)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("degrees", ["tp2+SP", "tp4+SP"])
def test_a_sequence_of_one_token_leaves_ranks_without_any(degrees, dtype):
    for errors in pool(DEGREES[degrees].world_size).run(one_token, DEGREES[degrees], dtype):
        assert max(errors)[0] < BOUND[dtype], errors


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("degrees", ["tp2", "tp2+SP"])
def test_a_padded_batch_is_equal_where_it_isnt_padding(degrees, side):
    on(degrees, "llama", torch.float32, seq=15, side=side)


def tied(vocab, degrees):
    """(storages before, storages after the plan and after a step, report) of a model with one embedding for both ends."""
    model = small("llama", vocab_size=vocab, tie_word_embeddings=True)
    before = model.lm_head.weight is model.model.embed_tokens.weight
    batch = tiny_batch(model, seq=9)
    report = check_parity(model, batch, degrees, steps=2)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    after = parameters["lm_head.weight"] is parameters["model.embed_tokens.weight"]
    size = parameters["lm_head.weight"].to_local().untyped_storage().nbytes()
    return before, after, size, None if report.ok else report.text()


@pytest.mark.parametrize("degrees", ["tp2", "tp2+SP", "tp4"])
@pytest.mark.parametrize("vocab", [64, 99])
def test_a_tied_embedding_is_one_tensor_before_and_after_with_both_halves_in_its_gradient(degrees, vocab):
    ranks = DEGREES[degrees].world_size
    for before, after, size, text in pool(ranks).run(tied, vocab, DEGREES[degrees]):
        assert before and after and text is None, text
        assert size <= -(-vocab // ranks) * 64 * 4


def optimised(family, degrees, options, dtype):
    """What differs between replicas after three steps, and the largest difference from one process under SGD."""
    model = small(family, attention_bias=True)
    single, batch = copy.deepcopy(model), tiny_batch(model, seq=9)
    mesh = make_mesh(tp=degrees.tp, dp=degrees.dp)
    applied = apply_plan(model, build_plan(model, mesh, **degrees.options), mesh)
    mine = {n: v.chunk(applied.data_parallel_size)[applied.data_parallel_rank] for n, v in batch.items()}
    mine = applied.shard_batch(mine)
    name = options.pop("name")
    ours, theirs = (getattr(torch.optim, name)(m.parameters(), **options) for m in (model, single))
    for _ in range(3):
        for m, o, b in ((model, ours, mine), (single, theirs, batch)):
            o.zero_grad()
            m(**b, use_cache=False).loss.backward()
            o.step()
    moments = [
        (state["exp_avg"].placements, parameter.placements)
        for parameter, state in ours.state.items()
        if "exp_avg" in state
    ]
    whole, largest = applied.full_parameters(), 0.0
    for key, value in single.named_parameters():
        largest = max(largest, float((whole[key] - value).abs().max() / value.abs().max()))
    return replica_differences(model), largest, all(a == b for a, b in moments), len(moments)


OPTIMIZERS = {
    "adamw": {"name": "AdamW", "lr": 1e-3, "foreach": False},
    "adamw foreach": {"name": "AdamW", "lr": 1e-3, "foreach": True},
    "adamw fused": {"name": "AdamW", "lr": 1e-3, "fused": True},
    "sgd": {"name": "SGD", "lr": 0.05, "momentum": 0.9},
    "sgd foreach": {"name": "SGD", "lr": 0.05, "foreach": True},
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("degrees", [SP2, Degrees(dp=2, tp=2)], ids=["tp2+SP", "dp2 x tp2"])
def test_three_optimizer_steps_keep_every_replica_bitwise_equal_and_sgd_weights_on_the_reference(optimizer, degrees):
    results = pool(degrees.world_size).run(optimised, "qwen3", degrees, dict(OPTIMIZERS[optimizer]), torch.float32)
    for differing, largest, alike, moments in results:
        assert differing == [] and alike
        assert largest < (1e-5 if "sgd" in optimizer else 0.1)
        assert (moments > 0) is ("adamw" in optimizer)
