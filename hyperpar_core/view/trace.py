"""A step as it ran: each boundary's collectives, bytes and time, as a table and as a Chrome trace, and what its tensors look like."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..apply.meshes import axis_groups
from ..collectives.functional import axis_group
from ..errors import ApplyError
from ..plan.sharding_plan import ShardingPlan
from .recorder import MODEL, SUMS, Recorder, Sent, Span, Statistic
from .tables import align, fold, size
from .words import collectives_text

__all__ = ["Trace", "trace"]


class Trace:
    """What happened inside `applied.trace()` on this rank; complete once the context is left.

    sent        every collective, in order: boundary, phase, axis, collective, bytes, start, seconds
    spans       runs of operators of one boundary in one phase
    statistics  of boundaries' inputs and outputs, where they were asked for
    """

    def __init__(self, plan: ShardingPlan, recorder: Recorder, rank: int) -> None:
        self.plan, self._recorder, self.rank = plan, recorder, rank

    @property
    def sent(self) -> list[Sent]:
        return self._recorder.sent

    @property
    def spans(self) -> list[Span]:
        return self._recorder.spans

    @property
    def statistics(self) -> list[Statistic]:
        return self._recorder.statistics

    def totals(self) -> dict[str, tuple[int, int]]:
        """{collective: (count, bytes)}, recomputation left out: what `predict` predicts, and what checks beside the step send."""
        found: dict[str, tuple[int, int]] = {}
        for one in self.sent:
            if one.phase != "recompute":
                count, bytes_ = found.get(one.collective, (0, 0))
                found[one.collective] = (count + 1, bytes_ + one.bytes)
        return found

    def table(self) -> str:
        """One row per boundary, layers that sent alike folded; times and bytes of such a row are all its layers'."""
        used = {one.boundary for one in self.sent} | {one.boundary for one in self.spans}
        names = [c.fqn or MODEL for c in self.plan.boundaries if c.template != "stack"]
        stacks = [c.fqn for c in self.plan.boundaries if c.template == "stack" and c.fqn in used]
        beside = [name for name in (MODEL, SUMS) if name not in names]
        rows = [["boundary", "forward", "backward", "collectives", "bytes", "time in them"]]
        for row in fold([(name, name) for name in names if name in used], self._likeness):
            entry = next((name for name in stacks if row.inside and name.startswith(row.name.partition("{")[0])), None)
            if entry is not None:
                stacks.remove(entry)
                rows.append([f"{entry} (entry)", *self._cells((entry,))])
            cells = self._cells(row.things) if row.things else ["", "", "", "", ""]
            if not row.things and row.copies > 1:
                cells = ["", "", f"{row.copies} x, in all", "", ""]
            rows.append(["  " * row.depth + row.name, *cells])
        rows += [[name, *self._cells((name,))] for name in beside if name in used]
        seconds = sum(span.seconds for span in self.spans)
        total = sum(one.bytes for one in self.sent)
        waited = sum(one.seconds for one in self.sent)
        head = (
            f"{self.plan.model}, rank {self.rank}: {_time(seconds)}, {len(self.sent)} collectives, {size(total)},"
            f" {_time(waited)} in them"
        )
        lines = [head, *align(rows, (40, 12, 22, 44, 12, 14))]
        if any(span.phase == "recompute" for span in self.spans):
            lines.append("backward: with what checkpointed layers computed again")
        return "\n".join([*lines, *(["", self.statistics_table()] if self.statistics else [])])

    def _likeness(self, name: str) -> Any:
        return tuple((one.phase, one.axis, one.collective, one.bytes) for one in self.sent if one.boundary == name)

    def _cells(self, names: Sequence[str]) -> list[str]:
        within = set(names)
        sent = [one for one in self.sent if one.boundary in within]
        seconds = {True: 0.0, False: 0.0}
        for span in self.spans:
            if span.boundary in within:
                seconds[span.phase == "forward"] += span.seconds
        return [
            _time(seconds[True]),
            _time(seconds[False]),
            collectives_text([(one.collective, one.axis) for one in sent]),
            size(sum(one.bytes for one in sent)) if sent else "",
            _time(sum(one.seconds for one in sent)) if sent else "",
        ]

    def statistics_table(self) -> str:
        """One row per tensor, in order; this rank's parts."""
        rows = [["boundary", "tensor", "mean", "std", "absmax", "nan", "inf"]]
        for one in self.statistics:
            call = f" #{one.call}" if one.call > 1 else ""
            numbers = (f"{value:.4g}" for value in (one.mean, one.std, one.absmax))
            rows.append([one.boundary, f"{one.side} {one.name}{call}", *numbers, str(one.nan), str(one.infinite)])
        return "\n".join(align(rows, (60, 34, 11, 11, 11, 9, 9)))

    def first_nonfinite(self) -> Statistic | None:
        """The first tensor with a NaN or an infinity, in the order of the run."""
        return next((one for one in self.statistics if one.nan or one.infinite), None)

    def events(self) -> list[dict[str, Any]]:
        """This rank's events, in microseconds since its trace began, as the Chrome trace format has them: a process for a rank,
        a thread for boundaries and one for collectives."""
        named = [("process_name", 0, f"rank {self.rank}"), ("thread_name", 0, "boundaries"), ("thread_name", 1, "collectives")]
        made: list[dict[str, Any]] = [
            {"name": kind, "ph": "M", "pid": self.rank, "tid": thread, "args": {"name": name}} for kind, thread, name in named
        ]
        for span in self.spans:
            made.append(self._event(span.boundary, span.phase, 0, span.start, span.seconds, {}))
        for one in self.sent:
            details = {k: v for k, v in asdict(one).items() if k not in ("start", "seconds")}
            made.append(self._event(f"{one.collective} {one.axis}", one.phase, 1, one.start, one.seconds, details))
        return made

    def _event(
        self, name: str, phase: str, thread: int, start: float, seconds: float, details: dict[str, Any]
    ) -> dict[str, Any]:
        return {
            "name": name, "cat": phase, "ph": "X", "ts": round(start * 1e6, 3), "dur": round(seconds * 1e6, 3),
            "pid": self.rank, "tid": thread, "args": details,
        }  # fmt: skip

    def save(self, path: str | Path) -> None:
        """Writes the events of all ranks to one file that chrome://tracing and Perfetto load. Every rank calls it; rank 0 writes."""
        mine = (self._recorder.epoch, self.events())
        everyone: list[Any] = [mine]
        if dist.is_initialized() and dist.get_world_size() > 1:
            everyone = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, mine)
        if self.rank == 0:
            first = min(epoch for epoch, _ in everyone)
            events = [
                {**event, "ts": round(event["ts"] + (epoch - first) * 1e6, 3)} if "ts" in event else event
                for epoch, of_rank in everyone
                for event in of_rank
            ]
            Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")


