"""Seeds for a job: ranks that work on the same samples draw alike."""

from __future__ import annotations

import random

import numpy
import torch
from torch.distributed.device_mesh import DeviceMesh

from ..errors import ApplyError
from ..plan.build import mesh_sizes

__all__ = ["set_seed"]


def set_seed(seed: int, mesh: DeviceMesh) -> None:
    """Seeds Python, numpy and torch (CPU and GPU): alike on the ranks of a tp and cp group, differently over dp. Every rank calls it.

    For what a training script draws itself: samples, noise, tokens of a sampled text. Dropout inside a planned model is right from any
    seed that the ranks of a tp group share. Call it once the model is made: all ranks have to start from the same weights.
    """
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**32:
        raise ApplyError(f"set_seed: {seed!r}; a seed is a whole number from 0 to 2**32 - 1.")
    rank = mesh["dp"].get_local_rank() if "dp" in mesh_sizes(mesh) else 0
    own = (seed + rank * 0x9E3779B1) % 2**32
    random.seed(own)
    numpy.random.seed(own)
    torch.manual_seed(own)
