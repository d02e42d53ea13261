"""Every conversion of the transition table, forward and backward, against plain slices and sums of whole tensors."""

import itertools

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard

from hyperpar_core.collectives import functional
from hyperpar_core.collectives.default_lowerer import lower
from hyperpar_core.collectives.transition import Transition, conversion, gradient_placement, transitions
from hyperpar_core.errors import PlanError
from hyperpar_core.testing import pool

R, P, S = Replicate(), Partial(), Shard
DIMS = (0, 1, 2, -1)
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-14, torch.bfloat16: 2e-2}

# (src, dst, gradient in, gradient out): the rows of the table, each dim of a shard a letter.
ROWS = (
    ("R", "R", "R", "R"),
    ("R", "R", "P", "R"),
    ("Sa", "R", "P", "Sa"),
    ("Sa", "R", "R", "Sa"),
    ("P", "R", "R", "R"),
    ("P", "Sa", "Sa", "R"),
    ("R", "Sa", "Sa", "R"),
    ("Sa", "Sb", "Sb", "Sa"),
    ("R", "P", "R", "R"),
)


# ---- the plain reference: a whole tensor, and each rank's part of it


def plain_shard(x, dim, ranks, rank):
    """What torch.chunk gives `rank`, empty where it gives nothing."""
    chunks = torch.chunk(x, ranks, dim) if x.shape[dim] else ()
    return chunks[rank] if rank < len(chunks) else x.narrow(dim, 0, 0)


def held(x, placement, ranks, rank, seed):
    """This rank's part of the whole tensor `x`; a partial one is a summand, different on each rank."""
    if isinstance(placement, Shard):
        return plain_shard(x, placement.dim, ranks, rank).clone()
    if isinstance(placement, Partial):
        generator = torch.Generator().manual_seed(seed)
        parts = [torch.randint(-8, 9, x.shape, generator=generator).to(x.dtype) for _ in range(ranks - 1)]
        parts.append(x - sum(parts[1:], parts[0]) if parts else x)
        return parts[rank].clone()
    return x.clone()


def whole_numbers(shape, dtype, seed):
    """Small whole numbers: their sums are exact in every dtype."""
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def represents(local, placement, x, ranks, rank):
    """Whether the parts of all ranks are those of `x`; for a partial one their sum."""
    if isinstance(placement, Partial):
        local = local.clone()
        dist.all_reduce(local)
        placement = R
    expected = held(x, placement, ranks, rank, 0)
    return local.shape == expected.shape and torch.equal(local, expected)


