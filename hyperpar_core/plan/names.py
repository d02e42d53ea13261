"""Names of modules and parameters in texts: repeated ones folded, the nearest to a mistyped one."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable

__all__ = ["fold_names", "listed", "nearest", "span"]


def span(numbers: Iterable[int]) -> str:
    """`{0-2,5}` for 0, 1, 2, 5; a single number as it is."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    texts = [str(a) if a == b else f"{a}-{b}" for a, b in runs]
    if len(texts) > 6:
        texts = [*texts[:4], "...", texts[-1]]
    return texts[0] if len(runs) == 1 and runs[0][0] == runs[0][1] else f"{{{','.join(texts)}}}"


def fold_names(names: Iterable[str]) -> list[str]:
    """Names that differ in their first number only, as one: `layers.{0-3}.mlp`. In order of first appearance."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for name in names:
        parts = name.split(".")
        at = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
        if at is None:
            groups.setdefault((name,), [])
        else:
            groups.setdefault((".".join(parts[:at]), ".".join(parts[at + 1 :])), []).append(int(parts[at]))
    return [
        key[0] if len(key) == 1 else ".".join(part for part in (key[0], span(set(numbers)), key[1]) if part)
        for key, numbers in groups.items()
    ]


def listed(names: Iterable[str], most: int = 8) -> str:
    """`a, b, c`, and how many more; `none` for none."""
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return (", ".join(names[:most]) + more) or "none"


def nearest(name: str, names: Collection[str]) -> str:
    """` Nearest: x.`, or nothing: the end of an error about an unknown name."""
    near = difflib.get_close_matches(name, list(names), 1)
    return f" Nearest: {near[0]}." if near else ""
