"""The contract of one boundary: who owns which parameters, what arrives, what the compute needs, what it yields, what leaves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from ..descriptors import TEMPLATES, Section
from ..errors import OverrideError
from ..placement import Layout, SharedShard, format_layout, format_placement, parse_layout, parse_placement
from .names import nearest
from .yaml_files import plain_data, refuse_unknown_keys, shown

__all__ = ["Contract", "callable_name", "parse_layouts"]

_LAYOUTS = ("params", "param_use", "param_grad", "in_src", "in_dst", "in_grad", "out_src", "out_dst")


@dataclass(frozen=True)
class Contract:
    """One boundary. Layouts map axis names to placements; an axis that is left out replicates.

    fqn            the module's name in the model ("" is the model itself)
    template       what it was derived from (attention, mlp, norm, ...), or "custom"
    params         {parameter: how it is held}
    param_use      {parameter: how the region sees it}, where that differs: a row-wise bias is Partial, held by the first rank
    param_grad     {parameter: placement of its gradient when the backward leaves it}, before any sum
    in_src, in_dst, in_grad   {forward argument: layout it arrives in, layout the compute needs, layout of its gradient there}
    out_src, out_dst          {output name: layout the compute yields, layout that leaves}
    out_names      names of a tuple's outputs, in order; a single tensor is "output"
    inner_target   "self" or a child, whose forward `inner_wrapper` replaces; `inner_out_src` is a child target's output layout
    local_compute_fn          replaces the region's compute
    region_dispatch           False: a black box to validate mode; True: only ordinary operators; None: nothing is injected
    options        of the wrapper or local compute
    special_handlers          {parameter: handler name}
    stacked        {list of expert modules: their number}: each of their parameters is held once for all of them, cut along the experts
    sections       {parameter: the sections that its handler cuts it into}, each held as a parameter of its own
    lowerer        name of the lowerer, or None for the default
    divide         {attribute of the module: what it is divided by} while its region sees local tensors
    counts         {attribute of the module: its value on a rank} where that is no quotient: rows of which a part is whole on each
    features       {input or output: global length of its last dim}, for bytes and for uneven shards; "experts_per_token" of a router,
                   "head_dim" of attention
    """

    fqn: str
    template: str = "custom"
    params: Mapping[str, Layout] = field(default_factory=dict)
    param_use: Mapping[str, Layout] = field(default_factory=dict)
    param_grad: Mapping[str, Layout] = field(default_factory=dict)
    in_src: Mapping[str, Layout] = field(default_factory=dict)
    in_dst: Mapping[str, Layout] = field(default_factory=dict)
    in_grad: Mapping[str, Layout] = field(default_factory=dict)
    out_src: Mapping[str, Layout] = field(default_factory=dict)
    out_dst: Mapping[str, Layout] = field(default_factory=dict)
    out_names: tuple[str, ...] = ("output",)
    inner_target: str | None = None
    inner_wrapper: Any = None
    inner_out_src: Any = None
    local_compute_fn: Any = None
    region_dispatch: bool | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    special_handlers: Mapping[str, str] = field(default_factory=dict)
    stacked: Mapping[str, int] = field(default_factory=dict)
    sections: Mapping[str, tuple[Section, ...]] = field(default_factory=dict)
    lowerer: str | None = None
    divide: Mapping[str, int] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)
    features: Mapping[str, int] = field(default_factory=dict)

    @property
    def injects(self) -> bool:
        """Whether something replaces or weaves into the region's compute."""
        return self.inner_wrapper is not None or self.local_compute_fn is not None

    def to_data(self) -> dict[str, Any]:
        """Plain data, fields at their defaults left out; callables are named, and can't be read back."""
        data: dict[str, Any] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name in _LAYOUTS:
                value = {name: format_layout(layout) for name, layout in value.items()}
            elif f.name in ("inner_wrapper", "local_compute_fn") and callable(value):
                value = f"<callable {callable_name(value)}>"
            elif f.name == "inner_out_src" and isinstance(value, Mapping):
                nested = any(isinstance(v, Mapping) for v in value.values())
                value = {n: format_layout(v) for n, v in value.items()} if nested else format_layout(value)
            elif f.name == "sections":
                value = {name: [_section_data(s) for s in sections] for name, sections in value.items()}
            elif f.name == "out_names":
                value = list(value) if value != ("output",) else None
            elif isinstance(value, Mapping):
                value = dict(value)
            if f.name == "fqn" or not (value is None or value == {}):
                data[f.name] = value
        return data

    @classmethod
    def from_data(cls, data: Any, where: str) -> Contract:
        """The inverse of `to_data`; OverrideError on an unknown key or a value of the wrong type."""
        if not isinstance(data, Mapping) or not isinstance(data.get("fqn"), str):
            raise OverrideError(f"{where}: a boundary is a mapping with an fqn, got {shown(data)}.")
        where = f"{where} ({data['fqn']})"
        refuse_unknown_keys(data, {f.name for f in fields(cls)}, where)
        return cls(**{name: _read(name, value, f"{where}.{name}") for name, value in data.items()})


