"""A plan as a person reads it: what lies where, what travels, what it costs."""

from __future__ import annotations

from ..collectives.transition import transitions
from ..errors import PlanError
from ..placement import Layout
from ..plan.contract import Contract
from ..plan.names import nearest
from ..plan.sharding_plan import ShardingPlan
from ..plan.stacks import as_held
from .cells import held_text, inside_text, layout_text, parameters_text, placement_text, sides_text
from .outline import Line, Outline, embedding_text, loss_text, moved_text, outline, remarks
from .tables import align, size
from .traffic import held_parts, movements

__all__ = ["boundary_cells", "explain", "summary"]

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
    named = None if fqn is None else _find(plan, fqn).fqn
    plan = as_held(plan)
    if named is not None:
        return _one(plan, plan.boundary(named), tokens, bytes_per_element)
    shown = outline(plan, 1, tokens, bytes_per_element, dp)
    rows = [["boundary", "parameters", "in -> compute", "compute -> out", f"a step of {tokens} tokens", ""]]
    for line in shown.lines:
        name = "  " * line.depth + line.name
        if line.contracts:
            rows.append([name, *boundary_cells(shown, line)])
        else:
            copies = f"{line.copies} x" if line.copies > 1 else ""
            rows.append([name, "", "", "", copies, size(line.bytes) if line.bytes and line.copies > 1 else ""])
    return "\n".join(["   ".join(shown.title), *align(rows, WIDEST), *summary(shown)])


def boundary_cells(shown: Outline, line: Line) -> list[str]:
    """The cells behind a boundary's name; the figures are one layer's."""
    plan, one = shown.plan, line.contracts[0]
    inside = inside_text(one)
    return [
        "; ".join(text for text in (parameters_text(plan, one), f"runs {inside}" if inside else "") if text),
        sides_text(plan, one, one.in_src, one.in_dst),
        sides_text(plan, one, one.out_src, one.out_dst),
        moved_text(plan, line.moved),
        size(line.bytes) if line.moved else "",
    ]


def summary(shown: Outline) -> list[str]:
    """The lines below the table."""
    lines = [f"boundaries: {size(shown.boundary_bytes)} a step handed to collectives by each rank, forward and backward"]
    for one in shown.sums:
        count = f"{one.buckets} bucket{'s' * (one.buckets > 1)}"
        lines.append(f"gradient sums over {one.axis}: {count}, {size(one.bytes)}: {one.of}")
    lines.append("; ".join([f"embedding: {embedding_text(shown.plan)}", f"loss: {loss_text(shown.plan)}"]))
    return [*lines, *remarks(shown)]


def _find(plan: ShardingPlan, fqn: str) -> Contract:
    for contract in plan.boundaries:
        if contract.fqn == fqn:
            return contract
    if fqn in plan.parameters:
        return plan.owner(fqn)[0]
    raise PlanError(f"the plan has no boundary or parameter {fqn!r}.{nearest(fqn, [c.fqn for c in plan.boundaries])}")


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
                "x".join(map(str, plan.parameters[f"{contract.fqn}.{name}" if contract.fqn else name])) or "scalar",
                held_text(plan, contract, name, layout).partition(" grad")[0],
                layout_text(contract.param_use[name], plan.sizes, "R", placement_text) if name in contract.param_use else "as held",
                layout_text(contract.param_grad.get(name, {}), plan.sizes, "replicate", placement_text),
                size(held * width),
            ]
        )
    lines += align(rows, (48, 20, 40, 24, 30, 16)) if contract.params else []
    moved = movements(plan, contract, 1, tokens, width)
    for side, src, dst in (("in", contract.in_src, contract.in_dst), ("out", contract.out_src, contract.out_dst)):
        for name, layout in src.items():
            grad = contract.in_grad.get(name, {}) if side == "in" else {}
            texts = [layout_text(lay, plan.sizes, "replicate", placement_text) for lay in (layout, dst.get(name, {}))]
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
        lines.append(f"inside: {moved_text(plan, sent)}, {', '.join(ways)} ({tokens} tokens, experts equally likely)")
    for label, value in (
        ("inside", inside_text(contract)),
        ("options", dict(contract.options)),
        ("region_dispatch", contract.region_dispatch),
        ("special handlers", dict(contract.special_handlers)),
        ("divided in the region", {name: f"/{by}" for name, by in contract.divide.items()}),
        ("counted in the region", dict(contract.counts)),
    ):
        if value not in (None, "", {}):
            text = ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else str(value).lower()
            lines.append(f"{label}: {text}")
    return "\n".join(lines)


def _grad_text(plan: ShardingPlan, grad: Layout) -> str:
    return f", gradient at the compute {layout_text(grad, plan.sizes, 'replicate', placement_text)}" if grad else ""
