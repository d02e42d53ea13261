"""What the tests of the core share: one planned model, one process to compare it with, and a counter of collectives."""

from __future__ import annotations

import copy
import ctypes
import gc
import os
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.autograd.profiler import profile
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hyperpar_core import Checks, apply_plan, build_plan, make_mesh
from hyperpar_core.testing import tiny_batch, tiny_model

BOUND = {torch.float32: 1e-5, torch.float64: 1e-10}
ALL = Checks()
WHERE = {  # what a collective is called at the process group
    "c10d::allreduce_": "all_reduce",
    "c10d::allgather_into_tensor_coalesced_": "all_gather",
    "c10d::_allgather_base_": "all_gather",
    "c10d::allgather_": "all_gather",
    "c10d::reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
    "c10d::alltoall_base_": "all_to_all",
}


def small(family="llama", dtype=torch.float32, **config):
    """A tiny model of one layer, whose four key/value heads fit tp2 and tp4."""
    return tiny_model(family, dtype, **{"num_key_value_heads": 4, "num_hidden_layers": 1, **config})


def planned(
    family="llama", *, dp=1, tp=1, seq=8, batch=2, data_parallel="core", config=None, dtype=torch.float32, checks=ALL, **plan
):
    """(applied, the same model in one process, the global batch), on every rank of a mesh of dp x tp."""
    model = small(family, dtype, **(config or {}))
    single = copy.deepcopy(model)
    mesh = make_mesh(dp=dp, tp=tp)
    applied = apply_plan(model, build_plan(model, mesh, **plan), mesh, data_parallel=data_parallel, checks=checks)
    return applied, single, tiny_batch(single, batch=batch * dp, seq=seq)


def part(applied, batch):
    """This data-parallel rank's rows of a global batch."""
    size, rank = applied.data_parallel_size, applied.data_parallel_rank
    return {name: value.chunk(size)[rank] for name, value in batch.items()}


def share(applied, batch):
    """What this rank computes of a global batch."""
    return applied.shard_batch(part(applied, batch))


def gradients(model):
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def worst(ours, theirs):
    """The largest relative difference of two {name: tensor}, by the bound's rule; (0.0, "") when they are equal."""
    assert ours.keys() <= theirs.keys(), sorted(ours.keys() - theirs.keys())
    largest = max((float(v.abs().max()) for v in ours.values() if v is not None and v.numel()), default=0.0)
    found = (0.0, "")
    for name, mine in ours.items():
        other = theirs[name]
        if mine is None or other is None:
            assert mine is None and other is None, f"{name}: {mine} and {other}"
            continue
        assert mine.shape == other.shape, (name, mine.shape, other.shape)
        assert other.isfinite().all(), name
        if mine.numel():
            scale = max(float(mine.abs().max()), 0.1 * largest, 1e-30)
            found = max(found, (float((mine - other).abs().max()) / scale, name))
    return found


def error_of(applied, single):
    """(largest relative difference of the gradients, its name), gathered on every rank."""
    return worst(gradients(single), applied.full_gradients())


def step(model, batch, **options):
    """Forward and backward; the loss."""
    loss = model(**batch, use_cache=False, **options).loss
    loss.backward()
    return loss.detach()


@contextmanager
def collectives(seen):
    """Counts into `seen` every collective that reaches a process group, DTensor's own too: {name: number, "elements": sent in}."""
    with profile(record_shapes=True) as record:
        yield
    for event in record.function_events:
        if event.name in WHERE:
            seen[WHERE[event.name]] += 1
        elif event.name.startswith("c10d::") and event.name not in ("c10d::barrier", "c10d::monitored_barrier_"):
            seen[event.name] += 1
        elif event.name.startswith("gloo:"):
            shape = event.input_shapes[0] if event.input_shapes else []
            seen["elements"] += int(torch.Size(shape).numel())


def counted(fn):
    """{collective: how many} of one call."""
    seen = Counter()
    with collectives(seen):
        fn()
    return {name: number for name, number in seen.items() if name != "elements"}


class DTensorOperators(TorchDispatchMode):
    """The operators that ran on a DTensor."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if any(isinstance(x, DTensor) for x in tree_leaves((args, kwargs))):
            self.seen.append(str(func))
        return func(*args, **kwargs)


def snapshot(model):
    """Everything of a model that an apply changes: identities of parameters, classes, forwards, attributes, hooks, state."""
    parts = {"parameters": [(n, id(p), type(p)) for n, p in model.named_parameters(remove_duplicate=False)]}
    for name, module in model.named_modules():
        own = {k: id(v) for k, v in module.__dict__.items() if not isinstance(v, (dict, int, float, str, bool))}
        plain = {k: v for k, v in module.__dict__.items() if isinstance(v, (int, float, str, bool))}
        hooks = {k: len(v) for k, v in module.__dict__.items() if k.endswith("hooks") and isinstance(v, dict)}
        order = [list(module._parameters), list(module._buffers), list(module._modules)]
        parts[name] = (type(module), type(module).forward, sorted(module.__dict__), own, plain, hooks, order)
    parts["tensor hooks"] = [bool(p._backward_hooks) for p in model.parameters()]
    parts["state"] = {name: (id(v) if v is None else v.data_ptr(), tuple(v.shape)) for name, v in model.state_dict().items()}
    return parts


def raised(fn):
    """(type name, text) of the error that `fn` raises, None if it raises none."""
    try:
        fn()
    except Exception as error:
        return type(error).__name__, str(error)
    return None


needs_peak_counter = pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's peak counter")


def memory_now():
    """The bytes that this process holds; `memory_peak` counts from here."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what earlier work freed and the allocator kept would be used again without growing
    Path("/proc/self/clear_refs").write_text("5")
    return _memory("VmRSS")


def memory_peak():
    """The most bytes that this process has held since the last `memory_now`."""
    return _memory("VmHWM")


def _memory(field):
    text = Path("/proc/self/status").read_text()
    return 1024 * int(next(line.split()[1] for line in text.splitlines() if line.startswith(field)))


class Tiny(nn.Module):
    """Two linear layers, for tests that need no transformer."""

    def __init__(self):
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.down_proj(self.up_proj(x).relu())
