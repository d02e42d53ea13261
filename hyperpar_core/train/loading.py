"""Pretrained weights from a Hugging Face folder straight into a planned model: each rank reads its own slices, and nothing else.

Which tensor of the folder becomes which of the model is transformers' own decision: its renamings and conversions run here on tensors
that aren't read yet (lazy.py), first to check everything, then to read.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..errors import CheckpointError
from .bare import bare_model, initial_buffers, kept_dtypes
from .canonical import WholeTensor, model_tensors
from .lazy import Box, LazyTensor, fill
from .line import line_of

__all__ = ["load_pretrained"]

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
BLOCK_BYTES = 8 * 2**20  # a read of some columns reads whole rows; this bounds how many at once
_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
}  # fmt: skip


@dataclass(frozen=True)
class _Stored:
    """A tensor of the folder."""

    opened: Any
    shape: tuple[int, ...]
    dtype: torch.dtype


def _open(folder: Path) -> dict[str, _Stored]:
    """{key: tensor} of a folder; CheckpointError for anything but safetensors."""
    from safetensors import SafetensorError, safe_open

    if (folder / INDEX).exists():
        try:
            weight_map = dict(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"])
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{folder / INDEX} has no weight_map ({type(error).__name__}: {error}).") from error
        files = sorted(set(weight_map.values()))
    elif (folder / SINGLE).exists():
        weight_map, files = {}, [SINGLE]
    else:
        pickles = sorted(p.name for p in folder.glob("*.bin")) if folder.is_dir() else []
        if pickles:
            raise CheckpointError(
                f"{folder} holds {pickles[0]}: a pickle, which may run anything when it is read, so it isn't.\n"
                "  Convert it to safetensors where you trust it: from_pretrained(folder), then save_pretrained(new folder)."
            )
        raise CheckpointError(f"{folder} has neither {SINGLE} nor {INDEX}.")
    found: dict[str, _Stored] = {}
    for file in files:
        if Path(file).name != file:
            raise CheckpointError(f"{folder / INDEX} names a file outside its folder: {file!r}.")
        try:
            opened: Any = safe_open(folder / file, framework="pt", backend="pread")  # not mapped: what is read is counted
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{folder / file} can't be read as safetensors: {error}") from error
        for key in opened.keys():  # noqa: SIM118
            if weight_map.get(key, file) == file:
                part = opened.get_slice(key)
                name = part.get_dtype()
                if name not in _DTYPES:
                    raise CheckpointError(f"{key} in {folder / file} is {name}: quantised weights aren't loaded.")
                found[key] = _Stored(opened, tuple(part.get_shape()), _DTYPES[name])
    lost = [key for key in weight_map if key not in found]
    if lost:
        raise CheckpointError(f"{folder / INDEX} says that {lost[0]} is in {weight_map[lost[0]]}, and it isn't ({len(lost)} such).")
    return found


def _lazy(key: str, stored: _Stored, dtype: torch.dtype) -> LazyTensor:
    """A stored tensor as `dtype`, read when asked for, a few rows at a time."""

    def into(target: Tensor, box: Box) -> None:
        if not box:
            target.copy_(stored.opened.get_tensor(key))
            return
        row = stored.dtype.itemsize
        for size in stored.shape[1:]:
            row *= size
        rows = max(1, BLOCK_BYTES // max(row, 1))
        (first, last), rest = box[0], tuple(slice(a, b) for a, b in box[1:])
        part = stored.opened.get_slice(key)
        for start in range(first, last, rows):
            stop = min(start + rows, last)
            target.narrow(0, start - first, stop - start).copy_(part[(slice(start, stop), *rest)])

    return LazyTensor(stored.shape, dtype, into)


@dataclass
class _Conversions:
    """How transformers makes a model's tensors from a folder's keys."""

    steps: list[tuple[str, Any]]  # (name of the first tensor made, transformers' mapping with what it collects)
    unexpected: set[str]
    used: list[Any]


def _conversions(
    bare: Any, stored: Mapping[str, _Stored], dtypes: Mapping[str, torch.dtype], make: Callable[[str, torch.dtype], Tensor]
) -> _Conversions:
    """Collects the folder's tensors as transformers' loader does (core_model_loading.convert_and_load_state_dict_in_model).

    make(key, dtype): the tensor that stands for a key, as `dtype`, that of the model's tensor it goes into.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    transforms = get_model_conversion_mapping(bare)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    expected, prefix = bare.state_dict(), bare.base_model_prefix
    steps: dict[str, Any] = {}
    unexpected = set()
    for key in sorted(stored, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, expected)
        if name not in expected and key in expected:
            name, pattern = rename_source_key(key, [], [], prefix, expected)
        if name not in expected:
            unexpected.add(name)
        elif pattern is None:
            steps.setdefault(name, WeightRenaming(key, name)).add_tensor(name, key, key, make(key, dtypes[name]))
        else:
            step = steps.setdefault(name, copy.deepcopy(by_pattern[pattern]))
            step.add_tensor(name, key, pattern, make(key, dtypes[name]))
    return _Conversions(list(steps.items()), unexpected, [t for t in transforms if t.was_used()])


def _converted(name: str, step: Any, bare: Any) -> dict[str, Tensor]:
    """{name: tensor} of one step; CheckpointError when transformers' conversion fails on what is there."""
    try:
        made = step.convert(name, model=bare, config=bare.config)
    except Exception as error:
        raise CheckpointError(f"transformers' conversion to {name} failed: {type(error).__name__}: {error}") from error
    return {target: value[0] if isinstance(value, list) else value for target, value in made.items()}


