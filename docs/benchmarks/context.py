"""What context-parallel attention sends, holds and takes, form by form: one attention, forward and backward, causal.

    python docs/benchmarks/context.py [--cp 4 --lengths 4096 16384 --heads 4 --kv-heads 2 --width 16 --rounds 3]

Bytes are those that leave a rank, counted at the functional collectives, beside the formulas of docs/context-parallel.md; a
difference of 2% or more is an error. Memory is the most that a rank's allocator held at once, beyond its inputs. Times
are of two ranks against one process with torch's own attention, one thread each: a form and the one process take turns
within each round, and "x one process" is the median of the ratios of rounds, so a slow minute of the machine hits both.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from hyperpar_cp_sdpa.attention import attention
from hyperpar_cp_sdpa.exchange import Parts
from hyperpar_cp_sdpa.masks import Mask, causal
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from hyperpar_core.collectives.functional import axis_group
from hyperpar_core.testing import pool
from hyperpar_core.testing.allocations import allocations

BOUND = 0.02
ORDER = "head_tail"
TIMED_RANKS = 2
FORMS: dict[str, Callable[[int], int]] = {  # the Ulysses degree for a given cp
    "all-gather": lambda cp: 1,
    "ring": lambda cp: 1,
    "ulysses": lambda cp: cp,
    "hybrid": lambda cp: 2,
}
NEEDS = {
    "all-gather": "nothing",
    "ring": "nothing",
    "ulysses": "cp divides the heads; key/value heads divide cp, or cp them",
    "hybrid": "ulysses_degree divides cp, and the heads as above",
}


@dataclass(frozen=True)
class Shape:
    """Rows, query heads, key/value heads, tokens in all, and the width of a head."""

    batch: int
    heads: int
    groups: int
    length: int
    width: int


@dataclass(frozen=True)
class Row:
    """What one form sends (bytes that leave a rank, forward and backward) and holds (bytes)."""

    form: str
    formula: tuple[int, int]
    counted: tuple[int, int]
    peak: int

    @property
    def difference(self) -> float:
        """The larger relative difference of the two directions."""
        return max(abs(c / f - 1) for f, c in zip(self.formula, self.counted, strict=True))


def formula(form: str, cp: int, shape: Shape, size: int = 4) -> tuple[int, int]:
    """Bytes that leave a rank forward and backward; docs/context-parallel.md names the terms."""
    u, n = FORMS[form](cp), shape.length // cp
    groups = max(shape.groups, u)  # a head that several seats need goes to each of them
    kv = shape.batch * groups * n * 2 * shape.width * size
    exchanged = shape.batch * n * 2 * (shape.heads + groups) * shape.width * size * (u - 1) // u
    ring = cp // u - 1
    return ring * kv + exchanged, 2 * ring * kv + exchanged


# ---- on the ranks


class Leaving(TorchDispatchMode):
    """Counts the bytes that this rank sends to others."""

    def __init__(self, ranks: int, rank: int) -> None:
        super().__init__()
        self.ranks, self.rank, self.bytes = ranks, rank, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name.startswith("_c10d_functional::") and "wait" not in name:
            size = args[0].element_size()
            if "all_to_all" in name:  # split sizes as sent, this rank's own among them
                self.bytes += (sum(args[2]) - args[2][self.rank]) * size
            elif "all_gather" in name:
                self.bytes += (self.ranks - 1) * args[0].numel() * size
            elif "reduce_scatter" in name:
                self.bytes += args[0].numel() * size * (self.ranks - 1) // self.ranks
            else:
                raise AssertionError(f"{name} isn't counted")
        return func(*args, **(kwargs or {}))


def inputs(shape: Shape, ranks: int) -> list[Tensor]:
    """This rank's q, k, v and the gradient of its output: any numbers will do."""
    generator = torch.Generator().manual_seed(0)
    n = shape.length // ranks
    heads = (shape.heads, shape.groups, shape.groups, shape.heads)
    made = [torch.randn((shape.batch, h, n, shape.width), generator=generator) for h in heads]
    return [x.requires_grad_(i < 3) for i, x in enumerate(made)]


def parts_of(form: str, shape: Shape) -> Parts:
    """Over all ranks of the job."""
    group = axis_group(init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))["cp"])
    return Parts(group, ORDER, shape.length, FORMS[form](group.ranks))


def forward(form: str, parts: Parts, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q, k, v, Mask(causal, ORDER, parts.length), parts, gather=form == "all-gather")


