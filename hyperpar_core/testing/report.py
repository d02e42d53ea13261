"""The parity report: what agrees with one process, what doesn't, and where a parallel run first parts from it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Comparison", "Difference", "FirstPart", "ParityReport"]

SHOWN = 3  # how many differing tensors the text names


@dataclass(frozen=True)
class Difference:
    """The distance of one tensor from the reference's.

    error, largest, bound   absolute; `largest` is the reference's largest value
    ratio                   the tensor is this multiple of the reference, where it is one
    note                    why the two couldn't be compared
    """

    kind: str  # loss, logits, gradient, weight
    name: str
    error: float
    largest: float
    bound: float
    ratio: float | None = None
    note: str = ""

    @property
    def relative(self) -> float:
        return self.error / self.largest if self.largest else self.error

    def text(self) -> str:
        if self.note:
            return self.note
        multiple = f", {self.ratio:.3g} times the reference" if self.ratio is not None else ""
        return f"relative difference {self.relative:.2g}{multiple}"


@dataclass(frozen=True)
class FirstPart:
    """Where a run first parts from the reference: in which phase, at which boundary, after how many equal ones.

    phase: forward, loss, backward, weights (after the SGD steps) or replicas. fqn is "" where no boundary parts.
    what: the boundary's own tensor that differs ("output", "gradient of x"), and by how much; "" where none does.
    """

    phase: str
    fqn: str
    forward_equal: int
    backward_equal: int
    what: str = ""

    @property
    def order(self) -> tuple[int, int, int]:
        phases = ("forward", "loss", "backward", "weights", "replicas")
        return phases.index(self.phase), self.forward_equal, self.backward_equal


@dataclass(frozen=True)
class Comparison:
    """One rank's record against the reference. `equal` and `total`: {kind: how many}."""

    rank: int
    equal: Mapping[str, int]
    total: Mapping[str, int]
    differences: tuple[Difference, ...]
    replicas: tuple[str, ...]
    first: FirstPart | None
    logits_error: float


@dataclass(frozen=True)
class ParityReport:
    """Every rank's comparison. `hints`: {parameter or boundary: what its contract says}, for the text; `notes`: what a reader has to
    know of the run, a lowerer that isn't exact, say."""

    title: str
    loss: float
    steps: int
    comparisons: tuple[Comparison, ...]
    hints: Mapping[str, str]
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether everything is equal on every rank, and every replica is bitwise equal."""
        return bool(self.comparisons) and not any(c.differences or c.replicas for c in self.comparisons)

    @property
    def first(self) -> FirstPart | None:
        """Where the first of the ranks parts from the reference."""
        found = [c.first for c in self.comparisons if c.first]
        return min(found, key=lambda first: first.order) if found else None

    @property
    def replicas(self) -> tuple[str, ...]:
        """What isn't bitwise equal on the ranks that hold the same shard of it."""
        return tuple(dict.fromkeys(name for c in self.comparisons for name in c.replicas))

    def differing(self, kind: str) -> dict[str, dict[int, Difference]]:
        """{name: {rank: difference}} of one kind: loss, logits, gradient or weight."""
        found: dict[str, dict[int, Difference]] = {}
        for comparison in self.comparisons:
            for d in comparison.differences:
                if d.kind == kind:
                    found.setdefault(d.name, {})[comparison.rank] = d
        return found

    def text(self) -> str:
        """The report as lines for a terminal; it fits a screen."""
        lines = [self.title] if self.title else []
        logits = max((c.logits_error for c in self.comparisons), default=0.0)
        lines.append(self._line("loss", f"equal ({self.loss:.6f})"))
        lines.append(self._line("logits", f"equal (largest difference {logits:.0e})"))
        lines.append(self._count("gradients", "gradient", ""))
        if self.steps:
            lines.append(self._count("weights", "weight", f" after {self.steps} SGD steps"))
        after = f", also after {self.steps} AdamW steps" if self.steps else ""
        replicas = self.replicas
        lines.append(
            f"  replicas  {_some(replicas)} differ{'s' if len(replicas) == 1 else ''} between ranks"
            if replicas
            else f"  replicas  bitwise equal{after}"
        )
        first = self.first
        if first:
            lines.append(f"  first part: {self._where(first)}")
            lines += [f"    {line}" for line in self._details(first)]
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)

    def to_data(self) -> dict[str, Any]:
        """Plain data: `ok`, the counts, where it first parts, and every difference by rank."""
        data = asdict(self)
        data["hints"] = dict(self.hints)
        data["notes"] = list(self.notes)
        first = asdict(self.first) if self.first else None
        return {"ok": self.ok, "first": first, "replicas": list(self.replicas), **data}

    def to_json(self) -> str:
        return json.dumps(self.to_data(), indent=2)

    # ---- lines of the text

    def _line(self, kind: str, when_equal: str) -> str:
        found = self.differing(kind).get(kind, {})
        return f"  {kind:<9} {_by_rank(found) if found else when_equal}"

    def _count(self, label: str, kind: str, when: str) -> str:
        total = max((c.total.get(kind, 0) for c in self.comparisons), default=0)
        return f"  {label:<9} {total - len(self.differing(kind))} of {total} equal{when}"

    def _where(self, first: FirstPart) -> str:
        place = f" of {first.fqn}" if first.fqn else ""
        order = f"execution order: forward {first.forward_equal} boundaries equal"
        if first.phase in ("backward", "weights", "replicas"):
            order += f", backward {first.backward_equal} equal"
        return f"{first.phase}{place} ({order})"

    def _details(self, first: FirstPart) -> list[str]:
        inside = f"{first.fqn}." if first.fqn else ""
        found = {**self.differing("weight"), **self.differing("gradient")}
        found = {name: by_rank for name, by_rank in found.items() if name.startswith(inside)}
        lines = []
        for name, by_rank in list(found.items())[:SHOWN] if first.phase in ("backward", "weights") else []:
            differ = f"gradient of {name}" in self.replicas
            lines.append(f"{name[len(inside) :]}  {_by_rank(by_rank)}{'; replicas differ' if differ else ''}")
            if hint := self.hints.get(name):
                but = ", and its replicas differ: it is partial" if differ and "replicate" in hint else ""
                lines.append(f"{hint}{but}")
        if first.what:
            lines.append(first.what)
            if hint := self.hints.get(f"{first.phase} of {first.fqn}"):
                lines.append(hint)
        if len(found) > SHOWN and lines:
            lines.append(f"and {len(found) - SHOWN} more")
        return lines


def _by_rank(found: Mapping[int, Difference]) -> str:
    """`relative difference 0.55 on rank 0, 0.61 on rank 1`."""
    texts = {rank: d.text() for rank, d in found.items()}
    if len(set(texts.values())) == 1:
        ranks = "on every rank" if len(texts) > 1 else f"on rank {next(iter(texts))}"
        return f"{next(iter(texts.values()))} {ranks}"
    parts = [f"{text} on rank {rank}" for rank, text in list(texts.items())[:4]]
    rest = [part.removeprefix("relative difference ") for part in parts[1:]]
    return ", ".join([parts[0], *rest]) + (", ..." if len(texts) > 4 else "")


def _some(names: tuple[str, ...]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
