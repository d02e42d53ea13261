"""The offline proof of a plan: DTensor propagates through every boundary, forward and backward, over fake ranks in one process.

A fake process group stands for the job, fake tensors for the data: a plan for a thousand ranks is proven on a laptop, without
memory for the weights. Layers of one kind, with the same contracts and shapes, are run once.
"""

from __future__ import annotations

import copy
import json
import logging
import math
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh

from ..errors import ApplyError, HyperparError
from ..plan.boundaries import find_structure
from ..plan.sharding_plan import ShardingPlan
from .applier import install
from .preflight import preflight

__all__ = ["CheckReport", "Problem", "check_plan"]


@dataclass(frozen=True)
class Problem:
    """What is wrong at one boundary (or, with an empty fqn, with the run as a whole)."""

    fqn: str
    what: str


@dataclass(frozen=True)
class CheckReport:
    """The outcome of check_plan. layers: (run, in the model); black_boxes: boundaries that were taken at their word."""

    problems: tuple[Problem, ...]
    ranks: int
    layers: tuple[int, int]
    black_boxes: tuple[str, ...]
    seconds: float

    @property
    def ok(self) -> bool:
        return not self.problems

    def text(self) -> str:
        """The report for a person, at most a screen."""
        lines = [f"{p.fqn or 'the model'}: {p.what}" for p in self.problems[:12]]
        if len(self.problems) > 12:
            lines.append(f"... and {len(self.problems) - 12} more")
        kinds = f"{self.layers[0]} of {self.layers[1]} layers run, the others are like them"
        count = len(self.black_boxes)
        boxes = (
            f"; {count} black box{'es' if count > 1 else ''} taken at {'their' if count > 1 else 'its'} word"
            if self.black_boxes
            else ""
        )
        verdict = (
            "every placement is as declared"
            if self.ok
            else f"{len(self.problems)} problem{'s' if len(self.problems) > 1 else ''}"
        )
        lines.append(
            f"{verdict}, forward and backward, on {self.ranks:,} fake ranks ({kinds}{boxes}; {self.seconds:.1f} s)"
        )
        return "\n".join(lines)


