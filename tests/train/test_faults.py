"""docs/examples/train.py under torchrun gets over ranks that are killed."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from test_example import SMALL, example, log

from hyperpar_core.testing import pool

HERE = Path(__file__).resolve().parent


def torchrun(ranks, *command, restarts):
    """(exit code, output) of a script under torchrun. When it takes too long, torchrun is told to end its ranks."""
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks, "--monitor-interval", 0.1]
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("TORCHELASTIC", "MASTER_", "RANK", "WORLD_SIZE"))}
    process = subprocess.Popen(
        [*map(str, [*run, "--max-restarts", restarts, *command])], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env={**inherited, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    try:
        out, _ = process.communicate()
    except BaseException:
        process.terminate()
        process.wait(30)
        raise
    return process.returncode, out


@pytest.mark.limit(300)
def test_ranks_that_are_killed_at_random_steps_leave_the_losses_of_an_undisturbed_run(tmp_path):
    steps, kills = 12, tmp_path / "kills"
    options = (*SMALL, "--micro", 1, "--dp", 2, "--every", 3, "--steps", steps)
    pool(2).run(example, *options, "--out", tmp_path / "calm")
    kills.mkdir()
    chosen = random.Random(7)
    for step in chosen.sample(range(2, steps), 3):
        (kills / f"{chosen.randrange(2)}_{step}").touch()
    code, out = torchrun(2, HERE / "faulty.py", kills, *options, "--out", tmp_path / "killed", restarts=3)
    assert code == 0, out[-4000:]
    assert list(kills.iterdir()) == []
    calm, killed = log(tmp_path / "calm"), log(tmp_path / "killed")
    assert sorted(calm) == sorted(killed) == list(range(1, steps + 1))
    assert any(len(runs) > 1 for runs in killed.values())  # what wasn't saved yet ran again
    for step, runs in killed.items():
        assert set(runs) == set(calm[step]), f"step {step}: {runs}, undisturbed {calm[step]}"