def convert_all(lengths, dtype):
    """The conversions that are wrong on this rank, as text."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    group = functional.axis_group(mesh["tp"])
    ranks, rank, wrong, done = group.ranks, group.rank, [], 0
    for length, row in itertools.product(lengths, ROWS):
        for a, b in itertools.product(DIMS, DIMS):
            uses = {letter for part in row for letter in part if letter in "ab"}
            if ("a" not in uses and a != 0) or ("b" not in uses and b != DIMS[0]) or ("b" in uses and a % 3 == b % 3):
                continue
            shape = [3, 4, 2]
            for dim in (a, *((b,) if "b" in uses else ())):
                shape[dim] = length
            places = {"R": R, "P": P, "Sa": S(a), "Sb": S(b)}
            src, dst, grad_in, grad_out = (places[name] for name in row)
            step = lower(Transition("tp", src, dst, grad_in, grad_out))
            x, gradient = whole_numbers(shape, dtype, 1), whole_numbers(shape, dtype, 2)
            local = held(x, src, ranks, rank, 3).requires_grad_()
            out = step(local, group, shape[src.dim] if isinstance(src, Shard) else None)
            good = represents(out.detach(), dst, x, ranks, rank)
            out.backward(held(gradient, grad_in, ranks, rank, 4))
            back = local.grad is not None and represents(local.grad, grad_out, gradient, ranks, rank)
            done += 1
            if not (good and back and out.dtype == local.grad.dtype == dtype):
                wrong.append(f"{row} a={a} b={b} length={length}: forward {good}, backward {back}")
    return done, wrong


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_every_row_of_the_table_carries_values_and_gradients_also_of_uneven_and_empty_shards(ranks, dtype):
    lengths = (0, 1, 2, 3, 5, 8) if dtype == torch.float32 else (1, 5)
    for done, wrong in pool(ranks).run(convert_all, lengths, dtype):
        assert done > len(lengths) * len(ROWS) and wrong == []


def even_without_size(dtype):
    """Where shards are even, the whole length needn't be told; scalars and non-contiguous tensors travel too."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))["tp"]
    n, rank = mesh.size(), mesh.get_local_rank()
    x = whole_numbers((3, 2 * n, 4 * n), dtype, 1)
    mine = plain_shard(x, 1, n, rank)
    transposed = plain_shard(x.transpose(0, 2), 1, n, rank)
    return (
        torch.equal(functional.all_gather(mine, 1, mesh), x),
        torch.equal(functional.all_gather(mine.contiguous(), -2, mesh), x),
        torch.equal(functional.all_gather(transposed, 1, mesh), x.transpose(0, 2)),
        torch.equal(functional.all_to_all(mine, 1, 2, mesh), plain_shard(x, 2, n, rank)),
        torch.equal(functional.reduce_scatter(x.transpose(0, 2), -1, mesh), n * plain_shard(x.transpose(0, 2), -1, n, rank)),
        float(functional.all_reduce(torch.tensor(rank + 1.0, dtype=dtype), mesh)) == n * (n + 1) / 2,
        float(functional.all_reduce(torch.tensor(rank + 1.0, dtype=dtype), mesh, "max")) == n,
        torch.equal(functional.exchange(torch.full((n, 2), float(rank)), None, None, mesh)[:, 0], torch.arange(n).float()),
    )


def test_even_shards_need_no_size_and_any_strides_travel():
    for results in pool(4).run(even_without_size, torch.float32):
        assert all(results), results


def sums_that_round(dtype):
    """Relative differences of sums of random values from the sum in float64."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))["tp"]
    parts = [torch.randn(7, 5, generator=torch.Generator().manual_seed(r), dtype=torch.float64) for r in range(mesh.size())]
    parts = [p.to(dtype) for p in parts]
    expected = sum(p.double() for p in parts)
    mine = parts[mesh.get_local_rank()]
    reduced = functional.all_reduce(mine, mesh).double()
    scattered = functional.reduce_scatter(mine, 0, mesh).double()
    own = plain_shard(expected, 0, mesh.size(), mesh.get_local_rank())
    scale = float(expected.abs().max())
    return float((reduced - expected).abs().max()) / scale, float((scattered - own).abs().max()) / scale if own.numel() else 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_sums_are_as_exact_as_their_dtype(dtype):
    for errors in pool(4).run(sums_that_round, dtype):
        assert max(errors) <= TOLERANCE[dtype]


def identity_backward():
    """What the identity with an all-reduced gradient does to its input, in place or not."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))["tp"]
    step = lower(Transition("tp", R, R, P, R))
    group = functional.axis_group(mesh)
    x = torch.ones(3, requires_grad=True)
    inner = step(x * 1, group)
    inner *= 3  # as a router's input jitter does
    (inner * (group.rank + 1)).sum().backward()
    with torch.no_grad():
        same = step(x, group) is x
    return x.grad.tolist(), same, step(torch.ones(2), group).requires_grad


def test_an_identity_boundary_allows_in_place_operators_and_costs_nothing_without_gradients():
    for gradient, same, requires in pool(2).run(identity_backward):
        assert gradient == [9.0] * 3 and same and not requires


