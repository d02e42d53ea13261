"""The tiny models: every family trains, and its weights don't depend on the process or the dtype."""

from __future__ import annotations

import pytest
import torch

from hyperpar_core.testing import families, jitter, tiny_batch, tiny_config, tiny_model


def digest_of_weights(name):
    return {n: float(p.detach().double().sum()) for n, p in tiny_model(name).named_parameters()}


@pytest.mark.limit(400)
def test_every_family_builds_small_and_has_a_finite_loss_and_finite_gradients():
    faults = {}
    for name in families():
        model = tiny_model(name)
        loss = model(**tiny_batch(model, batch=1, seq=16), use_cache=False).loss
        loss.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        if not all(bool(t.isfinite().all()) for t in [loss, *gradients]):
            faults[name] = "not finite"
        elif sum(p.numel() for p in model.parameters()) > 500_000:
            faults[name] = "not small"
    assert len(families()) > 140 and faults == {}


def test_weights_are_the_same_in_every_process(ranks2):
    here = digest_of_weights("qwen3_moe")
    assert ranks2.run(digest_of_weights, "qwen3_moe") == [here, here]


def test_weights_are_the_same_in_every_dtype():
    single, double = tiny_model("qwen3"), tiny_model("qwen3", torch.float64)
    for (name, a), b in zip(single.named_parameters(), double.parameters(), strict=True):
        assert b.dtype == torch.float64 and torch.equal(a.double(), b), name


def test_overrides_win_over_the_small_sizes():
    assert tiny_config("llama", num_hidden_layers=5).num_hidden_layers == 5
    assert tiny_config("llama").num_hidden_layers == 2
    with pytest.raises(KeyError):
        tiny_config("no_such_family")


def test_an_experts_model_in_float64_runs():
    model = tiny_model("mixtral", torch.float64)
    model(**tiny_batch(model)).loss.backward()
    assert model.model.layers[0].mlp.experts.down_proj.grad.any()


def test_jitter_moves_every_parameter_once_also_a_tied_one_and_the_buffers_that_are_saved():
    model = torch.nn.Module()
    model.a, model.b = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    model.b.weight = model.a.weight
    model.register_buffer("saved", torch.zeros(4))
    model.register_buffer("scratch", torch.zeros(4), persistent=False)
    before = {n: p.clone() for n, p in model.named_parameters()}
    jitter(model, scale=0.05, seed=3)
    assert model.a.weight is model.b.weight
    for name, parameter in model.named_parameters():
        moved = parameter - before[name]
        assert 0 < moved.abs().max() < 0.05 * 4, name
    assert model.saved.any() and not model.scratch.any()


def test_a_batch_holds_no_special_ids_and_fits_a_tiny_vocabulary():
    model = tiny_model("llama")
    ids = tiny_batch(model, batch=3, seq=17)["input_ids"]
    assert ids.shape == (3, 17) and ids.min() >= 3
    small = tiny_model("llama", vocab_size=5)
    assert tiny_batch(small)["input_ids"].max() < 5
