"""A plan as a person reads it: what lies where, what travels, what it costs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

from torch.distributed.tensor import Partial, Shard

from ..collectives.transition import transitions
from ..errors import PlanError
from ..placement import Layout, Placement, format_placement, short
from ..plan.contract import Contract, callable_name
from ..plan.names import fold_names, listed, nearest
from ..plan.sharding_plan import ShardingPlan
from .tables import align, fold, size
from .traffic import Movement, gradient_sums, held_parts, movements, tells_traffic

__all__ = ["explain"]

WORDS = {"all_gather": "gather", "reduce_scatter": "scatter", "all_reduce": "all-reduce", "all_to_all": "all-to-all"}
WIDEST = (34, 38, 22, 24, 26, 10)


def explain(
    plan: ShardingPlan, fqn: str | None = None, *, tokens: int = 8192, bytes_per_element: int = 2, dp: int = 1
) -> str:
    """The whole plan, repeated layers folded into one row each; or, with `fqn` (a boundary's or a parameter's name), all of one boundary.

    tokens: what a dp rank computes in a step, as one sequence. bytes_per_element: of parameters and activations; a plan knows
    shapes only. dp: degree of data parallelism, which no plan holds. Bytes are what one rank hands to collectives, forward and
    backward (see view.traffic). S(d) is a shard of dim d; replicate, partial and grad P (partial, summed after the backward)
    speak of the plan's axis where it has one only. PlanError for a name that the plan doesn't have.
    """
    if fqn is not None:
        return _one(plan, _find(plan, fqn), tokens, bytes_per_element)
    kept, whole, sharded = _held(plan)
    degrees = {**({"dp": dp} if dp > 1 else {}), **plan.sizes, **({"ep": plan.ep_size} if plan.ep_size > 1 else {})}
    title = [
        f"{plan.model} {_count(whole)}",
        " x ".join(f"{axis} {degree}" for axis, degree in degrees.items()) or "one rank",
        *(["sequence parallel"] if plan.sequence_parallel else []),
        *([f"{plan.cp_order} order"] if "cp" in plan.sizes else []),
        f"{size(kept * bytes_per_element)} of {size(whole * bytes_per_element)} per rank"
        f" ({bytes_per_element}-byte parameters), {_percent(sharded, whole)} of parameters sharded",
    ]
    rows = [["boundary", "parameters", "in -> compute", "compute -> out", f"a step of {tokens} tokens", ""]]
    named = [(c.fqn or "(model)", c) for c in plan.boundaries if c.template != "stack"]
    stacks = {c.fqn.rpartition(".")[0]: c for c in plan.boundaries if c.template == "stack" and c.in_src != c.in_dst}
    for row in fold(named, lambda c: _likeness(plan, c)):
        entry = stacks.pop(row.name.partition("{")[0].rstrip("."), None) if row.inside else None
        if entry is not None:
            rows.append([f"{entry.fqn} (stack)", *_cells(plan, (entry,), tokens, bytes_per_element)])
        name = "  " * row.depth + row.name
        if row.things:
            rows.append([name, *_cells(plan, row.things, tokens, bytes_per_element)])
        else:
            moved = _bytes(plan, row.inside, tokens, bytes_per_element)
            copies = f"{row.copies} x" if row.copies > 1 else ""
            rows.append([name, "", "", "", copies, size(moved) if moved and row.copies > 1 else ""])
    return "\n".join(["   ".join(title), *align(rows, WIDEST), *_summary(plan, tokens, bytes_per_element, dp)])


def _find(plan: ShardingPlan, fqn: str) -> Contract:
    for contract in plan.boundaries:
        if contract.fqn == fqn:
            return contract
    if fqn in plan.parameters:
        return plan.owner(fqn)[0]
    raise PlanError(f"the plan has no boundary or parameter {fqn!r}.{nearest(fqn, [c.fqn for c in plan.boundaries])}")


def _held(plan: ShardingPlan) -> tuple[int, int, int]:
    """Elements: held by the first rank, of the whole model, of parameters that are sharded. Tied ones once."""
    later = {name for group in plan.tied for name in group[1:]}
    kept = whole = sharded = 0
    for contract in plan.boundaries:
        for name in contract.params:
            fqn = _full(contract, name)
            if fqn in later:
                continue
            mine, all_ = sum(elements for elements, _ in held_parts(plan, contract, name)), prod(plan.parameters[fqn])
            kept, whole, sharded = kept + mine, whole + all_, sharded + (all_ if mine < all_ else 0)
    return kept, whole, sharded


def _full(contract: Contract, name: str) -> str:
    return f"{contract.fqn}.{name}" if contract.fqn else name


def _likeness(plan: ShardingPlan, contract: Contract) -> Any:
    """Equal for boundaries of repeated layers."""
    data = {**contract.to_data(), "fqn": "", "shapes": [plan.parameters[_full(contract, n)] for n in contract.params]}
    return json.dumps(data, sort_keys=True, default=str)


# ---- cells


def _bytes(plan: ShardingPlan, contracts: Iterable[Contract], tokens: int, width: int) -> int:
    return sum(m.bytes for contract in contracts for m in movements(plan, contract, 1, tokens, width))


def _cells(plan: ShardingPlan, alike: Sequence[Contract], tokens: int, width: int) -> list[str]:
    """The cells behind the name; the figures are one layer's."""
    one = alike[0]
    moved = movements(plan, one, 1, tokens, width)
    inside = _inside(one)
    return [
        "; ".join(text for text in (_parameters(plan, one), f"runs {inside}" if inside else "") if text),
        _sides(plan, one, one.in_src, one.in_dst),
        _sides(plan, one, one.out_src, one.out_dst),
        _collectives(plan, moved),
        size(sum(m.bytes for m in moved)) if moved else "",
    ]


