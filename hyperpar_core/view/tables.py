"""Plain text in columns, and rows for repeated layers."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ..plan.names import span

__all__ = ["Row", "align", "fold", "size"]

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
    lines = textwrap.wrap(
        cell.lstrip(), limit, initial_indent=indent, subsequent_indent=indent + "  ", break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip
    return lines or [""]


@dataclass(frozen=True)
class Row(Generic[T]):
    """One line of a folded list: `things` of equal key, one of each of `copies` layers; `inside`: all that stands below a header."""

    depth: int
    name: str
    copies: int
    things: tuple[T, ...]
    inside: tuple[T, ...] = ()


def fold(items: Sequence[tuple[str, T]], key: Callable[[T], Any]) -> Iterator[Row[T]]:
    """One row per thing, and one for all the layers whose parts have equal keys, under a header.

    items: (dotted name, thing), in order. Layers are what differs in the first number of the name.
    """
    yield from _fold([(tuple(name.split(".")), [thing]) for name, thing in items], key, 0)


def _fold(items: list[tuple[tuple[str, ...], list[T]]], key: Callable[[T], Any], depth: int) -> Iterator[Row[T]]:
    done: set[tuple[str, ...]] = set()
    for parts, things in items:
        at = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
        head = parts[:at]
        if at is None:
            yield Row(depth, ".".join(parts), 1, tuple(things))
        elif head not in done:
            done.add(head)
            yield from _layers(head, [item for item in items if item[0][:at] == head and len(item[0]) > at], key, depth)


def _layers(
    head: tuple[str, ...], items: list[tuple[tuple[str, ...], list[T]]], key: Callable[[T], Any], depth: int
) -> Iterator[Row[T]]:
    """The rows of one list of layers, those that are alike together."""
    layers: dict[str, list[tuple[tuple[str, ...], list[T]]]] = {}
    for parts, things in items:
        layers.setdefault(parts[len(head)], []).append((parts[len(head) + 1 :], things))
    alike: dict[Any, list[str]] = {}
    for index, parts_of in layers.items():
        alike.setdefault(tuple((parts, key(things[0])) for parts, things in parts_of), []).append(index)
    for indices in alike.values():
        merged = [
            (parts, [t for index in indices for t in layers[index][i][1]])
            for i, (parts, _) in enumerate(layers[indices[0]])
        ]
        own = tuple(t for parts, things in merged if not parts for t in things)
        beneath = [(parts, things) for parts, things in merged if parts]
        name = ".".join((*head, span(int(index) for index in indices)))
        yield Row(depth, name, len(indices), own, tuple(t for _, things in beneath for t in things))
        yield from _fold(beneath, key, depth + 1)
