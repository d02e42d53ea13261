"""Checkpoints of training: weights, optimizer state and what else the training loop needs to go on, at any degrees.

Written and read by torch's distributed checkpoint (DCP): storage.py says how, canonical.py what, atomic.py when a checkpoint counts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from ..errors import CheckpointError
from ..plan.build import mesh_sizes
from . import optimizer_state
from .atomic import newest
from .canonical import WholeTensor, model_tensors, refuse_meta
from .line import Line, line_of, said
from .plain_values import decode, encode
from .storage import FolderReader, FolderWriter, PartLoadPlanner, PartSavePlanner, read_index

__all__ = ["SaveHandle", "load_checkpoint", "save_checkpoint"]

Optimizers = Optimizer | Sequence[Optimizer] | None


class SaveHandle:
    """A save that goes on in the background."""

    def __init__(self, work: Callable[[], Path]) -> None:
        self._path: Path | None = None
        self._error: Exception | None = None
        self._work = work
        self.seen = False  # somebody waited for the end
        self._thread = threading.Thread(target=self._run, name="hyperpar checkpoint")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._path = self._work()
        except Exception as error:
            self._error = error
        del self._work  # and with it the copy of the weights

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return not self._thread.is_alive()

    def result(self, timeout: float | None = None) -> Path:
        """Waits for the end: the checkpoint's folder. Raises what went wrong; TimeoutError after `timeout` seconds."""
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"the checkpoint isn't written after {timeout} s.")
        self.seen = True
        if self._error is not None:
            raise self._error
        assert self._path is not None
        return self._path


def _wait(line: Line) -> None:
    """Waits for the save before; what went wrong with it is raised here, if nobody saw it yet."""
    pending, line.pending = line.pending, None
    if pending is not None and not (pending.seen and pending.done()):
        pending.result()


def _joined(what: str, work: Callable[[], Any]) -> Any:
    """Runs a step of DCP; an error of any rank is raised here on all, in our words."""
    try:
        return work()
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        raise CheckpointError(f"{what}: rank {rank} of the mesh says:\n  {said(cause)}") from cause


def _namespaced(tensors: Mapping[str, WholeTensor], space: str) -> dict[str, WholeTensor]:
    return {f"{space}/{name}": whole for name, whole in tensors.items()}


def _copied(whole: WholeTensor) -> WholeTensor:
    """Its parts on the host, in memory of their own."""
    return replace(whole, parts=tuple(replace(p, local=p.local.to("cpu", copy=True)) for p in whole.parts))


def save_checkpoint(
    model: nn.Module,
    mesh: DeviceMesh,
    folder: str | Path,
    optimizer: Optimizers = None,
    *,
    step: int,
    extra: Mapping[str, Any] | None = None,
    rank_extra: Mapping[str, Any] | None = None,
    keep: int | None = 2,
    asynchronous: bool = False,
) -> SaveHandle | None:
    """Writes `folder`/step_XXXXXXXX, whole or not at all, and keeps the newest `keep`. Every rank of the mesh calls it.

    optimizer: one, several in a list, or None. extra: {name: value}, the same on every rank. rank_extra: each rank's own.
    asynchronous: returns a SaveHandle once the tensors are copied to the host; a second save waits for the first.
    Raises CheckpointError, on every rank, with the checkpoints that are there untouched.
    """
    if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
        raise CheckpointError(f"keep={keep!r}; keep a whole number of checkpoints, at least 1, or None for all.")
    line = line_of(mesh)
    _wait(line)
    problem: Exception | None = None
    tensors: dict[str, WholeTensor] = {}
    facts: dict[str, Any] = {}
    own = None
    try:
        extra, rank_extra = dict(extra or {}), dict(rank_extra or {})
        taken = sorted({"step"} & {*extra, *rank_extra} | extra.keys() & rank_extra.keys())
        if taken:
            raise CheckpointError(f"{taken[0]!r} is taken; extra, rank_extra and the step are one dict when they are loaded.")
        weights = model_tensors(model)
        refuse_meta(weights)
        tensors = _namespaced(weights, "model")
        facts = {
            "step": step,
            "mesh": dict(mesh_sizes(mesh)),
            "aliases": {name: list(whole.aliases) for name, whole in weights.items() if whole.aliases},
            "extra": {name: encode(value, f"extra[{name!r}]") for name, value in extra.items()},
        }
        optimizers = optimizer_state.as_list(optimizer)
        if optimizers:
            states, facts["optimizer"] = optimizer_state.collect(model, optimizers)
            tensors |= _namespaced(states, "optimizer")
        if rank_extra:
            own = {name: encode(value, f"rank_extra[{name!r}]") for name, value in rank_extra.items()}
        if asynchronous:
            tensors = {name: _copied(whole) for name, whole in tensors.items()}
    except Exception as error:
        problem = error
    writer = FolderWriter(Path(folder), step, keep, own)
    planner = PartSavePlanner(tensors, facts, problem)
    what = f"save_checkpoint({str(folder)!r}, step={step})"

    def write() -> Path:
        try:
            _joined(what, lambda: save({}, storage_writer=writer, planner=planner, process_group=line.group))
        finally:
            writer.clear()
        return Path(line.from_first(str(writer.path)))

    if asynchronous:
        handle = SaveHandle(write)
        line.pending = handle
        return handle
    write()
    return None


