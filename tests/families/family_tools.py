"""One family in one mode: planned, saved, loaded by plain transformers, and compared with one process. For the tests and the table."""

from __future__ import annotations

import json
import shutil
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard

from hyperpar_core import ShardingPlan, apply_plan, build_plan, make_mesh
from hyperpar_core.errors import HyperparError, Refused
from hyperpar_core.testing import Degrees, check_parity, tiny_batch, tiny_model

PLAIN = {"sequence_parallel": False}
PARALLEL = {"sequence_parallel": True, "loss_parallel": True}
MODES = {
    "dp2": (Degrees(dp=2), "float32"),
    "tp2": (Degrees(tp=2, options=PLAIN), "float32"),
    "tp2 SP": (Degrees(tp=2, options=PARALLEL), "float32"),
    "tp4": (Degrees(tp=4, options=PLAIN), "float32"),
    "tp4 SP": (Degrees(tp=4, options=PARALLEL), "float32"),
    "dp2 tp2 SP": (Degrees(dp=2, tp=2, options=PARALLEL), "float32"),
    "float64": (Degrees(tp=2, options=PLAIN), "float64"),
    "float64 SP": (Degrees(tp=2, options=PARALLEL), "float64"),
}


@dataclass(frozen=True)
class Job:
    """A family, or a variant of it (`config`), in one of MODES. `saved`: its folder is loaded again, too."""

    family: str
    mode: str
    config: Mapping[str, Any] = field(default_factory=dict)
    saved: bool = False
    steps: int = 1
    seq: int = 18


@dataclass(frozen=True)
class Outcome:
    """status: equal, refused, different or error; text: the cause, or the parity report. sharded: the part of the parameters that
    tp cuts; whole: matrices inside the layers that it doesn't, layers folded."""

    status: str
    text: str = ""
    sharded: float = 0.0
    whole: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Outcome:
        data = json.loads(text)
        return cls(**{**data, "whole": tuple(data["whole"]), "kinds": tuple(data["kinds"])})


def cut_elements(plan: ShardingPlan) -> dict[str, tuple[int, int]]:
    """{parameter: (elements that tp cuts, elements)}, tied ones once."""
    later = {name for group in plan.tied for name in group[1:]}
    found = {}
    for contract in plan.boundaries:
        for local, layout in contract.params.items():
            name = f"{contract.fqn}.{local}" if contract.fqn else local
            if name in later:
                continue
            size = prod(plan.parameters[name])
            sections = contract.sections.get(local)
            if sections:
                cut = sum(s.size for s in sections if isinstance(s.placement, Shard))
                found[name] = size * cut // sum(s.size for s in sections), size
            else:
                found[name] = size if isinstance(layout.get("tp"), Shard) else 0, size
    return found


def sharded_fraction(plan: ShardingPlan) -> float:
    """The part of the model's parameters that tp cuts."""
    elements = cut_elements(plan).values()
    return sum(cut for cut, _ in elements) / sum(size for _, size in elements)


def whole_matrices(plan: ShardingPlan) -> tuple[str, ...]:
    """Names, relative to their layer, of the matrices inside the layers of which tp cuts nothing."""
    inside = {}
    for name, (cut, _) in cut_elements(plan).items():
        parts = name.split(".")
        at = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
        if at is not None and len(plan.parameters[name]) > 1 and not cut:
            inside[".".join(parts[at + 1 :])] = None
    return tuple(inside)


def run_job(job: Job) -> Outcome:
    """Called on every rank of the mode's degrees."""
    degrees, dtype = MODES[job.mode]
    default = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))  # for constants that a model makes without a dtype
    try:
        return _run(job, degrees, getattr(torch, dtype))
    finally:
        torch.set_default_dtype(default)


def _run(job: Job, degrees: Degrees, dtype: torch.dtype) -> Outcome:
    model = tiny_model(job.family, dtype, **job.config).to(dtype)  # also what a model keeps in float32
    mesh = make_mesh(dp=degrees.dp, tp=degrees.tp)
    plan = build_plan(model, mesh, **degrees.options)
    facts = {
        "sharded": sharded_fraction(plan),
        "whole": whole_matrices(plan),
        "kinds": tuple(dict.fromkeys(contract.template for contract in plan.boundaries)),
    }
    problem = _round_trip(model, plan, mesh, job.saved)
    if problem:
        return Outcome("different", problem, **facts)
    batch = tiny_batch(model, batch=2 * degrees.dp, seq=job.seq)
    report = check_parity(model, batch, degrees, plan=plan, steps=job.steps, title=f"{job.family}, {job.mode}")
    return Outcome("equal" if report.ok else "different", "" if report.ok else report.text(), **facts)


def _round_trip(model: Any, plan: ShardingPlan, mesh: Any, saved: bool) -> str:
    """What isn't bitwise as before: in full_parameters, the state_dict, a saved folder, or after undo. "" for nothing."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    kind = type(model)
    applied = apply_plan(model, plan, mesh)
    if list(applied.full_parameters()) != parameters:
        return "full_parameters: other names, or another order"
    problem = _unlike(before, applied.full_state_dict(), "full_state_dict")
    if saved and not problem:
        problem = _saved(applied, before, kind)
    applied.undo()
    return problem or _unlike(before, model.state_dict(), "the state_dict after undo")


def _saved(applied: Any, before: Mapping[str, torch.Tensor], kind: Any) -> str:
    """What the folder lacks, found by the first rank and told to all."""
    folders = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folders, 0)
    applied.save_pretrained(folders[0])
    found = [""]
    if dist.get_rank() == 0:
        try:
            found = [_loaded(folders[0], before, kind)]
        except Exception as error:
            found = [f"the saved folder: {type(error).__name__}: {error}"]
        shutil.rmtree(folders[0])
    dist.broadcast_object_list(found, 0)
    return found[0]


def _loaded(folder: str, before: Mapping[str, torch.Tensor], kind: Any) -> str:
    dtype = next(iter(before.values())).dtype
    loaded, info = kind.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    if any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")):
        return f"the saved folder: {info}"
    return _unlike(before, loaded.state_dict(), "the saved folder")


def _unlike(before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor], where: str) -> str:
    if list(before) != list(after):
        return f"{where}: other names, or another order: {sorted(set(before) ^ set(after))[:4]}"
    differing = [n for n, value in before.items() if value.shape != after[n].shape or not torch.equal(value, after[n])]
    return f"{where}: {len(differing)} tensors differ, first {differing[0]}" if differing else ""


def run_jobs(jobs: Sequence[Job]) -> list[Outcome]:
    """Every job after the other, on every rank; an error of one doesn't stop the others."""
    outcomes = []
    for job in jobs:
        try:
            outcome = run_job(job)
        except Refused as error:
            outcome = Outcome("refused", str(error))
        except HyperparError as error:
            outcome = Outcome("error", f"{type(error).__name__}: {error}")
        except Exception:
            outcome = Outcome("error", traceback.format_exc()[-1500:])
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, outcome)
        bad = [o for o in everywhere if o.status != "equal"]
        outcomes.append(bad[0] if bad else outcome)
    return outcomes


def ranks_of(mode: str) -> int:
    """How many ranks a mode needs."""
    return MODES[mode][0].world_size
