"""Selective activation checkpointing, and torch.compile per layer: the gradients of one process, and how often a graph breaks."""

import copy
import shutil
from functools import partial

import pytest
import torch
from core_tools import error_of, planned, share, small, step, worst
from test_randomness import HALF
from torch._dynamo.utils import counters
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from hyperpar_core import apply_plan, build_plan, make_mesh, set_seed, suggest_overrides
from hyperpar_core.testing import pool, tiny_batch

SAVED = {
    "matmuls": {torch.ops.aten.mm.default, torch.ops.aten.addmm.default},
    "collectives": {
        torch.ops._c10d_functional.all_reduce.default, torch.ops._c10d_functional.all_gather_into_tensor.default,
        torch.ops._c10d_functional.reduce_scatter_tensor.default, torch.ops._c10d_functional.wait_tensor.default,
    },
}  # fmt: skip


def policy(saved, ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if op in SAVED[saved] else CheckpointPolicy.PREFER_RECOMPUTE


def selective(sequence_parallel, saved, dropout):
    """The largest relative difference of a gradient; from one process, or from the same run without checkpointing."""
    config = {"num_hidden_layers": 2, **({"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5} if dropout else {})}
    found = []
    for checkpointing in (False, True) if dropout else (True,):
        family = "gpt2" if dropout else "qwen3"
        applied, single, batch = planned(family, tp=2, seq=9, sequence_parallel=sequence_parallel, config=config)
        set_seed(2, applied.mesh)
        layers = applied.model.transformer.h if dropout else applied.model.model.layers
        for i, layer in enumerate(layers if checkpointing else ()):
            context = partial(create_selective_checkpoint_contexts, partial(policy, saved))
            layers[i] = checkpoint_wrapper(layer, context_fn=context)
        step(applied.model, share(applied, batch))
        found.append(applied.full_gradients())
    if dropout:
        return worst(*found)
    step(single, batch)
    return error_of(applied, single)


@pytest.mark.parametrize("dropout", [False, True], ids=["plain", "dropout"])
@pytest.mark.parametrize("saved", SAVED)
@pytest.mark.parametrize("sp", [False, True], ids=["tp2", "tp2+SP"])
def test_selective_checkpointing_keeps_every_gradient(sp, saved, dropout):
    for error, name in pool(2).run(selective, sp, saved, dropout):
        assert error < 1e-5, name


def compiled(family, degrees, ep, backend):
    """(graph breaks, the largest relative difference of a gradient) with a layer compiled."""
    model = small(family, num_hidden_layers=1 if ep == 1 else 2)  # of two layers the second has experts
    if ep > 1:
        model.set_experts_implementation("grouped_mm")
    single, mesh = copy.deepcopy(model), make_mesh(**degrees)
    overrides = suggest_overrides(model, mesh, ep_size=ep)
    applied = apply_plan(model, build_plan(model, mesh, ep_size=ep, overrides=overrides), mesh)
    batch = tiny_batch(model, batch=2 * degrees.get("dp", 1), seq=16)
    torch._dynamo.reset()
    counters.clear()
    model.model.layers[-1].compile(backend=backend)
    step(model, share(applied, batch))
    step(single, batch)
    return dict(counters["graph_break"]), error_of(applied, single)


@pytest.mark.parametrize(("family", "degrees"), [("qwen3_moe", {"dp": 2}), ("qwen2_moe", {"tp": 2})], ids=str)
def test_a_compiled_layer_breaks_once_under_expert_parallel_where_the_counts_reach_the_host(family, degrees):
    """Under tp, sp and cp a layer is one graph: the tests of the core and of hyperpar-cp-sdpa compile with fullgraph."""
    for breaks, (error, name) in pool(2).run(compiled, family, degrees, 2, "eager", timeout=120):
        assert sum(n for why, n in breaks.items() if "nonzero" not in why) == 1, breaks  # nonzero: the model's own loop over experts
        assert error < 1e-5, name


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor_compiles_a_layer_to_the_same_gradients():
    for breaks, (error, name) in pool(2).run(compiled, "llama", {"tp": 2}, 1, "inductor", timeout=170):
        assert not breaks and error < 1e-5, name


def compiled_dropout():
    """Gradients of layers that drop, compiled and not, from one seed; how many graphs they break into."""
    found = []
    for compiling in (False, True):
        applied, _, batch = planned("gpt2", tp=2, config=HALF)
        set_seed(5, applied.mesh)
        torch._dynamo.reset()
        counters.clear()
        for layer in applied.model.transformer.h if compiling else ():
            layer.compile(backend="eager")
        step(applied.model, share(applied, batch))
        found.append(applied.full_gradients())
    return worst(*found), sum(counters["graph_break"].values())


def test_a_compiled_layer_draws_the_masks_of_an_uncompiled_one_and_breaks_where_the_stream_changes():
    for (error, name), breaks in pool(2).run(compiled_dropout, timeout=120):
        assert error < 1e-5, name
        assert breaks > 0
