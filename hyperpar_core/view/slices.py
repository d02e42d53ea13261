"""Small pictures of a tensor on a mesh: which rank holds which slice. Inline SVG, coloured by the page's own variables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html import escape

from torch.distributed.tensor import Partial, Shard

from ..placement import Layout, SharedShard, format_placement

__all__ = ["layout_sentence", "mesh_svg", "slices_svg"]

WIDTH, HEIGHT, MOST = 132, 84, 8  # of a tensor's picture, and the most parts that one axis is drawn with
LINE, TALLEST = 10, 170  # what a label needs, and how far a picture grows to have room for them


@dataclass(frozen=True)
class _Cell:
    """A rectangle (left, top, right, bottom; 0 to 1), who holds it ({axis: coordinate}), and which part (start, end) it is of what they
    hold of the rows."""

    box: tuple[float, float, float, float]
    held_by: Mapping[str, int]
    rows: tuple[float, float] = (0.0, 1.0)

    def columns_over(self, axis: str, ranks: int) -> Iterator[_Cell]:
        """Cut across, a column for each rank."""
        left, top, right, bottom = self.box
        step = (right - left) / ranks
        for rank in range(ranks):
            box = (left + rank * step, top, left + (rank + 1) * step, bottom)
            yield _Cell(box, {**self.held_by, axis: rank}, self.rows)

    def rows_over(self, axis: str, ranks: int) -> Iterator[_Cell]:
        """Cut downwards: each rank gets an equal part of the rows that are held together, of which this cell may be a part only."""
        left, top, right, bottom = self.box
        start, end = self.rows
        for rank in range(ranks):
            low, high = max(start, rank / ranks), min(end, (rank + 1) / ranks)
            if high - low > 1e-9:
                scale = (bottom - top) / (end - start)
                box = (left, top + (low - start) * scale, right, top + (high - start) * scale)
                yield _Cell(box, {**self.held_by, axis: rank}, (low * ranks - rank, high * ranks - rank))

    def head_and_tail_over(self, axis: str, ranks: int) -> Iterator[_Cell]:
        """Cut downwards into twice as many chunks: rank r holds chunk r and, behind it, chunk 2 n - 1 - r."""
        left, top, right, bottom = self.box
        step = (bottom - top) / (2 * ranks)
        for chunk in range(2 * ranks):
            rank = min(chunk, 2 * ranks - 1 - chunk)
            box = (left, top + chunk * step, right, top + (chunk + 1) * step)
            yield _Cell(box, {**self.held_by, axis: rank}, (0.0, 0.5) if chunk < ranks else (0.5, 1.0))


def layout_sentence(layout: Layout, sizes: Mapping[str, int], dims: tuple[str, ...] = ()) -> str:
    """`cut along the sequence over tp, a summand on each of cp`. dims: names of the tensor's dims."""
    texts = []
    for axis, ranks in sizes.items():
        placement = layout.get(axis)
        if isinstance(placement, Shard):
            dim = dims[placement.dim] if dims and -len(dims) <= placement.dim < len(dims) else f"dim {placement.dim}"
            texts.append(f"cut along {dim} over {axis}")
        elif isinstance(placement, SharedShard):
            texts.append(f"each {axis} rank uses one of {ranks // placement.copies} slices")
        elif isinstance(placement, Partial):
            texts.append(f"{format_placement(placement)}: each {axis} rank holds a summand")
        else:
            texts.append(f"whole on each {axis} rank")
    return ", ".join(texts) or "whole"


