"""Sums of gradients at the end of a backward: what is still Partial becomes Replicate, in one bucketed collective per axis.

A gradient's label says what it is. A backward adds Partial gradients; to let them be added, one that was summed before becomes
Partial again, kept by the first rank alone, so that accumulation over micro-batches counts nothing twice. Under no_sync the label
stays Partial. Nothing is remembered between backwards, so one that dies, or zero_grad, leaves nothing behind.
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
        self._task: int | None = None
        self._handles = [_hook(parameter, self._before(i)) for i, (parameter, _) in enumerate(self.watched)]

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
        @torch.utils.hooks.unserializable_hook  # type: ignore[untyped-decorator]
        def hook(grad: Tensor) -> None:
            task = torch._C._current_graph_task_id()
            if task != self._task:
                self._start(task)
            self._as_partial(index)

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
        self._task = task
        torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def _as_partial(self, index: int) -> None:
        """Relabels a gradient that is summed already: Partial, and kept by the first rank alone. Adding to it needs no communication."""
        parameter, axes = self.watched[index]
        like: Any = parameter.grad
        if like is None or _is_partial(like):
            return
        local = like._local_tensor
        if any(self.groups[axis].rank for axis in axes):
            local = torch.zeros_like(local)
        names = like.device_mesh.mesh_dim_names
        placements = [Partial() if name in axes else p for name, p in zip(names, like.placements, strict=True)]
        parameter.grad = DTensor.from_local(
            local, like.device_mesh, placements, run_check=False, shape=like.shape, stride=like.stride()
        )

    @torch.no_grad()
    def _finish(self) -> None:
        """The end of a backward: what is Partial on any rank is summed on all."""
        self._task = None
        if not self.enabled:
            return
        members = [i for i, (parameter, _) in enumerate(self.watched) if parameter.requires_grad]
        partial: dict[int, Tensor] = {}
        for i in members:
            self._as_partial(i)
            grad: Any = self.watched[i][0].grad
            if grad is not None:
                partial[i] = grad._local_tensor
        for axis, group in self.groups.items():
            for bucket in self._buckets([i for i in members if axis in self.watched[i][1]]):
                self._reduce(bucket, partial, group)
        for i, local in partial.items():
            self.watched[i][0].grad = _labelled(local, self.watched[i][0])

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
                # A copy: a DTensor on memory that starts within another's can't be deep-copied.
                fresh[i] = flat[offset : offset + local.numel()].view(local.shape).clone()
            offset += local.numel()


def _hook(parameter: nn.Parameter, hook: Any) -> Any:
    """Registers `hook` on a parameter's gradient, also on a frozen one: it may thaw later."""
    trained = parameter.requires_grad
    handle = parameter.requires_grad_(True).register_hook(hook)
    parameter.requires_grad_(trained)
    return handle


def _is_partial(grad: Tensor) -> bool:
    return isinstance(grad, DTensor) and any(isinstance(p, Partial) for p in grad.placements)


def _labelled(local: Tensor, parameter: nn.Parameter) -> DTensor:
    """A gradient with the sums done: it lies as the parameter does."""
    like: Any = parameter
    return DTensor.from_local(
        local.contiguous(), like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