def _parameters(plan: ShardingPlan, contract: Contract) -> str:
    """`q_proj k_proj S(0), o_proj S(1), q_norm R grad P`: parameters that are held alike together."""
    alike: dict[str, list[str]] = {}
    for name, layout in contract.params.items():
        names = alike.setdefault(_held_text(plan, contract, name, layout), [])
        owner, _, leaf = name.rpartition(".")
        if leaf == "bias" and owner and names and names[-1] == owner:
            names[-1] = f"{owner}+bias"
        else:
            names.append(name.removesuffix(".weight"))
    return ", ".join(f"{' '.join(names)} {text}" for text, names in alike.items())


def _held_text(plan: ShardingPlan, contract: Contract, name: str, layout: Layout) -> str:
    if name in contract.sections:
        text = "+".join(f"{s.name} {short(s.placement)}" for s in contract.sections[name])
    else:
        text = f"{short(layout['ep'])} ep" if "ep" in layout else _layout(layout, plan.sizes, "R", short)
    partial = [axis for axis in plan.sizes if isinstance(contract.param_grad.get(name, {}).get(axis), Partial)]
    if partial:
        text += " grad P" if len(plan.sizes) == 1 else f" grad P({','.join(partial)})"
    return text


def _layout(layout: Layout, axes: Mapping[str, int], whole: str, text: Any) -> str:
    """`S(1)` on one axis, `S(1) cp S(2) tp` on more; `whole` where nothing is cut."""
    cut = [(axis, layout[axis]) for axis in axes if axis in layout and text(layout[axis]) not in ("R", "replicate")]
    if not cut:
        return whole
    return " ".join(text(p) if len(axes) == 1 else f"{text(p)} {axis}" for axis, p in cut)


def _word(placement: Placement) -> str:
    return short(placement) if isinstance(placement, Shard) else format_placement(placement)


def _sides(plan: ShardingPlan, contract: Contract, src: Mapping[str, Layout], dst: Mapping[str, Layout]) -> str:
    """The layouts of what travels in every step; the others stand below the table."""
    names = [name for name in src if name in contract.features] or list(src)[:1]
    texts = []
    for name in names:
        before, after = (_layout(side.get(name, {}), plan.sizes, "replicate", _word) for side in (src, dst))
        texts.append((f"{name}: " if len(names) > 1 else "") + (before if before == after else f"{before} -> {after}"))
    return "; ".join(texts)


