"""Training over two ranks that is killed again and again inside a save, and goes on from the newest complete checkpoint each time.

    python killed.py FOLDER FIRST POINTS [asynchronous]        prints what is wrong; nothing when all is well

Each life is two forked ranks. In life n one of them is killed at an operation on the disk (half done, where it can be), later in each
life, counted from its first save on; FIRST is where the first one is killed. Every rank writes down each loss, each step that it has
saved and each step that it went on from.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import safetensors.torch
import torch
import torch.distributed as dist

from hyperpar_core import apply_plan, build_plan, make_mesh, plugin_report
from hyperpar_core.testing import tiny_batch, tiny_model

RANKS = 2
MOST = 3  # steps of a life: enough for saves that remove older ones


class Killer:
    """Kills this process at its n-th operation on the disk."""

    def __init__(self, point):
        self.left = point

    def watch(self, owner, name, half=None):
        real = getattr(owner, name)

        def watched(*args, **kwargs):
            if self.left == 0:
                if half is not None:
                    half(real, *args, **kwargs)
                os.kill(os.getpid(), signal.SIGKILL)
            self.left -= 1
            return real(*args, **kwargs)

        setattr(owner, name, watched)


def half_file(real, tensors, path, **options):
    real(tensors, path, **options)
    os.truncate(path, os.path.getsize(path) // 2)


def half_tree(real, path, **options):
    next(p for p in Path(path).iterdir()).unlink()


def half_text(real, value, file):
    file.write(json.dumps(value)[:50])
    file.flush()


def life(rank, store, folder, log, point, last, asynchronous):
    """One rank: goes on from the newest checkpoint and saves after every step. point: None lives on to step `last`."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    model = tiny_model("llama", num_hidden_layers=1, vocab_size=32)
    mesh = make_mesh(tp=RANKS)
    applied = apply_plan(model, build_plan(model, mesh), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = applied.load_checkpoint(folder, optimizer) or {"step": 0}
    note = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(note, f"{rank} from {state['step']}\n".encode())
    if point is not None:
        killer = Killer(point)
        for owner, name, half in (
            (os, "mkdir", None), (os, "fsync", None), (os, "rename", None), (shutil, "rmtree", half_tree),
            (safetensors.torch, "save_file", half_file), (json, "dump", half_text),
        ):  # fmt: skip
            killer.watch(owner, name, half)
    before = None
    for step in range(state["step"], last if point is None else min(state["step"] + MOST, last)):
        loss = model(**applied.shard_batch(tiny_batch(model, seq=8, seed=step)), use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        os.write(note, f"{rank} loss {step} {loss.item().hex()}\n".encode())
        handle = applied.save_checkpoint(folder, optimizer, step=step + 1, asynchronous=asynchronous)
        if before is not None:
            os.write(note, f"{rank} saved {before[0]} {before[1].result().name}\n".encode())
        before = (step + 1, handle) if handle else None
        if handle is None:
            os.write(note, f"{rank} saved {step + 1}\n".encode())
    if before is not None:
        before[1].result()


def live(folder, log, points, last, asynchronous):
    """One life; whether a rank was killed."""
    with tempfile.TemporaryDirectory() as scratch:
        children = []
        for rank in range(RANKS):
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    if any(point is not None for point in points):  # what the survivor says of the other's death
                        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
                    life(rank, f"{scratch}/store", folder, log, points[rank], last, asynchronous)
                    code = 0
                finally:
                    os._exit(code)
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    return codes


def main(folder, first, points, asynchronous):
    plugin_report()  # what the ranks import, they find imported
    build_plan(tiny_model("llama", num_hidden_layers=1, vocab_size=32), {"tp": RANKS})
    log = Path(folder) / "log"
    checkpoints = str(Path(folder) / "checkpoints")
    wrong, saved, killed = [], 0, 0
    for n in range(points):
        rank = 1 if n % 5 == 4 else 0  # the first rank does most of the work
        plan = [None, None]
        plan[rank] = n // 5 if rank else first + n - n // 5
        plan[1 - rank] = 10**9  # lives, and stops after MOST steps
        codes = live(checkpoints, log, plan, 10**6, asynchronous)
        killed += codes[rank] == -signal.SIGKILL
        lines = [line.split() for line in log.read_text().splitlines()]
        log.write_text("")
        starts = {int(line[2]) for line in lines if line[1] == "from"}
        if len(starts) != 1 or min(starts) < saved:
            wrong.append(f"life {n} went on from {sorted(starts)}, and step {saved} was saved")
        for line in lines:
            if line[1] == "saved":
                saved = max(saved, int(line[2]))
            elif line[1] == "loss" and losses.setdefault(line[2], line[3]) != line[3]:
                wrong.append(f"life {n}: the loss of step {line[2]} is {line[3]}, and was {losses[line[2]]}")
    if killed < points:
        wrong.append(f"{killed} of {points} lives were killed")
    last = max(map(int, losses)) + 1
    whole = live(str(Path(folder) / "undisturbed"), log, [None, None], last, False)
    for line in map(str.split, log.read_text().splitlines()):
        if line[1] == "loss" and losses[line[2]] != line[3]:
            wrong.append(f"undisturbed, the loss of step {line[2]} is {line[3]}, and was {losses[line[2]]}")
    if whole != [0, 0]:
        wrong.append(f"the undisturbed run ended with {whole}")
    left = [p.name for p in Path(checkpoints).iterdir() if not p.name.startswith(("step_", ".writing-"))]
    if left or not saved:
        wrong.append(f"{left} left, step {saved} saved")
    print("\n".join(wrong), end="")


losses: dict[str, str] = {}
if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:] == ["asynchronous"])
