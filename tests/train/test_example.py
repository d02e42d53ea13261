"""docs/examples/train.py: it trains, writes its files, and goes on where it stopped, bitwise."""

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from hyperpar_core.testing import pool

HERE = Path(__file__).resolve().parent
EXAMPLE = HERE.parents[1] / "docs" / "examples" / "train.py"
SMALL = ("--seq", 16, "--rows", 1, "--warmup", 3)


def example(*options):
    """The script, on a rank that is there already."""
    before, sys.argv = sys.argv, [str(EXAMPLE), *map(str, options)]
    try:
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    finally:
        sys.argv = before


def log(folder):
    """{step: the (loss, norm) of every time that it ran}."""
    found = {}
    for line in (folder / "log.jsonl").read_text().splitlines():
        entry = json.loads(line)
        found.setdefault(entry["step"], []).append((entry["loss"], entry["norm"]))
    return found


RUNS = {
    "dp2 x tp2, FSDP": ("llama", ("--dp", 2, "--tp", 2, "--fsdp")),
    "cp2 x tp2 x ep2": ("qwen3_moe", ("--cp", 2, "--tp", 2, "--ep", 2)),
    "dp4 x ep2, FSDP": ("qwen3_moe", ("--dp", 4, "--ep", 2, "--fsdp")),
}


@pytest.mark.parametrize("run", RUNS)
def test_it_trains_on_four_ranks_writes_its_files_and_goes_on_where_it_stopped(run, tmp_path):
    model, degrees = RUNS[run]
    options = ("--model", model, *degrees, *SMALL, "--every", 2)
    for steps in (2, 4):
        pool(4).run(example, *options, "--steps", steps, "--out", tmp_path / "two")
    pool(4).run(example, *options, "--steps", 4, "--out", tmp_path / "one")
    twice, once = log(tmp_path / "two"), log(tmp_path / "one")
    assert sorted(once) == [1, 2, 3, 4] and twice == once
    assert (tmp_path / "one" / "plan.yaml").read_text() == (tmp_path / "two" / "plan.yaml").read_text()
    first, second = (AutoModelForCausalLM.from_pretrained(tmp_path / n / "model").state_dict() for n in ("one", "two"))
    assert all(torch.equal(first[name], second[name]) for name in first)
