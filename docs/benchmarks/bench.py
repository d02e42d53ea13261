"""Times one training step (forward and backward) of one Llama, parallelised in five ways, side by side in one run.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 docs/benchmarks/bench.py [--hidden 512 --layers 4 --seq 512 ...]

single        one process, one thread, no parallelism (every rank computes the whole step)
hand          tensor parallelism written by hand after Megatron-LM (arXiv 1909.08053): the practical limit
transformers  transformers' own tp_plan
hyperpar      our plan without sequence parallelism
hyperpar sp   our plan with sequence parallelism (arXiv 2205.05198)

All see the same weights and tokens. Rounds are interleaved, so drift of the machine hits all alike; "x hand" is the
median over rounds of a contestant's time divided by the hand-written one's in the same round. Collectives, and the
bytes that a rank hands to them, are counted at the process group. A loss that isn't that of one process is an error.
"""

from __future__ import annotations

import argparse
import collections
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.distributed import DistributedConfig
from transformers.utils.logging import disable_progress_bar

from hyperpar_core import apply_plan, build_plan, make_mesh

Step = Callable[[], Tensor]
LOSS_BOUND = 1e-5
# Names differ between the two namespaces: allreduce_, all_reduce, _allgather_base_, all_gather_into_tensor...
KINDS = {
    "allreduce": "all-reduce",
    "allgather": "all-gather",
    "reducescatter": "reduce-scatter",
    "alltoall": "all-to-all",
    "broadcast": "broadcast",
    "send": "send",
}


class Traffic(TorchDispatchMode):
    """Counts the calls of each collective, and the bytes that this rank hands in."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: collections.Counter[str] = collections.Counter()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1].replace("_", "")
        kind = next((kind for start, kind in KINDS.items() if name.startswith(start)), None)
        if func.namespace in ("c10d", "_c10d_functional") and kind:
            names = [argument.name for argument in func._schema.arguments]
            payload = next(i for i, argument in enumerate(names) if argument.startswith(("input", "tensor")))
            self.calls[kind] += 1
            self.bytes += sum(t.numel() * t.element_size() for t in tree_leaves(args[payload]))
        return func(*args, **(kwargs or {}))


class Enter(torch.autograd.Function):
    """Into sharded compute: identity forward, all-reduce backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad


class Leave(torch.autograd.Function):
    """Out of sharded compute: all-reduce forward, identity backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class ShardedCrossEntropy(torch.autograd.Function):
    """Mean cross entropy of logits [tokens, vocab / tp] and targets [tokens]: two all-reduces, no gathered logits."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, first: int) -> Tensor:
        local = target - first
        outside = (local < 0) | (local >= logits.shape[1])
        local = local.masked_fill(outside, 0).unsqueeze(1)
        top = logits.amax(1)
        dist.all_reduce(top, dist.ReduceOp.MAX)
        shifted = logits - top.unsqueeze(1)
        picked = shifted.gather(1, local).squeeze(1).masked_fill(outside, 0.0)
        weights = shifted.exp_()
        sums = torch.stack([weights.sum(1), picked])
        dist.all_reduce(sums)
        ctx.save_for_backward(weights.div_(sums[0].unsqueeze(1)), local, outside)
        return (sums[0].log() - sums[1]).mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        softmax, local, outside = ctx.saved_tensors
        at_target = (~outside).to(softmax.dtype).unsqueeze(1)
        return softmax.scatter_add(1, local, -at_target) * (grad / softmax.shape[0]), None, None


def by_hand(model: Any, ids: Tensor) -> Step:
    """Cuts the weights in place and puts Enter and Leave around attention, MLP, embedding and head."""
    rank, world = dist.get_rank(), dist.get_world_size()

    def keep_shard(module: nn.Module, dim: int) -> None:
        module.weight = nn.Parameter(module.weight.detach().chunk(world, dim)[rank].clone())

    def around_attention(attention: nn.Module) -> Callable[..., Any]:
        inner = attention.forward

        def forward(hidden_states: Tensor, **kwargs: Any) -> Any:
            out, weights = inner(hidden_states=Enter.apply(hidden_states), **kwargs)
            return Leave.apply(out), weights

        return forward

    def around_mlp(mlp: nn.Module) -> Callable[..., Any]:
        inner = mlp.forward
        return lambda x: Leave.apply(inner(Enter.apply(x)))

    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for linear in (attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj):
            keep_shard(linear, 0)
        for linear in (attention.o_proj, mlp.down_proj):
            keep_shard(linear, 1)
        attention.forward = around_attention(attention)
        mlp.forward = around_mlp(mlp)

    embed, head = model.model.embed_tokens, model.lm_head
    keep_shard(embed, 0)
    keep_shard(head, 0)
    size = embed.weight.shape[0]

    def embed_forward(tokens: Tensor) -> Tensor:
        local = tokens - rank * size
        outside = (local < 0) | (local >= size)
        hidden = F.embedding(local.masked_fill(outside, 0), embed.weight)
        return Leave.apply(hidden.masked_fill(outside.unsqueeze(-1), 0.0))

    embed.forward = embed_forward

    def step() -> Tensor:
        model.zero_grad(set_to_none=True)
        hidden = Enter.apply(model.model(ids, use_cache=False).last_hidden_state)
        logits = head(hidden)[:, :-1].reshape(-1, size).float()
        loss = ShardedCrossEntropy.apply(logits, ids[:, 1:].reshape(-1), rank * size)
        loss.backward()
        return loss

    return step


