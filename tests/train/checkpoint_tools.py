"""What the tests of checkpoints share: models of numbered weights, at any degrees, and optimizers whose state follows the weights."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from hyperpar_core import apply_plan, build_plan, make_mesh
from hyperpar_core.testing import tiny_model

KINDS = {  # what checkpoints get wrong: (family, config)
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "tied, uneven vocab": ("llama", {"vocab_size": 99, "tie_word_embeddings": True}),
    "untied, uneven vocab": ("llama", {"vocab_size": 99, "tie_word_embeddings": False}),
    "uneven bias": ("phi", {"vocab_size": 99}),
    "shared heads": ("llama", {"num_key_value_heads": 1}),
    "packed": ("phi3", {"num_key_value_heads": 4}),
    "packed with biases": ("gpt2", {}),
    "experts": ("olmoe", {"num_key_value_heads": 4}),
}


def numbered(family, *, scale=1.0, dtype=torch.float32, **config):
    """A tiny model whose weights count 0, 1, 2, ... in the order of its parameters, times `scale`."""
    model = tiny_model(family, dtype, **{"num_hidden_layers": 1, **config})
    start = 0
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.arange(start, start + parameter.numel()).view_as(parameter) * scale)
            start += parameter.numel()
    return model


def planned(model, degrees, *, fsdp=False, ep=1):
    """`model` at the given degrees of dp, cp, tp."""
    mesh = make_mesh(**degrees)
    overrides = None
    if ep > 1 or "cp" in degrees:
        from hyperpar_core import suggest_overrides

        overrides = suggest_overrides(model, mesh, ep_size=ep)
    applied = apply_plan(model, build_plan(model, mesh, ep_size=ep, overrides=overrides), mesh)
    if fsdp:
        applied.fully_shard()
    return applied


def adam_of(model, scale=1.0):
    """AdamW as after a step, its averages 2 w + 1 and w + 3 of the weights w, its step 7 on every parameter."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.8, 0.9))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for parameter, old in zip(model.parameters(), before, strict=True):
            parameter.copy_(old)
            state = optimizer.state[parameter]
            state["exp_avg"].copy_(2 * parameter * scale + 1)
            state["exp_avg_sq"].copy_(parameter * scale + 3)
            state["step"].fill_(7)
    return optimizer


def wrong_state(model, optimizer, scale=1.0):
    """Names of parameters whose state isn't adam_of's."""
    wrong = []
    for name, parameter in model.named_parameters():
        state = optimizer.state.get(parameter, {})
        fits = sorted(state) == ["exp_avg", "exp_avg_sq", "step"] and float(state["step"]) == 7
        if fits:
            local = {key: value.to_local() if isinstance(value, DTensor) else value for key, value in state.items()}
            weight = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            fits = torch.equal(local["exp_avg"], 2 * weight * scale + 1) and torch.equal(
                local["exp_avg_sq"], weight * scale + 3
            )
            fits = fits and isinstance(state["exp_avg"], DTensor) == isinstance(parameter, DTensor)
        if not fits:
            wrong.append(name)
    return wrong


def wrong_weights(applied, family, config, **options):
    """Names of whole weights, and of saved tensors, that don't count as numbered() does."""
    expected, now = numbered(family, **options, **config).state_dict(), applied.full_state_dict()
    assert list(now) == list(expected)
    return [name for name in expected if not torch.equal(now[name], expected[name])]
