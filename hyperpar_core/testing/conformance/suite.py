"""What the suites of all kinds share: the plugin is installed, its numbers are one process's, and it leaves nothing behind."""

from __future__ import annotations

import inspect
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from ... import ShardingPlan, build_plan
from ...descriptors import ModelFamily
from ...errors import HyperparError
from ...plugins import get_registry, load, plugin_report
from ...plugins.registry import KINDS, Plugin, Registry
from ..parity import Bounds
from ..ranks import RankPool, pool
from ..report import ParityReport
from ..verify import Degrees
from ..zoo import tiny_batch, tiny_model
from . import on_ranks
from .leftovers import patches, sources

__all__ = ["Conformance", "Refusal"]

LONGEST = 8  # lines of an error
Ranks = Callable[[int], RankPool]


@dataclass(frozen=True)
class Refusal:
    """A case that must be refused: `cause` stands in the error's text. `options` and `model` in place of the suite's own."""

    cause: str
    degrees: Degrees = field(default_factory=lambda: Degrees(tp=2))
    options: Mapping[str, Any] | None = None
    model: Callable[[], nn.Module] | None = None


class Conformance:
    """The base of the suites: subclass one of those for a kind, not this.

    name       the descriptor's name
    options    what a plan sets, beside what `entries` adds
    degrees    parallel runs; each is compared with one process. Empty: what the kind needs, on two and on four ranks
    bounds     of the comparison; None: the comparer's own for float32
    steps      SGD and AdamW steps after the first backward
    seq        tokens of a row
    refusals   what must be refused, beside what the suite tries by itself
    """

    kind: ClassVar[type]
    name: str
    options: Mapping[str, Any] = {}
    degrees: Sequence[Degrees] = ()
    bounds: Bounds | None = None
    steps: int = 1
    seq: int = 16
    refusals: Sequence[Refusal] = ()

    # ---- what an author may replace

    def model(self) -> Any:
        """A new model with a config, in train mode, with the same weights in every process."""
        return tiny_model("llama")

    def batch(self, model: Any, rows: int) -> dict[str, Tensor]:
        """A global batch for it: [rows, seq]."""
        return tiny_batch(model, batch=rows, seq=self.seq)

    def entries(self, model: Any, degrees: Degrees, options: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The override entries that put what is tested on `model`."""
        raise NotImplementedError

    # ---- the suite's own

    def descriptor(self) -> Any:
        """The descriptor as the installed plugins offer it; PluginError with what is known where they don't."""
        return self._offered()[0]

    def runs(self) -> Sequence[Degrees]:
        return self.degrees or self.default_degrees()

    def default_degrees(self) -> Sequence[Degrees]:
        return Degrees(tp=2), Degrees(dp=2, tp=2)

    def _offered(self) -> tuple[Any, Any]:
        found: tuple[Any, Any] = get_registry().get(self.kind, self.name)
        return found

    def _plugin(self, registry: Registry) -> Plugin:
        """The plugin that offers it; PluginError with the reason where it is left out."""
        provider = registry.get(self.kind, self.name)[1]
        return next(plugin for plugin in registry.plugins if plugin.provider == provider)

    def _kind_in_plans(self) -> str:
        return "family" if self.kind is ModelFamily else KINDS[self.kind].noun.replace(" ", "_")

    def _module(self) -> str:
        return self._plugin(get_registry()).module.split(":")[0]

    def _address(self) -> on_ranks.Address:
        cls = type(self)
        if "<" in cls.__qualname__:
            raise TypeError(f"{cls.__qualname__} can't be found on ranks: a conformance class stands at the top of its file.")
        return on_ranks.Address(cls.__module__, getattr(sys.modules[cls.__module__], "__file__", None), cls.__qualname__)

    def _report(self, run: int, mode: str = "production") -> ParityReport:
        return _measured(type(self), run, mode)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "run" in metafunc.fixturenames:
            try:
                ids = [_text(degrees) for degrees in self.runs()]
            except HyperparError:  # it isn't installed: the tests say so, not the collection
                ids = ["not installed"]
            metafunc.parametrize("run", range(len(ids)), ids=ids)
        if "refused" in metafunc.fixturenames:
            metafunc.parametrize("refused", range(len(self.refusals)), ids=[one.cause[:40] for one in self.refusals])

    # ---- the plugin

    def test_it_is_installed_and_let_in_without_a_note(self) -> None:
        provider = self._plugin(get_registry()).provider
        (mine,) = [one for one in plugin_report() if (one["name"], one["distribution"]) == (provider.plugin, provider.distribution)]
        notes = [note for note in mine["notes"] if not note.startswith("took ")]
        assert notes == [], notes
        assert self.descriptor().summary, "give it a summary: `hyperpar plugins` and errors show it"

    def test_loading_it_again_offers_the_same(self) -> None:
        offered = []
        for _ in range(2):
            mine = self._plugin(load())
            offered.append({KINDS[kind].key: [_described(one) for one in some] for kind, some in mine.offers.items()})
        assert offered[0] == offered[1]

    def test_none_of_its_code_stands_in_torch_or_transformers_once_it_is_loaded(self) -> None:
        found = patches(sources(self._module()))
        assert found == [], f"it replaced {', '.join(found)} for the whole process"

    # ---- the plan

    def test_the_plan_pickles_and_its_file_reads_back_as_the_same_plan(self) -> None:
        for degrees in self.runs():
            model = self.model()
            options = on_ranks.planned(self, model, degrees).options
            sizes = {axis: getattr(degrees, axis) for axis in ("dp", "cp", "tp") if getattr(degrees, axis) > 1}
            plan = build_plan(model, sizes, ep_size=degrees.ep, **options)
            assert pickle.loads(pickle.dumps(plan)).digest() == plan.digest()
            assert ShardingPlan.from_yaml(plan.to_yaml()).digest() == plan.digest()
            assert f"{self._kind_in_plans()} {self.name}" in plan.providers, "no boundary of the plan uses it"

    # ---- the numbers

    def test_loss_and_logits_are_those_of_one_process(self, ranks: Ranks, run: int) -> None:
        report = self._report(run)
        assert not report.differing("loss") and not report.differing("logits"), report.text()

    def test_every_gradient_is_that_of_one_process(self, ranks: Ranks, run: int) -> None:
        report = self._report(run)
        assert not report.differing("gradient"), report.text()

    def test_weights_after_steps_are_those_of_one_process(self, ranks: Ranks, run: int) -> None:
        report = self._report(run)
        assert not report.differing("weight"), report.text()

    def test_replicas_are_bitwise_equal_before_and_after_steps(self, ranks: Ranks, run: int) -> None:
        report = self._report(run)
        assert report.replicas == (), report.text()

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
    def test_the_numbers_hold_on_cuda(self, ranks: Ranks) -> None:
        degrees = self.runs()[0]
        backend = "nccl" if torch.cuda.device_count() >= degrees.world_size else "gloo"
        run = pool(degrees.world_size, backend).run
        report = run(on_ranks.parity, self._address(), degrees, "production", "cuda", timeout=100)[0]
        assert report.ok, report.text()

    # ---- what it leaves

    def test_undo_leaves_nothing_behind_and_no_code_of_its_own_in_torch_or_transformers(self, ranks: Ranks) -> None:
        degrees = self.runs()[0]
        for rank, found in enumerate(ranks(degrees.world_size).run(on_ranks.undone, self._address(), degrees, self._module())):
            left = [f"{what}: {line}" for what, lines in found.items() for line in lines]
            assert not left, f"rank {rank}\n" + "\n".join(left[:20])

    def test_a_deepcopy_of_the_planned_model_computes_with_its_own_weights(self, ranks: Ranks) -> None:
        degrees = self.runs()[0]
        for difference in ranks(degrees.world_size).run(on_ranks.copied, self._address(), degrees):
            assert difference == "", f"the copy {difference} once the original's weights are zero"

    def test_whole_parameters_are_the_original_s(self, ranks: Ranks) -> None:
        degrees = self.runs()[0]
        for found in ranks(degrees.world_size).run(on_ranks.whole_parameters, self._address(), degrees):
            assert found == []

    # ---- refusals

    def test_what_can_t_be_done_is_refused_with_its_cause(self, ranks: Ranks, refused: int) -> None:
        case = self.refusals[refused]
        options = self.options if case.options is None else case.options
        said = ranks(case.degrees.world_size).run(on_ranks.refusal, self._address(), case.degrees, options, refused)
        for kind, text, untouched in said:
            assert kind, f"it wasn't refused: {case.cause}"
            assert case.cause in text, f"the error says something else:\n{text}"
            assert untouched, f"the model isn't as it was before the error:\n{text}"
            _check_text(text)


_reports: dict[tuple[type, int, str], ParityReport] = {}


def _measured(suite: type[Conformance], run: int, mode: str) -> ParityReport:
    """The report of one parallel run; every test of it reads the same."""
    if (suite, run, mode) not in _reports:
        mine = suite()
        degrees = mine.runs()[run]
        address = mine._address()
        done = pool(degrees.world_size).run(on_ranks.parity, address, degrees, mode, "cpu", timeout=100)
        _reports[suite, run, mode] = done[0]
    return _reports[suite, run, mode]


def refused_plan(suite: Conformance, model: Any, degrees: Degrees, options: Mapping[str, Any]) -> str:
    """The text with which build_plan refuses; AssertionError where it plans."""
    given = on_ranks.planned(suite, model, degrees, options).options
    sizes = {axis: getattr(degrees, axis) for axis in ("dp", "cp", "tp") if getattr(degrees, axis) > 1}
    try:
        build_plan(model, sizes, ep_size=degrees.ep, **given)
    except HyperparError as error:
        _check_text(str(error))
        return str(error)
    raise AssertionError(f"build_plan made a plan with options {dict(options)} on {_text(degrees)}")


def _check_text(text: str) -> None:
    assert len(text.splitlines()) <= LONGEST, f"an error has at most {LONGEST} lines:\n{text}"


def _text(degrees: Degrees) -> str:
    """`dp 2 x tp 2`, and what else build_plan is given."""
    plain = [f"{name}={value}" for name, value in degrees.options.items() if isinstance(value, bool | str | int)]
    return " ".join([degrees.text(), *plain])


def _described(value: Any) -> Any:
    """A descriptor as plain values; callables by name, as a hook may make them anew at each call."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: _described(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {key: _described(one) for key, one in value.items()}
    if isinstance(value, tuple | list):
        return [_described(one) for one in value]
    if callable(value):
        return f"{getattr(value, '__module__', '')}:{getattr(value, '__qualname__', type(value).__qualname__)}"
    return repr(value)


def options_of(factory: Callable[..., Any], context: frozenset[str]) -> list[str]:
    """The names of a factory's options."""
    return [name for name in inspect.signature(factory).parameters if name not in context]
