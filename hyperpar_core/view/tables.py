"""Plain text in columns, and rows for repeated layers."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from ..plan.names import span

__all__ = ["align", "fold", "size"]

T = TypeVar("T")


def size(count: float) -> str:
    """Bytes for people: 512 B, 28 MiB, 4.3 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.3g} {unit}"


def align(rows: Sequence[Sequence[str]], widest: Sequence[int]) -> list[str]:
    """Lines whose columns line up. A cell longer than its column's `widest` goes on in further lines, indented."""
    cells = [[_wrapped(cell, limit) for cell, limit in zip(row, widest, strict=True)] for row in rows]
    columns = range(len(widest))
    widths = [max((len(line) for row in cells for line in row[column]), default=0) for column in columns]
    used = [column for column in columns if any(any(row[column]) for row in cells[1:])]
    lines = []
    for row in cells:
        for i in range(max(len(row[column]) for column in used)):
            parts = ((row[column][i] if i < len(row[column]) else "").ljust(widths[column]) for column in used)
            lines.append("  ".join(parts).rstrip())
    return lines


def _wrapped(cell: str, limit: int) -> list[str]:
    indent = " " * (len(cell) - len(cell.lstrip()))
    lines = textwrap.wrap(cell, limit, initial_indent=indent, subsequent_indent=indent + "  ", break_long_words=False)
    return lines or [""]


def fold(items: Sequence[tuple[str, T]], key: Callable[[T], Any]) -> Iterator[tuple[int, str, list[T]]]:
    """(depth, name, items): one row per thing, and one for all the layers whose parts have equal keys, under a header without items.

    items: (dotted name, thing), in order. Layers are what differs in the first number of the name.
    """
    yield from _fold([(tuple(name.split(".")), thing) for name, thing in items], key, 0)


def _fold(
    items: list[tuple[tuple[str, ...], T]], key: Callable[[T], Any], depth: int
) -> Iterator[tuple[int, str, list[T]]]:
    done: set[tuple[str, ...]] = set()
    for parts, thing in items:
        at = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
        if at is None:
            yield depth, ".".join(parts), [thing]
            continue
        head = parts[:at]
        if head in done:
            continue
        done.add(head)
        yield from _layers(head, [i for i in items if i[0][:at] == head and len(i[0]) > at], key, depth)


def _layers(
    head: tuple[str, ...], items: list[tuple[tuple[str, ...], T]], key: Callable[[T], Any], depth: int
) -> Iterator[tuple[int, str, list[T]]]:
    """The rows of one list of layers."""
    at = len(head)
    layers: dict[str, list[tuple[tuple[str, ...], T]]] = {}
    for parts, thing in items:
        layers.setdefault(parts[at], []).append((parts[at + 1 :], thing))
    alike: dict[Any, list[str]] = {}
    for index, inside in layers.items():
        alike.setdefault(tuple((parts, key(thing)) for parts, thing in inside), []).append(index)
    for indices in alike.values():
        name = ".".join((*head, span(int(i) for i in indices)))
        own = [thing for i in indices for parts, thing in layers[i] if not parts]
        inner = [(parts, [t for i in indices for p, t in layers[i] if p == parts]) for parts, _ in layers[indices[0]]]
        yield depth, name, own
        nested = [(parts, things) for parts, things in inner if parts]
        for deeper, inner_name, groups in _fold(nested, lambda things: key(things[0]), depth + 1):
            yield deeper, inner_name, [thing for group in groups for thing in group]
