"""Override entries: what a person declares about boundaries, in YAML or as Python objects with the same meaning."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ..errors import OverrideError
from ..placement import format_layout, parse_layout
from .contract import parse_layouts
from .yaml_files import VERSION, dump, load_mapping, plain_data, refuse_unknown_keys, shown

__all__ = ["CONDITIONS", "INHERIT", "LAYOUT_FIELDS", "Override", "Overrides", "paste"]

CONDITIONS = ("cp", "ep", "tp", "sp")


class _Inherit:
    """Stands for a field that an entry doesn't write."""

    def __repr__(self) -> str:
        return "INHERIT"

    def __reduce__(self) -> str:
        return "INHERIT"  # one object, in every process


INHERIT: Any = _Inherit()

LAYOUT_FIELDS = ("params", "in_src", "in_dst", "in_grad", "out_src", "out_dst")
_CLEARED: dict[str, Any] = {
    "region_dispatch": None, "inner_target": None, "inner_wrapper": None, "inner_out_src": None, "local_compute_fn": None,
    "lowerer": None, "out_names": ("output",), "tp_divide_attrs": None,
}  # fmt: skip


@dataclass(frozen=True)
class Override:
    """One entry. `match`: a module's name or a glob (case-sensitive fnmatch; `*` crosses dots). `when`: axes that must be active.

    A field that isn't written inherits ("auto" says so aloud), "none" clears it (None in Python), a mapping replaces it.
    `region_dispatch` and the other keys are described in docs/overrides.md. OverrideError for anything else.
    """

    match: str
    when: str | Sequence[str] = ()
    region_dispatch: bool | str | None = INHERIT
    inner_target: str | None = INHERIT
    inner_wrapper: str | Callable[..., Any] | None = INHERIT
    inner_out_src: Any = INHERIT
    local_compute_fn: str | Callable[..., Any] | None = INHERIT
    options: Mapping[str, Any] | str | None = INHERIT
    params: Mapping[str, Any] | str | None = INHERIT
    in_src: Mapping[str, Any] | str | None = INHERIT
    in_dst: Mapping[str, Any] | str | None = INHERIT
    in_grad: Mapping[str, Any] | str | None = INHERIT
    out_src: Mapping[str, Any] | str | None = INHERIT
    out_dst: Mapping[str, Any] | str | None = INHERIT
    out_names: Sequence[str] | str | None = INHERIT
    special_handlers: Mapping[str, str] | str | None = INHERIT
    lowerer: str | None = INHERIT
    tp_divide_attrs: Mapping[str, int] | Sequence[str] | str | None = INHERIT

    def __post_init__(self) -> None:
        if not isinstance(self.match, str) or not self.match.strip():
            raise OverrideError(f"override: match must be a module name or a glob, got {self.match!r}.")
        where = f"override {self.match!r}"
        object.__setattr__(self, "when", _conditions(self.when, f"{where}.when"))
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name not in ("match", "when") and value is not INHERIT:
                object.__setattr__(self, f.name, _read(f.name, value, f"{where}.{f.name}"))

    def written(self) -> dict[str, Any]:
        """The fields that this entry writes, without match and when."""
        pairs = ((f.name, getattr(self, f.name)) for f in fields(self) if f.name not in ("match", "when"))
        return {name: value for name, value in pairs if value is not INHERIT}

    def to_data(self) -> dict[str, Any]:
        """The entry as YAML holds it; OverrideError for a Python callable."""
        data: dict[str, Any] = {"match": self.match}
        if self.when:
            data["when"] = self.when[0] if len(self.when) == 1 else list(self.when)
        for name, value in self.written().items():
            if name in LAYOUT_FIELDS:
                value = {n: format_layout(layout) for n, layout in value.items()}
            elif callable(value):
                raise OverrideError(f"override {self.match!r}.{name}: a Python callable can't be written to YAML.")
            elif name == "inner_out_src" and isinstance(value, Mapping):
                nested = any(isinstance(v, Mapping) for v in value.values())
                value = {n: format_layout(v) for n, v in value.items()} if nested else format_layout(value)
            elif isinstance(value, Mapping):
                value = dict(value)
            elif isinstance(value, tuple):
                value = list(value)
            data[name] = "none" if value is None else value
        return data

    @classmethod
    def from_data(cls, data: Any, where: str) -> Override:
        """An entry of a YAML file, or a mapping of the same form."""
        if not isinstance(data, Mapping):
            raise OverrideError(f"{where}: an entry is a mapping with a match, got {shown(data)}.")
        if _names_target(data):
            raise OverrideError(
                f"{where}: YAML doesn't import Python, so _target_ isn't read. Name what a plugin registered:\n"
                "    local_compute_fn: NAME\n    options: {option: value}"
            )
        refuse_unknown_keys(data, {f.name for f in fields(cls)}, where)
        if "match" not in data:
            raise OverrideError(f"{where}: no match; write the module's name, or a glob.")
        empty = [key for key, value in data.items() if value is None]
        if empty:
            raise OverrideError(f"{where}.{empty[0]}: no value; write none to clear the field, or leave the key out.")
        return cls(**data)


