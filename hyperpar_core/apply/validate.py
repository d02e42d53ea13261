"""Validate mode: a region computes on DTensors, and every placement that DTensor propagates is compared with the contract.

Forward, the placements of each output with out_src; backward, those of each input's gradient with in_grad and of each parameter's
with param_grad. What travels between boundaries stays plain, so transitions, black boxes and numbers are production's own. A black
box (region_dispatch false) computes on local tensors and is taken at its word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.experimental import implicit_replication, register_sharding
from torch.utils import _pytree as pytree

from ..collectives.functional import all_reduce, axis_group
from ..collectives.transition import gradient_placement
from ..errors import PlacementMismatch
from ..placement import Layout, Placement, SharedShard, format_placement, layout_on
from ..plan.contract import Contract

__all__ = ["ParameterView", "Validation", "dispatches", "register_strategies"]

_registered = False


def dispatches(contract: Contract) -> bool:
    """Whether validate mode propagates through a region: it injects nothing, or declares that it uses ordinary operators only.

    A region that sees a parameter as another slice than DTensor would (shared heads, packed sections) is taken at its word.
    """
    if contract.injects and contract.region_dispatch is not True:
        return False
    if contract.region_dispatch is False or contract.sections:
        return False
    if not contract.out_src:  # the entry of the stack: it only hands tokens on
        return False
    return not any(isinstance(p, SharedShard) for use in contract.param_use.values() for p in use.values())


def register_strategies() -> None:
    """DTensor strategies that torch lacks: the CPU attention operator is sharded over heads, over the batch, or not at all; an empty
    tensor of another size keeps what it can of its model's placement (latent attention fills its keys in part by part)."""
    global _registered
    if _registered:
        return
    aten = torch.ops.aten

    @register_sharding(aten._scaled_dot_product_flash_attention_for_cpu.default)  # type: ignore[untyped-decorator]
    def forward(q: Any, k: Any, v: Any, *args: Any, attn_mask: Any = None, scale: Any = None) -> list[Any]:
        rest: list[Any] = [None] * len(args)
        mask: list[Any] = [] if attn_mask is None else [Replicate()]
        choices: list[Any] = [([Replicate()] * 2, [Replicate()] * 3 + rest + mask)]
        per_head = Shard(1) if attn_mask is not None and attn_mask.shape[1] > 1 else Replicate()
        per_row = Shard(0) if attn_mask is not None and attn_mask.shape[0] > 1 else Replicate()
        choices.append(([Shard(1)] * 2, [Shard(1)] * 3 + rest + ([] if attn_mask is None else [per_head])))
        choices.append(([Shard(0)] * 2, [Shard(0)] * 3 + rest + ([] if attn_mask is None else [per_row])))
        return choices

    @register_sharding(aten._scaled_dot_product_flash_attention_for_cpu_backward.default)  # type: ignore[untyped-decorator]
    def backward(
        grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *args: Any, attn_mask: Any = None, scale: Any = None
    ) -> list[Any]:
        rest: list[Any] = [None] * len(args)
        choices: list[Any] = [
            ([Replicate()] * 3, [Replicate()] * 6 + rest + ([] if attn_mask is None else [Replicate()]))
        ]
        per_head = Shard(1) if attn_mask is not None and attn_mask.shape[1] > 1 else Replicate()
        per_row = Shard(0) if attn_mask is not None and attn_mask.shape[0] > 1 else Replicate()
        choices.append(([Shard(1)] * 3, [Shard(1)] * 6 + rest + ([] if attn_mask is None else [per_head])))
        choices.append(([Shard(0)] * 3, [Shard(0)] * 6 + rest + ([] if attn_mask is None else [per_row])))
        return choices

    @register_sharding(aten.new_empty.default)  # type: ignore[untyped-decorator]
    def new_empty(x: Any, size: Any, **kwargs: Any) -> list[Any]:
        same = tuple(x.shape) == tuple(size)
        choices: list[Any] = [([Replicate()], [Replicate(), None]), ([Partial() if same else Replicate()], [Partial(), None])]
        if len(x.shape) == len(size):
            choices += [([Shard(d)], [Shard(d), None]) for d in range(len(size)) if x.shape[d] == size[d]]
        return choices

    _registered = True


