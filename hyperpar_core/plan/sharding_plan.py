"""The plan: every boundary's contract, and what was decided for the whole model. Plain data; it can be read, compared and saved."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from ..errors import OverrideError
from .consistency import check_layouts, check_ownership
from .contract import Contract
from .yaml_files import VERSION, dump, load_mapping, plain_data, refuse_unknown_keys, shown

__all__ = ["CP_ORDERS", "Loss", "ShardingPlan"]

CP_ORDERS = ("head_tail", "contiguous")


@dataclass(frozen=True)
class Loss:
    """The loss that runs on sharded logits: a registered name and its options."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ShardingPlan:
    """Made by build_plan, read back by from_yaml.

    sizes       {axis: degree} of the active plan axes, in mesh order (cp, tp)
    boundaries  in the model's order
    parameters  {name: shape}, tied names each
    tied        groups of names that share one parameter
    providers   {"kind name": "distribution version"} of everything that plugins supply to this plan
    """

    model: str
    family: str | None
    sizes: Mapping[str, int]
    ep_size: int
    sequence_parallel: bool
    cp_order: str
    loss: Loss | None
    boundaries: tuple[Contract, ...]
    parameters: Mapping[str, tuple[int, ...]]
    tied: tuple[tuple[str, ...], ...] = ()
    providers: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def boundary(self, fqn: str) -> Contract:
        """The contract of the boundary at `fqn`; KeyError when there is none."""
        for contract in self.boundaries:
            if contract.fqn == fqn:
                return contract
        raise KeyError(f"no boundary at {fqn!r}")

    def owner(self, parameter: str) -> tuple[Contract, str]:
        """(the boundary that owns a parameter, the parameter's name in it)."""
        if parameter not in self._owners:
            raise KeyError(f"no boundary owns {parameter!r}")
        return self._owners[parameter]

    @cached_property
    def _owners(self) -> dict[str, tuple[Contract, str]]:
        return {f"{c.fqn}.{name}" if c.fqn else name: (c, name) for c in self.boundaries for name in c.params}

    def to_data(self) -> dict[str, Any]:
        data: dict[str, Any] = {"version": VERSION, "kind": "plan"}
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name == "boundaries":
                value = [c.to_data() for c in value]
            elif f.name == "loss":
                value = None if value is None else {"name": value.name, "options": dict(value.options)}
            elif f.name == "parameters":
                value = {n: list(shape) for n, shape in value.items()}
            elif f.name == "tied":
                value = [list(group) for group in value]
            elif isinstance(value, Mapping):
                value = dict(value)
            elif isinstance(value, tuple):
                value = list(value)
            data[f.name] = value
        return data

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> ShardingPlan:
        """The inverse of `to_data`; OverrideError for anything that build_plan can't have made."""
        refuse_unknown_keys(data, {f.name for f in fields(cls)} | {"version", "kind"}, "plan")
        missing = [f.name for f in fields(cls) if f.name not in data and f.name not in ("tied", "providers", "notes")]
        if missing:
            raise OverrideError(f"plan: no {missing[0]!r}.")
        values = {k: _read(k, v, f"plan.{k}") for k, v in data.items() if k not in ("version", "kind")}
        plan = cls(**values)
        check_ownership(plan.boundaries, plan.parameters, plan.tied)
        for contract in plan.boundaries:
            check_layouts(contract, plan.parameters, plan.sizes, plan.ep_size)
        return plan

    def to_yaml(self, path: str | Path | None = None) -> str:
        """The plan as YAML text; written to `path` too where given."""
        text = dump(self.to_data())
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    @classmethod
    def from_yaml(cls, path_or_text: str | Path) -> ShardingPlan:
        data = load_mapping(path_or_text, "plan")
        if data.get("kind") != "plan":
            raise OverrideError(f"plan: kind is {data.get('kind')!r}, expected 'plan'.")
        return cls.from_data(data)

    def digest(self) -> str:
        """A hash of everything in the plan: equal for equal plans, on every rank."""
        return hashlib.sha256(json.dumps(self.to_data(), sort_keys=True).encode()).hexdigest()[:16]


def _read(name: str, value: Any, where: str) -> Any:
    """One field of a plan file."""
    if name == "boundaries":
        _expect(isinstance(value, list), where, "a list", value)
        return tuple(Contract.from_data(one, f"{where}[{i}]") for i, one in enumerate(value))
    if name == "sizes":
        _expect(isinstance(value, Mapping), where, "a mapping", value)
        for axis, size in value.items():
            if axis not in ("cp", "tp") or type(size) is not int or size < 2:
                raise OverrideError(
                    f"{where}: {axis!r}: {size!r} is no active plan axis (cp, tp) with a size of at least 2."
                )
        _expect(list(value) == [axis for axis in ("cp", "tp") if axis in value], where, "the order cp, tp", value)
        return dict(value)
    if name == "parameters":
        right = isinstance(value, Mapping) and all(
            isinstance(n, str) and isinstance(shape, list) and all(type(s) is int and s >= 0 for s in shape)
            for n, shape in value.items()
        )
        _expect(right, where, "{name: [sizes]}", value)
        return {n: tuple(shape) for n, shape in value.items()}
    if name == "tied":
        right = isinstance(value, list) and all(isinstance(g, list) and len(g) > 1 and _texts(g) for g in value)
        _expect(right, where, "a list of lists of names", value)
        return tuple(tuple(group) for group in value)
    if name == "notes":
        _expect(isinstance(value, list) and _texts(value), where, "a list of texts", value)
        return tuple(value)
    if name == "providers":
        _expect(isinstance(value, Mapping) and _texts([*value, *value.values()]), where, "a mapping of texts", value)
        return dict(value)
    if name == "loss":
        right = isinstance(value, Mapping) and isinstance(value.get("name"), str) and set(value) <= {"name", "options"}
        _expect(value is None or right, where, "a name and options", value)
        options = {} if value is None else value.get("options", {})
        _expect(isinstance(options, Mapping), f"{where}.options", "a mapping", options)
        return None if value is None else Loss(value["name"], plain_data(options, f"{where}.options"))
    if name == "ep_size":
        _expect(type(value) is int and value >= 1, where, "a whole number of at least 1", value)
    elif name == "sequence_parallel":
        _expect(isinstance(value, bool), where, "true or false", value)
    elif name == "cp_order":
        _expect(value in CP_ORDERS, where, " or ".join(CP_ORDERS), value)
    else:
        _expect(isinstance(value, str) or (name == "family" and value is None), where, "a name", value)
    return value


def _texts(values: Iterable[Any]) -> bool:
    return all(isinstance(value, str) for value in values)


def _expect(right: bool, where: str, expected: str, value: Any) -> None:
    if not right:
        raise OverrideError(f"{where}: expected {expected}, got {shown(value)}.")
