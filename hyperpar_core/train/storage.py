"""How torch's distributed checkpoint (DCP) writes and reads our checkpoints: planners over boxes, safetensors, and a JSON index.

DCP decides who writes what (a box that many ranks hold is written once), what is read from where after a change of degrees, and that
an error of one rank is every rank's. Its own file format keeps an index that is pickled, so reading a stranger's would run it; here
each rank writes one safetensors file, and the first one an index in JSON.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from ..errors import CheckpointError
from .atomic import fsync_file, publish, start
from .canonical import Part, WholeTensor
from .plain_values import dtype_named

__all__ = ["INDEX", "Facts", "FolderReader", "FolderWriter", "PartLoadPlanner", "PartSavePlanner", "read_index"]

INDEX = "checkpoint.json"
VERSION = 1
Facts = dict[str, Any]  # what a checkpoint says beside its tensors, as JSON


def _chunk(part: Part) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(part.offsets), part.local.shape)


def _found(tensors: Mapping[str, WholeTensor], index: MetadataIndex) -> Tensor:
    assert index.offset is not None
    return next(p.local for p in tensors[index.fqn].parts if p.offsets == tuple(index.offset))


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


class PartSavePlanner(DefaultSavePlanner):
    """Offers this rank's parts, and `facts`, which must be the same on every rank. `problem`: what this rank couldn't do, raised on all."""

    def __init__(self, tensors: Mapping[str, WholeTensor], facts: Facts, problem: Exception | None = None) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.tensors, self.facts, self.problem = tensors, facts, problem

    def create_local_plan(self) -> SavePlan:
        if self.problem is not None:
            raise self.problem
        items = []
        for name, whole in self.tensors.items():
            for part in whole.parts:
                if not part.local.numel() and 0 not in whole.shape:
                    continue  # nothing of this tensor is here
                data = TensorWriteData(_chunk(part), TensorProperties(dtype=whole.dtype), torch.Size(whole.shape))
                items.append(WriteItem(MetadataIndex(name, part.offsets), WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items, planner_data=self.facts)
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        for rank, plan in enumerate(all_plans):
            _same_facts(self.facts, plan.planner_data, rank)
        shapes: dict[str, tuple[int, TensorWriteData]] = {}
        for rank, plan in enumerate(all_plans):
            for item in plan.items:
                data = item.tensor_data
                assert data is not None
                first, known = shapes.setdefault(item.index.fqn, (rank, data))
                if (known.size, known.properties.dtype) != (data.size, data.properties.dtype):
                    raise CheckpointError(
                        f"{item.index.fqn} is {tuple(known.size)} {known.properties.dtype} on rank {first} of the mesh and"
                        f" {tuple(data.size)} {data.properties.dtype} on rank {rank}."
                    )
        bare = [replace(plan, planner_data=None) for plan in all_plans]
        plans, metadata = super().create_global_plan(bare)
        return plans, replace(metadata, planner_data=self.facts)

    def lookup_object(self, index: MetadataIndex) -> Any:
        return _found(self.tensors, index)


def _same_facts(mine: Facts, theirs: Facts, rank: int) -> None:
    for key in sorted({*mine, *theirs}):
        if mine.get(key) == theirs.get(key):
            continue
        a, b = mine.get(key), theirs.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            names = [n for n in sorted({*a, *b}) if a.get(n) != b.get(n)]
            key = f"{key}[{names[0]!r}]"
            a, b = a.get(names[0]), b.get(names[0])
        raise CheckpointError(
            f"{key} differs between the first rank of the mesh and rank {rank}: {str(a)[:80]} and {str(b)[:80]}.\n"
            "  What every rank has of its own goes into rank_extra."
        )


class FolderWriter(StorageWriter):
    """Writes one checkpoint below `folder`. `own`: what only this rank has to say."""

    def __init__(self, folder: Path, step: int, keep: int | None, own: Any) -> None:
        self.folder, self.step, self.keep, self.own = folder, step, keep, own
        self.path: Path | None = None  # of the finished checkpoint, on the first rank
        self.writing: Path | None = None  # of the one in the making, on the first rank

    def clear(self) -> None:
        """Removes what a save that failed has left in the making."""
        if self.writing is not None and self.path is None:
            shutil.rmtree(self.writing, ignore_errors=True)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """DCP's; nothing is kept between saves."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self.writing = start(self.folder, self.step) if is_coordinator else None

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        assert self.writing is not None
        return [replace(plan, storage_data=(str(self.writing), i)) for i, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        from safetensors.torch import save_file

        folder, number = plan.storage_data
        file = f"tensors-{number:05d}.safetensors"
        tensors: dict[str, Tensor] = {}
        results = []
        for item in plan.items:
            data = item.tensor_data
            assert data is not None
            value = planner.resolve_data(item)
            assert isinstance(value, Tensor)
            key = item.index.fqn
            if data.chunk.sizes != data.size:  # one file may hold several boxes of a tensor
                ranges = zip(data.chunk.offsets, data.chunk.sizes, strict=True)
                key += f"[{', '.join(f'{o}:{o + n}' for o, n in ranges)}]"
            tensors[key] = value.detach().cpu().contiguous()
            entry = [list(data.chunk.offsets), list(data.chunk.sizes), file, key]
            results.append(WriteResult(item.index, value.nbytes, entry))
        if tensors:
            save_file(tensors, os.path.join(folder, file))
            fsync_file(Path(folder, file))
        if self.own is not None:
            _write_json(Path(folder, _own_file(number)), self.own)
        return _done(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        assert self.writing is not None
        tensors: dict[str, Any] = {}
        for name, held in metadata.state_dict_metadata.items():
            assert isinstance(held, TensorStorageMetadata)
            dtype = str(held.properties.dtype).removeprefix("torch.")
            tensors[name] = {"dtype": dtype, "shape": list(held.size), "parts": []}
        for result in (one for of_rank in results for one in of_rank):
            tensors[result.index.fqn]["parts"].append(result.storage_data)
        files = sorted({part[2] for entry in tensors.values() for part in entry["parts"]})
        missing = [file for file in files if not (self.writing / file).exists()]
        if missing:
            raise CheckpointError(
                f"{self.writing / missing[0]} isn't visible to the first rank ({len(missing)} of {len(files)} files aren't).\n"
                "  All ranks must write to one shared file system."
            )
        index = {
            "version": VERSION,
            **(metadata.planner_data or {}),
            "files": {file: (self.writing / file).stat().st_size for file in files},
            "tensors": tensors,
        }
        _write_json(self.writing / INDEX, index)
        self.path = publish(self.writing, self.keep)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def _own_file(number: int) -> str:
    return f"rank-{number:05d}.json"


def _write_json(path: Path, value: Any) -> None:
    with open(path, "w", encoding="utf-8") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())


def read_index(path: Path, rank: int) -> tuple[dict[str, Any], Any]:
    """(the index of a complete checkpoint, what `rank` of the mesh said for itself or None). CheckpointError for a damaged one."""
    try:
        index = json.loads((path / INDEX).read_text(encoding="utf-8"))
        version = index["version"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path / INDEX} can't be read ({type(error).__name__}: {error}).\n  {_GO_BACK}") from error
    if version != VERSION:
        raise CheckpointError(f"{path} is of format {version}, and this version reads {VERSION}.")
    for file, size in index["files"].items():
        if Path(file).name != file:
            raise CheckpointError(f"{path / INDEX} names a file outside its folder: {file!r}.")
        have = (path / file).stat().st_size if (path / file).exists() else None
        if have != size:
            state = "is missing" if have is None else f"has {have} bytes instead of {size}"
            raise CheckpointError(f"{path / file} {state}.\n  {_GO_BACK}")
    own = path / _own_file(rank)
    return index, json.loads(own.read_text(encoding="utf-8")) if own.exists() else None


_GO_BACK = "The checkpoint was damaged after it was written: remove its folder to load the one before it."


class FolderReader(StorageReader):
    """Reads one complete checkpoint by its index."""

    def __init__(self, path: Path, index: Mapping[str, Any]) -> None:
        self.path, self.index = path, index

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """DCP's; nothing is kept between loads."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        held: dict[str, Any] = {}
        for name, entry in self.index["tensors"].items():
            chunks = [ChunkStorageMetadata(torch.Size(p[0]), torch.Size(p[1])) for p in entry["parts"]]
            properties = TensorProperties(dtype=dtype_named(entry["dtype"]))
            held[name] = TensorStorageMetadata(properties, torch.Size(entry["shape"]), chunks)
        return Metadata(held)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self.where = {
            (name, tuple(part[0])): (part[2], part[3])
            for name, entry in self.index["tensors"].items()
            for part in entry["parts"]
        }

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        from safetensors import safe_open

        by_file: dict[str, list[tuple[ReadItem, str]]] = {}
        for item in plan.items:
            offset = item.storage_index.offset
            assert offset is not None
            file, key = self.where[item.storage_index.fqn, tuple(offset)]
            by_file.setdefault(file, []).append((item, key))
        for file, items in by_file.items():
            with safe_open(self.path / file, framework="pt") as opened:
                for item, key in items:
                    target = planner.resolve_tensor(item).detach()
                    if target.numel():
                        ranges = zip(item.storage_offsets, item.lengths, strict=True)
                        target.copy_(opened.get_slice(key)[tuple(slice(o, o + n) for o, n in ranges) or ...])
        return _done(None)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


class PartLoadPlanner(DefaultLoadPlanner):
    """Asks for this rank's parts; what is read goes straight into them. `problem`: what this rank couldn't do, raised on all."""

    def __init__(self, tensors: Mapping[str, WholeTensor], problem: Exception | None = None) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.tensors, self.problem = tensors, problem

    def create_local_plan(self) -> LoadPlan:
        if self.problem is not None:
            raise self.problem
        assert self.metadata is not None
        items: list[ReadItem] = []
        for name, whole in self.tensors.items():
            held = self.metadata.state_dict_metadata[name]
            assert isinstance(held, TensorStorageMetadata)
            chunks = [_chunk(part) for part in whole.parts if part.local.numel()]
            items += create_read_items_for_chunk_list(name, held, chunks)
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return _found(self.tensors, index)
