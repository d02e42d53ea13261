"""Tensors of a checkpoint that aren't read yet.

transformers converts a checkpoint's tensors with torch's own functions: it stacks experts, joins projections, cuts, transposes. On these
tensors that is noted instead of done; what a rank then asks for, a box of the result, is read from the file straight to where it is
needed. A function that isn't known here gets its arguments read whole, so the result is right in any case.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

__all__ = ["LazyTensor", "fill", "joined"]

Box = tuple[tuple[int, int], ...]  # (start, stop) along each dim
Fill = Callable[[Tensor, Box], None]  # writes the values of a box into a tensor of its size


class LazyTensor(torch.Tensor):
    """A tensor by its shape, its dtype, and how a box of it is read."""

    _fill: Fill

    @staticmethod
    def __new__(cls, shape: Sequence[int], dtype: torch.dtype, fill: Fill) -> LazyTensor:
        made: Any = torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype, device=torch.device("cpu"))
        made._fill = fill
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _KNOWN:
            with torch._C.DisableTorchFunctionSubclass():
                result = _KNOWN[func](*args, **kwargs)
            if result is not NotImplemented:
                return result
        if func in _ASKS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            args, kwargs = tree_map_only(LazyTensor, read, (args, kwargs))
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = tree_map_only(LazyTensor, read, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"LazyTensor({tuple(self.shape)}, {self.dtype})"


def fill(target: Tensor, source: Tensor, box: Box) -> None:
    """Writes the box of `source`, lazy or not, into `target`, which has the box's size; dtypes are cast."""
    if not target.numel():
        return
    if isinstance(source, LazyTensor):
        source._fill(target, box)
    else:
        target.copy_(source[tuple(slice(a, b) for a, b in box)])


def read(tensor: Tensor) -> Tensor:
    """The whole of a lazy tensor."""
    with torch._C.DisableTorchFunctionSubclass():
        target = torch.empty(tuple(tensor.shape), dtype=tensor.dtype)
        fill(target, tensor, tuple((0, size) for size in tensor.shape))
    return target


def joined(parts: Sequence[Tensor], dim: int) -> LazyTensor:
    """torch.cat."""
    dim %= parts[0].ndim
    ends: list[int] = []
    for part in parts:
        ends.append((ends[-1] if ends else 0) + part.shape[dim])
    shape = list(parts[0].shape)
    shape[dim] = ends[-1]

    def into(target: Tensor, box: Box) -> None:
        start, stop = box[dim]
        for part, end in zip(parts, ends, strict=True):
            first = end - part.shape[dim]
            a, b = max(start, first), min(stop, end)
            if a < b:
                inner = (*box[:dim], (a - first, b - first), *box[dim + 1 :])
                fill(target.narrow(dim, a - start, b - a), part, inner)

    return LazyTensor(shape, parts[0].dtype, into)


def _cat(tensors: Any, dim: int = 0, **options: Any) -> Any:
    tensors = list(tensors)
    same = len({(t.ndim, t.dtype) for t in tensors}) == 1
    return joined(tensors, dim) if same and not options else NotImplemented


def _stack(tensors: Any, dim: int = 0, **options: Any) -> Any:
    parts = list(tensors)
    if options or len({(tuple(t.shape), t.dtype) for t in parts}) != 1:
        return NotImplemented
    dim %= parts[0].ndim + 1
    shape = (*parts[0].shape[:dim], len(parts), *parts[0].shape[dim:])

    def into(target: Tensor, box: Box) -> None:
        start, stop = box[dim]
        for i in range(start, stop):
            fill(target.select(dim, i - start), parts[i], (*box[:dim], *box[dim + 1 :]))

    return LazyTensor(shape, parts[0].dtype, into)


def _narrow(tensor: Tensor, dim: int, first: int, size: int) -> LazyTensor:
    shape = (*tensor.shape[:dim], size, *tensor.shape[dim + 1 :])

    def into(target: Tensor, box: Box) -> None:
        start, stop = box[dim]
        fill(target, tensor, (*box[:dim], (start + first, stop + first), *box[dim + 1 :]))

    return LazyTensor(shape, tensor.dtype, into)


def _split(tensor: Tensor, split_size_or_sections: Any, dim: int = 0) -> Any:
    dim %= tensor.ndim
    size, total = split_size_or_sections, tensor.shape[dim]
    sizes = list(size) if not isinstance(size, int) else [min(size, total - i) for i in range(0, total, size)]
    firsts = [sum(sizes[:i]) for i in range(len(sizes))]
    return tuple(_narrow(tensor, dim, first, n) for first, n in zip(firsts, sizes, strict=True))


def _chunk(tensor: Tensor, chunks: int, dim: int = 0) -> Any:
    total = tensor.shape[dim % tensor.ndim]
    return _split(tensor, -(-total // chunks), dim) if total else NotImplemented


def _transpose(tensor: Tensor, dim0: int, dim1: int) -> Any:
    a, b = dim0 % tensor.ndim, dim1 % tensor.ndim
    order = list(range(tensor.ndim))
    order[a], order[b] = b, a

    def into(target: Tensor, box: Box) -> None:
        fill(target.transpose(a, b), tensor, tuple(box[i] for i in order))

    return LazyTensor([tensor.shape[i] for i in order], tensor.dtype, into)


def _squeeze(tensor: Tensor, dim: int | None = None) -> Any:
    if dim is None:
        return NotImplemented
    dim %= tensor.ndim
    if tensor.shape[dim] != 1:
        return tensor

    def into(target: Tensor, box: Box) -> None:
        fill(target.unsqueeze(dim), tensor, (*box[:dim], (0, 1), *box[dim:]))

    return LazyTensor((*tensor.shape[:dim], *tensor.shape[dim + 1 :]), tensor.dtype, into)


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor


_KNOWN: dict[Any, Callable[..., Any]] = {
    torch.cat: _cat,
    torch.concat: _cat,
    torch.stack: _stack,
    torch.split: _split,
    torch.Tensor.split: _split,
    torch.chunk: _chunk,
    torch.Tensor.chunk: _chunk,
    torch.transpose: _transpose,
    torch.Tensor.transpose: _transpose,
    torch.squeeze: _squeeze,
    torch.Tensor.squeeze: _squeeze,
    torch.Tensor.contiguous: _unchanged,
    torch.Tensor.detach: _unchanged,
}
# What only asks for what is known of a tensor.
_ASKS = {
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.numel,
    torch.Tensor.nelement,
    torch.Tensor.is_floating_point,
    torch.numel,
    torch.is_floating_point,
    torch.Tensor.__len__,
    *(getattr(torch.Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_meta")),
}
