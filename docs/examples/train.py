"""Trains a causal language model over dp x cp x tp ranks, experts over ep, with FSDP2, checkpoints, resume and a progress line.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 8 docs/examples/train.py --dp 2 --cp 2 --tp 2 --fsdp --out out/run
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 4 --max-restarts 3 docs/examples/train.py --model qwen3_moe --dp 2 --tp 2 --ep 4

MODEL is a transformers family (its tiny version), a config, a checkpoint folder or module:function. The text is the Python
standard library, byte by byte. The first run writes OUT/plan.yaml, later ones read it; a run that is started again goes on
from the newest checkpoint in OUT, at any degrees (another mesh needs another plan: delete plan.yaml). OUT/log.jsonl has a line
for every step, and OUT/model is a folder that plain transformers loads.
"""

from __future__ import annotations

import argparse
import json
import sys
import sysconfig
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hyperpar_core import Applied, ShardingPlan, apply_plan, build_plan, explain, make_mesh, set_seed, suggest_overrides
from hyperpar_core.testing import model_from


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama")
    for axis in ("dp", "cp", "tp", "ep"):
        parser.add_argument(f"--{axis}", type=int, default=1)
    parser.add_argument("--overrides", type=Path, help="YAML file; without it what the model's family suggests")
    parser.add_argument("--fsdp", action="store_true", help="shard parameters over dp x cp, experts over what ep leaves")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rows", type=int, default=2, help="sequences of one micro-batch on one dp rank")
    parser.add_argument("--micro", type=int, default=2, help="micro-batches of a step")
    parser.add_argument("--seq", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=int, default=5, help="steps from one checkpoint to the next; 0 for none")
    parser.add_argument("--out", type=Path, default=Path("out/train"))
    return parser.parse_args()


class Text:
    """Windows of the standard library's bytes. What a step sees follows from the seed and the step alone: nothing to save."""

    def __init__(self, seq: int, seed: int) -> None:
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:40]
        self.bytes = torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8)
        self.seq, self.seed = seq, seed

    def step(self, step: int, rows: int, micro: int, rank: int, ranks: int) -> list[dict[str, Tensor]]:
        """The micro-batches of one dp rank, [rows, seq] each."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        starts = torch.randint(len(self.bytes) - self.seq, (micro, ranks, rows), generator=generator)[:, rank]
        batches = [torch.stack([self.bytes[s : s + self.seq] for s in row]).long() for row in starts.tolist()]
        return [{"input_ids": ids, "labels": ids} for ids in batches]


def plan_for(model: Any, mesh: Any, args: argparse.Namespace) -> ShardingPlan:
    """The plan in OUT/plan.yaml, or a new one."""
    file = args.out / "plan.yaml"
    if file.exists():
        return ShardingPlan.from_yaml(file)
    overrides = args.overrides or suggest_overrides(model, mesh, ep_size=args.ep)
    return build_plan(model, mesh, ep_size=args.ep, overrides=overrides)


class Progress:
    """One line that is written over on a terminal, and a JSON line a step in a file. Rank 0 alone writes."""

    def __init__(self, file: Path, steps: int, tokens: int) -> None:
        self.file, self.steps, self.tokens = file, steps, tokens
        self.active, self.last = dist.get_rank() == 0, time.perf_counter()

    def step(self, step: int, loss: float, norm: float) -> None:
        now = time.perf_counter()
        seconds, self.last = now - self.last, now
        if not self.active:
            return
        with self.file.open("a") as log:
            log.write(json.dumps({"step": step, "loss": loss, "norm": norm}) + "\n")
        left = int(seconds * (self.steps - step))
        line = f"step {step}/{self.steps}   loss {loss:.4f}   norm {norm:.3f}   {self.tokens / seconds:,.0f} tokens/s   {left} s left"
        print(f"\r{line}" if sys.stdout.isatty() else line, end="" if sys.stdout.isatty() else "\n", flush=True)


def train_step(applied: Applied, optimizer: torch.optim.Optimizer, batches: list[dict[str, Tensor]], clip: float) -> Any:
    """(mean loss over all tokens of all ranks, norm of the gradients before clipping)."""
    total: Any = 0.0
    shares = applied.shard_batch(batches)  # counts the targets of the whole step, over all ranks
    for i, share in enumerate(shares):
        with nullcontext() if i == len(shares) - 1 else applied.no_sync():
            loss = applied.model(**share, use_cache=False).loss
            loss.backward()
        total = total + loss.detach()
    norm = applied.clip_grad_norm_(clip, error_if_nonfinite=True)
    optimizer.step()
    optimizer.zero_grad()
    return float(applied.reduce_loss(total)), float(norm)


def main() -> None:
    args = arguments()
    mesh = make_mesh(dp=args.dp, cp=args.cp, tp=args.tp)
    rank, checkpoints = dist.get_rank(), args.out / "checkpoints"
    model = model_from(args.model)
    plan = plan_for(model, mesh, args)
    applied = apply_plan(model.to(mesh.device_type), plan, mesh)
    if args.fsdp:
        applied.fully_shard()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    set_seed(args.seed, mesh)
    if rank == 0:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "plan.yaml").write_text(plan.to_yaml())
        print(explain(plan, tokens=args.rows * args.seq))

    state = applied.load_checkpoint(checkpoints, optimizer) or {"step": 0}
    if "random" in state:  # there when the degrees are those of the checkpoint
        torch.set_rng_state(state["random"])
    text = Text(args.seq, args.seed)
    tokens = args.rows * args.micro * args.seq * applied.data_parallel_size
    progress = Progress(args.out / "log.jsonl", args.steps, tokens)
    for step in range(state["step"], args.steps):
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(1.0, (step + 1) / args.warmup)
        batches = text.step(step, args.rows, args.micro, applied.data_parallel_rank, applied.data_parallel_size)
        batches = [{name: x.to(mesh.device_type) for name, x in batch.items()} for batch in batches]
        progress.step(step + 1, *train_step(applied, optimizer, batches, args.clip))
        if args.every and (step + 1) % args.every == 0:
            random = {"random": torch.get_rng_state()}
            applied.save_checkpoint(checkpoints, optimizer, step=step + 1, rank_extra=random)
    applied.save_pretrained(args.out / "model")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