def slices_svg(
    layout: Layout, sizes: Mapping[str, int], rows: int, columns: int, label: str, *, zigzag: bool = False
) -> str:
    """The picture of a tensor of which `rows` and `columns` are the dims drawn downwards and across. zigzag: of the sequence over cp."""
    cells = [_Cell((0.0, 0.0, 1.0, 1.0), {})]
    partial = [axis for axis in sizes if isinstance(layout.get(axis), Partial)]
    more = False
    for axis, ranks in sizes.items():
        placement = layout.get(axis)
        if not isinstance(placement, (Shard, SharedShard)):
            continue
        ranks = ranks // placement.copies if isinstance(placement, SharedShard) else ranks
        drawn = min(ranks, MOST)
        more = more or drawn < ranks
        if placement.dim == columns:
            cells = [part for cell in cells for part in cell.columns_over(axis, drawn)]
        elif zigzag and axis == "cp":
            cells = [part for cell in cells for part in cell.head_and_tail_over(axis, drawn)]
        elif placement.dim == rows:
            cells = [part for cell in cells for part in cell.rows_over(axis, drawn)]
    bands = len({cell.box[1] for cell in cells})
    height = min(max(HEIGHT, bands * LINE), TALLEST) if bands > 1 else HEIGHT
    shapes, labels = [], []
    for cell in cells:
        left, top, right, bottom = (round(a * b, 2) for a, b in zip(cell.box, (WIDTH, height) * 2, strict=True))
        colour = _colour(cell.held_by, sizes)
        shapes.append(
            f'<rect class="cell" x="{left + 1}" y="{top + 1}" width="{right - left:.2f}" height="{bottom - top:.2f}"'
            f' style="fill:var({colour})"/>'
        )
        text = " ".join(f"{axis}{rank}" for axis, rank in cell.held_by.items())
        if not text:
            text = " ".join(f"{axis} 0-{ranks - 1}" for axis, ranks in sizes.items() if axis not in partial)
        if bottom - top >= 9 and right - left >= 5.6 * len(text) + 2 and text:
            labels.append(f'<text x="{(left + right) / 2 + 1:.1f}" y="{(top + bottom) / 2 + 4:.1f}" text-anchor="middle">{text}</text>')
    if partial:
        lines = "".join(f"M{x} {height + 1}L{x + height} 1" for x in range(-height, WIDTH, 12))
        shapes.append(f'<svg x="1" y="1" width="{WIDTH}" height="{height}" viewBox="1 1 {WIDTH} {height}"><path d="{lines}" '
                      'style="stroke:var(--hatch);stroke-width:3;fill:none"/></svg>')  # fmt: skip
    shapes += labels
    shapes.append(f'<rect class="edge" x="1" y="1" width="{WIDTH}" height="{height}"/>')
    note = f" (the first {MOST} of each axis drawn)" if more else ""
    return (
        f'<svg width="{WIDTH + 2}" height="{height + 2}" viewBox="0 0 {WIDTH + 2} {height + 2}" role="img"'
        f' aria-label="{escape(label + note)}">{"".join(shapes)}</svg>'
    )


def _colour(held_by: Mapping[str, int], sizes: Mapping[str, int]) -> str:
    if not held_by:
        return "--all"
    place = 0
    for axis, rank in held_by.items():
        place = place * min(sizes.get(axis, 1), MOST) + rank
    return f"--c{place % 8}"


def mesh_svg(degrees: Mapping[str, int]) -> str:
    """The ranks of the mesh: tp across, dp and cp downwards; of many, the first rows and columns."""
    dp, cp, tp = (degrees.get(axis, 1) for axis in ("dp", "cp", "tp"))
    ep = degrees.get("ep", 1)
    columns, rows = min(tp, 16), min(dp * cp, 16)
    side, gap, head = 40, 4, 62
    shapes = []
    for row in range(rows):
        d, c = divmod(row, cp)
        name = " ".join(f"{axis}{at}" for axis, at, ranks in (("dp", d, dp), ("cp", c, cp)) if ranks > 1)
        shapes.append(f'<text x="0" y="{18 + row * (side + gap) + side / 2 + 3}">{name}</text>')
        for column in range(columns):
            rank = row * tp + column
            x, y = head + column * (side + gap), 18 + row * (side + gap)
            group = rank // ep if ep > 1 else row
            shapes.append(
                f'<rect class="cell" x="{x}" y="{y}" width="{side}" height="{side}" rx="5" style="fill:var(--c{group % 8})"/>'
                f'<text x="{x + side / 2}" y="{y + side / 2 + 3}" text-anchor="middle">{rank}</text>'
            )
    for column in range(columns if tp > 1 else 0):
        shapes.append(f'<text x="{head + column * (side + gap) + side / 2}" y="11" text-anchor="middle">tp{column}</text>')
    width, height = head + columns * (side + gap), 18 + rows * (side + gap)
    label = f"{dp * cp * tp} ranks" + (f", of which {rows * columns} are drawn" if rows * columns < dp * cp * tp else "")
    frame = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}"'
    return f"<svg {frame}>{''.join(shapes)}</svg>"
