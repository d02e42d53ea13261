"""The one comparer of a parallel run with one process: bounds, and the first boundary where the two part.

The bound of a tensor is a fraction of the reference's largest value: 1e-5 in float32, 1e-10 in float64. Gradients have
a floor, a tenth of that fraction of the model's largest gradient: some (a key bias's) are zero but for rounding.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .record import Record
from .report import Comparison, Difference, FirstPart, ParityReport

__all__ = ["Bounds", "compare", "merge"]


@dataclass(frozen=True)
class Bounds:
    """`relative` to a tensor's largest value; `floor` relative to the model's largest gradient, for gradients alone."""

    relative: float
    floor: float

    @classmethod
    def of(cls, dtype: torch.dtype) -> Bounds:
        """The bounds of float32 and float64; ValueError for another dtype, which has none."""
        if dtype == torch.float32:
            return cls(1e-5, 1e-6)
        if dtype == torch.float64:
            return cls(1e-10, 1e-11)
        raise ValueError(f"parity has bounds for float32 and float64, not for {dtype}.")


def compare(
    reference: Record,
    records: Sequence[Record],
    bounds: Bounds | None = None,
    *,
    rows: Tensor | None = None,
    title: str = "",
    hints: Mapping[str, str] | None = None,
    notes: Sequence[str] = (),
) -> ParityReport:
    """Compares the record of each rank with the reference. bounds: those of the reference's dtype, unless given.

    rows: a mask [batch, sequence] of the positions that count (padding doesn't).
    hints: {parameter, "forward of BOUNDARY" or "backward of BOUNDARY": what the contract says}.
    """
    bounds = bounds or Bounds.of(reference.logits.dtype)
    comparisons = tuple(_Comparer(reference, record, bounds, rows).result() for record in records)
    return ParityReport(title, float(reference.loss), reference.steps, comparisons, hints or {}, tuple(notes))


def merge(reports: Sequence[ParityReport]) -> ParityReport:
    """One report of what every rank has compared for itself."""
    first = reports[0]
    comparisons = tuple(comparison for report in reports for comparison in report.comparisons)
    return ParityReport(first.title, first.loss, first.steps, comparisons, first.hints, first.notes)


class _Comparer:
    """One rank's record against the reference."""

    def __init__(self, reference: Record, record: Record, bounds: Bounds, rows: Tensor | None) -> None:
        self.reference, self.record, self.bounds, self.rows = reference, record, bounds, rows
        self.floor = bounds.floor * _largest(reference.gradients.values())
        self.boundary_floor = bounds.floor * _largest(reference.input_gradients.values())

    def result(self) -> Comparison:
        ours, theirs = self.reference, self.record
        logits = self._difference("logits", "logits", ours.logits, theirs.logits, 0.0)
        found = [self._difference("loss", "loss", ours.loss, theirs.loss, 0.0), logits]
        for name, gradient in ours.gradients.items():
            found.append(self._difference("gradient", name, gradient, theirs.gradients.get(name), self.floor))
        for name, weight in ours.weights.items():
            found.append(self._difference("weight", name, weight, theirs.weights.get(name), 0.0))
        total, equal = {}, {}
        for kind in ("loss", "logits", "gradient", "weight"):
            of_kind = [d for d in found if d.kind == kind]
            total[kind], equal[kind] = len(of_kind), sum(not _exceeds(d) for d in of_kind)
        differences = tuple(d for d in found if _exceeds(d))
        first = self._first(differences) if differences or theirs.replicas else None
        return Comparison(theirs.rank, equal, total, differences, theirs.replicas, first, logits.error)

    def _difference(self, kind: str, name: str, ours: Tensor | None, theirs: Tensor | None, floor: float) -> Difference:
        """The distance of two tensors; infinite where they can't be compared."""
        if ours is None or theirs is None:
            both = ours is None and theirs is None
            zero = ours is None and theirs is not None and not theirs.any()
            note = "" if both or zero else "missing" if theirs is None else "there, and the reference has none"
            return Difference(kind, name, float("inf") if note else 0.0, 0.0, floor, note=note)
        if ours.shape != theirs.shape:
            note = f"shape {tuple(theirs.shape)}, the reference's is {tuple(ours.shape)}"
            return Difference(kind, name, float("inf"), 0.0, floor, note=note)
        ours, theirs = self._counted(ours).double(), self._counted(theirs.to(ours.device)).double()
        largest = float(ours.abs().max()) if ours.numel() else 0.0
        bound = max(self.bounds.relative * largest, floor)
        if kind == "loss" and ours.isnan() and theirs.isnan():  # the mean over no target, in both
            return Difference(kind, name, 0.0, largest, bound)
        if not ours.isfinite().all() or not theirs.isfinite().all():
            whose = "the reference isn't" if not ours.isfinite().all() else "not"
            return Difference(kind, name, float("inf"), largest, bound, note=f"{whose} finite")
        error = float((ours - theirs).abs().max()) if ours.numel() else 0.0
        return Difference(kind, name, error, largest, bound, _ratio(ours, theirs) if error > bound else None)

    def _counted(self, x: Tensor) -> Tensor:
        """Without the positions that don't count, where `x` has a dim for rows and one for positions."""
        return x if self.rows is None or x.shape[:2] != self.rows.shape else x[self.rows]

    # ---- where they part first

    def _first(self, differences: Sequence[Difference]) -> FirstPart:
        ours, theirs = self.reference, self.record
        forward = [boundary for boundary in ours.outputs if boundary in theirs.outputs]
        for count, boundary in enumerate(forward):
            part = self._part(boundary[1], ours.outputs[boundary], theirs.outputs[boundary], 0.0)
            if part:
                return FirstPart("forward", boundary[0], count, 0, part)
        equal = len(forward)
        if any(d.kind == "logits" for d in differences):
            return FirstPart("forward", "", equal, 0)
        if any(d.kind == "loss" for d in differences):
            return FirstPart("loss", "", equal, 0)
        backward = self._backward_order()
        gradients = self._owners(d.name for d in differences if d.kind == "gradient")
        replicas = self._owners(n.removeprefix("gradient of ") for n in theirs.replicas if n.startswith("gradient of "))
        for count, fqn in enumerate(backward):
            part = self._input_gradients_part(fqn)
            if fqn in gradients or part:
                return FirstPart("backward", fqn, equal, count, part)
        if gradients:
            return FirstPart("backward", min(gradients), equal, len(backward))
        weights = self._owners(d.name for d in differences if d.kind == "weight")
        if weights:
            return FirstPart("weights", min(weights), equal, len(backward))
        for fqn in backward:
            if fqn in replicas:
                return FirstPart("replicas", fqn, equal, len(backward))
        owner = self._owners([theirs.replicas[0].split(" after ")[0].removeprefix("gradient of ")])
        return FirstPart("replicas", min(owner), equal, len(backward))

    def _backward_order(self) -> list[str]:
        """Boundaries as the backward reaches them, deepest first; last those that send no gradient on, in reverse."""
        sends = dict.fromkeys(fqn for fqn, _, _ in self.reference.input_gradients)
        rest = dict.fromkeys(fqn for fqn, _, _ in reversed(list(self.reference.outputs)))
        return list(sends | rest)

    def _owners(self, parameters: Iterable[str]) -> set[str]:
        """The deepest boundary above each parameter; its module, where none was recorded."""
        known = {fqn for fqn, _, _ in [*self.reference.outputs, *self.reference.input_gradients]}
        owners = set()
        for parameter in parameters:
            above = [fqn for fqn in known if not fqn or parameter.startswith(f"{fqn}.")]
            owners.add(max(above, key=len) if above else parameter.rpartition(".")[0])
        return owners

    def _input_gradients_part(self, fqn: str) -> str:
        ours, theirs = self.reference.input_gradients, self.record.input_gradients
        shared = [boundary for boundary in ours if boundary[0] == fqn and boundary in theirs]
        parts = [self._part(f"gradient of {b[1]}", ours[b], theirs[b], self.boundary_floor) for b in shared]
        return next((part for part in parts if part), "")

    def _part(self, what: str, ours: Tensor, theirs: Tensor, floor: float) -> str:
        """How a boundary's tensors differ, or "". Rows that the plan has as sequences are compared as those."""
        if ours.ndim == 2 and ours.shape == theirs.flatten(0, -2).shape:
            ours = ours.view_as(theirs)
        if ours.shape != theirs.shape:
            return ""
        difference = self._difference("boundary", what, ours, theirs, floor)
        return f"{what}  {difference.text()}" if _exceeds(difference) else ""


def _exceeds(difference: Difference) -> bool:
    return not difference.error <= difference.bound


def _largest(tensors: Iterable[Tensor | None]) -> float:
    return max((float(t.abs().max()) for t in tensors if t is not None and t.numel()), default=0.0)


def _ratio(ours: Tensor, theirs: Tensor) -> float | None:
    """r, where `theirs` is r times `ours` to a thousandth (a gradient summed twice, or not divided), else None."""
    square = float((ours * ours).sum())
    if not square:
        return None
    ratio = float((ours * theirs).sum()) / square
    rest = float((theirs - ratio * ours).abs().max())
    return ratio if rest <= 1e-3 * abs(ratio) * float(ours.abs().max()) and abs(ratio - 1) > 1e-3 else None
