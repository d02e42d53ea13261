"""What a block sends where a row travels for each pair of a token and an expert, not for each rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

__all__ = ["of_pairs", "of_sorted_rows"]

Sent = list[tuple[str, str, int]]


def of_pairs(traffic: Callable[..., Sent | None]) -> Callable[..., Sent | None]:
    """A dispatcher's `traffic` for a block that hands it each pair as a token of its own, with one expert."""

    def sent(*, contract: Any, tokens: int, **rest: Any) -> Sent | None:
        chosen = contract.features.get("experts_per_token")
        if chosen is None:
            return None
        one = replace(contract, features={**contract.features, "experts_per_token": 1})
        return traffic(contract=one, tokens=tokens * chosen, **rest)

    return sent


def of_sorted_rows(*, contract: Any, shapes: Mapping[str, Sequence[int]], tokens: int, ranks: int, width: int) -> Sent | None:
    """Two layers of experts: both ask how many rows each rank has, the first sends the rows, the second brings them back."""
    hidden, chosen = next(iter(contract.features.values())), contract.features.get("experts_per_token")
    if chosen is None:
        return None
    counts = next(shapes[name][0] for name, layout in contract.params.items() if "ep" in layout) * 8
    rows = tokens * chosen * hidden * width
    forward = [("forward", "all_to_all", size) for size in (counts, rows, counts, rows)]
    return [*forward, *[("backward", "all_to_all", rows)] * 2]
