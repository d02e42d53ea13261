"""A planned model leaves the meta device: memory for this rank's parts, and the buffers that no checkpoint holds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..apply.generated import plain_name
from ..errors import CheckpointError
from .bare import initial_buffers

__all__ = ["materialise"]


def _made(tensor: Tensor, device: torch.device) -> Tensor:
    """Memory, with nothing in it yet, for this rank's part."""
    if not isinstance(tensor, DTensor):
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    local = torch.empty(tensor._local_tensor.shape, dtype=tensor.dtype, device=device)
    return DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def materialise(model: nn.Module, device: torch.device) -> dict[int, nn.Parameter]:
    """Gives every meta tensor of `model` memory on `device`; parameters and saved buffers are for the caller to fill, the others are right.

    Returns {id of a meta parameter: the new one that stands everywhere in its place}, empty when nothing was on the meta device.
    Raises CheckpointError for a buffer whose values nobody can say. No communication.
    """
    saved = {plain_name(name) for name in model.state_dict(keep_vars=True)}
    unsaved = {
        name: buffer
        for name, buffer in ((plain_name(n), b) for n, b in model.named_buffers())
        if buffer.is_meta and name not in saved
    }
    values = initial_buffers(model) if unsaved else {}
    for name, buffer in unsaved.items():
        if name not in values or values[name].shape != buffer.shape:
            raise CheckpointError(
                f"buffer {name} {tuple(buffer.shape)} is on the meta device, no checkpoint holds it, and {type(model).__name__} doesn't\n"
                "  say how it is made. Make the model on a real device, or give the buffer its values before apply_plan."
            )
    parameters: dict[int, nn.Parameter] = {}
    buffers: dict[int, Tensor] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None or not parameter.is_meta:
                continue
            if id(parameter) not in parameters:
                parameters[id(parameter)] = nn.Parameter(_made(parameter, device), requires_grad=parameter.requires_grad)
            module._parameters[name] = parameters[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is None or not buffer.is_meta:
                continue
            full = plain_name(f"{prefix}.{name}" if prefix else name)
            if id(buffer) not in buffers:
                value: Any = values.get(full) if full in unsaved else None
                buffers[id(buffer)] = _made(buffer, device) if value is None else value.to(device, buffer.dtype)
            module._buffers[name] = buffers[id(buffer)]
    return parameters
