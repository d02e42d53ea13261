"""Override entries put on derived contracts: merged field by field where a boundary is, inserted where none is."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.distributed.tensor import Replicate, Shard

from ..descriptors import Section
from ..errors import OverrideError
from ..placement import format_placement
from .boundaries import owners
from .contract import Contract
from .cuts import kept_uses
from .heads import attribute_of
from .names import fold_names, listed, nearest
from .overrides import Override, Overrides

__all__ = ["Merger"]

COMPLETE = ("params", "in_src", "in_dst", "out_src", "out_dst")
# Integers of attention modules that look like counts and are none: widths, positions and the like stay as they are.
_NOT_COUNTS = ("head_dim", "head_size", "layer_idx", "layer_id", "rotary", "rope", "window", "vocab_size")


@dataclass(frozen=True)
class Merger:
    """What entries need to know of the model and of the plan that is being made.

    active     the conditions that hold: active axes, "sp", "ep"
    trusted    modules that an entry may name as `module:object`
    sections   sections(parameter's full name, handler) -> the sections that the handler cuts it into
    """

    model: nn.Module
    active: frozenset[str]
    tp: int
    trusted: tuple[str, ...]
    sections: Callable[[str, str], tuple[Section, ...]]

    def declared(self, contract: Contract, fields: Mapping[str, Any], owned: Sequence[str]) -> Contract:
        """The contract with the fields that a family declares at it. `owned`: parameters of the boundary, by its own names."""
        entry = Override(match=contract.fqn or "*", **fields)
        if not set(entry.when) <= self.active:
            return contract
        return self._merged(contract, entry.written(), f"the family at {contract.fqn}", owned)

    def apply(
        self, derived: Mapping[str, Contract], overrides: Overrides
    ) -> tuple[dict[str, Contract], dict[str, str | None]]:
        """(contracts in the model's order, {parameter: the boundary that owns it}) with every entry merged or inserted.

        OverrideError for an entry that hits nothing, for an incomplete insert, and for values that the boundary can't have.
        """
        modules = dict(self.model.named_modules())
        inserted = self._inserted(derived, overrides, modules)
        known = {fqn: derived.get(fqn) or Contract(fqn) for fqn in modules if fqn in derived or fqn in inserted}
        written: dict[str, dict[str, Any]] = {}
        places: dict[str, str] = {}
        for entry in overrides.entries:
            active = set(entry.when) <= self.active
            for fqn in self._hits(entry, known, modules):
                if active:
                    written.setdefault(fqn, {}).update(entry.written())
                    places[fqn] = f"override {entry.match!r}" + (f" at {fqn}" if fqn != entry.match else "")
        owner_of = owners(self.model, {fqn for fqn, c in known.items() if c.template != "stack"})
        owned: dict[str, list[str]] = {fqn: [] for fqn in known}
        for name, owner in owner_of.items():
            if owner is not None:
                owned[owner].append(name[len(owner) + 1 if owner else 0 :])
        contracts = {}
        for fqn, contract in known.items():
            fields = written.get(fqn, {})
            if fqn in inserted:
                self._require_complete(fqn, modules[fqn], fields, owned[fqn])
                contract = replace(contract, params={name: {} for name in owned[fqn]})
            elif inserted and contract.template != "stack":
                contract = _without(contract, set(contract.params) - set(owned[fqn]))
            contracts[fqn] = self._merged(contract, fields, places[fqn], owned[fqn]) if fields else contract
        return contracts, owner_of

    # which entries hit what

    def _inserted(
        self, derived: Mapping[str, Contract], overrides: Overrides, modules: Mapping[str, nn.Module]
    ) -> set[str]:
        return {
            entry.match
            for entry in overrides.entries
            if entry.match in modules and entry.match not in derived and set(entry.when) <= self.active
        }

    def _hits(self, entry: Override, known: Mapping[str, Contract], modules: Mapping[str, nn.Module]) -> list[str]:
        hits = [fqn for fqn in known if fnmatchcase(fqn, entry.match)]
        if hits:
            return hits
        there = [name for name in modules if fnmatchcase(name, entry.match)]
        if not there:
            raise OverrideError(
                f"override {entry.match!r}: matches no module.{nearest(entry.match, fold_all(modules))}"
            )
        if set(entry.when) <= self.active:
            raise OverrideError(
                f"override {entry.match!r}: matches {len(there)} modules (first: {there[0]}), and none is a boundary of this plan.\n"
                f"  Boundaries: {listed(fold_names(known))}.\n  A new boundary needs the module's exact name."
            )
        return []

    # inserting

    def _require_complete(self, fqn: str, module: nn.Module, fields: Mapping[str, Any], owned: Sequence[str]) -> None:
        missing = [name for name in COMPLETE if name not in fields]
        if missing:
            raise OverrideError(
                f"override {fqn!r}: the module is no boundary yet, and the entry doesn't say all of one (missing:"
                f" {', '.join(missing)}). A draft, to be made right:\n{_draft(fqn, module, owned)}"
            )

    # merging

    def _merged(self, contract: Contract, written: Mapping[str, Any], where: str, owned: Sequence[str]) -> Contract:
        values = dict(written)
        packed = "special_handlers" in values or "params" in values
        if "params" in values:
            _check_names(f"{where}.params", values["params"], owned, contract)
            values["param_use"] = kept_uses(contract, values["params"])
        if packed:
            self._cut(contract, values, where, owned)
        if "tp_divide_attrs" in values:
            values["divide"] = self._divide(contract, values.pop("tp_divide_attrs"), f"{where}.tp_divide_attrs")
        for name in ("inner_wrapper", "local_compute_fn"):
            if name in values:
                values[name] = self._trusted(values[name], f"{where}.{name}")
        if "out_names" in values:
            declared = values.get("out_src", contract.out_src)
            unknown = [name for name in values["out_names"] if name not in declared]
            if unknown:
                raise OverrideError(f"{where}.out_names: {unknown[0]!r} has no layout; give it out_src and out_dst.")
        return replace(contract, **values)

    def _cut(self, contract: Contract, values: dict[str, Any], where: str, owned: Sequence[str]) -> None:
        """Sections for the parameters that handlers cut; the others lose theirs."""
        handlers = values.get("special_handlers", contract.special_handlers)
        unknown = [name for name in handlers if name not in owned]
        if unknown:
            raise OverrideError(
                f"{where}.special_handlers: no parameter {unknown[0]!r} here (parameters: {listed(owned)})."
            )
        if self.tp == 1:
            values["special_handlers"] = {}
            return
        params = dict(values.get("params", contract.params))
        sections = {}
        for name, handler in handlers.items():
            sections[name] = self.sections(f"{contract.fqn}.{name}" if contract.fqn else name, handler)
            held = {"tp": next((s.placement for s in sections[name] if isinstance(s.placement, Shard)), Replicate())}
            if "params" in values and params[name] not in (held, contract.params.get(name)):
                raise OverrideError(
                    f"{where}.params.{name}: the handler {handler!r} decides how it is held ({format_placement(held['tp'])} over tp)."
                )
            params[name] = held
        bare = [name for name in contract.sections if name not in handlers and "params" not in values]
        if bare:
            raise OverrideError(f"{where}: without its handler, {bare[0]} needs a placement; write params too.")
        values.update(params=params, sections=sections)

    def _divide(self, contract: Contract, attributes: Mapping[str, int] | None, where: str) -> dict[str, int]:
        """The automatic divisors and these; None: none at all."""
        if attributes is None or self.tp == 1:
            return {} if attributes is None else dict(contract.divide)
        module = self.model.get_submodule(contract.fqn)
        for attribute, divisor in attributes.items():
            if attribute in contract.divide:
                raise OverrideError(f"{where}: {attribute} is divided by {contract.divide[attribute]} already.")
            if any(part in attribute for part in _NOT_COUNTS):
                raise OverrideError(f"{where}: {attribute} is no count of what tp splits; it must stay as it is.")
            value = attribute_of(module, attribute)[2]
            if value is None:
                near = nearest(attribute, [n for n, v in vars(module).items() if isinstance(v, int)])
                raise OverrideError(f"{where}: {contract.fqn} has no attribute {attribute!r}.{near}")
            by = divisor or self.tp
            if not isinstance(value, int) or isinstance(value, bool):
                raise OverrideError(f"{where}: {attribute} is {value!r}, no whole number.")
            if self.tp % by:
                raise OverrideError(f"{where}: {attribute}: a divisor divides tp={self.tp}, and {by} doesn't.")
            if value % by:
                raise OverrideError(f"{where}: {attribute} is {value}, which {by} doesn't divide.")
        return {**contract.divide, **{name: by or self.tp for name, by in attributes.items()}}

    def _trusted(self, value: Any, where: str) -> Any:
        """`module:object` from a module that the caller trusts; other names pass through."""
        if not (isinstance(value, str) and ":" in value):
            return value
        module, _, name = value.partition(":")
        if module not in self.trusted:
            raise OverrideError(
                f"{where}: {value!r} names Python code; pass build_plan(..., trusted_modules=[{module!r}]) if you trust it."
            )
        try:
            found = importlib.import_module(module)
            for part in name.split("."):
                found = getattr(found, part)
        except Exception as error:  # the module's own code may raise anything
            raise OverrideError(f"{where}: {value!r} can't be loaded: {type(error).__name__}: {error}.") from error
        if not callable(found):
            raise OverrideError(f"{where}: {value!r} is {found!r}, which can't be called.")
        return found


def fold_all(modules: Mapping[str, nn.Module]) -> list[str]:
    """Names to suggest for a match: as they are, and with a star for the layer."""
    names = [name for name in modules if name]
    return [*names, *dict.fromkeys(f"*.{name.rpartition('.')[2]}" for name in names)]


def _without(contract: Contract, taken: set[str]) -> Contract:
    """The contract without parameters that an inserted boundary inside it owns."""
    if not taken:
        return contract
    kept: dict[str, Any] = {
        field: {name: value for name, value in getattr(contract, field).items() if name not in taken}
        for field in ("params", "param_use", "special_handlers", "sections")
    }
    return replace(contract, **kept)


def _check_names(where: str, params: Mapping[str, Any], owned: Sequence[str], contract: Contract) -> None:
    unknown = [name for name in params if name not in owned]
    if unknown:
        raise OverrideError(
            f"{where}: no parameter {unknown[0]!r} here (parameters: {listed(owned)}).{nearest(unknown[0], owned)}"
        )
    dropped = [name for name in owned if name not in params]
    if dropped:
        raise OverrideError(
            f"{where}: a mapping replaces the field, and this one drops {listed(dropped)}; write every parameter of the boundary."
        )


def _draft(fqn: str, module: nn.Module, owned: Sequence[str]) -> str:
    """An entry for a module that is no boundary: everything replicated, named as its forward names it."""
    inputs = [
        p.name
        for p in list(inspect.signature(type(module).forward).parameters.values())[1:]
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty
    ]
    layouts = "{" + ", ".join(f"{name}: {{tp: replicate}}" for name in inputs) + "}"
    params = "{" + ", ".join(f"{name}: {{tp: replicate}}" for name in owned) + "}"
    return (
        f'    - match: "{fqn}"\n      params: {params}\n      in_src: {layouts}\n      in_dst: {layouts}\n'
        "      out_src: {output: {tp: replicate}}\n      out_dst: {output: {tp: replicate}}"
    )
