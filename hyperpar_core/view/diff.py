"""What differs between two plans."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from ..plan.contract import Contract
from ..plan.names import fold_names, listed
from ..plan.sharding_plan import ShardingPlan

__all__ = ["diff"]


def diff(plan: ShardingPlan, other: ShardingPlan) -> str:
    """The fields and boundaries that differ, repeated layers folded: `name  field: here -> there`. Empty for equal plans."""
    here, there = plan.to_data(), other.to_data()
    lines = [
        _named(f.name, text)
        for f in fields(ShardingPlan)
        if f.name != "boundaries"
        for text in _texts(here[f.name], there[f.name])
    ]
    ours, theirs = ({c.fqn: c for c in p.boundaries} for p in (plan, other))
    for side, names in (
        ("first", [n for n in ours if n not in theirs]),
        ("second", [n for n in theirs if n not in ours]),
    ):
        if names:
            lines.append(f"boundaries only in the {side} plan: {listed(fold_names(names))}")
    changed: dict[str, list[str]] = {}
    for fqn in ours:
        for text in _contracts(ours[fqn], theirs[fqn]) if fqn in theirs else ():
            changed.setdefault(text, []).append(fqn or "(model)")
    by_names: dict[str, list[str]] = {}
    for text, names in changed.items():
        by_names.setdefault(listed(fold_names(names), 4), []).append(text)
    for names_text, texts in by_names.items():
        lines += [names_text, *(f"  {text}" for text in texts)]
    shared = [n for n in ours if n in theirs]
    if shared != [n for n in theirs if n in ours]:
        lines.append("the boundaries stand in another order")
    return "\n".join(lines)


def _contracts(a: Contract, b: Contract) -> Iterator[str]:
    here, there = a.to_data(), b.to_data()
    for f in fields(Contract):
        if f.name != "fqn":
            for text in _texts(here.get(f.name), there.get(f.name)):
                yield _named(f.name, text)


def _named(field: str, text: str) -> str:
    return f"{field}{text}" if text.startswith(".") else f"{field}: {text}"


def _texts(a: Any, b: Any) -> Iterator[str]:
    """`here -> there`, or `.key: here -> there` for every key of a mapping that differs."""
    if a == b:
        return
    if (isinstance(a, Mapping) and isinstance(b, Mapping)) or {type(a), type(b)} == {dict, type(None)}:
        a, b = a or {}, b or {}
        keys = [k for k in (*a, *(k for k in b if k not in a)) if a.get(k, _ABSENT) != b.get(k, _ABSENT)]
        folded: dict[str, list[str]] = {}
        for key in keys:
            text = f"{_value(a.get(key, _ABSENT))} -> {_value(b.get(key, _ABSENT))}"
            folded.setdefault(text, []).append(str(key))
        if not keys:
            yield "the same keys in another order"
        for text, names in folded.items():
            yield f".{listed(fold_names(names), 4)}: {text}"
    else:
        yield f"{_value(a)} -> {_value(b)}"


_ABSENT = object()


def _value(value: Any) -> str:
    if value is _ABSENT:
        return "absent"
    if value is None:
        return "none"
    if value == {}:
        return "replicate"
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {_value(v)}" for k, v in value.items())
    if isinstance(value, bool):
        return str(value).lower()
    return listed(map(_value, value), 6) if isinstance(value, list) else str(value)
