"""A plan as one HTML page: no script, nothing fetched; repeated layers folded, each layout drawn on the mesh."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template

from torch.distributed.tensor import Shard

from ..collectives.transition import transitions
from ..placement import Layout
from ..plan.contract import Contract
from ..plan.names import fold_names, listed
from ..plan.sharding_plan import ShardingPlan
from .cells import held_text, inside_text, layout_text, placement_text, sides_text
from .memory import Memory, memory
from .outline import Line, Outline, embedding_text, loss_text, moved_text, outline, remarks
from .slices import layout_sentence, mesh_svg, slices_svg
from .tables import size
from .traffic import held_parts, seen_shapes
from .words import count_text, percent_text

__all__ = ["html_page"]

HIDDEN = ("the batch", "the sequence", "the features")
WAYS = {"all_gather": "all-gather", "reduce_scatter": "reduce-scatter", "all_reduce": "all-reduce", "all_to_all": "all-to-all",
        "shard": "cut, nothing sent", "identity": "nothing", "keep_first": "kept by the first rank"}  # fmt: skip


def html_page(
    plan: ShardingPlan, *, batch: int = 1, sequence: int = 8192, bytes_per_element: int = 2, dp: int = 1, optimizer: str = "adamw"
) -> str:
    """The page. Figures are those of one rank in a step of `batch` x `sequence` tokens per dp rank; memory as view.memory estimates it."""
    shown = outline(plan, batch, sequence, bytes_per_element, dp)
    held = {
        again: memory(
            plan, batch, sequence, dp=dp, bytes_per_element=bytes_per_element, optimizer=optimizer, checkpointing=again
        )
        for again in (False, True)
    }
    page = Template((Path(__file__).parent / "page.html").read_text(encoding="utf-8"))
    body = "\n".join([_header(shown, held[False]), _mesh(shown), _memory(held, optimizer), _tree(shown, held[False]), _footer(shown)])
    return page.substitute(title=escape(" - ".join(shown.title[:2])), body=body)


# ---- head


def _header(shown: Outline, held: Memory) -> str:
    name, degrees, *modes, _ = shown.title
    sums = sum(one.bytes for one in shown.sums)
    figures = [
        (size(held.total), f"memory of one rank, activations estimated ({size(shown.kept * shown.width)} of it parameters)"),
        (size(shown.boundary_bytes), "handed to collectives by a rank in a step, at and inside boundaries"),
        (size(sums) if sums else "0 B", "gradient sums at the end of a backward"),
        (percent_text(shown.sharded, shown.whole), "of the parameters are sharded"),
    ]
    items = "".join(f"<li><b>{escape(figure)}</b><span>{escape(text)}</span></li>" for figure, text in figures)
    tokens = f"A step has {shown.batch} x {shown.sequence} tokens per dp rank; an element has {shown.width} bytes."
    return (
        f'<header><h1>{escape(name)}</h1><p class="degrees">{escape(", ".join([degrees, *modes]))}</p>'
        f'<p class="soft small">{tokens}</p><ul class="figures">{items}</ul></header>'
    )


def _mesh(shown: Outline) -> str:
    degrees = shown.degrees
    if not degrees:
        return ""
    groups = (
        f"Ranks of one colour hold the experts of one model between them (ep {degrees['ep']})."
        if "ep" in degrees
        else "Ranks of one colour hold one row of the mesh: tensor parallelism runs inside it."
    )
    sums = "".join(
        f"<li>over {escape(one.axis)}: {one.buckets} bucket{'s' * (one.buckets > 1)}, {size(one.bytes)}: {escape(one.of)}</li>"
        for one in shown.sums
    )
    return (
        f'<section aria-labelledby="mesh"><h2 id="mesh">Mesh</h2><p class="small soft">{groups}</p>'
        f'<div class="scroll" tabindex="0" role="region" aria-label="mesh">{mesh_svg(degrees)}</div>'
        + (f'<h3>Gradient sums</h3><ul class="plain small">{sums}</ul>' if sums else "")
        + "</section>"
    )


# ---- memory


def _memory(held: Mapping[bool, Memory], optimizer: str) -> str:
    plain = held[False]
    parts = [
        ("parameters", plain.parameters),
        ("gradients", plain.gradients),
        (f"optimizer ({optimizer})", plain.optimizer),
        ("activations in layers", plain.layers),
        ("activations elsewhere", plain.activations - plain.layers),
    ]
    whole = plain.total or 1
    bars = "".join(
        f'<i style="width:{100 * bytes_ / whole:.2f}%;background:var(--m{i})" title="{escape(name)}"></i>'
        for i, (name, bytes_) in enumerate(parts)
    )
    again = [*(b for _, b in parts[:3]), held[True].layers, held[True].activations - held[True].layers]
    rows = "".join(
        f'<tr><th scope="row"><span class="key" style="background:var(--m{i})"></span>{escape(name)}</th>'
        f'<td class="n">{size(bytes_)}</td><td class="n">{size(again[i])}</td></tr>'
        for i, (name, bytes_) in enumerate(parts)
    )
    totals = "".join(f'<td class="n">{size(one.total)}</td>' for one in (plain, held[True]))
    total = f'<tr class="sum"><th scope="row">in all</th>{totals}</tr>'
    formulas = _folded_formulas(plain)
    rough = [one.fqn for one in plain.boundaries if one.rough]
    note = f"<p class='small soft'>Rough: {escape(listed(fold_names(rough)))}.</p>" if rough else ""
    return (
        '<section aria-labelledby="memory"><h2 id="memory">Memory of one rank</h2>'
        f'<div class="bar" role="img" aria-label="{escape(", ".join(f"{n} {size(b)}" for n, b in parts))}">{bars}</div>'
        '<div class="scroll" tabindex="0" role="region" aria-label="memory"><table><thead><tr><th scope="col">what</th>'
        '<th scope="col" class="n">as it is</th><th scope="col" class="n">layers checkpointed</th></tr></thead>'
        f"<tbody>{rows}{total}</tbody></table></div>"
        "<details><summary>How activations are estimated</summary><div class='inside'>"
        "<p class='small soft'>What the forward keeps for the backward, of each boundary: tokens that the region sees on a rank, times"
        " bytes times widths. A checkpointed layer keeps its input, and one layer at a time all of it again.</p>"
        f'<div class="scroll" tabindex="0" role="region" aria-label="formulas"><table><tbody>{formulas}</tbody></table></div>{note}'
        "</div></details></section>"
    )


def _folded_formulas(held: Memory) -> str:
    by_formula: dict[tuple[str, int], list[str]] = {}
    for one in held.boundaries:
        if one.bytes:
            by_formula.setdefault((one.formula, one.bytes), []).append(one.fqn or "(model)")
    return "".join(
        f'<tr><th scope="row"><code>{escape(listed(fold_names(names)))}</code></th><td>{escape(formula)}</td>'
        f'<td class="n">{size(bytes_)}</td></tr>'
        for (formula, bytes_), names in by_formula.items()
    )


# ---- the model


def _tree(shown: Outline, held: Memory) -> str:
    kept = {one.fqn: one.bytes for one in held.boundaries}
    html: list[str] = []
    open_at: list[int] = []  # depths of headers whose details are open
    for line in shown.lines:
        while open_at and open_at[-1] >= line.depth:
            html.append("</div></details>")
            open_at.pop()
        if line.contracts:
            html.append(_boundary(shown, line, kept))
        else:
            copies = f'<span class="kind">{line.copies} layers</span>' if line.copies > 1 else ""
            cost = size(line.bytes) if line.bytes else ""
            html.append(
                f'<details open><summary><span class="row"><span class="name"><code>{escape(line.name)}</code>{copies}</span>'
                f'<span class="way"></span><span class="moves"></span><span class="cost">{cost}</span></span></summary><div>'
            )
            open_at.append(line.depth)
    html += ["</div></details>"] * len(open_at)
    return (
        '<section aria-labelledby="model"><h2 id="model">Model</h2><p class="small soft">A line is a boundary: how its input arrives and'
        " is needed, how its output comes about and leaves, and what that costs a rank in a step, forward and backward. Figures inside"
        f' layers are one layer\'s. Open a line for its parameters and pictures.</p><div class="tree">{"".join(html)}</div></section>'
    )


def _boundary(shown: Outline, line: Line, kept: Mapping[str, int]) -> str:
    plan, one = shown.plan, line.contracts[0]
    ways = [text for text in (sides_text(plan, one, one.in_src, one.in_dst), sides_text(plan, one, one.out_src, one.out_dst)) if text]
    moves = moved_text(plan, line.moved)
    summary = (
        f'<span class="row"><span class="name"><code>{escape(line.name)}</code><span class="kind">{escape(one.template)}</span></span>'
        f'<span class="way small">{escape("; ".join(dict.fromkeys(ways)))}</span>'
        f'<span class="moves">{escape(moves) if line.moved else "nothing sent"}</span>'
        f'<span class="cost">{size(line.bytes) if line.moved else ""}</span></span>'
    )
    names = fold_names(c.fqn or "(model)" for c in line.contracts)
    inside = inside_text(one)
    facts = [f"<code>{escape(listed(names))}</code>"]
    facts += [f"runs <code>{escape(inside)}</code>"] if inside else []
    facts += [f"keeps {size(kept.get(one.fqn, 0))} of activations"] if kept.get(one.fqn) else []
    own = [m for m in line.moved if m.tensor in ("inside", "loss")]
    facts += [f"sends by itself: {escape(moved_text(plan, own))}, {size(sum(m.bytes for m in own))}"] if own else []
    body = [f'<p class="small">{"; ".join(facts)}</p>']
    flows = "".join(f"<div>{flow}</div>" for flow in (_flow(shown, one, line, "in"), _flow(shown, one, line, "out")) if flow)
    body += [f'<div class="sides">{flows}</div>' if flows else "", _parameters(plan, one, shown.width)]
    return f"<details><summary>{summary}</summary><div class='inside'>{''.join(body)}</div></details>"


def _flow(shown: Outline, one: Contract, line: Line, side: str) -> str:
    """Each input, or output, before and after its transition."""
    plan = shown.plan
    src, dst = (one.in_src, one.in_dst) if side == "in" else (one.out_src, one.out_dst)
    zigzag = plan.cp_order == "head_tail"
    drawn = []
    for name, before in src.items():
        if name not in one.features and len(src) > 1 and name != next(iter(src)):
            continue
        after = dst.get(name, {})
        titles = ("arrives", "as the region needs it") if side == "in" else ("as the region yields it", "leaves")
        stages = [(before, titles[0]), (after, titles[1])]
        if before == after:
            stages = stages[:1] if side == "in" else stages[1:]
        figures = [_figure(layout, plan.sizes, f"{name}, {title}", zigzag) for layout, title in stages]
        ids = side == "in" and one.template == "embed"  # they have no gradient
        steps = () if ids else transitions(before, after, one.in_grad.get(name, {}) if side == "in" else {}, plan.sizes)
        said = []
        for t in steps:
            costs = {m.direction: size(m.bytes) for m in line.moved if m.tensor == name and m.axis == t.axis}
            ways = [
                f"{way} {WAYS.get(op, op)}{f' ({costs[way]})' if way in costs else ''}"
                for way, op in (("forward", t.forward), ("backward", t.backward))
            ]
            said.append(f"<b>over {escape(t.axis)} &rarr;</b>{escape(ways[0])}<br>{escape(ways[1])}")
        step = f'<p class="step">{"<br>".join(said)}</p>' if said else ""
        drawn.append(f'<div class="flow">{figures[0]}{step}{figures[1] if len(figures) > 1 else ""}</div>')
    return f"<h3>{'Input' if side == 'in' else 'Output'}</h3>{''.join(drawn)}" if drawn else ""


def _figure(layout: Layout, sizes: Mapping[str, int], title: str, zigzag: bool) -> str:
    # [batch, sequence, features]: a negative dim counts from the end
    counted = {a: Shard(p.dim % 3) if isinstance(p, Shard) and p.dim < 0 else p for a, p in layout.items()}
    sentence = layout_sentence(counted, sizes, HIDDEN)
    picture = slices_svg(counted, sizes, 1, 2, f"{title}: {sentence}", zigzag=zigzag)
    caption = f"<b>{escape(title)}</b> {escape(layout_text(layout, sizes, 'replicate', placement_text))}"
    return f"<figure>{picture}<figcaption>{caption}<br>{escape(sentence)}</figcaption></figure>"


def _parameters(plan: ShardingPlan, one: Contract, width: int) -> str:
    if not one.params:
        return ""
    seen = seen_shapes(plan, one)
    rows, pictures = [], []
    axes = {**plan.sizes, **({"ep": plan.ep_size} if plan.ep_size > 1 else {})}
    for name, layout in one.params.items():
        shape = plan.parameters[f"{one.fqn}.{name}" if one.fqn else name]
        held = sum(elements for elements, _ in held_parts(plan, one, name))
        text, _, grad = held_text(plan, one, name, layout).partition(" grad")
        rows.append(
            f'<tr><th scope="row"><code>{escape(name)}</code></th><td class="n">{_shape(shape)}</td><td>{escape(text)}</td>'
            f"<td class='n'>{_shape(seen[name])}</td><td>{'partial, summed' if grad else 'complete'}</td>"
            f'<td class="n">{size(held * width)}</td></tr>'
        )
        cut = {axis: placement for axis, placement in {**layout, **one.param_use.get(name, {})}.items() if axis in axes}
        if len(shape) > 1 and cut and name not in one.sections:
            used = {axis: ranks for axis, ranks in axes.items() if axis in cut}
            rows_dim = 0 if len(shape) == 2 or "ep" in cut else 1
            sentence = layout_sentence(cut, used)
            pictures.append((name, slices_svg(cut, used, rows_dim, len(shape) - 1, f"{name}: {sentence}"), sentence))
    figures = "".join(
        f"<figure>{picture}<figcaption><b>{escape(listed(names, 4))}</b><br>{escape(sentence)}</figcaption></figure>"
        for (picture, sentence), names in _alike(pictures).items()
    )
    head = "".join(
        f'<th scope="col"{" class=n" if c in ("shape", "in a region", "on a rank") else ""}>{c}</th>'
        for c in ("parameter", "shape", "held", "in a region", "gradient", "on a rank")
    )
    return (
        f'<h3>Parameters</h3><div class="pictures">{figures}</div><div class="scroll" tabindex="0" role="region"'
        f' aria-label="parameters of {escape(one.fqn)}"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
    )


def _alike(pictures: Iterable[tuple[str, str, str]]) -> dict[tuple[str, str], list[str]]:
    """Pictures that show the same, once for all their parameters."""
    found: dict[str, tuple[str, str]] = {}
    named: dict[tuple[str, str], list[str]] = {}
    for name, picture, sentence in pictures:
        key = found.setdefault(picture.partition('aria-label="')[0] + sentence, (picture, sentence))
        named.setdefault(key, []).append(name.removesuffix(".weight"))
    return named


def _shape(shape: Sequence[int]) -> str:
    return " &times; ".join(map(str, shape)) or "scalar"


def _footer(shown: Outline) -> str:
    lines = [
        f"embedding: {embedding_text(shown.plan)}; loss: {loss_text(shown.plan)}",
        *remarks(shown),
        f"{count_text(shown.whole)} parameters; plan {shown.plan.digest()}",
    ]
    return f"<footer>{''.join(f'<p>{escape(line)}</p>' for line in lines)}</footer>"
