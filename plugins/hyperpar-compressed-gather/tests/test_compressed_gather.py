"""The compressed wire: it conforms with its stated bound, it sends half the bytes, and the plan and the report say that it isn't exact."""

from math import prod

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hyperpar_core import Override, apply_plan, build_plan, make_mesh
from hyperpar_core.errors import OverrideError
from hyperpar_core.testing import Bounds, pool, tiny_batch, tiny_model
from hyperpar_core.testing.conformance import LowererConformance


class TestBf16Wire(LowererConformance):
    name = "bf16_wire"
    lowers = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
    bounds = Bounds(relative=0.02, floor=0.001)  # of a whole model of two layers: the largest measured is 0.0126


PARTS = {  # of its argument that a rank sends, to n - 1 others
    "all_gather_into_tensor": lambda n: n - 1,
    "reduce_scatter_tensor": lambda n: (n - 1) / n,
    "all_to_all_single": lambda n: (n - 1) / n,
    "all_reduce": lambda n: 2 * (n - 1) / n,
}


class SentBytes(TorchDispatchMode):
    """Bytes of activations that this rank sends to others, by ring and direct algorithms; integers (the check of ids) aren't any."""

    def __init__(self, ranks):
        super().__init__()
        self.ranks, self.bytes, self.seen = ranks, 0.0, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.split(".")[0]
        if func.namespace == "_c10d_functional" and name in PARTS and args[0].is_floating_point():
            self.seen.add((name, args[0].dtype))
            self.bytes += PARTS[name](self.ranks) * prod(args[0].shape) * args[0].element_size()
        return func(*args, **(kwargs or {}))


def sent(lowerer, sequence_parallel, dtype):
    """(bytes of a forward and a backward without the parameters' sums, {(collective, dtype)})."""
    model = tiny_model("llama", dtype)
    ranks = torch.distributed.get_world_size()
    mesh = make_mesh(tp=ranks)
    overrides = [Override("*", lowerer=lowerer)] if lowerer else []
    plan = build_plan(model, mesh, sequence_parallel=sequence_parallel, overrides=overrides)
    applied = apply_plan(model, plan, mesh)
    batch = applied.shard_batch(tiny_batch(model, batch=2, seq=16))
    with applied.no_sync(), SentBytes(ranks) as counted:
        model(**batch, use_cache=False).loss.backward()
    return counted.bytes, counted.seen


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_step_sends_half_the_bytes(ranks, sequence_parallel):
    plain = pool(ranks).run(sent, None, sequence_parallel, torch.float32)
    compressed = pool(ranks).run(sent, "bf16_wire", sequence_parallel, torch.float32)
    for (before, _), (after, seen) in zip(plain, compressed, strict=True):
        assert after == before / 2 > 0
        assert {dtype for _, dtype in seen} == {torch.bfloat16}


def test_another_dtype_travels_as_it_is():
    plain, compressed = (pool(2).run(sent, lowerer, True, torch.bfloat16) for lowerer in (None, "bf16_wire"))
    assert plain == compressed


def test_where_tp_isn_t_active_the_plan_refuses_it():
    with pytest.raises(OverrideError, match="bf16_wire works over tp"):
        build_plan(tiny_model("llama"), {"dp": 2}, overrides=[Override("*.mlp", lowerer="bf16_wire")])