def counted(form: str, shape: Shape) -> tuple[int, int, int]:
    """(bytes sent forward, bytes sent backward, peak of what is held) of this rank."""
    parts = parts_of(form, shape)
    q, k, v, grad = inputs(shape, parts.group.ranks)
    with Leaving(parts.group.ranks, parts.group.rank) as there:
        out = forward(form, parts, q, k, v)
    with Leaving(parts.group.ranks, parts.group.rank) as back:
        out.backward(grad)
    q, k, v, grad = inputs(shape, parts.group.ranks)
    held = allocations(lambda: forward(form, parts, q, k, v).backward(grad))
    return there.bytes, back.bytes, held.peak


def timed(forms: list[str], shape: Shape) -> tuple[float, dict[str, float]]:
    """Seconds of one round: of one process, and of each form on all ranks."""

    def seconds(step: Callable[[], None]) -> float:
        dist.barrier()
        start = time.perf_counter()
        step()
        dist.barrier()
        return time.perf_counter() - start

    def alone() -> None:
        if dist.get_rank() == 0:
            q, k, v, grad = inputs(shape, 1)
            F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).backward(grad)

    def together(form: str) -> Callable[[], None]:
        parts = parts_of(form, shape)
        q, k, v, grad = inputs(shape, parts.group.ranks)
        return lambda: forward(form, parts, q, k, v).backward(grad)

    return seconds(alone), {form: seconds(together(form)) for form in forms}


# ---- here


def rows_of(cp: int, shape: Shape) -> list[Row]:
    """One row a form that can deal these heads to `cp` ranks; the rank that holds most counts."""
    rows = []
    for form, degree in FORMS.items():
        u = degree(cp)
        if cp % u or shape.heads % u or (shape.groups % u and u % shape.groups):
            continue
        seen = pool(cp).run(counted, form, shape, timeout=600)
        rows.append(Row(form, formula(form, cp, shape), (seen[0][0], seen[0][1]), max(peak for *_, peak in seen)))
    return rows


def ratios_of(shape: Shape, rounds: int, console: Console) -> tuple[float, dict[str, float]]:
    """(median seconds of one process, median ratio of each form to it in the same round)."""
    forms = [form for form in FORMS if form != "hybrid"]  # on two ranks it is plain Ulysses
    run = pool(TIMED_RANKS).run
    run(timed, forms, shape, timeout=600)  # not counted
    taken = [
        run(timed, forms, shape, timeout=600)[0]
        for _ in track(range(rounds), description=f"{shape.length} tokens", console=console, disable=console.quiet)
    ]
    alone = statistics.median(one for one, _ in taken)
    return alone, {form: statistics.median(of[form] / one for one, of in taken) for form in forms}


def bytes_table(rows: list[Row], title: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("form")
    for column in ("forward", "formula", "backward", "formula", "difference", "held MiB"):
        table.add_column(column, justify="right")
    table.add_column("needs")
    for row in rows:
        table.add_row(
            row.form, f"{row.counted[0]:,}", f"{row.formula[0]:,}", f"{row.counted[1]:,}", f"{row.formula[1]:,}",
            f"{row.difference:.2%}", f"{row.peak / 2**20:.1f}", NEEDS[row.form],
        )  # fmt: skip
    return table


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cp", type=int, default=4, help="ranks for bytes and memory; default 4")
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 16384], help="tokens; default 4096 16384")
    for name, value in {"batch": 1, "heads": 4, "kv-heads": 2, "width": 16, "rounds": 3}.items():
        parser.add_argument(f"--{name}", type=int, default=value, help=f"default {value}")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    args = parser.parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else 160)
    results: dict[str, Any] = {}
    worst = 0.0
    for length in args.lengths:
        shape = Shape(args.batch, args.heads, args.kv_heads, length, args.width)
        rows = rows_of(args.cp, shape)
        worst = max([worst, *(row.difference for row in rows)])
        sizes = f"{args.batch} x {length} tokens, {args.heads} heads, {args.kv_heads} key/value heads of {args.width}, float32"
        console.print(bytes_table(rows, f"one attention, cp {args.cp}, {sizes}: bytes that leave a rank"))
        alone, ratios = ratios_of(shape, args.rounds, console)
        shown = ", ".join(f"{form} {ratio:.2f}" for form, ratio in ratios.items())
        console.print(f"one process {alone:.2f} s; cp {TIMED_RANKS} x one process: {shown} (median of {args.rounds} rounds)\n")
        results[str(length)] = {"rows": [asdict(row) for row in rows], "one process": alone, "ratios": ratios}
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    if worst >= BOUND:
        console.print(f"Counted bytes are {worst:.1%} off their formula (bound {BOUND:.0%}).")
    return int(worst >= BOUND)


if __name__ == "__main__":
    raise SystemExit(main())
