"""The suites of what a plan injects into a region: inner wrappers and local computes. Both are factories with options."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import pytest

from ...descriptors import CONTEXT_NAMES, InnerWrapper, LocalComputeFactory
from ..verify import Degrees
from . import on_ranks
from .suite import Conformance, Ranks, options_of, refused_plan

__all__ = ["InnerWrapperConformance", "LocalComputeConformance"]

# Runs on two and on four ranks, for each axis that a factory may need.
RUNS: dict[str | None, Sequence[Degrees]] = {
    None: (Degrees(tp=2), Degrees(dp=2, tp=2, options={"sequence_parallel": False})),
    "tp": (Degrees(tp=2), Degrees(tp=4), Degrees(dp=2, tp=2, options={"sequence_parallel": False})),
    "cp": (Degrees(cp=2), Degrees(cp=4), Degrees(cp=2, tp=2)),
    "ep": (Degrees(dp=2, ep=2), Degrees(dp=2, tp=2, ep=4)),
}


class _Injected(Conformance):
    """What both kinds share.

    match          a glob of the boundaries that get it
    other_options  {option: another value}, for every option of the factory: with it something else must be seen
    entry          further keys of the override entry, such as `out_src`
    """

    match: str
    other_options: Mapping[str, Any] = {}
    entry: Mapping[str, Any] = {}

    def default_degrees(self) -> Sequence[Degrees]:
        return RUNS[self.descriptor().needs_axis]

    def test_a_misspelt_option_is_refused_by_name(self) -> None:
        options = {**self.options, "no_such_option": 1}
        text = refused_plan(self, self.model(), self.runs()[0], options)
        assert "unknown option 'no_such_option'" in text and self.name in text, text

    def test_an_option_without_a_default_that_is_left_out_is_refused_by_name(self) -> None:
        for option in self.options:
            left = {name: value for name, value in self.options.items() if name != option}
            if self._is_required(option):
                assert option in refused_plan(self, self.model(), self.runs()[0], left)

    def _is_required(self, option: str) -> bool:
        parameter = inspect.signature(self.descriptor().factory).parameters.get(option)
        return parameter is not None and parameter.default is parameter.empty

    def test_no_option_is_swallowed(self, ranks: Ranks) -> None:
        options = options_of(self.descriptor().factory, CONTEXT_NAMES)
        untried = [name for name in options if name not in self.other_options]
        assert not untried, f"write another value of {', '.join(untried)} in other_options, with which something can be seen"
        unknown = [name for name in self.other_options if name not in options]
        assert not unknown, f"{self.name} has no option {', '.join(unknown)}"
        degrees = self.runs()[0]
        run = ranks(degrees.world_size).run
        usual = run(on_ranks.effects, self._address(), degrees, self.options, self._module()) if options else []
        for name, value in self.other_options.items():
            seen = run(on_ranks.effects, self._address(), degrees, {**self.options, name: value}, self._module())
            assert seen != usual, f"option {name}={value!r} changes nothing that can be seen: is it used?"

    def test_it_is_refused_where_the_axis_that_it_needs_isn_t_active(self) -> None:
        axis = self.descriptor().needs_axis
        if axis is None:
            pytest.skip("it needs no axis")
        text = refused_plan(self, self.model(), Degrees(dp=2) if axis == "tp" else Degrees(tp=2), self.options)
        assert axis in text, text

    def test_validate_mode_finds_the_placements_that_the_contract_declares(self, ranks: Ranks) -> None:
        if not self.descriptor().region_dispatch:
            pytest.skip("it states region_dispatch=False: a black box to validate mode")
        report = self._report(0, "validate")
        assert report.ok, report.text()


class InnerWrapperConformance(_Injected):
    """The suite of an InnerWrapper. `target`: "self" or a child of the boundary; a child needs `inner_out_src` in `entry`."""

    kind: ClassVar[type] = InnerWrapper
    target: str = "self"

    def entries(self, model: Any, degrees: Degrees, options: Mapping[str, Any]) -> list[dict[str, Any]]:
        injected = {"inner_target": self.target, "inner_wrapper": self.name, "options": dict(options)}
        return [{"match": self.match, **injected, **self.entry}]


class LocalComputeConformance(_Injected):
    """The suite of a LocalComputeFactory. `without`: a boundary whose module lacks what `expects` names; "": none is tried."""

    kind: ClassVar[type] = LocalComputeFactory
    without: str = "model.norm"

    def entries(self, model: Any, degrees: Degrees, options: Mapping[str, Any]) -> list[dict[str, Any]]:
        return [{"match": self.match, "local_compute_fn": self.name, "options": dict(options), **self.entry}]

    def test_a_module_without_what_it_expects_is_refused_with_the_module_s_name(self) -> None:
        expects = self.descriptor().expects
        if not expects or not self.without:
            pytest.skip("it expects nothing of the module")
        suite = type("Elsewhere", (type(self),), {"match": self.without})()
        text = refused_plan(suite, self.model(), self.runs()[0], self.options)
        assert self.without in text and self.name in text, text
