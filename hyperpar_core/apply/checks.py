"""Checks that run beside training: cheap ones that turn silent garbage into an error on every rank."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from ..collectives.functional import AxisGroup, all_gather, all_reduce, axis_group
from ..errors import ApplyError, RankMismatch
from .generated import plain_name
from .streams import APART

__all__ = ["Checks", "compare_inputs", "compare_replicas"]


@dataclass(frozen=True)
class Checks:
    """How often what is checked; 0 is never.

    inputs    that the ranks of a tp group were fed the same batch: every that many forwards. None: each one on a CPU, where it costs
              one small all-reduce; the first and each hundredth on a GPU, which has to wait for the answer
    replicas  that parameters are bitwise equal on the ranks that hold the same part of them: every that many training forwards
    """

    inputs: int | None = None
    replicas: int = 100

    def __post_init__(self) -> None:
        for name in ("inputs", "replicas"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
                raise ApplyError(f"Checks: {name}={value!r}; it is how often, a whole number, 0 for never.")


def due(every: int | None, count: int, cuda: bool) -> bool:
    """Whether the check of the `count`-th forward (from 0) is due."""
    every = (100 if cuda else 1) if every is None else every
    return every > 0 and count % every == 0


# ---- inputs


def _words(x: Tensor) -> Tensor:
    """A hash of a tensor of whole numbers, order included: an int64 of no dims."""
    flat = x.detach().reshape(-1).to(torch.int64)
    places = torch.arange(1, flat.numel() + 1, device=flat.device)
    return ((flat + 0x632BE5AB) * (places * 0x9E3779B1 + 1)).sum()


def compare_inputs(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], group: AxisGroup, device: torch.device, drawn: int = 0
) -> None:
    """Raises RankMismatch on every rank of `group` unless all were given equal tensors of whole numbers, and equal shapes of others.
    drawn: a random number that they drew; ApplyError where that alone differs."""
    given = [*((str(i), x) for i, x in enumerate(args)), *sorted(kwargs.items())]
    tensors = [(name, x) for name, x in given if isinstance(x, Tensor)]
    shapes = zlib.crc32(repr([(name, tuple(x.shape), str(x.dtype)) for name, x in tensors]).encode())
    whole = [_words(x).to(device) for _, x in tensors if not (x.is_floating_point() or x.is_complex())]
    values = torch.stack(whole).sum() if whole else torch.zeros((), dtype=torch.int64, device=device)
    mine = torch.stack([torch.tensor(shapes, device=device), values])
    sent = torch.cat([mine, mine.new_tensor([drawn])]) if drawn else mine
    high, low = all_reduce(torch.stack([sent, -sent]), group, "max").tolist()
    differs = [a != -b for a, b in zip(high, low, strict=True)]
    if not any(differs):
        return
    if not any(differs[:2]):
        raise ApplyError(APART)
    everyone = all_gather(mine.unsqueeze(0), 0, group).tolist()
    resolve: Any = c10d._resolve_process_group  # type: ignore[attr-defined]
    ranks = c10d.get_process_group_ranks(resolve(group.name))
    odd = [ranks[i] for i, pair in enumerate(everyone) if pair != everyone[0]]
    what = "shapes" if any(pair[0] != everyone[0][0] for pair in everyone) else "values"
    raise RankMismatch(
        f"the ranks of a tp group were fed different batches: {what} on rank {', '.join(map(str, odd))} differ from those on rank"
        f" {ranks[0]}.\n  Ranks of one tp (and cp) group read the same samples: applied.data_parallel_rank of"
        " applied.data_parallel_size is for samplers."
    )


# ---- replicas


def _bits(x: Tensor) -> Tensor:
    """A hash of a tensor's bits, fast rather than strong: an int64 of no dims."""
    data = x.detach().contiguous().view(-1)
    size = data.element_size()
    if data.dtype == torch.bool or size == 1:
        words = data.view(torch.uint8)
    else:
        words = data.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[size])
    return words.sum(dtype=torch.int64) + 31 * words[::3].sum(dtype=torch.int64)


def _held(model: nn.Module) -> Iterator[tuple[str, DTensor, str, AxisGroup]]:
    """(name, parameter, axis, its ranks) of every parameter that an axis of its mesh replicates."""
    groups: dict[tuple[DeviceMesh, int], AxisGroup] = {}
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
            continue
        mesh = parameter.device_mesh
        for i, (axis, placement) in enumerate(zip(mesh.mesh_dim_names or (), parameter.placements, strict=True)):
            if isinstance(placement, Replicate) and mesh.size(i) > 1:
                key = (mesh, i)
                if key not in groups:
                    groups[key] = axis_group(mesh[axis])
                yield plain_name(name), parameter, axis, groups[key]


def compare_replicas(model: nn.Module, groups: Mapping[str, AxisGroup], replaced: Sequence[str] = ()) -> None:
    """Raises RankMismatch on every rank of the mesh where replicas aren't bitwise equal; ranks that hold them name the parameters.
    Every rank calls it. groups: the mesh's axes. replaced: parameters of the plan that this rank's model no longer holds."""
    missing = torch.tensor(len(replaced), device=next(model.parameters()).device)
    for group in groups.values():
        missing = all_reduce(missing, group, "max")
    if int(missing):
        raise RankMismatch(
            f"{int(missing)} parameters were replaced after apply_plan ({', '.join(replaced[:3]) or 'on other ranks'}): they are no longer"
            " replicas, and nothing sums their gradients.\n  Load values by applied.load_full_state_dict(state); for new parameters call"
            " applied.undo() and plan anew."
        )
    by_group: dict[AxisGroup, tuple[str, list[str], list[Tensor]]] = {}
    for name, parameter, axis, group in _held(model):
        _, names, hashes = by_group.setdefault(group, (axis, [], []))
        names.append(name)
        hashes.append(_bits(parameter._local_tensor))
    differing: dict[str, str] = {}
    for group, (axis, names, hashes) in by_group.items():
        mine = torch.stack(hashes)
        high, low = all_reduce(torch.stack([mine, -mine]), group, "max").unbind(0)
        for i in (high != -low).nonzero().flatten().tolist():
            differing.setdefault(names[i], axis)
    found = torch.tensor(len(differing), device=next(model.parameters()).device)
    for group in groups.values():  # no rank goes on to wait for one that stopped
        found = all_reduce(found, group, "max")
    if int(found):
        shown = "; ".join(f"{name} over {axis}" for name, axis in list(differing.items())[:3])
        raise RankMismatch(
            f"replicas have drifted apart in {int(found)} parameters: {shown or 'on other ranks'}{'; ...' if len(differing) > 3 else ''}.\n"
            "  Something changed them outside the optimizer, or gradients weren't the same on all ranks (an optimizer step under"
            " no_sync, a clip with torch's own clip_grad_norm_)."
        )
