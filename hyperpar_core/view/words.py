"""The words of reports: collectives, counts, shares."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

__all__ = ["WORDS", "collectives_text", "count_text", "percent_text"]

WORDS = {"all_gather": "gather", "reduce_scatter": "scatter", "all_reduce": "all-reduce", "all_to_all": "all-to-all"}


def collectives_text(sent: Iterable[tuple[str, str]], axes: bool = True) -> str:
    """`2 gather tp 1 all-to-all ep` of (collective, axis) pairs; `-` for none. axes: whether the axis is named."""
    counts = Counter(sent)
    shown = [f"{n} {WORDS.get(op, op)}{f' {axis}' if axes or axis == 'ep' else ''}" for (op, axis), n in counts.items()]
    return " ".join(shown) or "-"


def count_text(elements: int) -> str:
    """Elements for people: 8.2B, 340M."""
    for unit, factor in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if elements >= factor:
            return f"{elements / factor:.3g}{unit}"
    return str(elements)


def percent_text(part: int, whole: int) -> str:
    """`99.98%`; never 100% unless it is."""
    if part == whole and whole:
        return "100%"
    return f"{min(100 * part / whole, 99.99):.4g}%" if whole else "0%"
