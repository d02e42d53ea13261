"""Parity of a planned model with one process: on ranks that are already there, or on a pool of one's own."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from .. import ShardingPlan, apply_plan, build_plan, make_mesh
from ..errors import HyperparError
from ..placement import format_placement
from .parity import Bounds, compare, merge
from .ranks import RankFailure, pool
from .record import record_parallel, record_reference
from .report import ParityReport
from .zoo import families, jitter, tiny_batch, tiny_model

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
    mesh = make_mesh(dp=degrees.dp, cp=degrees.cp, tp=degrees.tp)
    if plan is None:
        plan = build_plan(model, mesh, ep_size=degrees.ep, **degrees.options)
    single = copy.deepcopy(model)
    applied = apply_plan(model, plan, mesh, mode=mode)
    boundaries = {contract.fqn: contract.out_names for contract in plan.boundaries}
    reference = record_reference(single, batch, boundaries=boundaries, steps=steps, slices=degrees.dp)
    record = record_parallel(applied, batch, steps=steps)
    mask = batch.get("attention_mask")
    rows = mask.bool() if mask is not None and mask.ndim == 2 else None
    report = compare(reference, [record], bounds, rows=rows, title=title, hints=_hints(plan))
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
    **plan_options: Any,
) -> ParityReport:
    """Spawns dp x cp x tp gloo ranks on this machine and compares `model` on them with one process.

    model: what `model_from` takes. plan_options: what build_plan takes, such as sequence_parallel=False or
    overrides=FILE; they travel to the ranks by pickle. Raises the HyperparError that a rank raised, and RankFailure for
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
            _verify, model, degrees, dtype, steps, seq, mode, title, timeout=timeout
        )
        return reports[0]
    except RankFailure as failure:
        for error in failure.exceptions.values():
            if isinstance(error, HyperparError):
                raise error from failure
        raise


def _verify(spec: str, degrees: Degrees, dtype: str, steps: int, seq: int, mode: str, title: str) -> ParityReport:
    """On every rank: builds the model and a batch, and checks parity."""
    model = model_from(spec, DTYPES[dtype])
    batch = tiny_batch(model, batch=2 * degrees.dp, seq=seq)
    return check_parity(model, batch, degrees, steps=steps, mode=mode, title=title)


def model_from(spec: str, dtype: torch.dtype = torch.float32) -> Any:
    """The model that `spec` names, in train mode, the same in every process.

    spec is a transformers family (its tiny version), a config file or folder (random weights), a checkpoint folder, or
    module:function (called without arguments). Weights that aren't a checkpoint's are jittered. Raises HyperparError
    when it is none of these.
    """
    torch.manual_seed(0)
    if spec in families(include_excluded=True):
        return tiny_model(spec, dtype)
    path = Path(spec)
    if path.exists():
        folder = path if path.is_dir() else path.parent
        if path.is_dir() and (any(path.glob("*.safetensors")) or any(path.glob("pytorch_model*.bin"))):
            return AutoModelForCausalLM.from_pretrained(str(folder), dtype=dtype).train()
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(spec), dtype=dtype)
    elif ":" in spec:
        module, _, name = spec.partition(":")
        try:
            function = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise HyperparError(f"{spec}: {error}.") from error
        model = function().to(dtype)
    else:
        raise HyperparError(
            f"{spec!r} is no model: give a transformers family, a config file or folder, a checkpoint folder, or"
            " module:function."
        )
    jitter(model)
    return model.train()


def _hints(plan: ShardingPlan) -> dict[str, str]:
    """{parameter: what its contract says of its gradient}."""
    hints = {}
    for contract in plan.boundaries:
        for name, layout in contract.param_grad.items():
            over = ", ".join(f"{format_placement(placement)} over {axis}" for axis, placement in layout.items())
            hints[f"{contract.fqn}.{name}" if contract.fqn else name] = f"contract says gradient {over or 'replicate'}"
    return hints
