"""What all tests share: the rank pools, the limit on a test's time, and a test process that belongs to no job."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist

pytest_plugins = ["hyperpar_core.testing.pytest_plugin"]


@pytest.fixture(autouse=True)
def no_job_is_left_behind() -> Iterator[None]:
    """A test that made a mesh of one process in the test process leaves no process group to the next one."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
