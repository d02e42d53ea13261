"""Folders of checkpoints: one is there whole, or not at all.

    step_00000100/             complete: it got this name, by a rename, once all of it was on the disk
    step_00000100.again-1/     the same step, saved again later
    .writing-step_00000200/    in the making, or left by a run that was killed

A reader takes the newest complete one. A writer clears away what was left in the making, before it writes; it lets go of old
checkpoints after the new one is complete.
"""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from ..errors import CheckpointError

__all__ = ["Complete", "complete", "fsync_file", "newest", "publish", "start"]

_NAME = re.compile(r"step_(\d{8,})(?:\.again-(\d+))?")
_WRITING = ".writing-"


@dataclass(frozen=True, order=True)
class Complete:
    """A complete checkpoint. They sort by age."""

    step: int
    attempt: int
    path: Path


def complete(folder: Path) -> list[Complete]:
    """The complete checkpoints of a folder, the newest last."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _NAME.fullmatch(path.name)
        if match and path.is_dir():
            found.append(Complete(int(match[1]), int(match[2] or 0), path))
    return sorted(found)


def newest(folder: Path, step: int | None = None) -> Complete | None:
    """The newest complete checkpoint, or the newest of `step`; None when there is none. CheckpointError when `step` isn't there."""
    found = complete(folder)
    if step is not None:
        asked = [one for one in found if one.step == step]
        if not asked:
            steps = ", ".join(str(s) for s in sorted({one.step for one in found})) or "none"
            raise CheckpointError(f"{folder} has no complete checkpoint of step {step}. Complete there: {steps}.")
        return asked[-1]
    return found[-1] if found else None


def start(folder: Path, step: int) -> Path:
    """A new empty folder to write the checkpoint of `step` into; what killed runs left is cleared away. One process calls it."""
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise CheckpointError(f"step={step!r}; a step is a whole number of at least 0.")
    folder.mkdir(parents=True, exist_ok=True)
    last = newest(folder)
    if last is not None and last.step > step:
        raise CheckpointError(
            f"{folder} holds step {last.step}, and step {step} would be older than that, so nobody would load it.\n"
            f"  Choose another folder, or remove the checkpoints after step {step} to go on from there."
        )
    for left in folder.glob(f"{_WRITING}*"):
        shutil.rmtree(left)
    writing = folder / f"{_WRITING}step_{step:08d}"
    writing.mkdir()
    return writing


def publish(writing: Path, keep: int | None) -> Path:
    """Makes a written folder a complete checkpoint, and removes all but the newest `keep` (None: none). One process calls it."""
    folder = writing.parent
    step = int(writing.name.removeprefix(f"{_WRITING}step_"))
    attempts = [one.attempt for one in complete(folder) if one.step == step]
    name = f"step_{step:08d}" + (f".again-{max(attempts) + 1}" if attempts else "")
    _fsync_folder(writing)
    target = folder / name
    os.rename(writing, target)
    _fsync_folder(folder)
    for old in complete(folder)[: -keep if keep else 0]:
        trash = folder / f"{_WRITING}old-{old.path.name}"
        os.rename(old.path, trash)  # half removed, it must not look complete
        shutil.rmtree(trash)
    return target


def fsync_file(path: Path) -> None:
    """Waits until a written file is on the disk."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def _fsync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
