"""The plan: every boundary's contract, and what was decided for the whole model. Plain data; it can be read, compared and saved."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ..errors import OverrideError
from .contract import Contract
from .yaml_files import VERSION, dump, load_mapping, refuse_unknown_keys

__all__ = ["Loss", "ShardingPlan"]


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
        best: tuple[Contract, str] | None = None
        for contract in self.boundaries:
            prefix = f"{contract.fqn}." if contract.fqn else ""
            name = parameter[len(prefix) :]
            if parameter.startswith(prefix) and name in contract.params:
                best = (contract, name)
        if best is None:
            raise KeyError(f"no boundary owns {parameter!r}")
        return best

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
        refuse_unknown_keys(data, {f.name for f in fields(cls)} | {"version", "kind"}, "plan")
        missing = [f.name for f in fields(cls) if f.name not in data and f.name not in ("tied", "providers", "notes")]
        if missing:
            raise OverrideError(f"plan: no {missing[0]!r}.")
        values = {k: v for k, v in data.items() if k not in ("version", "kind")}
        for name, kind in (
            ("boundaries", list),
            ("parameters", dict),
            ("sizes", dict),
            ("tied", list),
            ("notes", list),
        ):
            if not isinstance(values.get(name, kind()), kind):
                raise OverrideError(f"plan.{name}: expected a {kind.__name__}, got {values[name]!r}.")
        for axis, size in values["sizes"].items():
            if axis not in ("cp", "tp") or not isinstance(size, int) or isinstance(size, bool) or size < 2:
                raise OverrideError(
                    f"plan.sizes: {axis!r}: {size!r} is no active plan axis (cp, tp) with a size of at least 2."
                )
        values["boundaries"] = tuple(
            Contract.from_data(c, f"plan.boundaries[{i}]") for i, c in enumerate(values["boundaries"])
        )
        loss = values["loss"]
        if loss is not None:
            if not isinstance(loss, Mapping) or not isinstance(loss.get("name"), str):
                raise OverrideError(f"plan.loss: expected a name and options, got {loss!r}.")
            values["loss"] = Loss(loss["name"], dict(loss.get("options") or {}))
        try:
            values["parameters"] = {n: tuple(int(s) for s in shape) for n, shape in values["parameters"].items()}
        except (TypeError, ValueError):
            raise OverrideError("plan.parameters: expected {name: [sizes]}.") from None
        values["tied"] = tuple(tuple(group) for group in values.get("tied", ()))
        values["notes"] = tuple(values.get("notes", ()))
        return cls(**values)

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
