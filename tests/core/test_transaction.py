"""All or nothing: an apply that fails, on any rank and in any step, leaves the model as it was, and undo brings it back."""

import copy
import time

import pytest
import torch
import torch.distributed as dist
from core_tools import Tiny, planned, raised, share, small, snapshot, step, worst
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hyperpar_core import apply_plan, build_plan, make_mesh
from hyperpar_core.testing import pool, tiny_batch

# Every step of an apply: (module, name) of what fails, the call at which it fails.
STEPS = {
    "preflight": ("hyperpar_core.applied", "preflight", 0),
    "hashes": ("hyperpar_core.applied", "weight_hashes", 0),
    "record": ("hyperpar_core.applied", "record", 0),
    "factory": ("hyperpar_core.apply.applier", "call_factory", 0),
    "first distribute": ("hyperpar_core.apply.applier", "distribute", 0),
    "tenth distribute": ("hyperpar_core.apply.applier", "distribute", 9),
    "placements": ("hyperpar_core.apply.applier", "held_placements", 3),
    "attributes": ("hyperpar_core.apply.journal", "Journal.set_attribute", 0),
    "first class": ("hyperpar_core.apply.journal", "Journal.set_class", 0),
    "fifth class": ("hyperpar_core.apply.journal", "Journal.set_class", 4),
    "generated": ("hyperpar_core.apply.journal", "generated_class", 2),
    "region": ("hyperpar_core.apply.applier", "Region", 3),
    "transition": ("hyperpar_core.apply.applier", "BoundStep", 4),
    "root": ("hyperpar_core.apply.applier", "Root", 0),
    "sums": ("hyperpar_core.applied", "GradientSums", 0),
    "handle": ("hyperpar_core.applied", "Applied", 0),
}


class Injected(Exception):
    pass


class Fault:
    """While active, the given function raises at one of its calls, on the given ranks."""

    def __init__(self, step, ranks):
        import importlib

        module, path, self.at = STEPS[step]
        self.owner = importlib.import_module(module)
        *parents, self.name = path.split(".")
        for parent in parents:
            self.owner = getattr(self.owner, parent)
        self.ranks, self.calls, self.fired = ranks, 0, False

    def __enter__(self):
        self.original = getattr(self.owner, self.name)
        original = self.original

        def faulty(*args, **kwargs):
            self.calls += 1
            if self.calls > self.at and dist.get_rank() in self.ranks:
                self.fired = True
                raise Injected(f"{self.name} failed")
            return original(*args, **kwargs)

        setattr(self.owner, self.name, faulty)
        return self

    def __exit__(self, *args):
        setattr(self.owner, self.name, self.original)


def fails_at(step_name, ranks):
    """(what was raised, seconds, whether the model is as before, whether it then works)."""
    model = small("qwen3", num_hidden_layers=2)
    model.lm_head.weight.register_hook(lambda grad: None)
    model.model.norm.register_forward_hook(lambda *_: None)
    model.model.norm.weight.requires_grad_(False)
    for module in model.modules():  # counted heads, as older models have them
        if type(module).__name__.endswith("Attention"):
            module.num_heads = 4
    single, batch = copy.deepcopy(model), tiny_batch(model, seq=6)
    mesh = make_mesh(tp=2)
    plan = build_plan(model, mesh, loss_parallel=True)
    before = snapshot(model)
    with Fault(step_name, ranks) as fault:
        dist.barrier()
        start = time.monotonic()
        error = raised(lambda: apply_plan(model, plan, mesh))
        seconds = time.monotonic() - start
    after = snapshot(model)
    changed = [key for key in before if before[key] != after.get(key)]
    grads = []
    for m in (model, single):
        step(m, batch)
        grads.append({n: p.grad for n, p in m.named_parameters()})
    equal = worst(*grads)[0]
    applied = apply_plan(model, plan, mesh)
    model.zero_grad()
    loss = step(model, share(applied, batch))
    return fault.fired, error, seconds, changed, equal, bool(loss.isfinite())


@pytest.mark.parametrize("ranks", [(0, 1), (1,)], ids=["all", "one"])
@pytest.mark.parametrize("where", STEPS)
def test_a_fault_in_any_step_on_all_ranks_or_one_leaves_every_model_as_it_was(where, ranks):
    results = pool(2).run(fails_at, where, ranks)
    assert [fired for fired, *_ in results] == [rank in ranks for rank in (0, 1)]
    for rank, (fired, error, seconds, changed, equal, works) in enumerate(results):
        assert error is not None and "failed" in error[1], error
        assert error[0] == ("Injected" if fired else "RankMismatch")
        assert fired or f"rank {ranks[0]}" in error[1], rank
        assert seconds < 5
        assert changed == [] and equal == 0 and works


# ---- undo


