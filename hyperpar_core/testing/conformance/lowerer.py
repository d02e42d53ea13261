"""The suite of lowerers: each transition against the default's, forward and backward, and whole models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard

from ... import make_mesh
from ...collectives.functional import AxisGroup, axis_group
from ...collectives.transition import Transition
from ...descriptors import CollectiveLowerer
from ...placement import PLAN_AXES, Placement, format_placement, shard_size
from ...plugins import get_registry
from ..verify import Degrees
from .suite import Conformance, Ranks

__all__ = ["LowererConformance"]

EXACT = 1e-6  # of the largest value: the order of a sum may differ
R, P = Replicate(), Partial()
# (src, dst, gradient in, gradient out): the rows of the transition table.
ROWS: tuple[tuple[Placement, Placement, Placement, Placement], ...] = (
    (R, R, P, R),
    (Shard(1), R, P, Shard(1)), (Shard(-1), R, P, Shard(-1)), (Shard(1), R, R, Shard(1)),
    (P, R, R, R), (P, Shard(1), Shard(1), R), (P, Shard(-1), Shard(-1), R),
    (R, Shard(1), Shard(1), R), (Shard(1), Shard(2), Shard(2), Shard(1)), (R, P, R, R),
)  # fmt: skip
SHAPE = (2, 8, 12)  # [batch, sequence, features], whole
UNEVEN = (2, 5, 12)  # on four ranks the last one's part is empty
SENT = {"all_gather", "reduce_scatter", "all_reduce", "all_to_all"}


@dataclass(frozen=True)
class Compared:
    """One transition against the default's: errors relative to the largest value, or to the largest sum of absolute summands."""

    what: str
    taken: bool
    forward: float = 0.0
    backward: float = 0.0
    replicas: bool = True


class LowererConformance(Conformance):
    """The suite of a CollectiveLowerer. It is put on every boundary of the model.

    lowers     the conversions (all_gather, reduce_scatter, ...) that it takes, all of them
    bounds     of whole models: an inexact lowerer states them; an exact one leaves the comparer's own
    """

    kind: ClassVar[type] = CollectiveLowerer
    lowers: Sequence[str] = ()

    def entries(self, model: Any, degrees: Degrees, options: Mapping[str, Any]) -> list[dict[str, Any]]:
        return [{"match": "*", "lowerer": self.name}]

    def default_degrees(self) -> Sequence[Degrees]:
        return Degrees(tp=2), Degrees(tp=2, options={"sequence_parallel": False}), Degrees(tp=4)

    def _axes(self) -> Sequence[str]:
        return self.descriptor().axes or PLAN_AXES

    def _allowed(self) -> float:
        descriptor = self.descriptor()
        return EXACT if descriptor.exact else float(descriptor.error or 0.0)

    def test_it_lowers_what_it_says_and_leaves_the_rest_to_the_default(self) -> None:
        taken = set()
        for transition in _transitions(self._axes()[0]):
            call = self.descriptor().lower(transition)
            assert call is None or callable(call), f"lower returned {call!r} for {_shown(transition)}"
            if call is not None:
                taken |= {transition.forward, transition.backward} & SENT
        assert taken, "it lowers no transition of the table"
        assert taken == set(self.lowers), f"it takes {', '.join(sorted(taken))}; the suite says {', '.join(self.lowers)}"

    def test_an_inexact_one_declares_so_with_a_bound_and_the_suite_has_bounds_for_models(self) -> None:
        descriptor = self.descriptor()
        if descriptor.exact:
            assert descriptor.error is None and self.bounds is None, "an exact lowerer needs no bound of its own"
        else:
            assert descriptor.error, "exact=False: state `error`, the bound of one transition"
            assert self.bounds is not None, "exact=False: state `bounds` for whole models"

    def test_two_ranks_compute_what_the_default_computes_forward_and_backward(self, ranks: Ranks) -> None:
        self._check(ranks, 2)

    def test_four_ranks_compute_what_the_default_computes_forward_and_backward(self, ranks: Ranks) -> None:
        self._check(ranks, 4)

    def _check(self, ranks: Ranks, size: int) -> None:
        found = ranks(size).run(_compare, self.name, self._axes()[0], size)
        assert any(one.taken for one in found[0])
        allowed = self._allowed()
        wrong = [
            f"rank {rank}: {one.what}: forward {one.forward:.2g}, backward {one.backward:.2g} off; allowed: {allowed:.2g}"
            for rank, several in enumerate(found)
            for one in several
            if not (one.forward <= allowed and one.backward <= allowed)
        ]
        assert not wrong, "\n".join(wrong)
        differ = [one.what for one in found[0] if not one.replicas]
        assert not differ, f"ranks hold different bits of one replicated value: {', '.join(differ)}"

    def test_the_report_says_when_the_lowerer_isn_t_exact(self, ranks: Ranks) -> None:
        said = self._report(0).text()
        assert ("not exact" in said and self.name in said) is not self.descriptor().exact, said


