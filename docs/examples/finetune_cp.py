"""Fine-tunes SmolLM2-135M on packed documents whose sequence is cut over ranks, beside the same run in one process.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 docs/examples/finetune_cp.py [--steps 10 --tokens 512 --out out]

A document is a function or class of the Python standard library; a row holds as many as fit, whatever their length, and
none sees another. Both runs start from the same weights and see the same rows. The exit code is 1 where a loss differs by
more than 1e-10. `--tiny` takes a small random model and bytes for tokens, which needs no weights and a few seconds.

Both train in float64. In float32 the gradient of one of these rows is itself right to three digits only, in one process too: two runs of
one process, whose first weights are 1e-8 apart, then differ by 1e-5 in the next loss, and would hide an error of that size.
"""

from __future__ import annotations

import argparse
import ast
import copy
import os
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from finetune import Row, bar, load, optimizer_for, plot
from rich.console import Console
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers.utils.logging import disable_progress_bar

from hyperpar_core import apply_plan, build_plan, make_mesh
from hyperpar_core.testing import tiny_model
from hyperpar_core.testing.record import no_float32_casts

SOURCES = ("statistics.py", "textwrap.py", "heapq.py", "bisect.py", "fractions.py", "calendar.py")
OVERRIDES = """
version: 1
plan_overrides:
  - match: "*.self_attn"
    when: cp
    inner_target: self
    inner_wrapper: sdpa_hf_ring
"""


def documents() -> Iterator[str]:
    """The source of one function or class after the other, from each file in turn."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    files = []
    for name in SOURCES:
        text = (stdlib / name).read_text(encoding="utf-8")
        parts = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
        files.append([ast.get_source_segment(text, node) or "" for node in parts])
    for place in range(max(map(len, files))):
        yield from (texts[place] for texts in files if place < len(texts))


def packed(encode: Callable[[str], list[int]], tokens: int, steps: int) -> list[dict[str, Tensor]]:
    """A row [1, tokens] a step: documents one behind the other, the last one cut; positions restart with each."""
    rows: list[dict[str, Tensor]] = []
    source = documents()
    while len(rows) < steps:
        ids: list[int] = []
        positions: list[int] = []
        while len(ids) < tokens:
            document = encode(next(source))
            ids += document
            positions += range(len(document))
        row = {"input_ids": torch.tensor([ids[:tokens]]), "position_ids": torch.tensor([positions[:tokens]])}
        row["labels"] = row["input_ids"].masked_fill(row["position_ids"] == 0, -100)  # no document predicts the next one
        rows.append(row)
    return rows


def mean_loss(logits: Tensor, targets: Tensor, count: int) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / count


def single_step(model: Any, optimizer: torch.optim.Optimizer, row: dict[str, Tensor], cores: int) -> float:
    """Plain training in one process. Rank 0 alone runs it, on every core, while the others wait."""
    torch.set_num_threads(cores)
    with no_float32_casts():  # the model's norms would compute in float32 inside
        logits = model(input_ids=row["input_ids"], position_ids=row["position_ids"], use_cache=False).logits
    targets = row["labels"][:, 1:]
    loss = mean_loss(logits[:, :-1], targets, int((targets != -100).sum()))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.set_num_threads(1)
    return float(loss.detach())


def parallel_step(model: Any, applied: Any, optimizer: torch.optim.Optimizer, row: dict[str, Tensor]) -> float:
    """The same on every rank, on its part of the row."""
    share = applied.shard_batch(row)
    del share["labels"]  # the loss is computed here, as in one process
    targets, count = share.pop("shift_labels"), int(share.pop("num_items_in_batch"))
    with no_float32_casts():
        logits = model(**share).logits
    loss = mean_loss(logits, targets, count)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(applied.reduce_loss(loss))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=512, help="tokens of a row; a step is one row")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--tiny", action="store_true", help="a small random model")
    parser.add_argument("--bound", type=float, default=1e-10, help="of the relative difference of a loss")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the plot")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    disable_progress_bar()
    console = Console(quiet=rank != 0, width=None if sys.stdout.isatty() else 140, highlight=False)

    name = "a tiny Llama" if args.tiny else "SmolLM2-135M"
    console.print(f"loading {name} on every rank")
    if args.tiny:
        model, encode = tiny_model("llama"), lambda text: list(text.encode())
    else:
        model, tokenizer = load()
        encode = lambda text: tokenizer(text).input_ids  # noqa: E731
    model.double()
    rows_of_tokens = packed(encode, args.tokens, args.steps)
    lengths = [len(part) for row in rows_of_tokens for part in row["position_ids"][0].tensor_split(starts(row))]
    single = copy.deepcopy(model) if rank == 0 else None
    single_optimizer = optimizer_for(single, args.lr) if single else None

    mesh = make_mesh(cp=ranks)
    applied = apply_plan(model, build_plan(model, mesh, overrides=OVERRIDES), mesh)
    optimizer = optimizer_for(model, args.lr)
    console.print(
        f"{args.steps} rows of {args.tokens} tokens, each cut over {ranks} ranks: {len(lengths)} documents of"
        f" {min(lengths)} to {max(lengths)} tokens"
    )

    rows: list[Row] = []
    with bar(console) as progress:
        task = progress.add_task("fine-tuning", total=args.steps)
        for step, tokens in enumerate(rows_of_tokens):
            start = time.perf_counter()
            cores = len(os.sched_getaffinity(0))
            expected = single_step(single, single_optimizer, tokens, cores) if single and single_optimizer else 0.0
            dist.barrier()
            half = time.perf_counter()
            value = parallel_step(model, applied, optimizer, tokens)
            row = Row(value, expected, time.perf_counter() - half, half - start)
            rows.append(row)
            if rank == 0:
                progress.console.print(
                    f"step {step + 1:2d}   loss cp={ranks} {row.parallel:.10f}   one process {row.single:.10f}   "
                    f"relative difference {row.difference:.1e}   {row.parallel_s:.1f} s and {row.single_s:.1f} s"
                )
            progress.advance(task)

    status = torch.zeros(1, dtype=torch.int64)
    if rank == 0:
        worst = max(row.difference for row in rows)
        args.out.mkdir(parents=True, exist_ok=True)
        file = args.out / "loss_cp.png"
        title = f"{name}, cp={ranks}, {args.tokens} tokens of packed documents a step"
        plot(rows, file, title, f"cp {ranks}", f"{len(lengths)} documents of {min(lengths)} to {max(lengths)} tokens", args.bound)
        status.fill_(0 if worst <= args.bound else 1)
        console.print(f"\nlargest relative difference of the loss {worst:.1e} (bound {args.bound:.0e}); wrote {file}")
    dist.broadcast(status, 0)
    dist.destroy_process_group()
    return int(status)


def starts(row: dict[str, Tensor]) -> tuple[int, ...]:
    """Where the documents of a row begin, but the first."""
    return tuple(int(i) for i in torch.nonzero(row["position_ids"][0] == 0).flatten()[1:])


if __name__ == "__main__":
    raise SystemExit(main())
