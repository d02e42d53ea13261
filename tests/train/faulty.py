"""Runs docs/examples/train.py, and kills this process where a file of the test says so: `python faulty.py KILLS [arguments]`.

KILLS is a folder of files named RANK_STEP; a rank that reaches a step removes its file and dies, once.
"""

import os
import runpy
import signal
import sys
from pathlib import Path

from torch.optim.optimizer import register_optimizer_step_post_hook

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "train.py"


def main():
    kills, rank = Path(sys.argv.pop(1)), os.environ["RANK"]

    def after_step(optimizer, args, kwargs):
        step = int(max(float(state["step"]) for state in optimizer.state.values()))
        file = kills / f"{rank}_{step}"
        if file.exists():
            file.unlink()
            os.kill(os.getpid(), signal.SIGKILL)

    register_optimizer_step_post_hook(after_step)
    sys.argv[0] = str(EXAMPLE)
    runpy.run_path(str(EXAMPLE), run_name="__main__")


if __name__ == "__main__":
    main()
