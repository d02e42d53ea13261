"""The dispatcher by itself: any routing, any number of tokens, few and small messages."""

import pytest
import torch
from hyperpar_moe_ep.dispatch import AllToAll
from torch.utils._python_dispatch import TorchDispatchMode

from hyperpar_core import make_mesh
from hyperpar_core.collectives.functional import axis_group
from hyperpar_core.testing import pool

EXPERTS, HIDDEN, K = 8, 6, 3


class Messages(TorchDispatchMode):
    """The shapes of what is handed to collectives."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "_c10d_functional" and not func._schema.name.endswith("wait_tensor"):
            self.shapes.append((func._schema.name.rpartition("::")[2], tuple(args[0].shape)))
        return func(*args, **(kwargs or {}))


def routing(rank, tokens, dtype):
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(tokens, HIDDEN, generator=generator, dtype=dtype).requires_grad_()
    indices = torch.rand(tokens, EXPERTS, generator=generator).topk(K).indices
    weights = torch.rand(tokens, K, generator=generator, dtype=torch.float64).requires_grad_()
    return x, indices, weights


def matrices(dtype):
    return torch.randn(EXPERTS, HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(99), dtype=dtype)


def apply_experts(weight, x, expert, scale):
    """y = tanh(x W_e) * scale, one pair of token and expert a row."""
    return torch.einsum("nh,nhd->nd", x, weight[expert[:, 0]]).tanh() * scale.to(x.dtype)


def dispatched(tokens_of_rank, dtype):
    """(largest error of output and gradients, messages forward, messages backward, rows that each rank should have got)."""
    mesh = make_mesh(dp=len(tokens_of_rank))
    group = axis_group(mesh["dp"])
    n = EXPERTS // group.ranks
    whole = matrices(dtype)
    mine = whole[group.rank * n : (group.rank + 1) * n].clone().requires_grad_()
    x, indices, weights = routing(group.rank, tokens_of_rank[group.rank], dtype)
    seen = []

    def experts(x, expert, scale):
        seen.append(expert[:, 0].tolist())
        return apply_experts(mine, x, expert, scale) + mine.flatten()[:0].sum()

    with Messages() as forward:
        out = AllToAll(group, n)(experts, x, indices, weights)
    with Messages() as backward:
        (out * out).sum().backward()
    # one process: every rank's tokens, all experts
    reference = whole.clone().requires_grad_()
    errors = []
    for rank, tokens in enumerate(tokens_of_rank):
        x1, i1, w1 = routing(rank, tokens, dtype)
        pairs = apply_experts(
            reference, x1.repeat_interleave(K, 0), i1.reshape(-1, 1), w1.reshape(-1, 1)
        )
        y = pairs.view(tokens, K, HIDDEN).sum(1)
        (y * y).sum().backward()
        if rank == group.rank:
            errors += [(out - y), x.grad - x1.grad, weights.grad - w1.grad]
    errors.append(mine.grad - reference.grad[group.rank * n : (group.rank + 1) * n])
    worst = max(float(e.abs().max()) if e.numel() else 0.0 for e in errors)
    destinations = [len(set(row)) for row in (indices // n).tolist()]
    assert len(seen) == 1
    return worst, forward.shapes, backward.shapes, sum(destinations)


@pytest.mark.parametrize("tokens", [(5, 5), (7, 0), (0, 0), (1, 30), (3, 0, 9, 1)], ids=str)
def test_output_and_gradients_are_those_of_one_process_for_any_number_of_tokens(tokens):
    for worst, *_ in pool(len(tokens)).run(dispatched, tokens, torch.float64):
        assert worst < 1e-12


def test_a_token_travels_once_to_each_rank_in_three_messages_forward_and_two_backward():
    for _, forward, backward, rows in pool(2).run(dispatched, (40, 40), torch.float32):
        assert [name for name, _ in forward] == ["all_to_all_single"] * 3
        assert [name for name, _ in backward] == ["all_to_all_single"] * 2
        (counts, out, _) = (shape for _, shape in forward)
        assert counts == (2,)
        assert out == (rows, 4 * HIDDEN + 8 * K + K)  # bytes: the token, its weights, the numbers of its experts
        assert rows < 40 * K


def kept():
    """Elements of the floating tensors that a dispatch keeps for its backward, around experts that keep none."""
    group = axis_group(make_mesh(dp=2)["dp"])
    x, indices, weights = routing(group.rank, 40, torch.float32)
    held = []

    def keep(tensor):
        held.append(tensor.numel() * tensor.is_floating_point())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = AllToAll(group, EXPERTS // 2)(lambda rows, expert, weight: rows + weight, x, indices, weights)
    y.sum().backward()
    return sum(held)


def test_no_rows_are_kept_for_the_backward():
    assert pool(2).run(kept) == [0, 0]


def half_precision():
    """The error of a sum of 2 experts' outputs in bfloat16, with weights in float32 and in bfloat16."""
    group = axis_group(make_mesh(dp=2)["dp"])
    x = torch.full((1, 1), 1.0, dtype=torch.bfloat16)
    values = torch.tensor([[1.0, 2.0**-9]])

    def experts(x, expert, scale):
        return scale.to(x.dtype) * x

    indices = torch.tensor([[0, 1]]) if group.rank == 0 else torch.tensor([[0, 1]]) + 4
    return [
        float(AllToAll(group, 4)(experts, x, indices, values.expand(1, 2).to(dtype)).float()) for dtype in
        (torch.float32, torch.bfloat16)
    ]


def test_sums_are_taken_in_the_routing_weights_precision():
    for wide, narrow in pool(2).run(half_precision):
        assert wide == narrow == 1.0  # 1 + 2**-9 rounds to 1 once, in the tokens' dtype, and nothing overflows
