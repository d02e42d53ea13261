"""Checkpointing, deepcopy, pickling, compilation, FSDP2 and in-place operators on a planned model."""

import copy
import io
import subprocess
import sys
import warnings

import pytest
import torch
from core_tools import error_of, gradients, planned, share, small, step, worst
from torch import nn
from torch._dynamo.backends.debugging import aot_eager
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from hyperpar_core import apply_plan, build_plan, make_mesh
from hyperpar_core.testing import pool, tiny_batch

SP = {"tp2": False, "tp2+SP": True}


# ---- activation checkpointing


def checkpointed(kind, sequence_parallel, seq):
    """A step under checkpointing, and two forwards of different lengths outstanding before their backwards."""
    applied, single, batch = planned("qwen3", tp=2, seq=seq, sequence_parallel=sequence_parallel, config={"num_hidden_layers": 2})
    recomputed = []
    if kind == "transformers":
        applied.model.gradient_checkpointing_enable()
    else:
        layers = applied.model.model.layers
        for i, layer in enumerate(layers):
            layers[i] = checkpoint_wrapper(layer)
    applied.model.model.layers[1].mlp.register_forward_pre_hook(lambda *_: recomputed.append(torch._C._current_graph_task_id() != -1))
    step(applied.model, share(applied, batch))
    step(single, batch)
    once = error_of(applied, single)
    other = tiny_batch(single, seq=seq - 2, seed=5)
    for model, batches in ((applied.model, [share(applied, b) for b in (batch, other)]), (single, [batch, other])):
        model.zero_grad()
        losses = [model(**b, use_cache=False).loss for b in batches]
        for loss in losses:  # the first backward recomputes after the second forward
            loss.backward()
    names = sorted(applied.full_parameters()), sorted(n for n, _ in single.named_parameters())
    return once, error_of(applied, single), any(recomputed), names


@pytest.mark.parametrize("seq", [8, 15])
@pytest.mark.parametrize("sp", SP)
@pytest.mark.parametrize("kind", ["transformers", "wrapper"])
def test_checkpointing_recomputes_to_the_same_gradients_also_with_two_forwards_outstanding(kind, sp, seq):
    for once, twice, recomputed, (ours, theirs) in pool(2).run(checkpointed, kind, SP[sp], seq):
        assert recomputed and max(once, twice)[0] < 1e-5, (once, twice)
        assert ours == theirs


# ---- copies


