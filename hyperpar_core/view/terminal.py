"""Reports on a terminal, by rich where the [cli] extra is there; as plain text where it isn't, or where the output is no terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..plan.sharding_plan import ShardingPlan
from .explain import boundary_cells, explain, summary
from .memory import memory
from .outline import outline
from .tables import size
from .what_if import WhatIf

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

__all__ = ["memory_lines", "print_plan", "print_what_if"]

NARROW = 100  # columns below which layouts stand under the name


def memory_lines(
    plan: ShardingPlan, *, batch: int, sequence: int, bytes_per_element: int = 2, dp: int = 1, optimizer: str = "adamw"
) -> list[str]:
    """What a rank holds, as it is and with layers checkpointed."""
    lines = []
    for again in (False, True):
        held = memory(
            plan, batch, sequence, dp=dp, bytes_per_element=bytes_per_element, optimizer=optimizer, checkpointing=again
        )
        parts = (("parameters", held.parameters), ("gradients", held.gradients), (optimizer, held.optimizer))
        state = ", ".join(f"{name} {size(bytes_)}" for name, bytes_ in parts)
        if again:
            lines.append(f"  with checkpointed layers {size(held.total)}: activations {size(held.activations)}")
        else:
            lines.append(f"memory per rank: {size(held.total)}: {state}, activations {size(held.activations)} (estimated)")
    return lines


def print_plan(plan: ShardingPlan, *, batch: int, sequence: int, dp: int = 1) -> None:
    """`explain` with memory: a rich table on a terminal, plain text elsewhere."""
    console = _console()
    below = memory_lines(plan, batch=batch, sequence=sequence, dp=dp)
    if console is None:
        print("\n".join([explain(plan, tokens=batch * sequence, dp=dp), *below]))
        return
    from rich.table import Table
    from rich.text import Text

    shown = outline(plan, batch, sequence, 2, dp)
    name, *facts = shown.title
    console.print(Text.assemble((name, "bold"), "   ", "   ".join(facts)))
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    narrow = console.width < NARROW
    titles = ("boundary", "parameters", "in -> compute", "compute -> out", f"a step of {batch * sequence} tokens", "")
    kept = [0, 4, 5] if narrow else list(range(6))
    for place in kept:
        table.add_column(titles[place], justify="right" if place == 5 else "left", overflow="fold", no_wrap=place == 5)
    for line in shown.lines:
        label = Text("  " * line.depth + line.name, style="" if line.contracts else "bold")
        if line.contracts:
            cells = boundary_cells(shown, line)
            texts = [_held(cells[0]), _layout(cells[1]), _layout(cells[2]), Text(cells[3], style="dim" if cells[3] == "-" else "")]
            row = [label, *texts, Text(cells[4], style="bold" if line.bytes else "")]
        else:
            copies = f"{line.copies} x" if line.copies > 1 else ""
            row = [label, Text(), Text(), Text(), Text(copies, style="bold"), Text(size(line.bytes) if copies and line.bytes else "")]
        table.add_row(*(row[place] for place in kept))
    console.print(table)
    for text in [*below, *summary(shown)]:
        head, colon, rest = text.partition(":")
        console.print(Text.assemble((head + colon, "dim"), rest), soft_wrap=False)
    if narrow:
        console.print(Text("layouts are shown from 100 columns on", style="dim"))


def print_what_if(report: WhatIf, most: int = 20) -> None:
    """The products as a table."""
    console = _console()
    if console is None:
        print(report.text(most))
        return
    from rich.table import Table
    from rich.text import Text

    console.print(Text.assemble((f"{report.model} on {report.world} ranks", "bold"), f"   {len(report.choices)} products work"))
    console.print(Text(report.assumed, style="dim"))
    header, *rows = report.rows(most)
    console.print(_table(header, rows))
    if len(report.choices) > most:
        console.print(Text(f"and {len(report.choices) - most} more (--json has all)", style="dim"))
    if report.refused:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
        table.add_column("refused")
        table.add_column("why", overflow="fold")
        for products, cause in report.refusals():
            table.add_row(Text(products), Text(cause))
        console.print(table)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    last = len(header) - 1
    for place, title in enumerate(header):
        table.add_column(title, justify="right" if 0 < place < last else "left", no_wrap=place < last)
    styles = {"best": "bold", "too large": "dim"}
    for row in rows:
        table.add_row(*(Text(cell) for cell in row), style=styles.get(row[0], ""))
    return table


def _held(text: str) -> Text:
    from rich.text import Text

    made = Text(text)
    made.highlight_regex(r"S\(-?\d+\)", "green")
    made.highlight_regex(r"grad P(\([a-z,]+\))?", "yellow")
    made.highlight_regex(r"runs .*", "cyan")
    return made


def _layout(text: str) -> Text:
    from rich.text import Text

    made = Text(text)
    made.highlight_regex(r"S\(-?\d+\)", "green")
    made.highlight_regex(r"partial", "yellow")
    made.highlight_regex(r"->", "dim")
    return made


def _console() -> Console | None:
    """rich's console, where it is there and the output is a terminal."""
    try:
        from rich.console import Console
    except ImportError:
        return None
    console = Console(highlight=False, markup=False, file=sys.stdout)
    return console if console.is_terminal else None
