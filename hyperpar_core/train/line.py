"""The ranks of a mesh on a line of their own: a gloo group that meets nobody else's collectives, and one verdict for all."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..errors import CheckpointError, HyperparError

__all__ = ["Line", "line_of", "said"]


class Line:
    """All ranks of a mesh, in order. `pending`: what still goes on in the background on this line."""

    def __init__(self, ranks: list[int]) -> None:
        self.group = dist.new_group(ranks, backend="gloo", use_local_synchronization=len(ranks) < dist.get_world_size())
        self.pending: Any = None

    @property
    def rank(self) -> int:
        """This rank's place on the line."""
        return dist.get_rank(self.group)

    def from_first(self, value: Any) -> Any:
        """The first rank's `value`, on every rank."""
        held = [value]
        dist.broadcast_object_list(held, dist.get_global_rank(self.group, 0), group=self.group)
        return held[0]

    def agree(self, what: str, problem: Exception | None) -> None:
        """Raises on every rank when any rank has a problem. Every rank calls it."""
        texts: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(texts, None if problem is None else said(problem), group=self.group)
        rank = next((i for i, text in enumerate(texts) if text is not None), None)
        if rank is not None:
            who = "" if len(set(texts)) == 1 else f" rank {rank} of the mesh says:"
            raise CheckpointError(f"{what}:{who}\n  {texts[rank]}") from problem


def said(error: BaseException) -> str:
    """What an error says; with its type where it isn't one of ours."""
    return str(error) if isinstance(error, HyperparError) else f"{type(error).__name__}: {error}"


_lines: dict[tuple[int, ...], tuple[Any, Line]] = {}


def line_of(mesh: DeviceMesh) -> Line:
    """The line of a mesh's ranks; made once for a job. Every rank of the mesh calls it."""
    ranks = tuple(sorted(mesh.mesh.flatten().tolist()))
    job, line = _lines.get(ranks, (None, None))
    if line is None or job is not dist.group.WORLD:
        line = Line(list(ranks))
        _lines[ranks] = (dist.group.WORLD, line)
    return line