def copies(how, options):
    """What a copy of a planned model is worth: (same loss, independent, gradients right, kept kinds)."""
    applied, single, batch = planned("qwen3", tp=2, seq=7, **options)
    mine = share(applied, batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if how == "deepcopy":
            twin = copy.deepcopy(applied.model)
        else:
            file = io.BytesIO()
            torch.save(applied.model, file)
            file.seek(0)
            twin = torch.load(file, weights_only=False)
    before = applied.model(**mine, use_cache=False).loss.detach()
    same = bool(twin(**mine, use_cache=False).loss == before)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(1.5)
        for parameter in single.parameters():
            parameter.mul_(1.5)
    untouched = bool(applied.model(**mine, use_cache=False).loss == before)
    step(twin, mine)
    step(single, batch)
    whole = {n: p.grad.full_tensor() for n, p in twin.named_parameters()}
    kinds = all(isinstance(p, nn.Parameter) and isinstance(p, DTensor) for p in twin.parameters())
    classes = [type(a) is type(b) for a, b in zip(applied.model.modules(), twin.modules(), strict=True)]
    clean = all(p.grad is None for p in applied.model.parameters())
    return same, untouched, clean, kinds and all(classes), worst(gradients(single), whole)


@pytest.mark.parametrize("options", [{}, {"sequence_parallel": False}, {"loss_parallel": True}], ids=["sp", "tp", "loss"])
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_computes_with_its_own_weights_and_leaves_the_original_alone(how, options):
    for same, untouched, clean, kinds, (error, name) in pool(2).run(copies, how, options):
        assert same and untouched and clean and kinds
        assert error < 1e-5, name


def state_round_trip():
    """torch.save of a state_dict into another planned model, and of an optimizer's state."""
    applied, _, batch = planned("qwen3", tp=2, seq=7)
    optimizer = torch.optim.AdamW(applied.model.parameters(), lr=0.01)
    mine = share(applied, batch)
    step(applied.model, mine)
    optimizer.step()
    file = io.BytesIO()
    torch.save({"model": applied.model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    other, _, _ = planned("qwen3", tp=2, seq=7)
    with torch.no_grad():
        for parameter in other.model.parameters():
            parameter.zero_()
    other.model.load_state_dict(loaded["model"])
    resumed = torch.optim.AdamW(other.model.parameters(), lr=0.01)
    resumed.load_state_dict(loaded["optimizer"])
    for model, o in ((applied.model, optimizer), (other.model, resumed)):
        model.zero_grad()
        step(model, mine)
        o.step()
    return worst(applied.full_parameters(), other.full_parameters())[0]


def test_state_dicts_of_model_and_optimizer_go_through_a_file_and_training_goes_on_the_same():
    assert pool(2).run(state_round_trip) == [0.0, 0.0]


# ---- torch.compile


def compiled(sequence_parallel, lengths):
    """Layers that compile as one graph each, the second length after the first."""
    applied, single, _ = planned("qwen3", tp=2, sequence_parallel=sequence_parallel, config={"attention_bias": True})
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return aot_eager(graph, inputs)

    for layer in applied.model.model.layers:
        layer.compile(fullgraph=True, dynamic=False, backend=backend)
    errors = []
    for number, seq in enumerate(lengths):
        batch = tiny_batch(single, seq=seq, seed=number)
        for model, mine in ((applied.model, share(applied, batch)), (single, batch)):
            model.zero_grad()
            step(model, mine)
        errors.append(error_of(applied, single))
    return errors, len(graphs)


@pytest.mark.parametrize("sp", SP)
def test_layers_compile_without_breaks_to_the_same_gradients_even_and_uneven(sp):
    lengths = (8, 15) if SP[sp] else (8,)
    for errors, graphs in pool(2).run(compiled, SP[sp], lengths, timeout=110):
        assert graphs == len(lengths) and max(errors)[0] < 1e-5, errors


# ---- FSDP2


def under_fsdp(sequence_parallel, checkpointing):
    """torch's own fully_shard over dp on a model that the core has cut over tp."""
    applied, single, batch = planned(
        "qwen3", dp=2, tp=2, seq=9, data_parallel="external", sequence_parallel=sequence_parallel,
        config={"num_hidden_layers": 2},
    )  # fmt: skip
    model, dp = applied.model, applied.mesh["dp"]
    if checkpointing:
        model.gradient_checkpointing_enable()
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=dp)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
    ours = torch.optim.AdamW(model.parameters(), lr=1e-3)
    mine, errors = share(applied, batch), []
    for _ in range(2):
        ours.zero_grad()
        single.zero_grad()
        step(model, mine)
        step(single, batch)
        errors.append(error_of(applied, single))
        ours.step()
        with torch.no_grad():
            whole = applied.full_parameters()
            for name, parameter in single.named_parameters():
                parameter.copy_(whole[name])
    placements = {len(p.placements) for p in model.parameters()}
    return errors, placements


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("sp", SP)
def test_fsdp2_over_dp_has_the_gradients_of_one_process(sp, checkpointing):
    for errors, placements in pool(4).run(under_fsdp, SP[sp], checkpointing):
        assert max(errors)[0] < 1e-5, errors
        assert placements == {2}


# ---- in-place operators at a boundary


class Jitter(nn.Module):
    """An MLP that scales its input in place, as a router's jitter does."""

    def __init__(self, inner):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = inner.gate_proj, inner.up_proj, inner.down_proj

    def forward(self, x):
        if self.training:
            x *= 1.25
        return self.down_proj(self.gate_proj(x).sigmoid() * self.up_proj(x))


def jittered(sequence_parallel, observed):
    model = small("llama", num_hidden_layers=2)
    for layer in model.model.layers:
        layer.mlp = Jitter(layer.mlp)
    single, batch = copy.deepcopy(model), tiny_batch(model, seq=9)
    mesh = make_mesh(tp=2)
    applied = apply_plan(model, build_plan(model, mesh, sequence_parallel=sequence_parallel), mesh)
    seen = []
    if observed:
        with applied.observe(lambda fqn, kind, name, tensor, layout: seen.append(kind)):
            step(model, share(applied, batch))
    else:
        step(model, share(applied, batch))
    step(single, batch)
    return error_of(applied, single), seen.count("grad_input")


@pytest.mark.parametrize("observed", [False, True])
@pytest.mark.parametrize("sp", SP)
def test_an_operator_in_place_on_a_boundarys_input_keeps_every_gradient(sp, observed):
    for (error, name), seen in pool(2).run(jittered, SP[sp], observed):
        assert error < 1e-5, name
        assert seen >= (6 if observed else 0)


def frozen_base(sequence_parallel):
    """Parameters that are frozen before the plan, and one that thaws after it."""
    model = small("qwen3")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("mlp" in name)
    single, batch = copy.deepcopy(model), tiny_batch(model, seq=9)
    mesh = make_mesh(tp=2)
    applied = apply_plan(model, build_plan(model, mesh, sequence_parallel=sequence_parallel), mesh)
    mine = share(applied, batch)
    step(model, mine)
    step(single, batch)
    first = error_of(applied, single)
    for m in (model, single):
        m.zero_grad()
        m.model.norm.weight.requires_grad_(True)
        m.model.layers[0].self_attn.q_norm.weight.requires_grad_(True)
    step(model, mine)
    step(single, batch)
    return first, error_of(applied, single)


@pytest.mark.parametrize("sp", SP)
def test_parameters_that_were_frozen_before_the_plan_stay_so_and_thaw_rightly(sp):
    for errors in pool(2).run(frozen_base, SP[sp]):
        assert max(errors)[0] < 1e-5, errors


# ---- the end of a process

ENDING = """
import atexit, torch.distributed as dist
atexit.register(lambda: print("left" if not dist.is_initialized() else "still in"))
from hyperpar_core import make_mesh
{before}
make_mesh(device_type="cpu")
{after}
"""


@pytest.mark.parametrize(
    ("before", "after", "end"),
    [
        ("", "", "left"),
        ("", "dist.destroy_process_group()", "left"),
        ("dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)", "", "still in"),
    ],
    ids=["ends", "destroyed by the script", "started by the script"],
)
def test_a_gloo_group_that_make_mesh_started_is_destroyed_when_the_process_ends(before, after, end):
    script = ENDING.format(before=before, after=after)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, end), done.stderr