def check_plan(
    plan: ShardingPlan, model: nn.Module, *, world_size: int | None = None, batch: int = 1, sequence: int | None = None
) -> CheckReport:
    """Proves `plan` for `model` (real or meta; untouched) over `world_size` fake ranks, by default as many as its axes and experts need.

    batch, sequence: tokens of the fake input [batch, sequence]; by default one row of 8 tokens for each rank that cuts it.
    Runs in one process, outside any job: ApplyError where a process group is there already.
    """
    start = time.perf_counter()
    if dist.is_initialized():
        raise ApplyError(
            "check_plan makes a fake job of its own; call it in a process that has none (not under torchrun)."
        )
    ranks = 1
    for size in plan.sizes.values():
        ranks *= size
    world = math.lcm(ranks, plan.ep_size) if world_size is None else world_size
    if world % ranks:
        raise ApplyError(f"check_plan: world_size={world} is no multiple of the plan's {ranks} ranks.")
    problems: list[Problem] = []

    def report(fqn: str, what: str) -> None:
        problem = Problem(fqn, what)
        if problem not in problems:
            problems.append(problem)

    small, small_plan, names = _representatives(model, plan)
    where = ""
    fake_tensors = _FakeTensors(allow_non_fake_inputs=True)
    with _fake_job(world):
        active = {axis: n for axis, n in {"dp": world // ranks, **plan.sizes}.items() if n > 1} or {"dp": 1}
        mesh = init_device_mesh("cpu", tuple(active.values()), mesh_dim_names=tuple(active))
        with fake_tensors:
            fake = _fake_copy(small)
        try:
            preflight(fake, small_plan, mesh, "validate", "core", "trust")
            installed = install(fake, small_plan, mesh, "validate", "core", report)
            try:
                with fake_tensors, _quiet():
                    _step(fake, batch, sequence or 8 * ranks)
            finally:
                where = installed.state.where
        except HyperparError as error:
            report(where, f"{type(error).__name__}: {error}")
        except Exception as error:  # a placement that is wrong enough makes an operator fail
            report(where, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
    boxes = tuple(c.fqn for c in plan.boundaries if c.injects and c.region_dispatch is not True)
    found = tuple(replace(p, fqn=_original(p.fqn, names)) for p in problems)
    total = len(find_structure(model).layers)
    return CheckReport(found, world, (len(names) or total, total), boxes, time.perf_counter() - start)


class _FakeTensors(FakeTensorMode):
    """Where a model's own code asks for values, which fake tensors don't have, they are 0, and the entries that aren't 0 are one: an
    expert that is picked, a token that it gets. Rows that are split by such values all go to the first part. Placements don't depend
    on how many there are."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.split_with_sizes.default and not any(args[1]):
            x, sizes, *dim = args
            args = (x, [x.shape[dim[0] if dim else 0], *sizes[1:]], *dim)
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        except DataDependentOutputException:
            if func is not torch.ops.aten._local_scalar_dense.default:
                raise
            return False if args[0].dtype is torch.bool else 0.0 if args[0].dtype.is_floating_point else 0
        except DynamicOutputShapeException:
            if func is not torch.ops.aten.nonzero.default:
                raise
            with self:
                return torch.empty(1, args[0].ndim, dtype=torch.long, device=args[0].device)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's own account of an operator that fails on fake tensors: the report has it."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


@contextmanager
def _fake_job(world: int) -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _fake_copy(model: nn.Module) -> nn.Module:
    """The model with fake tensors on the CPU; call it inside FakeTensorMode. Tied parameters stay tied."""
    memo: dict[int, object] = {}
    for parameter in model.parameters():
        empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
        memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu")
    fake: Any = copy.deepcopy(model, memo)
    if getattr(fake, "_can_set_experts_implementation", bool)():  # the others need to know which token goes where
        fake.set_experts_implementation("batched_mm")
    return fake  # type: ignore[no-any-return]


def _step(model: nn.Module, batch: int, tokens: int) -> None:
    """Forward and backward on `tokens` per row."""
    ids = torch.zeros(batch, tokens, dtype=torch.long)
    count = torch.tensor(batch * tokens)
    out = model(input_ids=ids, labels=ids, shift_labels=ids, num_items_in_batch=count, use_cache=False)
    out.loss.backward()


# layers of one kind are run once


def _representatives(model: nn.Module, plan: ShardingPlan) -> tuple[nn.Module, ShardingPlan, dict[str, str]]:
    """(a model with one layer of each kind, the plan for it, {its layer names: the original ones}).

    Two layers are of one kind when their modules print alike, their plain attributes are equal (the index aside), and so are the
    contracts of all their boundaries and the shapes of their parameters. The first and the last layer always stay.
    """
    layers = find_structure(model).layers
    if len(layers) < 4:
        return model, plan, {}
    kinds: dict[str, list[int]] = {}
    inside: dict[str, list[dict[str, object]]] = {name: [] for name in layers}
    for contract in plan.boundaries:
        layer = _layer_of(contract.fqn)
        if layer in inside:
            data = contract.to_data()
            data["fqn"] = contract.fqn[len(layer) :]
            inside[layer].append(data)
    for i, name in enumerate(layers):
        module = model.get_submodule(name)
        shapes = [(n, tuple(p.shape), str(p.dtype)) for n, p in module.named_parameters()]
        facts = [_attributes(m) for m in module.modules()]
        key = json.dumps([inside[name], shapes, facts, str(module)], sort_keys=True, default=str)
        kinds.setdefault(key, []).append(i)
    chosen = sorted({0, len(layers) - 1, *(members[0] for members in kinds.values())})
    if len(chosen) == len(layers):
        return model, plan, {}
    prefix = layers[0].rpartition(".")[0]
    small = _without_layers(model, prefix, chosen)
    names = {f"{prefix}.{new}": layers[old] for new, old in enumerate(chosen)}
    back = {old: new for new, old in names.items()}

    def moved(name: str) -> str | None:
        layer = _layer_of(name)
        if layer not in inside:
            return name
        return back[layer] + name[len(layer) :] if layer in back else None

    boundaries = tuple(replace(c, fqn=new) for c in plan.boundaries if (new := moved(c.fqn)) is not None)
    parameters = {new: shape for n, shape in plan.parameters.items() if (new := moved(n)) is not None}
    tied = tuple(tuple(new for n in group if (new := moved(n)) is not None) for group in plan.tied)
    return small, replace(plan, boundaries=boundaries, parameters=parameters, tied=tied), names


def _layer_of(name: str) -> str:
    """The layer that a module or parameter stands in, by its first numbered component; "" for none."""
    found = re.match(r"(.*?\.\d+)(?:\.|$)", name)
    return found.group(1) if found else ""


def _attributes(module: nn.Module) -> dict[str, object]:
    """The plain values that a module carries, without its index."""
    plain = (bool, int, float, str, type(None))
    return {k: v for k, v in vars(module).items() if isinstance(v, plain) and k not in ("layer_idx", "layer_id")}


def _without_layers(model: nn.Module, prefix: str, chosen: list[int]) -> nn.Module:
    """A copy that shares the parameters, with only the chosen layers in the list at `prefix`."""
    memo: dict[int, object] = {id(t): t for t in (*model.parameters(), *model.buffers())}
    full = model.get_submodule(prefix)
    short: Any = nn.ModuleList([copy.deepcopy(full[i], memo) for i in chosen])  # type: ignore[index]
    memo[id(full)] = short
    small = copy.deepcopy(model, memo)
    config = copy.deepcopy(getattr(small, "config", None))
    if hasattr(config, "num_hidden_layers"):
        _shorten(small, config, chosen)
    return small


def _shorten(model: nn.Module, config: Any, chosen: list[int]) -> None:
    """The config of the copy says how many layers are left, and of which kinds; its modules read it."""
    old = config.num_hidden_layers
    for name, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == old:
            setattr(config, name, [value[i] for i in chosen])
    config.num_hidden_layers = len(chosen)
    for module in model.modules():
        if getattr(getattr(module, "config", None), "num_hidden_layers", None) == old:
            module.__dict__["config"] = config


def _original(fqn: str, names: dict[str, str]) -> str:
    layer = _layer_of(fqn)
    return names[layer] + fqn[len(layer) :] if layer in names else fqn