def as_it_is(model: Any, ids: Tensor) -> Step:
    def step() -> Tensor:
        model.zero_grad(set_to_none=True)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        return loss

    return step


def planned(model: Any, ids: Tensor, sequence_parallel: bool) -> Step:
    mesh = make_mesh(tp=dist.get_world_size())
    plan = build_plan(model, mesh, sequence_parallel=sequence_parallel, loss_parallel=True)
    applied = apply_plan(model, plan, mesh)

    def step() -> Tensor:
        model.zero_grad(set_to_none=True)
        batch = applied.shard_batch({"input_ids": ids, "labels": ids})
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        return loss

    return step


def contestants(args: argparse.Namespace) -> dict[str, Step]:
    config = LlamaConfig(
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        intermediate_size=args.intermediate or int(args.hidden * 2.6875),
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        max_position_embeddings=args.seq,
    )
    ids = torch.randint(3, args.vocab, (args.batch, args.seq), generator=torch.Generator().manual_seed(1))
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder[0])
    dist.barrier()

    def fresh(**options: Any) -> Any:
        return AutoModelForCausalLM.from_pretrained(folder[0], **options)

    theirs = DistributedConfig(tp_size=dist.get_world_size(), tp_plan="auto")
    build: dict[str, Callable[[], Step]] = {
        "single": lambda: as_it_is(fresh(), ids),
        "hand": lambda: by_hand(fresh(), ids),
        "transformers": lambda: as_it_is(fresh(distributed_config=theirs), ids),
        "hyperpar": lambda: planned(fresh(), ids, sequence_parallel=False),
        "hyperpar sp": lambda: planned(fresh(), ids, sequence_parallel=True),
    }
    return {name: make() for name, make in build.items() if name not in args.without}


def measure(steps: dict[str, Step], rounds: int, console: Console) -> dict[str, dict[str, Any]]:
    """One uncounted step of each to warm up, one to count, then `rounds` rounds of one timed step of each."""
    results: dict[str, dict[str, Any]] = {}
    for name, step in steps.items():
        step()
        with Traffic() as traffic:
            loss = float(step().detach())
        results[name] = {"loss": loss, "calls": dict(traffic.calls), "bytes": traffic.bytes, "seconds": []}
    for _ in track(range(rounds), description="rounds", console=console, disable=console.quiet):
        for name, step in steps.items():
            dist.barrier()
            start = time.perf_counter()
            step()
            dist.barrier()
            results[name]["seconds"].append(time.perf_counter() - start)
    for result in results.values():
        pairs = zip(result["seconds"], results["hand"]["seconds"], strict=True)
        result["ratio"] = statistics.median(mine / hand for mine, hand in pairs)
    return results


def table(results: dict[str, dict[str, Any]], title: str) -> Table:
    out = Table(title=title, title_justify="left")
    out.add_column("contestant")
    for column in ("median ms", "x hand", "loss", "collectives", "MiB handed in"):
        out.add_column(column, justify="right")
    out.add_column("per step and rank")
    for name, r in results.items():
        calls = ", ".join(f"{n} {kind}" for kind, n in sorted(r["calls"].items())) or "-"
        out.add_row(
            name,
            f"{statistics.median(r['seconds']) * 1e3:.1f}",
            f"{r['ratio']:.2f}",
            f"{r['loss']:.6f}",
            str(sum(r["calls"].values())),
            f"{r['bytes'] / 2**20:.1f}",
            calls,
        )
    return out


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sizes = {"hidden": 512, "layers": 4, "heads": 8, "kv-heads": 4, "seq": 512, "batch": 1, "vocab": 8192, "rounds": 9}
    for name, size in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=size, help=f"default {size}")
    parser.add_argument("--intermediate", type=int, help="default 2.6875 x hidden")
    others = ["transformers", "hyperpar", "hyperpar sp"]
    parser.add_argument("--without", nargs="*", default=[], choices=others, help="leave these contestants out")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    torch.set_num_threads(1)
    disable_progress_bar()
    dist.init_process_group("gloo")
    console = Console(quiet=dist.get_rank() != 0, width=None if sys.stdout.isatty() else 160)
    results = measure(contestants(args), args.rounds, console)
    title = (
        f"Llama, hidden {args.hidden}, layers {args.layers}, batch {args.batch} x {args.seq} tokens, "
        f"vocab {args.vocab}; {dist.get_world_size()} gloo ranks, one thread each, median of {args.rounds} rounds"
    )
    console.print(table(results, title))
    if args.json and dist.get_rank() == 0:
        args.json.write_text(json.dumps({"title": title, "results": results}, indent=1) + "\n")
    dist.destroy_process_group()
    reference = results["single"]["loss"]
    wrong = [n for n, r in results.items() if not math.isclose(r["loss"], reference, rel_tol=LOSS_BOUND)]
    if wrong:
        console.print(f"The loss of {', '.join(wrong)} isn't that of one process: the times mean nothing.")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