@contextmanager
def plain_is_replicated() -> Iterator[None]:
    """torch's implicit_replication, which can stand inside itself."""
    dispatcher = DTensor._op_dispatcher
    before = dispatcher._allow_implicit_replication
    with implicit_replication():
        yield
    dispatcher._allow_implicit_replication = before


def _in_backward(running: bool) -> None:
    """The same for the operators of a region's backward, from the gradient of its output to that of its input."""
    DTensor._op_dispatcher._allow_implicit_replication = running


def _differences(
    have: tuple[Placement, ...], declared: tuple[Placement, ...], axes: tuple[str, ...], ndim: int
) -> list[str]:
    """ "axis: have, declared ..." for every axis where the two part."""

    def settled(p: Placement) -> Placement:
        return Shard(p.dim % ndim) if isinstance(p, Shard) and ndim else p

    return [
        f"{format_placement(settled(a))} over {axis}, and the contract declares {format_placement(settled(b))}"
        for a, b, axis in zip(have, declared, axes, strict=True)
        if settled(a) != settled(b)
    ]


class Validation:
    """What one region does in validate mode. `report` receives (fqn, problem); it raises, or notes it and lets the run go on."""

    def __init__(
        self,
        contract: Contract,
        mesh: DeviceMesh,
        axes: tuple[str, ...],
        report: Callable[[str, str], None],
        lengths: Any,
    ) -> None:
        self.contract, self.mesh, self.axes, self.report = contract, mesh, axes, report
        self.dispatch = dispatches(contract)
        self.lengths = lengths  # the model's state: it knows the length of an uneven sequence
        self.nested = False

    # between this region and one around it that computes on DTensors

    def arrive(self, name: str, x: DTensor) -> Tensor:
        """The local part of an input that an outer region hands over, after a look at its placements."""
        self.nested = True
        declared = layout_on(self.contract.in_src[name], self.axes)
        self._compare(f"input {name!r}", x.placements, declared, "in_src", x.ndim)
        if x.requires_grad:  # past this region, the backward is the outer one's again
            x.register_hook(lambda g: _in_backward(True))
        return x.to_local(grad_placements=tuple(gradient_placement(p) for p in self._settled(declared, x.ndim)))

    def depart(self, name: str, x: Tensor) -> Tensor:
        """An output as the outer region needs it."""
        return self._wrapped(x, self.contract.out_dst[name], None) if self.nested else x

    # the compute

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Plain tensors inside the region (masks, rotary tables, constants) count as replicated."""
        if not self.dispatch:
            yield
            return
        with plain_is_replicated():
            yield

    def others(self, args: Any) -> Any:
        """Every plain tensor among a call's other arguments, as a replicated DTensor: the backward needs them too."""
        if not self.dispatch:
            return pytree.tree_map_only(DTensor, lambda x: x.to_local(), args)
        return pytree.tree_map_only(Tensor, lambda x: x if isinstance(x, DTensor) else self._wrapped(x, {}, None), args)

    def enter(self, name: str, x: Tensor) -> Tensor:
        """A declared input as the compute sees it, with a look at its gradient."""
        if not self.dispatch:
            return x
        grad = self.contract.in_grad.get(name, {})
        wrapped = self._wrapped(x, self.contract.in_dst[name], grad)
        if wrapped.requires_grad:
            declared = layout_on(grad, self.axes)

            def look(g: DTensor) -> None:
                _in_backward(False)
                self._compare(f"gradient of input {name!r}", g.placements, declared, "in_grad", g.ndim)

            wrapped.register_hook(look)
        return wrapped

    def leave(self, name: str, x: Tensor) -> Tensor:
        """An output of the compute, as a local tensor, after a look at its placements."""
        if not self.dispatch:
            return x
        declared = layout_on(self.contract.out_src[name], self.axes)
        if not isinstance(x, DTensor):
            x = self._wrapped(x, {}, None)
        self._compare(f"output {name!r}", x.placements, declared, "out_src", x.ndim)
        if x.requires_grad:
            x.register_hook(lambda g: _in_backward(True))
        return x.to_local(grad_placements=tuple(gradient_placement(p) for p in self._settled(declared, x.ndim)))

    # details

    def _compare(
        self, what: str, have: tuple[Placement, ...], declared: tuple[Placement, ...], field: str, ndim: int
    ) -> None:
        self.lengths.where = self.contract.fqn  # an operator that fails next, fails here
        for difference in _differences(tuple(have), declared, self.axes, ndim):
            self.report(self.contract.fqn, f"{what} is {difference} ({field})")

    @staticmethod
    def _settled(placements: tuple[Placement, ...], ndim: int) -> tuple[Placement, ...]:
        return tuple(Shard(p.dim % ndim) if isinstance(p, Shard) else p for p in placements)

    def _wrapped(self, x: Tensor, layout: Layout, grad: Layout | None) -> DTensor:
        placements = self._settled(layout_on(layout, self.axes), x.ndim)
        shape = list(x.shape)
        for i, p in reversed(list(enumerate(placements))):
            if isinstance(p, Shard):
                shape[p.dim] = self._whole(shape[p.dim], i, p.dim)
        return DTensor.from_local(
            x, self.mesh, placements, run_check=False, shape=torch.Size(shape), stride=_strides(shape),
            grad_placements=None if grad is None else self._settled(layout_on(grad, self.axes), x.ndim),
        )  # fmt: skip

    def _whole(self, length: int, axis: int, dim: int) -> int:
        """The whole length of a cut dim. An uneven sequence is asked for: validate mode may spend a collective."""
        if not self.lengths.uneven:
            return length * self.mesh.size(axis)
        group = axis_group(self.mesh if self.mesh.ndim == 1 else self.mesh[self.axes[axis]])
        return int(all_reduce(torch.tensor(length), group).item())


