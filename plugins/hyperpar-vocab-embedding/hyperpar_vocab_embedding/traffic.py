"""What the embedding and the loss send in a step: for plans."""

from __future__ import annotations

from typing import Any

__all__ = ["sends_nothing", "sent_by_the_loss"]


def sends_nothing(*, contract: Any, shapes: Any, tokens: int, ranks: int, width: int) -> list[tuple[str, str, int]]:
    """The sum of the lookups is the boundary's own transition."""
    return []


def sent_by_the_loss(*, contract: Any, shapes: Any, tokens: int, ranks: int, width: int) -> list[tuple[str, str, int]]:
    """The maximum, then the sums, of each token, in float32 or float64; label smoothing adds a third number to the two."""
    number, sums = max(width, 4), 3 if contract.options.get("label_smoothing") else 2
    return [("forward", "all_reduce", tokens * number), ("forward", "all_reduce", sums * tokens * number)]
