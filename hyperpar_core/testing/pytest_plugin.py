"""Fixtures for tests that need ranks, for the core's tests and for authors of plugins.

In a top-level conftest.py:    pytest_plugins = ["hyperpar_core.testing.pytest_plugin"]
In a conftest.py further down: from hyperpar_core.testing.pytest_plugin import *

    def test_every_rank_sees_the_sum(ranks2):
        assert ranks2.run(sum_of_ranks) == [1, 1]

    def test_it_plans_on_any_number_of_ranks(ranks, tiny):
        assert build_plan(tiny("llama"), {"tp": 2}).sizes == {"tp": 2} and len(ranks(3).run(rank)) == 3

Each test fails after 120 s, or after what `@pytest.mark.limit(seconds)` says. `python -m pytest -m "not ranks"` leaves
out the tests that use rank processes.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Generator, Iterator
from types import FrameType
from typing import Any

import pytest

from .ranks import RankPool, close_pools, pool
from .zoo import tiny_model

__all__ = [
    "close_rank_pools",
    "pytest_collection_modifyitems",
    "pytest_configure",
    "pytest_runtest_call",
    "ranks",
    "ranks2",
    "ranks3",
    "ranks4",
    "tiny",
]

LIMIT = 120.0  # seconds for a test's own call; spawning a pool is part of its fixtures
POOLS = {"ranks2": 2, "ranks3": 3, "ranks4": 4}


class TestLimit(Exception):
    """A test ran longer than its limit."""

    __test__ = False


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "limit(seconds): how long the test may run (120 s without it)")
    config.addinivalue_line("markers", "ranks: runs on rank processes (set by the fixtures ranks, ranks2, ranks3, ranks4)")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if {"ranks", *POOLS} & set(getattr(item, "fixturenames", ())):
            item.add_marker("ranks")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    marker = item.get_closest_marker("limit")
    seconds = float(marker.args[0]) if marker else LIMIT

    def stop(signum: int, frame: FrameType | None) -> None:
        raise TestLimit(f"{item.nodeid} ran longer than {seconds:g} s")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def _shared(world_size: int) -> RankPool:
    shared = pool(world_size)
    shared.start()
    return shared


@pytest.fixture(scope="session")
def ranks2() -> RankPool:
    """Two rank processes in one gloo process group, shared by the whole session."""
    return _shared(2)


@pytest.fixture(scope="session")
def ranks3() -> RankPool:
    """Three rank processes in one gloo process group, shared by the whole session."""
    return _shared(3)


@pytest.fixture(scope="session")
def ranks4() -> RankPool:
    """Four rank processes in one gloo process group, shared by the whole session."""
    return _shared(4)


@pytest.fixture(scope="session")
def ranks() -> Callable[[int], RankPool]:
    """`ranks(n)`: n rank processes in one gloo process group, shared by the whole session."""
    return _shared


@pytest.fixture(scope="session")
def tiny() -> Callable[..., Any]:
    """`tiny(family)`: a new tiny model of a family of transformers, jittered, in train mode; as `tiny_model` makes it."""
    return tiny_model


@pytest.fixture(scope="session", autouse=True)
def close_rank_pools() -> Iterator[None]:
    yield
    close_pools()
