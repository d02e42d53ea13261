"""Override entries: what a person declares about boundaries, in YAML or as Python objects with the same meaning."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ..errors import OverrideError
from ..placement import format_layout, parse_layout
from .contract import Contract, parse_layouts
from .yaml_files import VERSION, dump, load_mapping, refuse_unknown_keys

__all__ = ["INHERIT", "Override", "Overrides", "apply_overrides"]

CONDITIONS = ("cp", "ep", "tp", "sp")


class _Inherit:
    """Stands for a field that an entry doesn't write."""

    def __repr__(self) -> str:
        return "INHERIT"


INHERIT: Any = _Inherit()

_LAYOUT_FIELDS = ("params", "in_src", "in_dst", "in_grad", "out_src", "out_dst")
_MAPPING_FIELDS = ("options", "special_handlers", "tp_divide_attrs")
_CLEARED: dict[str, Any] = {
    "region_dispatch": None, "inner_target": None, "inner_wrapper": None, "inner_out_src": None, "local_compute_fn": None,
    "lowerer": None, "out_names": ("output",),
}  # fmt: skip


@dataclass(frozen=True)
class Override:
    """One entry. `match`: a module's name or a glob (case-sensitive fnmatch; `*` crosses dots). `when`: axes that must be active.

    A field that isn't written inherits ("auto" says so aloud), "none" clears it, a mapping replaces it.
    """

    match: str
    when: str | Sequence[str] = ()
    region_dispatch: bool | str | None = INHERIT
    inner_target: str | None = INHERIT
    inner_wrapper: str | Callable[..., Any] | None = INHERIT
    inner_out_src: Any = INHERIT
    local_compute_fn: str | Callable[..., Any] | None = INHERIT
    options: Mapping[str, Any] | str = INHERIT
    params: Mapping[str, Any] | str = INHERIT
    in_src: Mapping[str, Any] | str = INHERIT
    in_dst: Mapping[str, Any] | str = INHERIT
    in_grad: Mapping[str, Any] | str = INHERIT
    out_src: Mapping[str, Any] | str = INHERIT
    out_dst: Mapping[str, Any] | str = INHERIT
    out_names: Sequence[str] | str = INHERIT
    special_handlers: Mapping[str, str] | str = INHERIT
    lowerer: str | None = INHERIT
    tp_divide_attrs: Mapping[str, int] | Sequence[str] | str = INHERIT

    def __post_init__(self) -> None:
        where = f"override {self.match!r}"
        if not isinstance(self.match, str) or not self.match:
            raise OverrideError(f"override: match must be a module name or a glob, got {self.match!r}.")
        when = (self.when,) if isinstance(self.when, str) else tuple(self.when)
        for condition in when:
            if condition not in CONDITIONS:
                raise OverrideError(f"{where}: when: unknown condition {condition!r} (known: {', '.join(CONDITIONS)}).")
        object.__setattr__(self, "when", when)
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name in ("match", "when") or value is INHERIT:
                continue
            object.__setattr__(self, f.name, self._checked(f.name, value, f"{where}.{f.name}"))

    @staticmethod
    def _checked(name: str, value: Any, where: str) -> Any:
        if value == "auto":
            return INHERIT
        if name in _LAYOUT_FIELDS:
            return {} if value in ("none", None) else parse_layouts(value, where)
        if name == "tp_divide_attrs" and isinstance(value, (list, tuple)):
            value = dict.fromkeys(value, 0)
        if name in _MAPPING_FIELDS:
            if value in ("none", None):
                return {}
            if not isinstance(value, Mapping) or not all(isinstance(k, str) for k in value):
                raise OverrideError(f"{where}: expected a mapping, got {value!r}.")
            return dict(value)
        if value in ("none", None):
            return _CLEARED[name]
        if name == "region_dispatch":
            if not isinstance(value, bool):
                raise OverrideError(f"{where}: expected true or false, got {value!r}.")
        elif name == "out_names":
            if isinstance(value, str) or not all(isinstance(v, str) for v in value):
                raise OverrideError(f"{where}: expected a list of names, got {value!r}.")
            return tuple(value)
        elif name == "inner_out_src":
            return value if value == "first_input" else parse_layout(value, where)
        elif not (isinstance(value, str) or (callable(value) and name in ("inner_wrapper", "local_compute_fn"))):
            raise OverrideError(f"{where}: expected a name, got {value!r}.")
        return value

    def written(self) -> dict[str, Any]:
        """The fields that this entry writes, without match and when."""
        pairs = ((f.name, getattr(self, f.name)) for f in fields(self) if f.name not in ("match", "when"))
        return {name: value for name, value in pairs if value is not INHERIT}

    def to_data(self) -> dict[str, Any]:
        data: dict[str, Any] = {"match": self.match}
        if self.when:
            data["when"] = self.when[0] if len(self.when) == 1 else list(self.when)
        for name, value in self.written().items():
            if name in _LAYOUT_FIELDS:
                value = {n: format_layout(layout) for n, layout in value.items()}
            elif callable(value):
                raise OverrideError(f"override {self.match!r}.{name}: a Python callable can't be written to YAML.")
            elif isinstance(value, Mapping):
                value = format_layout(value) if name == "inner_out_src" else dict(value)
            elif isinstance(value, tuple):
                value = list(value)
            data[name] = "none" if value is None else value
        return data

    @classmethod
    def from_data(cls, data: Any, where: str) -> Override:
        if not isinstance(data, Mapping):
            raise OverrideError(f"{where}: an entry is a mapping with a match, got {data!r}.")
        if "_target_" in data:
            raise OverrideError(
                f"{where}: YAML doesn't import Python, so _target_ isn't read. Name what a plugin registered:\n"
                "    local_compute_fn: NAME\n    options: {option: value}"
            )
        refuse_unknown_keys(data, {f.name for f in fields(cls)}, where)
        if "match" not in data:
            raise OverrideError(f"{where}: no match.")
        return cls(**data)


