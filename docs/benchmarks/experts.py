"""Times one training step (forward and backward) of one Qwen3-MoE, its experts over the ranks in three ways, side by side in one run.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 docs/benchmarks/experts.py [--hidden 256 --layers 4 --seq 512 ...]

single        one process, one thread, no parallelism (every rank computes the whole step)
transformers  transformers' own ep_plan: attention and experts over the same ranks
hyperpar      our plan: tp with sequence parallelism, experts over the same ranks, vocab-parallel loss

All see the same weights and tokens. Rounds are interleaved, so drift of the machine hits all alike; "x theirs" is the median over rounds
of a contestant's time divided by transformers' in the same round. Collectives, and the bytes that a rank hands to them, are counted at
the process group. What the tokens' way to the experts and back sends stands beside its formula, four times the rows that travel; 2% or
more above it is an error, as is a loss that isn't that of one process.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bench import LOSS_BOUND, Step, Traffic, as_it_is
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3MoeConfig
from transformers.distributed import DistributedConfig
from transformers.utils.logging import disable_progress_bar

from hyperpar_core import apply_plan, build_plan, make_mesh, suggest_overrides

OVER_FORMULA = 1.02


class Exchanged(Traffic):
    """Traffic, and the bytes of the exchanges alone."""

    def __init__(self) -> None:
        super().__init__()
        self.exchanged = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self.bytes, self.calls["all-to-all"]
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if self.calls["all-to-all"] > before[1]:
            self.exchanged += self.bytes - before[0]
        return out


def planned(model: Any, ids: Tensor, rows: list[int]) -> Step:
    """Our step. `rows` grows by the number of (token, rank) pairs of each router's choice on this rank."""
    ranks = dist.get_world_size()
    mesh = make_mesh(tp=ranks)
    overrides = suggest_overrides(model, mesh, ep_size=ranks)
    applied = apply_plan(model, build_plan(model, mesh, ep_size=ranks, overrides=overrides, loss_parallel=True), mesh)
    here = model.config.num_experts // ranks

    def chosen(module: Any, args: Any, out: Any) -> None:
        rows.append(sum(len(set(token)) for token in (out[2] // here).tolist()))

    counted = [layer.mlp.gate.register_forward_hook(chosen) for layer in model.model.layers]

    def step() -> Tensor:
        model.zero_grad(set_to_none=True)
        batch = applied.shard_batch({"input_ids": ids, "labels": ids})
        loss: Tensor = model(**batch, use_cache=False).loss
        loss.backward()
        if len(rows) == 2 * len(counted):  # the warm-up and the counted step are over
            for hook in counted:
                hook.remove()
        return loss

    return step


def contestants(args: argparse.Namespace, rows: list[int]) -> dict[str, Step]:
    config = Qwen3MoeConfig(
        vocab_size=args.vocab, hidden_size=args.hidden, intermediate_size=2 * args.hidden, moe_intermediate_size=args.hidden // 2,
        num_hidden_layers=args.layers, num_attention_heads=8, num_key_value_heads=4, head_dim=args.hidden // 8,
        num_experts=args.experts, num_experts_per_tok=args.chosen, max_position_embeddings=args.seq,
    )  # fmt: skip
    ids = torch.randint(3, args.vocab, (args.batch, args.seq), generator=torch.Generator().manual_seed(1))
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder[0])
    dist.barrier()

    def fresh(**options: Any) -> Any:
        return AutoModelForCausalLM.from_pretrained(folder[0], **options)

    ranks = dist.get_world_size()
    return {
        "single": as_it_is(fresh(), ids),
        "transformers": as_it_is(fresh(distributed_config=DistributedConfig(tp_size=ranks, ep_size=ranks)), ids),
        "hyperpar": planned(fresh(), ids, rows),
    }


def measure(steps: dict[str, Step], rounds: int, console: Console) -> dict[str, dict[str, Any]]:
    """One uncounted step of each to warm up, one to count, then `rounds` rounds of one timed step of each."""
    results: dict[str, dict[str, Any]] = {}
    for name, step in steps.items():
        step()
        with Exchanged() as traffic:
            loss = float(step().detach())
        results[name] = {
            "loss": loss, "calls": dict(traffic.calls), "bytes": traffic.bytes, "exchanged": traffic.exchanged, "seconds": [],
        }  # fmt: skip
    for _ in track(range(rounds), description="rounds", console=console, disable=console.quiet):
        for name, step in steps.items():
            dist.barrier()
            start = time.perf_counter()
            step()
            dist.barrier()
            results[name]["seconds"].append(time.perf_counter() - start)
    for result in results.values():
        pairs = zip(result["seconds"], results["transformers"]["seconds"], strict=True)
        result["ratio"] = statistics.median(mine / theirs for mine, theirs in pairs)
    return results


def table(results: dict[str, dict[str, Any]], title: str) -> Table:
    out = Table(title=title, title_justify="left")
    out.add_column("contestant")
    for column in ("median ms", "x theirs", "loss", "collectives", "MiB handed in", "all-to-all MiB"):
        out.add_column(column, justify="right")
    out.add_column("per step and rank")
    for name, r in results.items():
        calls = ", ".join(f"{n} {kind}" for kind, n in sorted(r["calls"].items())) or "-"
        out.add_row(
            name, f"{statistics.median(r['seconds']) * 1e3:.1f}", f"{r['ratio']:.2f}", f"{r['loss']:.6f}",
            str(sum(r["calls"].values())), f"{r['bytes'] / 2**20:.1f}", f"{r['exchanged'] / 2**20:.2f}", calls,
        )  # fmt: skip
    return out


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sizes = {"hidden": 256, "layers": 4, "experts": 16, "chosen": 4, "seq": 512, "batch": 1, "vocab": 8192, "rounds": 9}
    for name, size in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=size, help=f"default {size}")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    torch.set_num_threads(1)
    disable_progress_bar()
    dist.init_process_group("gloo")
    console = Console(quiet=dist.get_rank() != 0, width=None if sys.stdout.isatty() else 160)
    rows: list[int] = []
    results = measure(contestants(args, rows), args.rounds, console)
    title = (
        f"Qwen3-MoE, hidden {args.hidden}, layers {args.layers}, {args.chosen} of {args.experts} experts, batch {args.batch} x"
        f" {args.seq} tokens, vocab {args.vocab}; {dist.get_world_size()} gloo ranks, one thread each, median of {args.rounds} rounds"
    )
    console.print(table(results, title))
    both = torch.tensor([4 * sum(rows[: args.layers]) * args.hidden * 4, results["hyperpar"]["exchanged"]])
    dist.all_reduce(both)  # what one rank sends another receives and sends back: only the sums are equal
    formula, exchanged = both.tolist()  # rows of float32: out, back, and their gradients
    over = exchanged / formula
    console.print(f"rows to experts and back, all ranks: {formula / 2**20:.2f} MiB by formula, counted {over - 1:+.2%}")
    if args.json and dist.get_rank() == 0:
        args.json.write_text(json.dumps({"title": title, "formula": formula, "results": results}, indent=1) + "\n")
    dist.destroy_process_group()
    reference = results["single"]["loss"]
    wrong = [n for n, r in results.items() if not math.isclose(r["loss"], reference, rel_tol=LOSS_BOUND)]
    if wrong:
        console.print(f"The loss of {', '.join(wrong)} isn't that of one process: the times mean nothing.")
    return 1 if wrong or over >= OVER_FORMULA else 0


if __name__ == "__main__":
    raise SystemExit(main())
