"""Sums of gradients at the end of a backward: what is still Partial becomes Replicate, in one bucketed collective per axis.

A gradient's label says what it is. A backward adds Partial gradients; the sums take only what this backward added, set aside from
what was summed before, so accumulation over micro-batches counts nothing twice. Under no_sync the label stays Partial.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial
from torch.utils import checkpoint

from ..collectives.functional import AxisGroup, all_reduce
from ..errors import ApplyError
from ..placement import Placement

__all__ = ["BUCKET_BYTES", "GradientSums"]

BUCKET_BYTES = 256 * 2**20  # the copy that a bucket makes is at most this large


class GradientSums:
    """Watches parameters, and sums their gradients when a backward ends. Every rank of the mesh runs the same backwards.

    parameters  {name: (DTensor parameter, placements of its gradient as a backward leaves it)}, in the same order on all ranks
    groups      {axis: its ranks}
    """

    def __init__(
        self, parameters: Mapping[str, tuple[nn.Parameter, tuple[Placement, ...]]], groups: Mapping[str, AxisGroup]
    ) -> None:
        self.groups = dict(groups)
        self.watched: list[tuple[nn.Parameter, tuple[str, ...]]] = []
        for parameter, placements in parameters.values():
            names = parameter.device_mesh.mesh_dim_names  # type: ignore[attr-defined]
            partial = tuple(axis for axis, p in zip(names, placements, strict=True) if isinstance(p, Partial))
            if partial:
                self.watched.append((parameter, partial))
        self.enabled = True
        self._kept: dict[int, Tensor] = {}
        self._task: int | None = None
        self._handles = [parameter.register_hook(self._before(i)) for i, (parameter, _) in enumerate(self.watched)]

    def remove(self) -> None:
        """Stops watching."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.watched.clear()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside leave their gradients Partial; the first one outside sums them too."""
        before, self.enabled = self.enabled, False
        try:
            yield
        finally:
            self.enabled = before

    def _before(self, index: int) -> Any:
        def hook(grad: Tensor) -> None:
            task = torch._C._current_graph_task_id()
            if task != self._task:
                self._start(task)
            parameter = self.watched[index][0]
            if parameter.grad is not None and not _is_partial(parameter.grad):
                self._kept[index] = parameter.grad
                parameter.grad = None

        return hook

    def _start(self, task: int) -> None:
        """The first gradient of a backward."""
        frame: Any = sys._getframe()
        while frame is not None:
            if frame.f_code is checkpoint.CheckpointFunction.backward.__code__:
                raise ApplyError(
                    "reentrant activation checkpointing runs backwards inside the backward, and the gradient sums can't tell"
                    " them apart.\n  Use use_reentrant=False (model.gradient_checkpointing_enable({'use_reentrant': False}))."
                )
            frame = frame.f_back
        self._restore()  # of a backward that died
        self._task = task
        torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def _restore(self) -> None:
        for index, grad in self._kept.items():
            self.watched[index][0].grad = grad
        self._kept.clear()

    @torch.no_grad()
    def _finish(self) -> None:
        self._task = None
        kept, self._kept = self._kept, {}
        if self.enabled:
            self._sum(kept)
            return
        for (
            index,
            grad,
        ) in kept.items():  # keep the two kinds apart: a DTensor sum of both would communicate, one parameter at a time
            parameter = self.watched[index][0]
            parameter.grad = (
                grad
                if parameter.grad is None
                else _as_partial(grad, self.watched[index][1], self.groups) + parameter.grad
            )

    def _sum(self, kept: dict[int, Tensor]) -> None:
        members = [i for i, (parameter, _) in enumerate(self.watched) if parameter.requires_grad]
        fresh: dict[int, Tensor] = {}
        for i in members:
            grad = self.watched[i][0].grad
            if grad is not None and _is_partial(grad):
                fresh[i] = grad._local_tensor  # type: ignore[attr-defined]
        for axis, group in self.groups.items():
            for bucket in self._buckets([i for i in members if axis in self.watched[i][1]]):
                self._reduce(bucket, fresh, group)
        for i in members:
            parameter = self.watched[i][0]
            if i in fresh:
                total = _labelled(fresh[i], parameter)
                old = kept.pop(i, None)
                if old is None and parameter.grad is not None and not _is_partial(parameter.grad):
                    old = parameter.grad
                if old is not None:
                    total._local_tensor.add_(old._local_tensor)  # type: ignore[attr-defined]
                parameter.grad = total
        for i, grad in kept.items():
            self.watched[i][0].grad = grad

    def _buckets(self, members: list[int]) -> Iterator[list[int]]:
        """Members in runs of one dtype and device, each at most BUCKET_BYTES."""
        by_kind: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for i in members:
            local = self.watched[i][0]._local_tensor  # type: ignore[attr-defined]
            by_kind.setdefault((local.dtype, local.device), []).append(i)
        for kind in by_kind.values():
            bucket: list[int] = []
            size = 0
            for i in kind:
                local = self.watched[i][0]._local_tensor  # type: ignore[attr-defined]
                if bucket and size + local.nbytes > BUCKET_BYTES:
                    yield bucket
                    bucket, size = [], 0
                bucket.append(i)
                size += local.nbytes
            if bucket:
                yield bucket

    def _reduce(self, bucket: list[int], fresh: dict[int, Tensor], group: AxisGroup) -> None:
        """One all-reduce over the bucket. Every member travels on every rank, so that ranks that miss one don't get out of step."""
        locals_ = [self.watched[i][0]._local_tensor for i in bucket]  # type: ignore[attr-defined]
        present = locals_[0].new_tensor([float(i in fresh) for i in bucket])
        pieces = [
            (fresh[i] if i in fresh else torch.zeros_like(x)).reshape(-1) for i, x in zip(bucket, locals_, strict=True)
        ]
        flat = all_reduce(torch.cat([*pieces, present]), group)
        # What is here is present somewhere; only a rank that misses something has to read the counts.
        counts = [1.0] * len(bucket) if all(i in fresh for i in bucket) else flat[-len(bucket) :].tolist()
        offset = 0
        for i, local, count in zip(bucket, locals_, counts, strict=True):
            if count:
                fresh[i] = flat[offset : offset + local.numel()].view(local.shape)
            offset += local.numel()


def _is_partial(grad: Tensor) -> bool:
    return isinstance(grad, DTensor) and any(isinstance(p, Partial) for p in grad.placements)


def _labelled(local: Tensor, parameter: nn.Parameter) -> DTensor:
    """A gradient with the sums done: it lies as the parameter does."""
    like: Any = parameter
    return DTensor.from_local(
        local.contiguous(), like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def _as_partial(grad: Tensor, axes: tuple[str, ...], groups: Mapping[str, AxisGroup]) -> Tensor:
    """A summed gradient as a Partial one over `axes`: the first rank of each keeps it."""
    like: Any = grad
    local = like._local_tensor
    if any(groups[axis].rank for axis in axes):
        local = torch.zeros_like(local)
    names = like.device_mesh.mesh_dim_names
    placements = [Partial() if name in axes else p for name, p in zip(names, like.placements, strict=True)]
    return DTensor.from_local(
        local, like.device_mesh, placements, run_check=False, shape=like.shape, stride=like.stride()
    )