@dataclass(frozen=True)
class Overrides:
    """A list of entries, in order; later entries win field by field."""

    entries: tuple[Override, ...] = ()

    @classmethod
    def of(cls, value: Any) -> Overrides:
        """From Overrides, an entry, a list of entries, a path, YAML text, or None."""
        if value is None:
            return cls()
        if isinstance(value, Overrides):
            return value
        if isinstance(value, Override):
            return cls((value,))
        if isinstance(value, (str, Path)):
            return cls.from_yaml(value)
        if isinstance(value, Iterable) and not isinstance(value, Mapping):
            entries = tuple(value)
            if all(isinstance(e, Override) for e in entries):
                return cls(entries)
        raise OverrideError(
            f"overrides: expected a YAML file or text, or Override objects, got {type(value).__name__}."
        )

    @classmethod
    def from_yaml(cls, path_or_text: str | Path) -> Overrides:
        data = load_mapping(path_or_text, "overrides")
        refuse_unknown_keys(data, {"version", "plan_overrides"}, "overrides")
        entries = data.get("plan_overrides")
        if not isinstance(entries, list):
            raise OverrideError(f"overrides: plan_overrides must be a list of entries, got {entries!r}.")
        return cls(tuple(Override.from_data(e, f"plan_overrides[{i}]") for i, e in enumerate(entries)))

    def to_yaml(self) -> str:
        return dump({"version": VERSION, "plan_overrides": [e.to_data() for e in self.entries]})


def _load_trusted(value: Any, trusted: Sequence[str], where: str) -> Any:
    """`module:object` from a module that the caller trusts; other names pass through."""
    if not (isinstance(value, str) and ":" in value):
        return value
    module, _, name = value.partition(":")
    if module not in trusted:
        raise OverrideError(
            f"{where}: {value!r} names Python code; pass build_plan(..., trusted_modules=[{module!r}]) if you trust it."
        )
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise OverrideError(f"{where}: {value!r} can't be loaded: {error}.") from None


def merge(contract: Contract, entry: Override, trusted: Sequence[str] = ()) -> Contract:
    """The contract with the fields that `entry` writes."""
    values = entry.written()
    where = f"override {entry.match!r} at {contract.fqn}"
    if "params" in values:
        dropped = sorted(set(contract.params) - set(values["params"]))
        if dropped:
            raise OverrideError(
                f"{where}.params: a mapping replaces the field, and this one drops {', '.join(dropped)};"
                " write every parameter of the boundary."
            )
        unknown = sorted(set(values["params"]) - set(contract.params))
        if unknown:
            raise OverrideError(
                f"{where}.params: no parameter {unknown[0]!r} here (parameters: {', '.join(contract.params)})."
            )
        values["param_use"] = {n: u for n, u in contract.param_use.items() if values["params"][n] == contract.params[n]}
    if "tp_divide_attrs" in values:
        values["divide"] = {**contract.divide, **values.pop("tp_divide_attrs")}
    for name in ("inner_wrapper", "local_compute_fn"):
        if name in values:
            values[name] = _load_trusted(values[name], trusted, f"{where}.{name}")
    return replace(contract, **values)


def apply_overrides(
    contracts: dict[str, Contract],
    overrides: Overrides,
    active: set[str],
    module_names: Iterable[str],
    trusted: Sequence[str] = (),
) -> dict[str, Contract]:
    """The contracts with every entry merged. `active`: the conditions that hold. OverrideError for a match that hits nothing."""
    result = dict(contracts)
    names = list(module_names)
    for entry in overrides.entries:
        hits = [fqn for fqn in result if fnmatchcase(fqn, entry.match)]
        if not hits:
            import difflib

            if any(fnmatchcase(n, entry.match) for n in names):
                raise OverrideError(
                    f"override {entry.match!r}: a module, but no boundary of this plan. Boundaries: {', '.join(_folded(result))}."
                )
            near = difflib.get_close_matches(entry.match, names, 1)
            raise OverrideError(
                f"override {entry.match!r}: matches no module.{f' Nearest: {near[0]}.' if near else ''}"
            )
        if not set(entry.when) <= active:
            continue
        for fqn in hits:
            result[fqn] = merge(result[fqn], entry, trusted)
    return result


def _folded(names: Iterable[str]) -> list[str]:
    import re

    return list(dict.fromkeys(re.sub(r"\.\d+(?=\.|$)", ".*", n) for n in names))[:12]
