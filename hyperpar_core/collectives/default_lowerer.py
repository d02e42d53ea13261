"""The default lowerer, a plugin like any other: each conversion of the table becomes one functional collective."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.distributed.tensor import Shard

from ..descriptors import CollectiveLowerer, PluginInfo
from ..hookspecs import hookimpl
from .functional import AxisGroup, convert
from .transition import Transition

__all__ = ["lower"]


@dataclass(frozen=True)
class Step:
    """One conversion forward and one backward, with the dims that each joins and cuts. Plain values: it pickles and compiles."""

    op: str
    grad_op: str
    src_dim: int
    dst_dim: int
    grad_src_dim: int
    grad_dst_dim: int

    def __call__(self, x: Tensor, group: AxisGroup, size: int | None = None) -> Tensor:
        """`x`: a local tensor; `size`: the whole length of an uneven source dim. Differentiable."""
        return convert(
            x, group, self.op, self.grad_op, src_dim=self.src_dim, dst_dim=self.dst_dim,
            grad_src_dim=self.grad_src_dim, grad_dst_dim=self.grad_dst_dim, size=size,
        )  # fmt: skip


def lower(transition: Transition) -> Step:
    """The step of `transition`, exact, on any axis and backend."""
    dims = [
        p.dim if isinstance(p, Shard) else 0
        for p in (transition.src, transition.dst, transition.grad_in, transition.grad_out)
    ]
    return Step(transition.forward, transition.backward, *dims)


@hookimpl
def hyperpar_plugin_info() -> PluginInfo:
    return PluginInfo()


@hookimpl
def hyperpar_collective_lowerers() -> list[CollectiveLowerer]:
    return [CollectiveLowerer("default", lower, summary="functional collectives, exact")]