@contextmanager
def trace(
    model: nn.Module,
    plan: ShardingPlan,
    mesh: DeviceMesh,
    expert_mesh: DeviceMesh | None = None,
    *,
    statistics: bool = False,
    show: bool = True,
) -> Iterator[Trace]:
    """Records what runs inside, on this rank: `with applied.trace() as t: model(**batch).loss.backward()`.

    statistics: also mean, std, absmax, NaN and infinity counts of each boundary's inputs and outputs (a pass over each tensor).
    show: rank 0 prints the table at the end. Times are the host's; on a device, work is waited for around collectives, so a step
    takes longer than it would. Nothing stays on the model. Raises ApplyError for a compiled module: its inside can't be seen.
    """
    compiled = [n or MODEL for n, m in model.named_modules() if getattr(m, "_compiled_call_impl", None) is not None]
    if compiled:
        raise ApplyError(f"trace: {compiled[0]} is compiled, and what runs inside it can't be seen. Trace the model before compile().")
    groups: dict[str, list[str]] = {}
    for axis, group in axis_groups(mesh).items():
        groups.setdefault(group.name, []).append(axis)
    for axis in ("edp", "ep") if expert_mesh is not None else ():
        assert expert_mesh is not None
        if expert_mesh[axis].size() > 1:
            groups.setdefault(axis_group(expert_mesh[axis]).name, []).append(axis)
    recorder = Recorder(model, plan.boundaries, groups, mesh.device_type, statistics)
    made = Trace(plan, recorder, dist.get_rank() if dist.is_initialized() else 0)
    recorder.start()
    try:
        yield made
    finally:
        recorder.stop()
    if show and made.rank == 0:
        print(made.table())


def _time(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