def _inside(contract: Contract) -> str:
    named = contract.inner_wrapper if contract.inner_wrapper is not None else contract.local_compute_fn
    target = f" on {contract.inner_target}" if contract.inner_target not in (None, "self") else ""
    parts = [f"{_name(named)}{target}"] if named is not None else []
    if contract.region_dispatch is False and named is None:
        parts.append("own forward, a black box")
    return ", ".join([*parts, *([f"lowerer {contract.lowerer}"] if contract.lowerer else [])])


def _name(value: Any) -> str:
    return value if isinstance(value, str) else callable_name(value)


def _collectives(plan: ShardingPlan, moved: Sequence[Movement]) -> str:
    """`2 gather 2 scatter`; with the axis where the plan has several."""
    counts = Counter((m.collective, m.axis) for m in moved)
    several = len(plan.sizes) > 1
    shown = [f"{n} {WORDS[op]}{f' {axis}' if several or axis == 'ep' else ''}" for (op, axis), n in counts.items()]
    return " ".join(shown) or "-"


# ---- below the table


def _summary(plan: ShardingPlan, tokens: int, width: int, dp: int) -> list[str]:
    total = _bytes(plan, plan.boundaries, tokens, width)
    lines = [f"boundaries: {size(total)} a step handed to collectives by each rank, forward and backward"]
    by_axis: dict[str, list[tuple[tuple[str, ...], int]]] = {}
    for one in gradient_sums(plan, width, dp):
        by_axis.setdefault(one.axis, []).append((one.parameters, one.bytes))
    for axis, buckets in by_axis.items():
        names = list(dict.fromkeys(name for parameters, _ in buckets for name in parameters))
        everything = len(names) + sum(len(group) - 1 for group in plan.tied) == len(plan.parameters)
        everything = everything or (axis == "dp" and plan.ep_size > 1)
        leaves = dict.fromkeys(
            ".".join(name.removesuffix(".weight").split(".")[-2 if ".bias" in name else -1 :]) for name in names
        )
        whole = "all parameters" if plan.ep_size == 1 else "all parameters but experts"
        text = whole if everything else listed(leaves, 8)
        count = f"{len(buckets)} bucket{'s' * (len(buckets) > 1)}"
        lines.append(f"gradient sums over {axis}: {count}, {size(sum(b for _, b in buckets))}: {text}")
    lines.append("; ".join([f"embedding: {_embedding(plan)}", f"loss: {_loss(plan)}"]))
    used = [f"{name} ({provider})" for name, provider in plan.providers.items()]
    lines += [f"from plugins: {', '.join(used)}"] if used else []
    unknown = fold_names(
        f"{_full(c, name)} {a} -> {b}"
        for c in plan.boundaries
        for src, dst in ((c.in_src, c.in_dst), (c.out_src, c.out_dst))
        for name, layout in src.items()
        if name not in c.features and transitions(layout, dst.get(name, {}), {}, plan.sizes)
        for a, b in [[_layout(side, plan.sizes, "replicate", _word) for side in (layout, dst.get(name, {}))]]
    )
    lines += [f"not counted, only where a module returns it: {', '.join(unknown)}"] if unknown else []
    if any(m.axis == "ep" for c in plan.boundaries for m in movements(plan, c, 1, tokens, width)):
        lines.append("over ep: counted as if every expert were as likely as any other")
    senders = _senders(plan)
    lines += [f"not counted, if they communicate: {', '.join(senders)}"] if senders else []
    return [*lines, *(f"note: {note}" for note in plan.notes)]


def _senders(plan: ShardingPlan) -> list[str]:
    """What may send by itself, of which a plan doesn't know how much."""
    black_boxes = [c for c in plan.boundaries if c.region_dispatch is False and c.injects and tells_traffic(c) is None]
    found = [_name(c.inner_wrapper or c.local_compute_fn) for c in black_boxes]
    found += [plan.loss.name] if plan.loss else []
    return list(dict.fromkeys(found))