def load_checkpoint(
    model: nn.Module,
    mesh: DeviceMesh,
    folder: str | Path,
    optimizer: Optimizers = None,
    *,
    step: int | None = None,
    materialise: Callable[[], Any] = lambda: None,
) -> dict[str, Any] | None:
    """Reads the newest complete checkpoint of `folder`, or that of `step`, into the model and the optimizer, in place.

    Every rank of the mesh calls it, at whatever degrees the mesh has. Returns {"step": ..., and what extra held}, and what this rank's
    rank_extra held too where the mesh's axes and sizes are those of the save; None where there is no complete checkpoint.
    materialise: gives a model on the meta device its memory; called when names, shapes and dtypes fit. Until then nothing is changed.
    Raises CheckpointError on every rank.
    """
    line = line_of(mesh)
    _wait(line)
    found: Any = None
    if line.rank == 0:  # one rank looks, so that all read the same
        try:
            found = newest(Path(folder), step)
        except CheckpointError as error:
            found = error
    found = line.from_first(found)
    if isinstance(found, CheckpointError):
        raise found
    if found is None:
        return None
    path: Path = found.path
    problem: Exception | None = None
    index, own = _EMPTY, None
    tensors: dict[str, WholeTensor] = {}
    states: optimizer_state.States = []
    options: list[dict[str, Any]] = []
    try:
        index, own = read_index(path, line.rank)
        _check(model_tensors(model), index)
        materialise()
        tensors = _namespaced(model_tensors(model), "model")
        optimizers = optimizer_state.as_list(optimizer)
        if optimizers:
            if "optimizer" not in index:
                raise CheckpointError("it was saved without an optimizer; load it without one, and start that anew.")
            saved = {n.removeprefix("optimizer/"): e for n, e in index["tensors"].items() if n.startswith("optimizer/")}
            targets, states, options = optimizer_state.restore(model, optimizers, saved, index["optimizer"])
            tensors |= _namespaced(targets, "optimizer")
    except Exception as error:
        problem = error
    reader, planner = FolderReader(path, index), PartLoadPlanner(tensors, problem)
    _joined(
        f"load_checkpoint({str(path)!r})",
        lambda: load({}, storage_reader=reader, planner=planner, process_group=line.group),
    )
    optimizer_state.apply(states, options)
    result = {name: decode(value) for name, value in index["extra"].items()}
    if own is not None and index["mesh"] == dict(mesh_sizes(mesh)):
        result |= {name: decode(value) for name, value in own.items()}
    return {"step": int(index["step"]), **result}


_EMPTY: dict[str, Any] = {"tensors": {}}


def _check(weights: Mapping[str, WholeTensor], index: Mapping[str, Any]) -> None:
    """Raises one CheckpointError that says all that doesn't fit between the model and a checkpoint."""
    saved = {n.removeprefix("model/"): e for n, e in index["tensors"].items() if n.startswith("model/")}
    lines = []
    for what, names in (
        ("the checkpoint lacks", [n for n in weights if n not in saved]),
        ("the model lacks", [n for n in saved if n not in weights]),
    ):
        if names:
            lines.append(f"{what} {len(names)}: {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}")
    for name in (n for n in weights if n in saved):
        whole, entry = weights[name], saved[name]
        ours = f"{tuple(whole.shape)} {str(whole.dtype).removeprefix('torch.')}"
        theirs = f"{tuple(entry['shape'])} {entry['dtype']}"
        tied, was = sorted(whole.aliases), sorted(index["aliases"].get(name, []))
        if ours != theirs:
            lines.append(f"{name} is {ours} in the model and {theirs} in the checkpoint")
        if tied != was:
            both = [", ".join(names) or "nothing" for names in (tied, was)]
            lines.append(f"{name} is tied to {both[0]} in the model, and to {both[1]} in the checkpoint")
    if lines:
        more = f"\n  ... and {len(lines) - 5} more" if len(lines) > 5 else ""
        raise CheckpointError(
            "the checkpoint is another model's, or one of another size or dtype:\n  " + "\n  ".join(lines[:5]) + more
        )