class ParameterView:
    """A validated region's view of a parameter: a DTensor on the plan's axes, with a look at its gradient."""

    def __init__(
        self,
        validation: Validation,
        name: str,
        shape: torch.Size,
        layout: Layout,
        grad: Layout,
        inner: Callable[[Tensor], Tensor] | None,
    ) -> None:
        self.validation, self.name, self.shape, self.inner = validation, name, shape, inner
        self.placements = Validation._settled(layout_on(layout, validation.axes), len(shape))
        self.grad = Validation._settled(layout_on(grad, validation.axes), len(shape))

    def __call__(self, local: Tensor) -> Tensor:
        if self.inner is not None:
            local = self.inner(local)
        partial = any(isinstance(p, Partial) for p in self.placements)
        seen = DTensor.from_local(
            local, self.validation.mesh, self.placements, run_check=False, shape=self.shape, stride=_strides(self.shape),
            grad_placements=None if partial else self.grad,
        )  # fmt: skip
        if seen.requires_grad:
            what = f"gradient of parameter {self.name!r}"
            seen.register_hook(lambda g: self.validation._compare(what, g.placements, self.grad, "param_grad", g.ndim))
        return seen


def raise_mismatch(fqn: str, problem: str) -> None:
    """The report of a live run."""
    raise PlacementMismatch(f"{fqn}: {problem}.")


def _strides(shape: torch.Size | list[int]) -> tuple[int, ...]:
    strides = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        strides[i] = strides[i + 1] * shape[i + 1]
    return tuple(strides)


def sees_local(contract: Contract, mode: str) -> bool:
    """Whether a region computes on local tensors, so that head counts have to be divided for it."""
    return mode != "validate" or not dispatches(contract)