def _embedding(plan: ShardingPlan) -> str:
    found = [_inside(c) or "the model's own" for c in plan.boundaries if c.template == "embed"]
    return found[0] if found else "none"


def _loss(plan: ShardingPlan) -> str:
    if plan.loss is None:
        return "the model's own, on whole logits"
    options = f" {dict(plan.loss.options)}" if plan.loss.options else ""
    return f"{plan.loss.name}{options}, on logits sharded over tp"


def _count(elements: int) -> str:
    for unit, factor in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if elements >= factor:
            return f"{elements / factor:.3g}{unit}"
    return str(elements)


def _percent(part: int, whole: int) -> str:
    if part == whole and whole:
        return "100%"
    return f"{min(100 * part / whole, 99.99):.4g}%" if whole else "0%"


# ---- one boundary


def _one(plan: ShardingPlan, contract: Contract, tokens: int, width: int) -> str:
    """Everything that the plan says of one boundary, and each step of it."""
    lines = [f"{contract.fqn or '(model)'}   {contract.template}"]
    rows = [["parameter", "shape", "held", "in the region", "gradient", "bytes per rank"]]
    for name, layout in contract.params.items():
        held = sum(elements for elements, _ in held_parts(plan, contract, name))
        rows.append(
            [
                f"  {name}",
                "x".join(map(str, plan.parameters[_full(contract, name)])) or "scalar",
                _held_text(plan, contract, name, layout).partition(" grad")[0],
                _layout(contract.param_use[name], plan.sizes, "R", _word) if name in contract.param_use else "as held",
                _layout(contract.param_grad.get(name, {}), plan.sizes, "replicate", _word),
                size(held * width),
            ]
        )
    lines += align(rows, (48, 20, 40, 24, 30, 16)) if contract.params else []
    moved = movements(plan, contract, 1, tokens, width)
    for side, src, dst in (("in", contract.in_src, contract.in_dst), ("out", contract.out_src, contract.out_dst)):
        for name, layout in src.items():
            grad = contract.in_grad.get(name, {}) if side == "in" else {}
            texts = [_layout(lay, plan.sizes, "replicate", _word) for lay in (layout, dst.get(name, {}))]
            lines.append(f"{side} {name}: {' -> '.join(texts)}{_grad_text(plan, grad)}")
            for t in transitions(layout, dst.get(name, {}), grad, plan.sizes):
                bytes_ = {m.direction: m.bytes for m in moved if m.tensor == name and m.axis == t.axis}
                cost = [f"{way} {size(b)}" for way, b in bytes_.items()]
                said = ", ".join(cost) if name in contract.features else "width unknown to the plan: not counted"
                lines.append(
                    f"  over {t.axis}: forward {t.forward.replace('_', '-')}, backward {t.backward.replace('_', '-')}"
                    + (f" ({said}, {tokens} tokens)" if said else "")
                )
    sent = [m for m in moved if m.tensor == "inside"]
    if sent:
        ways = [f"{way} {size(sum(m.bytes for m in sent if m.direction == way))}" for way in ("forward", "backward")]
        lines.append(f"inside: {_collectives(plan, sent)}, {', '.join(ways)} ({tokens} tokens, experts equally likely)")
    for label, value in (
        ("inside", _inside(contract)),
        ("options", dict(contract.options)),
        ("region_dispatch", contract.region_dispatch),
        ("special handlers", dict(contract.special_handlers)),
        ("divided in the region", {name: f"/{by}" for name, by in contract.divide.items()}),
    ):
        if value not in (None, "", {}):
            text = ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else str(value).lower()
            lines.append(f"{label}: {text}")
    return "\n".join(lines)


def _grad_text(plan: ShardingPlan, grad: Layout) -> str:
    return f", gradient at the compute {_layout(grad, plan.sizes, 'replicate', _word)}" if grad else ""
