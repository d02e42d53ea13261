"""Whether every rank starts from the same weights: hashes to compare, or rank 0's copy to take."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

__all__ = ["broadcast_weights", "checksum", "weight_hashes"]

_CHUNK = 1 << 22


def checksum(tensor: Tensor) -> str:
    """A hash of a tensor's bytes, order included. On the meta device there are none: its shape and dtype."""
    if tensor.device.type == "meta":
        return f"meta {tuple(tensor.shape)} {tensor.dtype}"
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    words = data[: data.numel() // 4 * 4].view(torch.int32)
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for start in range(0, words.numel(), _CHUNK):
        chunk = words[start : start + _CHUNK].to(torch.int64)
        positions = torch.arange(start, start + chunk.numel(), dtype=torch.int64, device=data.device)
        total += ((chunk ^ (positions * 0x9E3779B1)) * (2 * positions + 1)).sum()
    tail = data[words.numel() * 4 :].to(torch.int64)
    total += (tail * torch.arange(1, tail.numel() + 1, device=data.device)).sum()
    return f"{int(total.item()) & (2**64 - 1):016x}"


def weight_hashes(model: nn.Module) -> dict[str, str]:
    """{parameter or saved buffer: hash of this rank's copy}."""
    return {
        name: checksum(value) for name, value in model.state_dict(keep_vars=True).items() if isinstance(value, Tensor)
    }


@torch.no_grad()
def broadcast_weights(model: nn.Module, mesh: DeviceMesh) -> None:
    """Every rank of `mesh` takes the weights and buffers of its first rank, axis by axis from the outermost."""
    for axis in range(mesh.ndim):
        group = mesh.get_group(axis)
        source = dist.get_global_rank(group, 0)
        for value in (*model.parameters(), *model.buffers()):
            if value.device.type != "meta":
                dist.broadcast(value.data, source, group=group)