def callable_name(value: Any) -> str:
    """`module:qualname`, of the object's class where it has none itself: the same on every rank."""
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}:{named.__qualname__}"


def _read(name: str, value: Any, where: str) -> Any:
    """One field of a plan file."""
    if name in _LAYOUTS:
        return parse_layouts(value, where, shared=name == "param_use")
    if name == "sections":
        return _read_sections(value, where)
    if name == "options":
        return plain_data(_mapping(value, where), where)
    if name == "special_handlers":
        return _mapping(value, where, str, "a name")
    if name in ("divide", "counts", "features", "stacked"):
        least = {"divide": 2, "stacked": 1}.get(name, 0)
        made = _mapping(value, where, int, "a whole number")
        odd = [v for v in made.values() if isinstance(v, bool) or v < least]
        if odd:
            raise OverrideError(f"{where}: expected whole numbers of at least {least}, got {odd[0]!r}.")
        return made
    if name == "out_names":
        if not isinstance(value, list) or not value or not all(isinstance(v, str) for v in value):
            raise OverrideError(f"{where}: expected a list of names, got {shown(value)}.")
        return tuple(value)
    if name == "region_dispatch":
        if not isinstance(value, bool):
            raise OverrideError(f"{where}: expected true or false, got {shown(value)}.")
        return value
    if name == "inner_out_src" and isinstance(value, Mapping):
        nested = value and all(isinstance(v, Mapping) for v in value.values())
        return parse_layouts(value, where) if nested else parse_layout(value, where)
    if not isinstance(value, str):
        raise OverrideError(f"{where}: expected a name, got {shown(value)}.")
    if value.startswith("<callable"):
        raise OverrideError(f"{where}: the plan was made with a Python callable, which a file can't carry.")
    if name == "inner_out_src" and value != "first_input":
        raise OverrideError(f"{where}: expected first_input, a layout, or {{output: layout}}, got {shown(value)}.")
    if name == "template" and value not in (*TEMPLATES, "custom"):
        raise OverrideError(f"{where}: no template {value!r}.{nearest(value, TEMPLATES)}")
    return value


def _mapping(value: Any, where: str, kind: type = object, what: str = "") -> dict[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(k, str) and isinstance(v, kind) for k, v in value.items()):
        raise OverrideError(
            f"{where}: expected a mapping{f' of a name to {what}' if what else ''}, got {shown(value)}."
        )
    return dict(value)


def parse_layouts(value: object, where: str, shared: bool = False) -> dict[str, dict[str, Any]]:
    """Reads `{name: {axis: placement}}`. `shared`: whether shard(dim, copies) may stand there."""
    if not isinstance(value, Mapping):
        raise OverrideError(
            f"{where}: expected a mapping of name to layout, such as {{weight: {{tp: shard(0)}}}}, got {shown(value)}."
        )
    odd = [name for name in value if not isinstance(name, str)]
    if odd:
        raise OverrideError(f"{where}: {shown(odd[0])} is no name; quote it if it is one.")
    made = {name: parse_layout(layout, f"{where}.{name}") for name, layout in value.items()}
    if not shared:
        for name, layout in made.items():
            for axis, placement in layout.items():
                if isinstance(placement, SharedShard):
                    raise OverrideError(f"{where}.{name}: {axis}: {format_placement(placement)}: write shard(N).")
    return made


def _section_data(section: Section) -> dict[str, Any]:
    return {
        "name": section.name,
        "dim": section.dim,
        "size": section.size,
        "placement": format_placement(section.placement),
    }


def _read_sections(value: object, where: str) -> dict[str, tuple[Section, ...]]:
    made = {}
    for name, sections in _mapping(value, where, list, "a list of sections").items():
        for section in sections:
            kinds = {"name": str, "dim": int, "size": int, "placement": str}
            right = isinstance(section, Mapping) and section.keys() == kinds.keys()
            if not right or not all(type(section[key]) is kind for key, kind in kinds.items()):
                raise OverrideError(f"{where}.{name}: expected {{name, dim, size, placement}}, got {shown(section)}.")
        made[name] = tuple(Section(s["name"], s["dim"], s["size"], parse_placement(s["placement"])) for s in sections)
    return made
