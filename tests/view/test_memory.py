"""What a plan says a rank holds is what it holds: live storage, counted on real ranks."""

from __future__ import annotations

import re

import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

from hyperpar_core import apply_plan, build_plan, make_mesh, suggest_overrides
from hyperpar_core.errors import PlanError
from hyperpar_core.testing import pool
from hyperpar_core.view.memory import OPTIMIZERS, memory

BATCH, SEQUENCE = 2, 256
SIZES = {
    "vocab_size": 1024, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 16, "attention_dropout": 0.0,
}  # fmt: skip
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "output_router_logits": False}


def model_of(family, dtype=torch.float32):
    config = LlamaConfig(**SIZES) if family == "llama" else Qwen3MoeConfig(**SIZES, **EXPERTS)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).to(dtype).train()


def local(x):
    return x.to_local() if isinstance(x, DTensor) else x


class Kept:
    """The storage of everything that a forward saves for the backward, each once, parameters left out."""

    def __init__(self, model):
        self.parameters = {local(p).untyped_storage().data_ptr() for p in model.parameters()}
        self.bytes = {}
        self.alive = []  # so that no storage is used again for another tensor

    def add(self, x):
        storage = local(x).untyped_storage()
        if storage.data_ptr() not in self.parameters:
            self.bytes[storage.data_ptr()] = storage.nbytes()
            self.alive.append(storage)
        return x

    def total(self):
        return sum(self.bytes.values())


def measured(family, degrees, ep, options, checkpointing, optimizer, dtype):
    """(predicted, measured) of this rank: {what: bytes}."""
    model = model_of(family, dtype)
    mesh = make_mesh(**degrees)
    overrides = suggest_overrides(model, mesh, ep_size=ep)
    plan = build_plan(model, mesh, ep_size=ep, overrides=overrides, **options)
    applied = apply_plan(model, plan, mesh)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    stepped = {
        "adamw": lambda p: torch.optim.AdamW(p),
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
        "sgd_momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    }[optimizer](model.parameters())
    torch.manual_seed(1)
    ids = torch.randint(0, SIZES["vocab_size"], (BATCH, SEQUENCE))
    batch = applied.shard_batch({"input_ids": ids, "labels": ids})
    kept = Kept(model)
    with torch.autograd.graph.saved_tensors_hooks(kept.add, lambda x: x):
        out = model(**batch, use_cache=False)
    kept.add(out.logits)
    out.loss.backward()
    stepped.step()
    state = [x for per in stepped.state.values() for x in per.values() if isinstance(x, torch.Tensor) and x.ndim]
    seen = {
        "parameters": sum(local(p).nbytes for p in model.parameters()),
        "gradients": sum(local(p.grad).nbytes for p in model.parameters()),
        "optimizer": sum(local(x).nbytes for x in state),
        "activations": kept.total(),
    }
    width = torch.finfo(dtype).bits // 8
    said = memory(
        plan, BATCH, SEQUENCE, dp=degrees.get("dp", 1), bytes_per_element=width, optimizer=optimizer, checkpointing=checkpointing
    )
    again = said.again if checkpointing else 0
    return {**{name: getattr(said, name) for name in seen}, "activations": said.activations - again}, seen


CASES = {
    "llama, whole sequences": ("llama", {"tp": 2}, 1, {"sequence_parallel": False}, False, "adamw"),
    "llama, sequence parallel": ("llama", {"tp": 2}, 1, {}, False, "adamw"),
    "llama, loss parallel": ("llama", {"tp": 2}, 1, {"loss_parallel": True}, False, "sgd"),
    "llama, checkpointed": ("llama", {"tp": 2}, 1, {}, True, "sgd_momentum"),
    "llama, cp": ("llama", {"cp": 2}, 1, {}, False, "adamw"),
    "llama, cp, checkpointed": ("llama", {"cp": 2}, 1, {}, True, "adamw"),
    "llama, dp": ("llama", {"dp": 2}, 1, {}, False, "adamw"),
    "qwen3_moe, tp": ("qwen3_moe", {"tp": 2}, 1, {"sequence_parallel": False}, False, "adamw"),
    "qwen3_moe, sequence parallel": ("qwen3_moe", {"tp": 2}, 1, {}, False, "adamw"),
    "qwen3_moe, ep": ("qwen3_moe", {"dp": 2}, 2, {}, False, "adamw"),
    "qwen3_moe, ep, sequence parallel": ("qwen3_moe", {"tp": 2}, 2, {}, False, "adamw"),
    "qwen3_moe, checkpointed": ("qwen3_moe", {"tp": 2}, 2, {}, True, "adamw"),
}


NARROW = ("llama, sequence parallel", "llama, checkpointed", "qwen3_moe, tp", "qwen3_moe, ep, sequence parallel")


@pytest.mark.parametrize(
    ("case", "dtype"),
    [*((case, torch.float32) for case in CASES), *((case, torch.bfloat16) for case in NARROW)],
    ids=str,
)
def test_activations_and_the_sum_are_within_a_tenth_of_what_a_rank_holds(case, dtype):
    results = pool(2).run(measured, *CASES[case], dtype)
    for said, seen in results:
        for name in ("parameters", "gradients", "optimizer"):
            assert said[name] == seen[name], name
    if CASES[case][2] > 1:  # where routed tokens go is data: the estimate is that of even routing, which ranks have on the mean
        results = [({n: said[n] for n in said}, {n: sum(seen[n] for _, seen in results) / 2 for n in said}) for said, _ in results]
    for said, seen in results:
        assert abs(said["activations"] - seen["activations"]) <= 0.1 * seen["activations"], (said, seen)
        assert abs(sum(said.values()) - sum(seen.values())) <= 0.1 * sum(seen.values())


def meta_plan(family="llama", sizes=None):
    with torch.device("meta"):
        return build_plan(model_of(family), sizes or {"tp": 2})


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_optimizer_s_state_follows_its_name(optimizer):
    held = memory(meta_plan(), 1, 64, optimizer=optimizer)
    per_element = {"adamw": 4, "adamw_float32": 12, "sgd_momentum": 2, "sgd": 0}[optimizer]
    assert held.optimizer == per_element * held.parameters // 2 and held.gradients == held.parameters


def test_an_unknown_optimizer_is_an_error():
    with pytest.raises(PlanError, match="no optimizer 'lamb'; known: adamw"):
        memory(meta_plan(), 1, 64, optimizer="lamb")


def test_each_boundary_s_formula_gives_its_bytes():
    for family in ("llama", "qwen3_moe"):
        for one in memory(meta_plan(family), 2, 64).boundaries:
            if one.bytes:
                text = one.formula.replace(" x ", " * ").replace(" B", "").replace("[", "(").replace("]", ")")
                value = eval(re.sub(r"[a-z_][a-z_ ]*", "", text))  # what is left are numbers and signs
                assert round(value) == one.bytes, one.formula


def test_checkpointing_keeps_a_layer_s_input_and_one_layer_at_a_time():
    plan = meta_plan()
    whole, again = memory(plan, 1, 64), memory(plan, 1, 64, checkpointing=True)
    layer = whole.layers // SIZES["num_hidden_layers"]
    assert again.again == layer and again.layers < whole.layers and again.activations - again.layers == whole.activations - whole.layers
