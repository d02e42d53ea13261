"""The example of packed documents over cp, with a tiny model."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STEP = re.compile(r"^step +(\d+) +loss cp=2 ([\d.]+) +one process ([\d.]+) +relative difference (\S+)", re.MULTILINE)


@pytest.mark.limit(300)
@pytest.mark.parametrize(("bound", "code"), [("1e-10", 0), ("1e-18", 1)])
def test_it_prints_both_losses_a_step_plots_them_and_its_exit_code_says_whether_they_are_equal(
    bound: str, code: int, tmp_path: Path
) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = [str(ROOT / "docs/examples/finetune_cp.py"), "--tiny", "--steps", "3", "--tokens", "777", "--lr", "0.1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launcher, *script, "--out", str(tmp_path), "--bound", bound], env=environment, capture_output=True, text=True, timeout=280
    )
    assert (done.returncode == 0) is (code == 0), done.stdout + done.stderr[-3000:]
    steps = STEP.findall(done.stdout)
    assert [number for number, *_ in steps] == ["1", "2", "3"], done.stdout
    assert all(float(difference) <= 1e-10 for *_, difference in steps)
    assert all(float(a) == pytest.approx(float(b), rel=1e-9) for _, a, b, _ in steps)
    assert len({loss for _, loss, _, _ in steps}) == 3
    assert (tmp_path / "loss_cp.png").stat().st_size > 10_000
    assert re.search(r"\d+ documents of \d+ to \d+ tokens", done.stdout)
