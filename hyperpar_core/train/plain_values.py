"""Values as JSON and back, exactly, with nothing that runs when it is read: what a checkpoint holds beside its tensors."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import CheckpointError

__all__ = ["decode", "dtype_named", "encode"]

_DTYPES = {str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)}


def dtype_named(name: str) -> torch.dtype:
    """The dtype called `name` ("float32"); CheckpointError where there is none."""
    if name not in _DTYPES:
        raise CheckpointError(f"{name!r} is no dtype of torch.")
    return _DTYPES[name]


def _bytes(data: bytes) -> str:
    return base64.b64encode(data).decode()


def encode(value: Any, where: str) -> Any:
    """`value` as JSON: None, bool, int, float, str, bytes, tensors, numpy arrays and numbers, and tuples, lists, dicts of them.

    Raises CheckpointError that names the place, `where`, of anything else.
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return {"float": value.hex()}
    if isinstance(value, (tuple, list)) and type(value) in (tuple, list):
        items = [encode(item, f"{where}[{i}]") for i, item in enumerate(value)]
        return items if isinstance(value, list) else {"tuple": items}
    if isinstance(value, dict):
        return {"dict": [[encode(k, f"{where}'s key"), encode(v, f"{where}[{k!r}]")] for k, v in value.items()]}
    if isinstance(value, bytes):
        return {"bytes": _bytes(value)}
    if type(value) in (Tensor, torch.nn.Parameter):
        data = value.detach().cpu().contiguous()
        raw = data.reshape(-1).view(torch.uint8).numpy().tobytes()
        return {"tensor": [str(data.dtype).removeprefix("torch."), list(data.shape), _bytes(raw)]}
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biufc":
        array = np.ascontiguousarray(value)
        return {"numpy": [array.dtype.str, list(np.shape(value)), _bytes(array.tobytes()), isinstance(value, np.ndarray)]}
    raise CheckpointError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint doesn't hold: pickles aren't written.\n"
        "  Pass its plain parts: numbers, texts, bytes, tensors, arrays, and tuples, lists and dicts of them."
    )


def decode(value: Any) -> Any:
    """What `encode` was given."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, held),) = value.items()
    if kind == "float":
        return float.fromhex(held)
    if kind == "tuple":
        return tuple(decode(item) for item in held)
    if kind == "dict":
        return {decode(k): decode(v) for k, v in held}
    if kind == "bytes":
        return base64.b64decode(held)
    if kind == "tensor":
        dtype, shape, data = held
        raw = torch.frombuffer(bytearray(base64.b64decode(data)) or bytearray(1), dtype=torch.uint8)
        return raw[: len(base64.b64decode(data))].view(dtype_named(dtype)).reshape(shape)
    if kind == "numpy":
        dtype, shape, data, whole = held
        array = np.frombuffer(base64.b64decode(data), dtype=np.dtype(dtype)).reshape(shape).copy()
        return array if whole else array[()]
    raise CheckpointError(f"a value of kind {kind!r}, which this version doesn't know.")
