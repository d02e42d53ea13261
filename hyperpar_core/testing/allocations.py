"""What a call allocates on the CPU: the allocator's own log, kernels' workspaces included, each free as it happens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.profiler import ProfilerActivity, profile

__all__ = ["Allocations", "allocations"]


@dataclass(frozen=True)
class Allocations:
    """Bytes. peak: the most that was live at once, beyond what was live before. largest: of a single allocation. left: still live."""

    peak: int
    largest: int
    left: int


def allocations(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Allocations:
    """Runs `call` and reads what the allocator did meanwhile, on every thread of this process."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as log:
        call(*args, **kwargs)
    events = log.profiler.kineto_results.events()
    live = peak = largest = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: int(e.start_ns())):
        size = int(event.nbytes())
        live += size
        peak, largest = max(peak, live), max(largest, size)
    return Allocations(peak, largest, live)
