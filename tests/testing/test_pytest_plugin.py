"""The pytest plugin: what a plugin author gets from one import in a conftest.py."""

from __future__ import annotations

import subprocess
import sys

import pytest

CONFTEST = "from hyperpar_core.testing.pytest_plugin import *  # noqa: F403\n"
TESTS = """
import time
import pytest
import torch.distributed as dist

def rank():
    return dist.get_rank()

def hang():
    time.sleep(60)

def test_the_fixture_runs_on_two_ranks(ranks2):
    assert ranks2.run(rank) == [0, 1]

@pytest.mark.limit(0.3)
def test_that_hangs():
    time.sleep(60)

@pytest.mark.limit(0.5)
def test_whose_ranks_hang(ranks2):
    ranks2.run(hang)

def test_the_ranks_are_back_afterwards(ranks2):
    assert ranks2.run(rank) == [0, 1]

def test_ranks_by_number_are_the_same_ones_and_tiny_models_are_new_each_time(ranks, ranks2, tiny):
    assert ranks(2) is ranks2
    a, b = tiny("llama"), tiny("llama")
    assert a is not b and all(x.equal(y) for x, y in zip(a.parameters(), b.parameters()))
"""


@pytest.mark.limit(240)
def test_an_author_gets_ranks_a_limit_per_test_and_live_ranks_after_a_hang(tmp_path):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_them.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "--strict-markers", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=230, cwd=tmp_path)
    assert "2 failed, 3 passed" in done.stdout, done.stdout + done.stderr
    for failed, seconds in (("test_that_hangs", "0.3"), ("test_whose_ranks_hang", "0.5")):
        assert f"{failed} ran longer than {seconds} s" in done.stdout