@dataclass(frozen=True)
class Overrides:
    """A list of entries, in order; later entries win field by field."""

    entries: tuple[Override, ...] = ()

    @classmethod
    def of(cls, value: Any) -> Overrides:
        """From Overrides, an entry, a list of entries (Override objects or mappings), a path, YAML text, or None."""
        if value is None:
            return cls()
        if isinstance(value, Overrides):
            return value
        if isinstance(value, Override):
            return cls((value,))
        if isinstance(value, (str, Path)):
            return cls.from_yaml(value)
        if isinstance(value, Iterable) and not isinstance(value, (Mapping, bytes)):
            made = (
                e if isinstance(e, Override) else Override.from_data(e, f"overrides[{i}]") for i, e in enumerate(value)
            )
            return cls(tuple(made))
        raise OverrideError(
            f"overrides: expected a YAML file or text, or a list of Override objects, got {shown(value)}."
        )

    @classmethod
    def from_yaml(cls, path_or_text: str | Path) -> Overrides:
        """Reads `{version: 1, plan_overrides: [...]}`; OverrideError for anything else. Nothing in it is imported or run."""
        data = load_mapping(path_or_text, "overrides")
        if data.get("kind") == "plan":
            raise OverrideError("overrides: this is a plan file; read it with ShardingPlan.from_yaml.")
        refuse_unknown_keys(data, {"version", "plan_overrides"}, "overrides")
        entries = data.get("plan_overrides")
        if not isinstance(entries, list):
            raise OverrideError(f"overrides: plan_overrides must be a list of entries, got {shown(entries)}.")
        return cls(tuple(Override.from_data(e, f"plan_overrides[{i}]") for i, e in enumerate(entries)))

    def to_yaml(self, path: str | Path | None = None) -> str:
        """The entries as YAML text; written to `path` too where given."""
        text = dump({"version": VERSION, "plan_overrides": [e.to_data() for e in self.entries]})
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text


def paste(entries: Iterable[str]) -> str:
    """The end of an error: a whole file of these entries, a line of YAML each, and who else writes it."""
    return "\n".join([
        "  A file for overrides= (also: `hyperpar plan --write-overrides FILE`, suggest_overrides, `hyperpar verify --suggested`):",
        f"version: {VERSION}", "plan_overrides:", *(f"  - {entry}" for entry in entries),
    ])  # fmt: skip


def _conditions(value: Any, where: str) -> tuple[str, ...]:
    when = (value,) if isinstance(value, str) else value
    if not isinstance(when, (list, tuple)) or (value == [] and isinstance(value, list)):
        raise OverrideError(f"{where}: expected one or a list of {', '.join(CONDITIONS)}, got {shown(value)}.")
    for condition in when:
        if condition not in CONDITIONS:
            raise OverrideError(f"{where}: unknown condition {shown(condition)} (known: {', '.join(CONDITIONS)}).")
    return tuple(when)


def _read(name: str, value: Any, where: str) -> Any:
    """The value of one field, checked and in its one form."""
    if isinstance(value, str) and value == "auto":
        return INHERIT
    clear = value is None or (isinstance(value, str) and value == "none")
    if name in LAYOUT_FIELDS:
        return {} if clear else parse_layouts(value, where)
    if name in ("options", "special_handlers"):
        if not clear and not (isinstance(value, Mapping) and all(isinstance(k, str) for k in value)):
            raise OverrideError(f"{where}: expected a mapping of names, got {shown(value)}.")
        made = {} if clear else dict(value)
        if name == "special_handlers" and not all(isinstance(v, str) for v in made.values()):
            raise OverrideError(f"{where}: expected {{parameter: name of a handler}}, got {shown(value)}.")
        return plain_data(made, where)
    if clear:
        return _CLEARED[name]
    if name == "tp_divide_attrs":
        return _divisors(value, where)
    if name == "region_dispatch":
        if not isinstance(value, bool):
            raise OverrideError(f"{where}: expected true or false, got {shown(value)}.")
    elif name == "out_names":
        names = tuple(value) if isinstance(value, (list, tuple)) else ()
        if not names or not all(isinstance(v, str) and v for v in names) or len(set(names)) < len(names):
            raise OverrideError(f"{where}: expected a list of different names, got {shown(value)}.")
        return names
    elif name == "inner_out_src":
        return _inner_out(value, where)
    elif not (
        (isinstance(value, str) and value) or (callable(value) and name in ("inner_wrapper", "local_compute_fn"))
    ):
        raise OverrideError(f"{where}: expected a name, got {shown(value)}.")
    return value


def _divisors(value: Any, where: str) -> dict[str, int]:
    """{attribute: divisor}, 0 for tp itself."""
    if isinstance(value, (list, tuple)):
        if len({str(v) for v in value}) < len(value):
            raise OverrideError(f"{where}: {shown(value)} names an attribute twice.")
        value = {v if isinstance(v, str) else None: 0 for v in value}
    elif isinstance(value, Mapping):
        odd = [v for v in value.values() if not isinstance(v, int) or isinstance(v, bool) or v < 2]
        if odd:
            raise OverrideError(f"{where}: a divisor is a whole number of at least 2, got {shown(odd[0])}.")
    if not isinstance(value, Mapping) or not all(isinstance(k, str) and k for k in value):
        raise OverrideError(f"{where}: expected a list of attributes, or {{attribute: divisor}}, got {shown(value)}.")
    return dict(value)


def _inner_out(value: Any, where: str) -> Any:
    if isinstance(value, str):
        if value == "first_input":
            return value
    elif isinstance(value, Mapping):
        if value and all(isinstance(v, Mapping) for v in value.values()):
            return parse_layouts(value, where)
        return parse_layout(value, where)
    raise OverrideError(f"{where}: expected first_input, a layout, or {{output: layout}}, got {shown(value)}.")


def _names_target(data: Mapping[Any, Any]) -> bool:
    """Whether `_target_` stands as a key of the entry, or of one of its fields."""
    return any("_target_" in part for part in (data, *data.values()) if isinstance(part, Mapping))
