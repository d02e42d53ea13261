"""Parity of a planned model with one process: on ranks that are already there, or on a pool of one's own."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .. import Overrides, ShardingPlan, apply_plan, build_plan, make_mesh, suggest_overrides
from ..errors import HyperparError
from ..placement import Layout, format_placement
from ..plugins import get_registry
from .models import model_from
from .parity import Bounds, compare, merge
from .ranks import RankFailure, pool
from .record import record_parallel, record_reference
from .report import ParityReport
from .zoo import tiny_batch

__all__ = ["DTYPES", "Degrees", "check_parity", "model_from", "verify"]

DTYPES = {"float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class Degrees:
    """The degrees of a parallel run, and what else build_plan takes by name, such as `sequence_parallel=False`."""

    dp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def world_size(self) -> int:
        return self.dp * self.cp * self.tp

    def text(self) -> str:
        sizes = {"dp": self.dp, "cp": self.cp, "tp": self.tp, "ep": self.ep}
        return " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "one rank"


def check_parity(
    model: nn.Module,
    batch: Mapping[str, Tensor],
    degrees: Degrees,
    *,
    plan: ShardingPlan | None = None,
    steps: int = 0,
    mode: str = "production",
    title: str = "",
    bounds: Bounds | None = None,
) -> ParityReport:
    """Plans and applies `degrees` to `model`, and compares it with a copy of it that one process runs.

    Called on every rank of `degrees.world_size` ranks, with the same model and the global batch (its rows a multiple of
    dp); every rank gets the report of all ranks. `plan`: one to use as it is, in place of build_plan's. `model` stays
    planned. Raises what build_plan and apply_plan raise.
    """
    device = next((p.device.type for p in model.parameters()), None)
    mesh = make_mesh(dp=degrees.dp, cp=degrees.cp, tp=degrees.tp, device_type=device)
    if plan is None:
        plan = build_plan(model, mesh, ep_size=degrees.ep, **degrees.options)
    single = copy.deepcopy(model)
    applied = apply_plan(model, plan, mesh, mode=mode)
    boundaries = {contract.fqn: contract.out_names for contract in plan.boundaries}
    reference = record_reference(single, batch, boundaries=boundaries, steps=steps, slices=degrees.dp)
    record = record_parallel(applied, batch, steps=steps)
    mask = batch.get("attention_mask")
    rows = mask.bool() if mask is not None and mask.ndim == 2 else None
    report = compare(reference, [record], bounds, rows=rows, title=title, hints=_hints(plan), notes=_inexact(plan))
    everywhere: list[Any] = [report]
    if dist.is_initialized():
        everywhere = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, report)
    return merge(everywhere)


def verify(
    model: str,
    *,
    dp: int = 1,
    cp: int = 1,
    tp: int = 1,
    ep: int = 1,
    dtype: str = "float32",
    steps: int = 3,
    seq: int = 32,
    mode: str = "production",
    timeout: float = 300.0,
    suggested: bool = False,
    **plan_options: Any,
) -> ParityReport:
    """Spawns dp x cp x tp gloo ranks on this machine and compares `model` on them with one process.

    model: what `model_from` takes. plan_options: what build_plan takes, such as sequence_parallel=False or
    overrides=FILE; they travel to the ranks by pickle. suggested: plans with what the model's family suggests for cp and ep, and
    `overrides` after it. Raises the HyperparError that a rank raised, and RankFailure for
    anything else.
    """
    degrees = Degrees(dp, cp, tp, ep, plan_options)
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} has no bounds (dtypes: {', '.join(DTYPES)}).")
    sequence = plan_options.get("sequence_parallel", True) and tp > 1
    bound = f"{dtype}, bound {Bounds.of(DTYPES[dtype]).relative:g}"
    title = "   ".join([model, degrees.text(), *(["sequence parallel"] if sequence else []), bound])
    ranks = pool(degrees.world_size)
    try:
        reports: list[ParityReport] = ranks.run(
            _verify, model, degrees, dtype, steps, seq, mode, title, suggested, timeout=timeout
        )
        return reports[0]
    except RankFailure as failure:
        for _, error in sorted(failure.exceptions.items()):
            if isinstance(error, HyperparError):
                raise error from failure
        raise


def _verify(
    spec: str, degrees: Degrees, dtype: str, steps: int, seq: int, mode: str, title: str, suggested: bool
) -> ParityReport:
    """On every rank: builds the model and a batch, and checks parity."""
    model = model_from(spec, DTYPES[dtype])
    if not hasattr(model, "config"):
        raise HyperparError(f"{spec}: a {type(model).__name__} without a config, whose vocab_size a batch needs.")
    if suggested:
        sizes = {"dp": degrees.dp, "cp": degrees.cp, "tp": degrees.tp}
        entries = suggest_overrides(model, sizes, ep_size=degrees.ep).entries
        own = Overrides.of(degrees.options.get("overrides")).entries
        degrees = replace(degrees, options={**degrees.options, "overrides": Overrides(entries + own)})
    batch = tiny_batch(model, batch=2 * degrees.dp, seq=seq)
    return check_parity(model, batch, degrees, steps=steps, mode=mode, title=title)


def _hints(plan: ShardingPlan) -> dict[str, str]:
    """What the contracts say: {parameter: of its gradient, "forward of BOUNDARY": of what its compute yields, and
    "backward of BOUNDARY": of its inputs' gradients in the compute}."""
    hints = {}
    for contract in plan.boundaries:
        for name, layout in contract.param_grad.items():
            hints[f"{contract.fqn}.{name}" if contract.fqn else name] = f"contract says gradient {_over(layout)}"
        if contract.out_src:
            yields = "; ".join(f"{name} {_over(layout)}" for name, layout in contract.out_src.items())
            hints[f"forward of {contract.fqn}"] = f"contract says that the compute yields {yields}"
        if contract.in_grad:
            gradients = "; ".join(f"{name} {_over(layout)}" for name, layout in contract.in_grad.items())
            hints[f"backward of {contract.fqn}"] = f"contract says that the compute's input gradients are {gradients}"
    return hints


def _inexact(plan: ShardingPlan) -> list[str]:
    """One sentence for each lowerer of the plan that doesn't compute what the default computes."""
    notes = []
    for name in sorted({contract.lowerer for contract in plan.boundaries if contract.lowerer is not None}):
        lowerer, provider = get_registry().lowerer(name)
        if not lowerer.exact:
            stated = "how far off a transition may be isn't stated"
            if lowerer.error is not None:
                stated = f"a transition may be off by {lowerer.error:.2g} of the largest value"
            notes.append(f"lowerer {name} ({provider}) is not exact by its own word: {stated}")
    return notes


def _over(layout: Layout) -> str:
    return ", ".join(f"{format_placement(placement)} over {axis}" for axis, placement in layout.items()) or "replicate"
