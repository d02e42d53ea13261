"""Which products of degrees a model can be planned with on so many ranks, what each sends and holds, and why others are refused.

Every product tp x cp x dp of the world, with every ep that divides it where the model has experts, is planned on the meta device; a
refusal is the planner's own. One layer of each kind stands for all that are like it. What a product sends is compared per token, since
products differ in how many tokens a step has: bytes that all ranks together hand to collectives, by the tokens of the step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from ..errors import HyperparError, PlanError
from ..plan.boundaries import find_structure
from ..plan.build import build_plan, find_family, suggest_overrides
from ..plan.contract import Contract
from ..plan.overrides import Overrides
from ..plan.roles import assign_roles
from ..plan.sharding_plan import ShardingPlan
from ..plan.stacks import as_held
from .memory import Memory, memory
from .tables import align, size
from .traffic import fully_sharded_elements, movements, summed

__all__ = ["Choice", "Refusal", "WhatIf", "what_if"]

AXES = ("tp", "cp", "ep", "dp")


@dataclass(frozen=True)
class Choice:
    """A product that works. sent: {axis: bytes per rank and step}; per_token: bytes of all ranks per token of the step; best: no other
    product sends less and holds less. fits: within the memory that was given."""

    degrees: Mapping[str, int]
    memory: Memory
    sent: Mapping[str, int]
    per_token: float
    fits: bool = True
    best: bool = False


@dataclass(frozen=True)
class Refusal:
    """Products that the planner refuses for one cause."""

    degrees: tuple[Mapping[str, int], ...]
    cause: str


@dataclass(frozen=True)
class WhatIf:
    """All products of `world` ranks: `choices` in order, the best first. `assumed`: what the figures rest on."""

    model: str
    world: int
    assumed: str
    choices: tuple[Choice, ...]
    refused: tuple[Refusal, ...]

    def to_data(self) -> dict[str, Any]:
        """Plain data, for --json."""
        return {
            "model": self.model, "world": self.world, "assumed": self.assumed,
            "choices": [
                {
                    **one.degrees, "sent": dict(one.sent), "bytes_per_token": round(one.per_token, 1), "fits": one.fits,
                    "best": one.best,
                    "memory": {"total": one.memory.total} | {
                        k: v for k, v in asdict(one.memory).items() if isinstance(v, int)
                    },
                }
                for one in self.choices
            ],
            "refused": [{"products": [dict(d) for d in one.degrees], "cause": one.cause} for one in self.refused],
        }  # fmt: skip

    def rows(self, most: int) -> list[list[str]]:
        """The table: header and the first `most` products."""
        axes = [axis for axis in AXES if axis != "ep" or any(one.degrees["ep"] > 1 for one in self.choices)]
        header = ["", *axes, "memory", "weights+state", "activations", "sent per token", "of which"]
        rows = [header]
        for one in self.choices[:most]:
            held = one.memory.total - one.memory.activations
            share = sum(one.sent.values()) or 1
            parts = sorted(one.sent.items(), key=lambda item: -item[1])
            text = ", ".join(f"{axis} {100 * b / share:.0f}%" for axis, b in parts if b * 200 >= share)
            mark = "too large" if not one.fits else "best" if one.best else ""
            degrees = [str(one.degrees[axis]) for axis in axes]
            figures = [size(one.memory.total), size(held), size(one.memory.activations), size(one.per_token)]
            rows.append([mark, *degrees, *figures, text or "nothing"])
        return rows

    def refusals(self) -> list[tuple[str, str]]:
        """(the products, the cause), products as the degrees that they have in common."""
        return [(_common(one.degrees), one.cause) for one in self.refused]

    def text(self, most: int = 20) -> str:
        """The report as plain text."""
        lines = [f"{self.model} on {self.world} ranks: {len(self.choices)} products work", self.assumed]
        rows = self.rows(most)
        lines += align(rows, (9, *[5] * (len(rows[0]) - 6), 10, 14, 12, 16, 40)) if self.choices else []
        if len(self.choices) > most:
            lines.append(f"and {len(self.choices) - most} more (--json has all)")
        if self.refused:
            lines += align([["refused", "why"], *([f"  {products}", cause] for products, cause in self.refusals())], (44, 110))
        return "\n".join(lines)


def what_if(
    model: nn.Module,
    world: int,
    *,
    batch: int = 1,
    sequence: int = 8192,
    bytes_per_element: int = 2,
    optimizer: str = "adamw",
    checkpointing: bool = True,
    fully_sharded: bool = True,
    limit: int | None = None,
    overrides: Any = None,
    sequence_parallel: bool = True,
    loss_parallel: bool = False,
) -> WhatIf:
    """Plans every product of `world` ranks. `batch` x `sequence`: tokens of one dp rank's step. `limit`: bytes a rank may hold.

    overrides: entries for all products; for cp and ep, what the family suggests comes before them. fully_sharded: FSDP over dp x cp.
    PlanError for arguments that nothing could be planned with.
    """
    if min(world, batch, sequence) < 1:
        raise PlanError(f"what_if: world={world}, batch={batch}, sequence={sequence}; whole numbers from 1.")
    entries = Overrides.of(overrides).entries
    planned, copies = (model, _once) if entries else _shortened(model)
    choices, causes = [], dict[str, list[Mapping[str, int]]]()
    for degrees in _products(world, _has_experts(model)):
        sizes = {axis: degrees[axis] for axis in ("dp", "cp", "tp")}
        try:
            suggested = suggest_overrides(planned, sizes, ep_size=degrees["ep"]).entries
            plan = build_plan(
                planned, sizes, overrides=Overrides((*suggested, *entries)), ep_size=degrees["ep"],
                sequence_parallel=sequence_parallel, loss_parallel=loss_parallel and degrees["tp"] > 1,
            )  # fmt: skip
        except HyperparError as error:
            causes.setdefault(str(error).splitlines()[0], []).append(degrees)
            continue
        held = memory(
            plan, batch, sequence, dp=degrees["dp"], bytes_per_element=bytes_per_element, optimizer=optimizer,
            checkpointing=checkpointing, fully_sharded=fully_sharded, copies=copies,
        )  # fmt: skip
        sent = _sent(plan, batch, sequence, bytes_per_element, degrees["dp"], fully_sharded, copies)
        per_token = sum(sent.values()) * degrees["cp"] * degrees["tp"] / (batch * sequence)
        choices.append(Choice(degrees, held, sent, per_token, limit is None or held.total <= limit))
    return WhatIf(
        getattr(getattr(model, "config", None), "model_type", None) or type(model).__name__, world,
        _assumed(batch, sequence, bytes_per_element, optimizer, checkpointing, fully_sharded),
        _ranked(choices), tuple(Refusal(tuple(degrees), cause) for cause, degrees in causes.items()),
    )  # fmt: skip


def _assumed(batch: int, sequence: int, width: int, optimizer: str, checkpointing: bool, fully_sharded: bool) -> str:
    return (
        f"{batch} x {sequence} tokens per dp rank, {width}-byte parameters, {optimizer},"
        f" layers {'' if checkpointing else 'not '}checkpointed, {'FSDP over dp x cp' if fully_sharded else 'no FSDP'};"
        " sent per token: by all ranks together"
    )


def _products(world: int, experts: bool) -> Iterator[dict[str, int]]:
    divisors = [d for d in range(1, world + 1) if world % d == 0]
    for tp in divisors:
        for cp in (d for d in divisors if world // tp % d == 0):
            for ep in divisors if experts else (1,):
                yield {"tp": tp, "cp": cp, "ep": ep, "dp": world // tp // cp}


def _has_experts(model: nn.Module) -> bool:
    family, _ = find_family(model)
    return "moe_expert" in assign_roles(model, family.roles if family else {}).values()


def _ranked(choices: list[Choice]) -> tuple[Choice, ...]:
    """What fits first, then what sends least, then what holds least."""

    def beaten(one: Choice) -> bool:
        return any(
            o.per_token <= one.per_token and o.memory.total <= one.memory.total
            and (o.per_token, o.memory.total) != (one.per_token, one.memory.total)
            for o in choices
        )  # fmt: skip

    marked = [Choice(c.degrees, c.memory, c.sent, c.per_token, c.fits, c.fits and not beaten(c)) for c in choices]
    return tuple(sorted(marked, key=lambda c: (not c.fits, c.per_token, c.memory.total, tuple(c.degrees.values()))))


def _common(products: tuple[Mapping[str, int], ...]) -> str:
    """`tp 16, 32 (12 products)`: the axes whose degrees tell these products from others, the narrowest first."""
    values = {axis: sorted({p[axis] for p in products}) for axis in AXES}
    axis = min(AXES, key=lambda a: (len(values[a]), AXES.index(a)))
    fixed = [a for a in AXES if len(values[a]) == 1 and values[a][0] > 1] or [axis]
    text = ", ".join(f"{a} {'/'.join(map(str, values[a]))}" for a in fixed)
    return text if len(products) == 1 else f"{text} ({len(products)} products)"


# ---- what is sent


def _sent(
    plan: ShardingPlan, batch: int, sequence: int, width: int, dp: int, fully_sharded: bool, copies: Callable[[Contract], int]
) -> dict[str, int]:
    """{axis: bytes of one rank's step}; over "fsdp" what FSDP gathers (twice) and scatters."""
    plan = as_held(plan)
    sent: dict[str, int] = {}
    for contract in plan.boundaries:
        times = copies(contract)
        for m in movements(plan, contract, batch, sequence, width):
            sent[m.axis] = sent.get(m.axis, 0) + times * m.bytes
        for axis, _, elements in summed(plan, contract, dp):
            if not fully_sharded or axis == "tp":
                sent[axis] = sent.get(axis, 0) + times * elements * width
        if fully_sharded:
            sent["fsdp"] = sent.get("fsdp", 0) + times * fully_sharded_elements(plan, contract, dp) * width
    return {axis: bytes_ for axis, bytes_ in sent.items() if bytes_}


# ---- one layer for all that are like it


def _once(contract: Contract) -> int:
    return 1


def _shortened(model: nn.Module) -> tuple[nn.Module, Callable[[Contract], int]]:
    """(a copy of a meta model with one decoder layer of each kind, how many boundaries one of its boundaries stands for)."""
    layers = find_structure(model).layers
    if len(layers) < 3 or any(p.device.type != "meta" for p in model.parameters()):
        return model, _once
    path = layers[0].rpartition(".")[0]
    whole: Any = model.get_submodule(path)
    kinds: dict[Any, list[int]] = {}
    for index, layer in enumerate(whole):
        kinds.setdefault(_kind(layer), []).append(index)
    memo: dict[int, Any] = {}
    kept = [copy.deepcopy(whole[indices[0]], memo) for indices in kinds.values()]
    memo[id(whole)] = nn.ModuleList(kept)
    counts = {str(place): len(indices) for place, indices in enumerate(kinds.values())}

    def copies(contract: Contract) -> int:
        if contract.template == "stack" or not contract.fqn.startswith(f"{path}."):
            return 1
        return counts[contract.fqn[len(path) + 1 :].partition(".")[0]]

    return copy.deepcopy(model, memo), copies


def _kind(layer: nn.Module) -> Any:
    """Equal for layers that are planned alike: classes, shapes, and plain attributes but for the layer's own number."""
    modules = []
    for name, module in layer.named_modules():
        plain = sorted(
            (k, v) for k, v in vars(module).items()
            if isinstance(v, (int, str, float, bool, type(None))) and k not in ("layer_idx", "layer_id", "layer_number", "idx")
        )  # fmt: skip
        shapes = [(n, tuple(p.shape)) for n, p in module._parameters.items() if p is not None]
        modules.append((name, type(module), repr(plain), repr(shapes)))
    return tuple(modules)