def changed_in_place(ranks):
    """Every row of the table on one sequence, even and uneven, whose result is flattened and changed in place."""
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))["tp"]
    group = functional.axis_group(mesh)
    for length in (2 * ranks, 2 * ranks - 1):
        for src, dst in ((S(1), R), (P, R), (P, S(1)), (R, S(1)), (S(1), S(2)), (R, P)):
            whole = whole_numbers((1, length, ranks), torch.float32, 1)
            x = held(whole, src, ranks, group.rank, 2).requires_grad_()
            step = lower(Transition("tp", src, dst, gradient_placement(dst), gradient_placement(src)))
            size = length if src == S(1) else None
            out = (step(x, group, size) if size else step(x, group)).flatten(0, 1)
            out *= 2
            out.sum().backward()
            yield tuple(x.grad.unique().tolist())


def changed_everywhere(ranks):
    return list(changed_in_place(ranks))


def test_what_a_step_yields_can_be_changed_in_place_as_blocks_do():
    for gradients in pool(2).run(changed_everywhere, 2):
        assert gradients == [(2.0,)] * 12


# ---- the algebra of the table, on simulated ranks


@st.composite
def placements(draw, kinds="RSP", dims=3):
    kind = draw(st.sampled_from(kinds))
    return S(draw(st.integers(0, dims - 1))) if kind == "S" else {"R": R, "P": P}[kind]


def split(parts, axis, placement, sizes):
    """The whole tensor of each group of ranks along `axis`, cut as `placement` says. parts: {coordinate: tensor}."""
    out = {}
    for at, x in parts.items():
        out[at] = held(x, placement, sizes[axis], at[axis], sum(at[:axis]) + 10 * axis)
    return out


def lay(x, layout, axes, sizes):
    """{coordinate: local tensor} of a whole tensor, cut in mesh order."""
    parts = {at: x for at in itertools.product(*(range(n) for n in sizes))}
    for i, axis in enumerate(axes):
        parts = split(parts, i, layout.get(axis, R), sizes)
    return parts


def join(parts, layout, axes, sizes):
    """The inverse of `lay`, on the first rank; None when replicas differ."""
    for i in reversed(range(len(axes))):
        placement, merged = layout.get(axes[i], R), {}
        for at in parts:
            line = [parts[(*at[:i], k, *at[i + 1 :])] for k in range(sizes[i])]
            if isinstance(placement, Shard):
                merged[at] = torch.cat(line, placement.dim)
            elif isinstance(placement, Partial):
                merged[at] = sum(line[1:], line[0])
            else:
                if not all(x.shape == line[0].shape and torch.equal(x, line[0]) for x in line):
                    return None
                merged[at] = line[0]
        parts = merged
    return parts[(0,) * len(axes)]


def simulate(op, parts, i, sizes, src, dst):
    """One conversion on all ranks: the plain meaning of each name in the table."""
    out = {}
    for at, x in parts.items():
        line = [parts[(*at[:i], k, *at[i + 1 :])] for k in range(sizes[i])]
        cut = lambda y, i=i, at=at: plain_shard(y, dst.dim, sizes[i], at[i])  # noqa: E731
        out[at] = {
            "identity": lambda x=x: x,
            "all_gather": lambda line=line: torch.cat(line, src.dim),
            "all_reduce": lambda line=line: sum(line[1:], line[0]),
            "reduce_scatter": lambda line=line, cut=cut: cut(sum(line[1:], line[0])),
            "shard": lambda x=x, cut=cut: cut(x),
            "all_to_all": lambda line=line, cut=cut: cut(torch.cat(line, src.dim)),
            "keep_first": lambda x=x, at=at, i=i: x if at[i] == 0 else torch.zeros_like(x),
        }[op]()
    return out


AXES = ("cp", "tp")