def undone(degrees, options):
    applied, single, batch = planned("qwen3", config={"num_hidden_layers": 2, "tie_word_embeddings": True}, **degrees, **options)
    model, mine = applied.model, share(applied, batch)
    for m, b in ((model, mine), (single, batch)):
        optimizer = torch.optim.SGD(m.parameters(), lr=0.05)
        for _ in range(2):
            optimizer.zero_grad()
            step(m, b)
            optimizer.step()
    trained = {n: v.clone() for n, v in applied.full_parameters().items()}
    returned = applied.undo()
    plain = {n: p for n, p in model.named_parameters(remove_duplicate=False)}
    facts = [
        returned is model, all(type(p) is nn.Parameter for p in plain.values()),
        plain["lm_head.weight"] is plain["model.embed_tokens.weight"],
        all(type(a) is type(b) for a, b in zip(model.modules(), single.modules(), strict=True)),
        all(set(a.__dict__) == set(b.__dict__) for a, b in zip(model.modules(), single.modules(), strict=True)),
        list(model.state_dict()) == list(single.state_dict()),
    ]  # fmt: skip
    exact, near = worst(trained, plain)[0], worst(dict(single.named_parameters()), plain)[0]
    for m in (model, single):
        m.zero_grad()
        step(m, batch)
    gradients = worst({n: p.grad for n, p in single.named_parameters()}, {n: p.grad for n, p in model.named_parameters()})[0]
    again = raised(applied.undo)
    tp = degrees.get("tp", 1)
    other = make_mesh(**({"dp": 2} if tp > 1 else {"tp": 2}))
    second = apply_plan(model, build_plan(model, other), other)
    model.zero_grad()
    step(model, second.shard_batch({n: v.chunk(second.data_parallel_size)[second.data_parallel_rank] for n, v in batch.items()}))
    replanned = worst({n: p.grad for n, p in single.named_parameters()}, second.full_gradients())[0]
    return facts, exact, near, gradients, again, replanned


@pytest.mark.parametrize(
    ("degrees", "options"),
    [({"tp": 2}, {}), ({"tp": 2}, {"loss_parallel": True}), ({"dp": 2}, {})],
    ids=["tp2+SP", "loss parallel", "dp2"],
)
def test_undo_after_training_gives_whole_trained_weights_and_another_plan_goes_on(degrees, options):
    for facts, exact, near, gradients, again, replanned in pool(2).run(undone, degrees, options):
        assert facts == [True] * 6
        assert exact == 0 and max(near, gradients, replanned) < 1e-5
        assert again[0] == "ApplyError" and "undo" in again[1]


# ---- preflight


def refused(case):
    """(error, whether the model is as before, seconds) on each rank."""
    model = small("llama")
    mesh = make_mesh(tp=2)
    plan, options = build_plan(model, mesh), {}
    if case == "second apply":
        apply_plan(model, plan, mesh)
    elif case == "fsdp first":
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    elif case == "forward on an instance":
        model.model.layers[0].mlp.forward = lambda x: x
    elif case == "forward of the model on the instance":
        model.forward = model.forward
    elif case == "mixed devices":
        model.lm_head.weight = nn.Parameter(torch.empty_like(model.lm_head.weight, device="meta"))
    elif case == "other mesh":
        mesh = make_mesh(dp=2)
    elif case == "other model":
        model = small("qwen3")
    elif case == "other shape":
        model = small("llama", vocab_size=99)
    elif case == "int parameter":
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.to(torch.int8), requires_grad=False)
    elif case == "new parameter":
        model.model.layers[0].mlp.scale = nn.Parameter(torch.ones(1))
    elif case == "one rank alone":
        if dist.get_rank():
            model.model.layers[0].mlp.forward = lambda x: x
    elif case == "mode":
        options = {"mode": "fast"}
    elif case == "weights":
        options = {"weights": "hope"}
    elif case == "data_parallel":
        options = {"data_parallel": "ddp"}
    before = snapshot(model)
    dist.barrier()
    start = time.monotonic()
    error = raised(lambda: apply_plan(model, plan, mesh, **options))
    return error, snapshot(model) == before, time.monotonic() - start


REFUSALS = {
    "second apply": "undo()",
    "fsdp first": "FSDP",
    "forward on an instance": "model.layers.0.mlp: its forward was replaced on the instance",
    "forward of the model on the instance": "its forward was replaced on the instance",
    "mixed devices": "cpu, meta",
    "other mesh": "the plan is for tp=2",
    "other model": "k_norm.weight",
    "other shape": "lm_head.weight",
    "int parameter": "lm_head.weight",
    "new parameter": "mlp.scale",
    "one rank alone": "mlp: its forward was replaced on the instance",
    "mode": "'fast'",
    "weights": "'hope'",
    "data_parallel": "'ddp'",
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_cant_work_is_refused_on_every_rank_before_anything_changes(case):
    for rank, (error, untouched, seconds) in enumerate(pool(2).run(refused, case)):
        assert error is not None and REFUSALS[case] in error[1], error
        assert error[0] == ("RankMismatch" if case == "one rank alone" and rank == 0 else "ApplyError")
        assert untouched and seconds < 5 and error[1].count("\n") < 8


def test_a_model_that_isnt_transformers_own_is_as_it_was_too():
    model = Tiny()
    before = snapshot(model)
    assert snapshot(model) == before
    model.up_proj.num = 3
    assert snapshot(model) != before
