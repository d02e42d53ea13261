"""What a plan moves and holds, in bytes of one rank.

Convention: bytes are what this rank hands to a collective, as counted at the process group's input. For a tensor of `whole` bytes on
an axis of n ranks that is whole / n for an all-gather, whole for an all-reduce and a reduce-scatter, and whole / n for an all-to-all.
Uneven shards are counted as long as the longest, which is how they travel. A rank's parameters are counted as the first rank's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from torch.distributed.tensor import Partial, Shard

from ..apply.gradient_sums import BUCKET_BYTES
from ..collectives.transition import Transition, transitions
from ..descriptors import InnerWrapper, LocalComputeFactory, LossFactory
from ..placement import Layout, Placement, SharedShard, shard_size
from ..plan.contract import Contract
from ..plan.gradients import section_contract
from ..plan.sharding_plan import ShardingPlan
from ..plan.stacks import as_held, member
from ..plugins import get_registry

__all__ = ["GradientSum", "Movement", "fully_sharded_elements", "gradient_sums", "held_parts", "local_shape", "movements", "predict",
           "seen_shapes", "sent_by_itself", "summed"]  # fmt: skip

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")


@dataclass(frozen=True)
class Movement:
    """One collective of one step: `tensor` is an input or output of a boundary, "inside" or "loss"; `direction` forward or backward."""

    tensor: str
    direction: str
    axis: str
    collective: str
    bytes: int


@dataclass(frozen=True)
class GradientSum:
    """One bucketed all-reduce over `axis` at the end of a backward, of the gradients of `parameters`."""

    axis: str
    parameters: tuple[str, ...]
    bytes: int


def held_parts(plan: ShardingPlan, contract: Contract, name: str) -> list[tuple[int, Layout]]:
    """(the first rank's elements, placement of their gradient) of a parameter: one part, or one per section of a packed one."""
    shape = plan.parameters[f"{contract.fqn}.{name}" if contract.fqn else name]
    expert = member(contract.stacked, name)
    if expert:  # the first rank holds the first experts of a list
        here = expert[1] < contract.stacked[expert[0]] // plan.ep_size
        return [(prod(shape) if here else 0, contract.param_grad.get(name, {}))]
    sections = contract.sections.get(name)
    if not sections:
        return [
            (
                prod(local_shape(shape, contract.params[name], {**plan.sizes, "ep": plan.ep_size})),
                contract.param_grad.get(name, {}),
            )
        ]
    parts = []
    for section in sections:
        whole = tuple(section.size if dim == section.dim % len(shape) else size for dim, size in enumerate(shape))
        held, grad = section_contract(contract, name, section)
        parts.append((prod(local_shape(whole, held, plan.sizes)), grad))
    return parts


def local_shape(shape: tuple[int, ...], layout: Layout, sizes: Mapping[str, int]) -> list[int]:
    """The first rank's local shape."""
    local = list(shape)
    for axis, ranks in sizes.items():
        placement = layout.get(axis)
        if isinstance(placement, Shard):
            local[placement.dim] = shard_size(local[placement.dim], ranks, 0)[0]
    return local


def movements(
    plan: ShardingPlan, contract: Contract, batch: int, sequence: int, bytes_per_element: int
) -> list[Movement]:
    """The collectives of one boundary in a step, forward and backward, from the transition table.

    `batch` x `sequence`: a dp rank's tokens. A tensor whose width the plan doesn't know isn't counted. What an injection sends by
    itself is where its descriptor says how much.
    """
    found = sent_by_itself(plan, contract, batch, sequence, bytes_per_element)[0]
    sides: tuple[tuple[str, Mapping[str, Layout], Mapping[str, Layout], Mapping[str, Layout]], ...] = (
        ("in", contract.in_src, contract.in_dst, contract.in_grad),
        ("out", contract.out_src, contract.out_dst, {}),
    )
    for side, src, dst, grads in sides:
        for name, before in src.items():
            width = contract.features.get(name)
            if width is None or name not in dst:
                continue
            shape = (batch, sequence, width)
            grad = grads.get(name, {})
            steps = transitions(before, dst[name], grad, plan.sizes)
            forward = ((t, t.forward, t.src, t.dst) for t in steps)
            backward = ((t, t.backward, t.grad_in, t.grad_out) for t in reversed(steps))
            ids = side == "in" and contract.template == "embed"  # token ids have no gradient
            for direction, walk, at in (
                ("forward", forward, dict(before)),
                ("backward", () if ids else backward, {t.axis: t.grad_in for t in steps} | _others(dst[name], steps)),
            ):
                for t, op, a, b in walk:
                    if op in COLLECTIVES:
                        elements = _handed(shape, at, t.axis, op, a, b, plan.sizes)
                        found.append(Movement(name, direction, t.axis, op, elements * bytes_per_element))
                    at[t.axis] = b
    return found


Injection = InnerWrapper | LocalComputeFactory | LossFactory


def injections(plan: ShardingPlan, contract: Contract) -> list[tuple[str, Any]]:
    """("inside" or "loss", what is named there) of a boundary: its wrapper or local compute, and the loss at the output head."""
    named = contract.inner_wrapper if contract.inner_wrapper is not None else contract.local_compute_fn
    found = [("inside", named)] if named is not None else []
    return [*found, *([("loss", plan.loss.name)] if plan.loss is not None and contract.template == "lm_head" else [])]


def sent_by_itself(
    plan: ShardingPlan, contract: Contract, batch: int, sequence: int, width: int
) -> tuple[list[Movement], list[Any]]:
    """(what the injections of a boundary send by themselves, those of which that isn't known)."""
    moved: list[Movement] = []
    unknown: list[Any] = []
    for tensor, named in injections(plan, contract):
        descriptor = _descriptor(tensor, contract, named)
        axis = descriptor.needs_axis if descriptor is not None else None
        ranks = {**plan.sizes, "ep": plan.ep_size}.get(axis or "", 1)
        sent: Any = None
        if descriptor is not None and descriptor.traffic is not None and contract.in_dst:
            layout = next(iter(contract.in_dst.values()))
            options = plan.loss.options if tensor == "loss" and plan.loss is not None else contract.options
            sent = descriptor.traffic(
                contract=replace(contract, options=options), shapes=seen_shapes(plan, contract), ranks=ranks, width=width,
                tokens=prod(local_shape((batch, sequence, 1), layout, plan.sizes)),
            )  # fmt: skip
        if sent is None:
            unknown.append(named)
        elif axis is not None and ranks > 1:
            moved += [Movement(tensor, direction, axis, collective, bytes_) for direction, collective, bytes_ in sent]
    return moved, unknown


def _descriptor(tensor: str, contract: Contract, named: Any) -> Injection | None:
    """The descriptor of an injection; None for a callable, and for a plugin that isn't there."""
    wraps = contract.inner_wrapper is not None
    kind: type[Any] = LossFactory if tensor == "loss" else InnerWrapper if wraps else LocalComputeFactory
    found = get_registry().find(kind, named) if isinstance(named, str) else None
    return found[0] if found else None


def seen_shapes(plan: ShardingPlan, contract: Contract) -> dict[str, tuple[int, ...]]:
    """{parameter: its shape as the region of the first tp rank sees it}, and {parameter.section: ...} of packed ones."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, held in contract.params.items():
        whole = plan.parameters[f"{contract.fqn}.{name}" if contract.fqn else name]
        shapes[name] = _seen(whole, {**held, **contract.param_use.get(name, {})}, plan.sizes)
        for section in contract.sections.get(name, ()):
            dim = section.dim % len(whole)
            part = _seen((*whole[:dim], section.size, *whole[dim + 1 :]), {"tp": section.placement}, plan.sizes)
            shapes[f"{name}.{section.name}"] = part
        if name in contract.sections:
            dim = contract.sections[name][0].dim % len(whole)
            rows = sum(shapes[f"{name}.{section.name}"][dim] for section in contract.sections[name])
            shapes[name] = (*whole[:dim], rows, *whole[dim + 1 :])
    return shapes


def _seen(shape: tuple[int, ...], layout: Layout, sizes: Mapping[str, int]) -> tuple[int, ...]:
    tp = layout.get("tp")
    if isinstance(tp, SharedShard):  # a run of ranks uses the same slice
        local = list(shape)
        local[tp.dim] = local[tp.dim] * tp.copies // sizes["tp"]
        return tuple(local)
    return tuple(local_shape(shape, {"tp": tp} if tp is not None else {}, sizes))


def _others(layout: Layout, steps: tuple[Transition, ...]) -> dict[str, Placement]:
    moved = {t.axis for t in steps}
    return {axis: placement for axis, placement in layout.items() if axis not in moved}


def _handed(
    shape: tuple[int, ...], at: Layout, axis: str, op: str, src: Placement, dst: Placement, sizes: Mapping[str, int]
) -> int:
    """Elements at the input of one collective, padding included."""
    local = local_shape(shape, {a: p for a, p in at.items() if a != axis}, sizes)
    ranks = sizes[axis]
    if op in ("all_gather", "all_to_all") and isinstance(src, Shard):
        local[src.dim] = -(-local[src.dim] // ranks)
    if op in ("reduce_scatter", "all_to_all") and isinstance(dst, Shard):
        local[dst.dim] = -(-local[dst.dim] // ranks) * ranks
    return prod(local)


def gradient_sums(plan: ShardingPlan, bytes_per_element: int, dp: int = 1) -> list[GradientSum]:
    """The all-reduces at the end of a backward in which every parameter gets a gradient; over dp too where the core sums there,
    and over edp for experts."""
    members: dict[str, list[tuple[str, int]]] = {axis: [] for axis in ("dp", *plan.sizes, "edp")}
    for contract in plan.boundaries:
        for axis, parameter, elements in summed(plan, contract, dp):
            members[axis].append((parameter, elements))
    return [
        GradientSum(axis, tuple(dict.fromkeys(n for n, _ in bucket)), sum(e + 1 for _, e in bucket) * bytes_per_element)
        for axis, of_axis in members.items()
        for bucket in _buckets(of_axis, bytes_per_element)
    ]


def summed(plan: ShardingPlan, contract: Contract, dp: int) -> Iterator[tuple[str, str, int]]:
    """(axis, parameter, the first rank's elements) of every gradient, or section of one, that the core sums over an axis."""
    later = {name for group in plan.tied for name in group[1:]}
    experts = dp * prod(plan.sizes.values()) > plan.ep_size > 1
    axes = (*(("dp",) if dp > 1 else ()), *plan.sizes, *(("edp",) if experts else ()))
    for name in contract.params:
        fqn = f"{contract.fqn}.{name}" if contract.fqn else name
        for elements, grad in held_parts(plan, contract, name) if fqn not in later else ():
            for axis in axes:
                of_data = axis == ("edp" if "ep" in contract.params[name] else "dp")
                if of_data or isinstance(grad.get(axis), Partial):
                    yield axis, fqn, elements


def fully_sharded_elements(plan: ShardingPlan, contract: Contract, dp: int) -> int:
    """What a rank hands to FSDP's collectives for a boundary in a step: gathers in forward and backward, a scatter of gradients.

    Over dp x cp, experts over the other ranks of the expert mesh. Layers are resharded after the forward.
    """
    later = {name for group in plan.tied for name in group[1:]}
    ranks, experts = dp * plan.sizes.get("cp", 1), max(dp * prod(plan.sizes.values()) // plan.ep_size, 1)
    handed = 0
    for name in contract.params:
        if (f"{contract.fqn}.{name}" if contract.fqn else name) in later:
            continue
        elements = sum(count for count, _ in held_parts(plan, contract, name))
        n = experts if "ep" in contract.params[name] else ranks
        handed += 2 * -(-elements // n) + elements if n > 1 else 0
    return handed


def _buckets(members: list[tuple[str, int]], bytes_per_element: int) -> Iterator[list[tuple[str, int]]]:
    bucket: list[tuple[str, int]] = []
    size = 0
    for name, elements in members:
        if bucket and size + elements * bytes_per_element > BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, elements))
        size += elements * bytes_per_element
    if bucket:
        yield bucket


def predict(
    plan: ShardingPlan, batch: int, sequence: int, *, bytes_per_element: int = 2, dp: int = 1
) -> dict[str, tuple[int, int]]:
    """{collective: (count, bytes)} of one training step on one rank: every boundary forward and backward, and the gradient sums.

    `batch` x `sequence`: the whole sequences of one dp rank. Tokens to experts: as if every expert were as likely as any other.
    Not in it: what an injection sends by itself where its descriptor doesn't say how much, and what activation checkpointing computes
    again.
    """
    plan = as_held(plan)
    total: dict[str, tuple[int, int]] = {}
    handed = [
        (m.collective, m.bytes)
        for contract in plan.boundaries
        for m in movements(plan, contract, batch, sequence, bytes_per_element)
    ]
    handed += [("all_reduce", s.bytes) for s in gradient_sums(plan, bytes_per_element, dp)]
    for collective, size in handed:
        count, bytes_ = total.get(collective, (0, 0))
        total[collective] = (count + 1, bytes_ + size)
    return total