@settings(max_examples=200, deadline=None)
@given(st.data(), st.tuples(st.integers(1, 3), st.integers(1, 4)), st.tuples(*[st.integers(0, 7)] * 3))
def test_steps_over_two_axes_carry_the_value_forward_and_the_gradient_back(data, sizes, shape):
    src = {axis: data.draw(placements(), label=f"src {axis}") for axis in AXES}
    dst = {axis: data.draw(placements(), label=f"dst {axis}") for axis in AXES}
    grad = {}
    for axis in AXES:  # the gradient of replicated data may be partial: each rank used it for its own part
        if isinstance(dst[axis], Replicate) and not isinstance(src[axis], Partial):
            grad[axis] = data.draw(placements("RP"), label=f"grad {axis}")
    try:
        steps = transitions(src, dst, grad, AXES)
    except PlanError:  # never on the way to whole tensors, nor from them
        assert not all(isinstance(dst[axis], Replicate) for axis in AXES)
        assert not all(isinstance(src[axis], Replicate) for axis in AXES)
        return
    x, gradient = whole_numbers(shape, torch.float64, 1), whole_numbers(shape, torch.float64, 2)
    parts = lay(x, src, AXES, sizes)
    for step in steps:
        parts = simulate(step.forward, parts, AXES.index(step.axis), sizes, step.src, step.dst)
    out = join(parts, dst, AXES, sizes)
    assert out is not None and torch.equal(out, x)
    at_dst = {axis: grad.get(axis, gradient_placement(dst[axis])) for axis in AXES}
    back = lay(gradient, at_dst, AXES, sizes)
    for step in reversed(steps):
        back = simulate(step.backward, back, AXES.index(step.axis), sizes, step.grad_in, step.grad_out)
    at_src = {axis: gradient_placement(src[axis]) for axis in AXES}
    steps_of = {step.axis for step in steps}
    at_src.update({axis: at_dst[axis] for axis in AXES if axis not in steps_of})
    result = join(back, at_src, AXES, sizes)
    assert result is not None and torch.equal(result, gradient)


def test_no_table_row_leaves_a_gradient_partial_unless_the_tensor_was_replicated_and_stayed():
    for src, dst in itertools.product((R, P, S(0), S(1)), repeat=2):
        try:
            conversion(src, dst)
        except PlanError:
            assert isinstance(src, Shard) and isinstance(dst, Partial)
            continue
        (step,) = transitions({"tp": src}, {"tp": dst}, {}, ("tp",)) or (None,)
        if step is not None:
            assert not isinstance(step.grad_out, Partial)
            assert step.grad_out == (R if isinstance(src, Partial) else src)


@pytest.mark.parametrize("placement", [Partial("max"), Partial("avg")])
def test_a_reduction_that_isnt_a_sum_has_no_transition(placement):
    with pytest.raises(PlanError, match="only sums"):
        transitions({"tp": placement}, {"tp": R}, {}, ("tp",))


@pytest.mark.parametrize(
    ("src", "dst", "order"),
    [
        ({"cp": S(1), "tp": S(1)}, {}, "tp cp"),
        ({}, {"cp": S(1), "tp": S(1)}, "cp tp"),
        ({"cp": S(1), "tp": S(1)}, {"cp": S(1)}, "tp"),
        ({"cp": S(1), "tp": P}, {"cp": S(1), "tp": S(1)}, "tp"),
        ({"cp": P, "tp": P}, {"cp": S(1), "tp": S(1)}, "cp tp"),
        ({"cp": S(2), "tp": S(1)}, {"cp": S(2)}, "tp"),
    ],
)
def test_cuts_run_from_the_outer_axis_in_and_gathers_from_the_inner_one_out(src, dst, order):
    assert " ".join(step.axis for step in transitions(src, dst, {}, AXES)) == order


@pytest.mark.parametrize(
    ("src", "dst"),
    [
        ({"tp": S(1)}, {"cp": S(1), "tp": S(1)}),
        ({"cp": S(1), "tp": S(1)}, {"tp": S(1)}),
        ({"cp": S(2), "tp": S(1)}, {"tp": S(2)}),
        ({"cp": P, "tp": S(1)}, {"cp": S(1), "tp": S(1)}),
    ],
)
def test_an_outer_axis_cant_cut_or_join_a_dim_that_an_inner_one_keeps_cut(src, dst):
    with pytest.raises(PlanError, match="inner"):
        transitions(src, dst, {}, AXES)
