"""The rank pool: every rank's traceback, no hang, live processes afterwards, functions found where tests write them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hyperpar_core.testing import RankFailure, RankPool, ranks


class Unpicklable(Exception):
    def __init__(self, a, b):
        super().__init__(f"{a} {b}")


def sum_of_ranks(scale, *, shift=0):
    total = torch.tensor(float(dist.get_rank() * scale + shift))
    dist.all_reduce(total)
    return total


def who():
    return os.getpid(), dist.get_rank(), os.environ["RANK"]


def fail_everywhere():
    raise ValueError(f"no luck on rank {dist.get_rank()}")


def fail_on_rank_1_while_others_wait():
    if dist.get_rank() == 1:
        raise KeyError("only rank 1")
    dist.barrier()


def fail_between_collectives():
    dist.all_reduce(torch.ones(1))
    if dist.get_rank() == 0:
        raise ValueError("before the second")
    handle = dist.all_reduce(torch.ones(1), async_op=True)
    assert handle is not None
    raise ValueError("after the second was started")


def raise_unpicklable():
    raise Unpicklable("left", "right")


def wait_for_rank_1():
    if dist.get_rank() == 0:
        dist.recv(torch.ones(1), src=1)
    time.sleep(600)


def print_and_die():
    if dist.get_rank() == 0:
        for line in range(50):
            print("line", line)
        sys.stdout.flush()
        os._exit(7)


def return_a_lock():
    import threading

    return threading.Lock()


def make_groups(count):
    for _ in range(count):
        dist.new_group()
    return len(dist.distributed_c10d._world.pg_map)


def change_state():
    os.environ["HYPERPAR_DISABLE_PLUGINS"] = "everything"
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(1234 + dist.get_rank())


def state():
    return "HYPERPAR_DISABLE_PLUGINS" in os.environ, torch.get_default_dtype(), torch.rand(1).item()


def test_results_come_back_in_the_order_of_the_ranks(ranks2):
    assert [rank for _, rank, _ in ranks2.run(who)] == [0, 1]
    assert [rank for _, _, rank in ranks2.run(who)] == ["0", "1"]
    assert ranks2.run(sum_of_ranks, 3, shift=1) == [torch.tensor(5.0)] * 2


def test_runs_share_the_same_processes(ranks2):
    pids = [pid for pid, _, _ in ranks2.run(who)]
    for _ in range(10):
        assert [pid for pid, _, _ in ranks2.run(who)] == pids == ranks2.pids


def test_a_failure_shows_every_ranks_traceback_and_exception(ranks2):
    with pytest.raises(RankFailure) as failure:
        ranks2.run(fail_everywhere)
    for rank in (0, 1):
        assert f"no luck on rank {rank}" in failure.value.reports[rank]
        assert "in fail_everywhere" in failure.value.reports[rank]
        assert isinstance(failure.value.exceptions[rank], ValueError)
        assert f"ValueError: no luck on rank {rank}" in str(failure.value)


def test_a_rank_that_waits_for_a_failed_one_is_shown_with_its_stack_and_the_pool_lives_on(ranks2):
    with pytest.raises(RankFailure) as failure:
        ranks2.run(fail_on_rank_1_while_others_wait)
    assert "only rank 1" in failure.value.reports[1]
    assert "in barrier" in failure.value.reports[0]
    assert "ranks [0] were still running" in failure.value.summary
    assert ranks2.run(sum_of_ranks, 1) == [torch.tensor(1.0)] * 2


def test_a_failure_between_collectives_doesnt_shift_the_next_runs_collectives(ranks2):
    pids = ranks2.pids
    with pytest.raises(RankFailure, match="before the second"):
        ranks2.run(fail_between_collectives)
    assert ranks2.run(sum_of_ranks, 1) == [torch.tensor(1.0)] * 2
    assert ranks2.pids == pids


def test_an_exception_that_cant_be_pickled_is_still_shown(ranks2):
    with pytest.raises(RankFailure, match="Unpicklable: left right") as failure:
        ranks2.run(raise_unpicklable)
    assert failure.value.exceptions == {}


def test_a_result_that_cant_be_pickled_is_a_failure_that_says_so(ranks2):
    with pytest.raises(RankFailure, match="cannot pickle"):
        ranks2.run(return_a_lock)


def test_on_timeout_each_stack_is_shown_and_the_pools_processes_are_killed_and_respawned():
    own = RankPool(2)
    try:
        first = [pid for pid, _, _ in own.run(who)]
        with pytest.raises(RankFailure, match=r"were still running after 0\.5 s") as failure:
            own.run(wait_for_rank_1, timeout=0.5)
        assert "in recv" in failure.value.reports[0]
        assert "in wait_for_rank_1" in failure.value.reports[1]
        assert not any(alive(pid) for pid in first)
        again = [pid for pid, _, _ in own.run(who)]
        assert not set(first) & set(again)
    finally:
        own.close()
    assert not any(alive(pid) for pid in again)


def test_a_rank_that_dies_is_reported_with_its_exit_code_and_its_last_lines():
    own = RankPool(2, grace=0.5)
    try:
        with pytest.raises(RankFailure, match="died with exit code 7") as failure:
            own.run(print_and_die)
        assert "| line 49" in failure.value.reports[0]
        assert "| line 29" not in failure.value.reports[0]
        assert own.run(sum_of_ranks, 1) == [torch.tensor(1.0)] * 2
    finally:
        own.close()


def test_a_run_leaves_no_environment_dtype_or_seed_behind(ranks2):
    before = ranks2.run(state)
    ranks2.run(change_state)
    assert ranks2.run(state) == before
    assert before[0] == (False, torch.float32, before[1][2])


def threads_of_groups():
    for _ in range(4):
        dist.all_reduce(torch.ones(1), group=dist.new_group([0, 1]))
    return sum(1 for task in os.listdir("/proc/self/task") if "gloo_tcp" in Path(f"/proc/self/task/{task}/comm").read_text())


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="needs Linux's list of threads")
def test_all_groups_of_a_rank_share_one_thread_that_wakes_up(ranks2):
    assert ranks2.run(threads_of_groups) == [1, 1]


def test_groups_stay_between_runs_until_they_are_too_many(ranks2):
    few = ranks2.run(make_groups, 3)[0]
    assert ranks2.run(make_groups, 1) == [few + 1] * 2
    assert ranks2.run(make_groups, ranks.MAX_GROUPS)[0] > ranks.MAX_GROUPS
    assert ranks2.run(make_groups, 0) == [1, 1]
    assert ranks2.run(sum_of_ranks, 1) == [torch.tensor(1.0)] * 2


def test_only_a_function_at_the_top_of_a_module_is_accepted(ranks2):
    with pytest.raises(TypeError, match="at the top of a module"):
        ranks2.run(lambda: 1)


@pytest.mark.limit(240)
def test_functions_of_a_script_run_and_the_ranks_end_when_their_parent_is_killed(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import os, signal
        import torch.distributed as dist
        from hyperpar_core.testing import pool

        class Point:
            def __init__(self, x):
                self.x = x

        def double(point):
            return Point(point.x * 2 + dist.get_rank()), os.getpid()

        if __name__ == "__main__":
            results = pool(2).run(double, Point(4))
            print([point.x for point, _ in results], *[pid for _, pid in results], flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        """)
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=220)
    assert done.returncode == -signal.SIGKILL, done.stderr
    doubled, first, second = done.stdout.rsplit(maxsplit=2)
    assert doubled == "[8, 9]"
    deadline = time.monotonic() + 30
    while any(alive(int(pid)) for pid in (first, second)):
        assert time.monotonic() < deadline, "the ranks outlive their parent"
        time.sleep(0.05)


def alive(pid):
    """Whether `pid` runs (a zombie that nobody has collected doesn't)."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