def _check(bare: Any, stored: Mapping[str, _Stored], wholes: Mapping[str, WholeTensor]) -> list[Any]:
    """Raises one CheckpointError that says all that doesn't fit; the conversions that the folder needs. Reads no tensor."""
    from transformers.utils.loading_report import LoadStateDictInfo

    if getattr(bare.config, "quantization_config", None) is not None:
        raise CheckpointError("the folder's config has a quantization_config: quantised weights aren't loaded.")
    by_name = {name: whole for whole in wholes.values() for name in (whole.name, *whole.aliases)}
    expected = bare.state_dict()
    new = sorted(set(by_name) - set(expected))
    if new:
        raise CheckpointError(f"{new[0]} isn't part of {type(bare).__name__} ({len(new)} such); load before adding to the model.")
    kept = kept_dtypes(bare)
    dtypes = {name: whole.dtype for name, whole in by_name.items()}
    wrong = [name for name, dtype in kept.items() if dtypes[name] != dtype]
    if wrong:
        raise CheckpointError(
            f"transformers keeps {wrong[0]} in {kept[wrong[0]]}, and here it is {dtypes[wrong[0]]} ({len(wrong)} such).\n"
            "  Make the model with hyperpar_core.meta_model(folder), which does the same."
        )
    plan = _conversions(bare, stored, dtypes, lambda key, dtype: torch.empty(stored[key].shape, dtype=dtype, device="meta"))
    lines, loaded = [], set()
    for first, step in plan.steps:
        for name, value in _converted(first, step, bare).items():
            if name not in by_name:
                plan.unexpected.add(name)
            elif tuple(value.shape) != by_name[name].shape:
                lines.append(f"{name} is {by_name[name].shape} in the model and {tuple(value.shape)} in the folder")
            loaded.add(name)
    missing = {w.name for w in wholes.values() if not loaded & {w.name, *w.aliases}}
    report = LoadStateDictInfo(missing, plan.unexpected, set(), {}, [], set())
    bare._adjust_missing_and_unexpected_keys(report)
    buffers = {name for name, _ in bare.named_buffers()}
    missing = {name for name in missing if name not in buffers or name in report.missing_keys}
    for what, names in (("the folder lacks", sorted(missing)), ("the model has no place for", sorted(report.unexpected_keys))):
        if names:
            lines.insert(0, f"{what} {len(names)}: {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}")
    if lines:
        more = f"\n  ... and {len(lines) - 5} more" if len(lines) > 5 else ""
        raise CheckpointError(f"the folder isn't this {type(bare).__name__}'s:\n  " + "\n  ".join(lines[:5]) + more)
    return plan.used


def _read(bare: Any, stored: Mapping[str, _Stored], wholes: Mapping[str, WholeTensor]) -> None:
    """Reads this rank's parts of everything into the model's memory, one of the model's tensors after the other."""
    by_name = {name: whole for whole in wholes.values() for name in (whole.name, *whole.aliases)}
    dtypes = {name: whole.dtype for name, whole in by_name.items()}
    plan = _conversions(bare, stored, dtypes, lambda key, dtype: _lazy(key, stored[key], dtype))
    done: dict[str, str] = {}
    for first, step in plan.steps:
        for name, value in _converted(first, step, bare).items():
            whole = by_name.get(name)
            if whole is None:
                continue
            for part in whole.parts:
                box = tuple((o, o + n) for o, n in zip(part.offsets, part.local.shape, strict=True))
                if whole.name not in done:
                    fill(part.local, value, box)
                    continue
                again = torch.empty_like(part.local)
                fill(again, value, box)
                if not torch.equal(again, part.local):
                    raise CheckpointError(
                        f"{done[whole.name]} and {name} are tied in the model and differ in the folder.\n"
                        "  Its config should say tie_word_embeddings=False; make the model from that."
                    )
            done[whole.name] = name
    values = initial_buffers(bare) if len(done) < len(wholes) else {}
    for whole in wholes.values():
        if whole.name not in done:  # a buffer that its module computes
            for part in whole.parts:
                part.local.copy_(values[whole.name])


def load_pretrained(
    model: nn.Module, mesh: DeviceMesh, folder: str | Path, materialise: Callable[[], Any] = lambda: None
) -> None:
    """Reads a Hugging Face folder (safetensors, in one file or several) into a planned transformers model. Every rank of the mesh calls it.

    What a rank holds at most beside its own share is one tensor. transformers' own key conversions apply; tied weights stay tied; values
    are cast to the model's dtypes. materialise: gives a model on the meta device its memory; called when everything fits.
    Raises CheckpointError, on every rank, before anything is changed when a key is missing, unexpected or has another shape.
    """
    what = f"load_pretrained({str(folder)!r})"
    line = line_of(mesh)
    problem: Exception | None = None
    stored: dict[str, _Stored] = {}
    bare: Any = None
    try:
        bare = bare_model(model)
        stored = _open(Path(folder))
        used = _check(bare, stored, model_tensors(model))
    except Exception as error:
        problem = error
    line.agree(what, problem)
    try:
        materialise()
        with torch.no_grad():
            _read(bare, stored, model_tensors(model))
        model.__dict__["_weight_conversions"] = used  # what transformers' own loader leaves there; saving undoes it
    except Exception as error:
        problem = error
    line.agree(what, problem)
