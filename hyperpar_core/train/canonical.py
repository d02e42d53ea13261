"""Whole tensors and this rank's parts of them: names, shapes and places that no degree of parallelism changes.

Every parameter has the name and shape that it had before the plan. What a rank holds of it are boxes: one where it is cut by plain
placements, one for each section of a packed parameter, the whole of it where it is replicated. Checkpoints are written and read, and
pretrained weights are loaded, box by box.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from ..apply.expert_stack import ExpertStack
from ..apply.generated import plain_name, state_of
from ..errors import CheckpointError
from ..placement import Placement, shard_size

__all__ = [
    "Part", "Place", "Section", "WholeTensor", "box", "describe", "laid", "model_tensors", "part_of", "places", "refuse_meta", "sections",
    "stacks",
]  # fmt: skip


@dataclass(frozen=True)
class Part:
    """This rank's values of a box of a whole tensor: `local` begins at `offsets`. It is the model's own memory, not a copy."""

    offsets: tuple[int, ...]
    local: Tensor


@dataclass(frozen=True)
class WholeTensor:
    """A whole tensor by its name (tied names: the first one), and this rank's parts of it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[Part, ...]
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True)
class Section:
    """One section of a packed parameter: its place along `dim` of the parameter `name`, which has sections `names`."""

    name: str
    dim: int
    names: tuple[str, ...]


@dataclass(frozen=True)
class Place:
    """Where a registered parameter lies in the whole one `name` of `shape`: it begins at `offset` along `dim`.

    members: of a stack of experts, the names of the parameters that it is made of.
    """

    name: str
    shape: tuple[int, ...]
    dim: int = 0
    offset: int = 0
    packed: bool = False
    members: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The original names."""
        return self.members or (self.name,)


def sections(model: nn.Module) -> dict[str, Section]:
    """{name of a section: what it is a section of}."""
    found = {}
    for prefix, module in model.named_modules():
        state = state_of(module)
        for name, (dim, parts) in (state.packed if state else {}).items():
            dot = f"{plain_name(prefix)}." if prefix else ""
            names = tuple(f"{dot}{part}" for part in parts)
            found.update({part: Section(f"{dot}{name}", dim, names) for part in names})
    return found


def box(
    shape: Iterable[int], mesh: DeviceMesh, placements: Iterable[Placement]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(offsets, sizes) of this rank's part of a tensor. FSDP cuts what tp left, so its strided shards come last."""
    sizes = list(shape)
    offsets = [0] * len(sizes)
    cuts = list(enumerate(placements))
    for kind in (Shard, _StridedShard):
        for axis, placement in cuts:
            if isinstance(placement, kind):
                dim = placement.dim
                length, offset = shard_size(sizes[dim], mesh.size(axis), mesh.get_local_rank(axis))
                sizes[dim], offsets[dim] = length, offsets[dim] + offset
    return tuple(offsets), tuple(sizes)


def part_of(name: str, tensor: Tensor) -> Part:
    """This rank's part of one registered tensor, within that tensor."""
    if not isinstance(tensor, DTensor):
        return Part((0,) * tensor.ndim, tensor.detach())
    if any(isinstance(p, Partial) for p in tensor.placements):
        raise CheckpointError(f"{name} is held as summands ({tensor.placements}), not as values; it can't be saved or loaded.")
    offsets, sizes = box(tensor.shape, tensor.device_mesh, tensor.placements)
    local: Tensor = tensor._local_tensor.detach()
    if tuple(local.shape) != sizes:
        raise CheckpointError(
            f"{name}: this rank holds {tuple(local.shape)}, and {tensor.placements} of {tuple(tensor.shape)} on a mesh of"
            f" {tuple(tensor.device_mesh.shape)} is {sizes}. Its placements aren't ones that a checkpoint understands."
        )
    return Part(offsets, local)


def _registered(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of everything that the model saves; under FSDP the sharded parameters."""
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            raise CheckpointError(f"{name} of type {type(value).__name__} is extra state of a module; only tensors can be saved.")
        yield plain_name(name), value


def places(model: nn.Module) -> tuple[dict[int, Place], dict[str, Tensor], dict[str, tuple[str, ...]]]:
    """({id of a registered tensor: its place}, {registered name: tensor}, {whole tensor's name: its other, tied names}).

    Tied tensors are there once, under their first name.
    """
    packed, stacked = sections(model), stacks(model)
    registered = dict(_registered(model))
    found: dict[int, Place] = {}
    once: dict[str, Tensor] = {}
    aliases: dict[str, tuple[str, ...]] = {}
    for name, tensor in registered.items():
        section = packed.get(name)
        original = section.name if section else name
        if id(tensor) in found:
            first = found[id(tensor)].name
            if original not in aliases[first]:
                aliases[first] = (*aliases[first], original)
            continue
        once[name] = tensor
        aliases.setdefault(original, ())
        if section is None:
            found[id(tensor)] = Place(name, tuple(tensor.shape), members=stacked.get(name, ()))
            continue
        sizes = [registered[part].shape[section.dim] for part in section.names]
        offset = sum(sizes[: section.names.index(name)])
        shape = (*tensor.shape[: section.dim], sum(sizes), *tensor.shape[section.dim + 1 :])
        found[id(tensor)] = Place(original, tuple(shape), section.dim, offset, True)
    return found, once, aliases


def laid(part: Part, place: Place) -> Iterator[tuple[str, tuple[int, ...], list[Part]]]:
    """(original name, shape, this rank's parts) of what a registered tensor holds: one parameter, or one for each expert of a stack."""
    if place.members:
        for number, member in enumerate(place.members):
            at = number - part.offsets[0]
            here = [Part(part.offsets[1:], part.local[at])] if 0 <= at < part.local.shape[0] else []
            yield member, place.shape[1:], here
        return
    offsets = list(part.offsets)
    if place.packed:
        offsets[place.dim] += place.offset
    yield place.name, place.shape, [Part(tuple(offsets), part.local)]


def model_tensors(model: nn.Module) -> dict[str, WholeTensor]:
    """{name before the plan: the whole tensor and this rank's parts}, of all parameters and saved buffers. No communication."""
    where, once, aliases = places(model)
    parts: dict[str, list[Part]] = {}
    first: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for registered, tensor in once.items():
        for name, shape, here in laid(part_of(registered, tensor), where[id(tensor)]):
            first.setdefault(name, (shape, tensor.dtype))
            parts.setdefault(name, []).extend(here)
    return {
        name: WholeTensor(name, shape, dtype, tuple(parts[name]), aliases.get(name, ()))
        for name, (shape, dtype) in first.items()
    }


def stacks(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """{name of a stacked parameter of experts: the names of its parts before the plan, in order}."""
    return {
        f"{plain_name(prefix)}.{name}": tuple(f"{plain_name(prefix)}.{i}.{path}" for i in range(stack.count))
        for prefix, stack in model.named_modules()
        if isinstance(stack, ExpertStack)
        for name, path in stack.names.items()
    }


def refuse_meta(tensors: Mapping[str, WholeTensor]) -> None:
    """Raises CheckpointError where a tensor has no memory yet."""
    for name, whole in tensors.items():
        if any(part.local.is_meta for part in whole.parts):
            raise CheckpointError(f"{name} is on the meta device: there are no weights to save. Load some first.")


def describe(value: Any) -> str:
    """A tensor's shape and dtype, for errors."""
    return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