# ---- one transition


def _transitions(axis: str) -> list[Transition]:
    return [Transition(axis, *row) for row in ROWS]


def _shown(t: Transition) -> str:
    src, dst, grad_in, grad_out = map(format_placement, (t.src, t.dst, t.grad_in, t.grad_out))
    return f"{src} -> {dst}, gradient {grad_in} -> {grad_out}"


def _compare(name: str, axis: str, size: int) -> list[Compared]:
    """Every transition of the table, even and uneven, on this rank."""
    group = axis_group(make_mesh(tp=size, device_type="cpu"))
    lower = get_registry().lowerer(name)[0].lower
    default = get_registry().lowerer("default")[0].lower
    found = []
    for transition in _transitions(axis):
        call = lower(transition)
        for shape in (SHAPE, UNEVEN):
            what = f"{_shown(transition)} of {list(shape)}"
            if call is None:
                found.append(Compared(what, False))
                continue
            exact = default(transition)
            assert exact is not None
            found.append(_one(what, transition, shape, group, call, exact))
    return found


def _one(what: str, t: Transition, shape: tuple[int, ...], group: AxisGroup, call: Any, exact: Any) -> Compared:
    x, scale = _local(t.src, shape, group, seed=1)
    size = shape[t.src.dim] if isinstance(t.src, Shard) else None
    results = []
    for step in (call, exact):
        mine = x.clone().requires_grad_()
        out = step(mine, group, size) if t.forward in ("all_gather", "all_to_all") else step(mine, group)
        grad, grad_scale = _local(t.grad_in, shape, group, seed=2)
        out.backward(grad)
        results.append((out.detach(), mine.grad, grad_scale))
    (ours, our_grad, grad_scale), (theirs, their_grad, _) = results
    assert our_grad is not None and their_grad is not None and ours.shape == theirs.shape, (what, ours.shape, theirs.shape)
    forward = float((ours - theirs).abs().max()) / scale if ours.numel() else 0.0
    backward = float((our_grad - their_grad).abs().max()) / grad_scale if our_grad.numel() else 0.0
    same = (t.dst != R or _equal_everywhere(ours)) and (t.grad_out != R or _equal_everywhere(our_grad))
    return Compared(what, True, forward, backward, same)


def _local(placement: Placement, shape: tuple[int, ...], group: AxisGroup, seed: int) -> tuple[Tensor, float]:
    """(this rank's part of a random tensor, its scale: the largest value, of summands the largest sum of absolute values)."""
    generator = torch.Generator().manual_seed(seed)
    if isinstance(placement, Partial):
        parts = torch.randn(group.ranks, *shape, generator=generator)
        return parts[group.rank].clone(), float(parts.abs().sum(0).max())
    whole = torch.randn(shape, generator=generator)
    scale = float(whole.abs().max())
    if not isinstance(placement, Shard):
        return whole, scale
    length, offset = shard_size(shape[placement.dim], group.ranks, group.rank)
    return whole.narrow(placement.dim, offset, length).clone(), scale


def _equal_everywhere(x: Tensor) -> bool:
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, x)
    return all(torch.equal(parts[0], other) for other in parts)
