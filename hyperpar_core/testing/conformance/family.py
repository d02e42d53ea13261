"""The suite of model families: every rule hits something, every limit is refused, what is suggested makes a plan, numbers agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, ClassVar

from torch import nn

from ... import build_plan, suggest_overrides
from ...descriptors import ModelFamily
from ...errors import HyperparError
from ...plan.build import find_family
from ..verify import Degrees
from .suite import Conformance

__all__ = ["FamilyConformance"]


class FamilyConformance(Conformance):
    """The suite of a ModelFamily. `model` makes a tiny one of the family; cp and ep runs take what the family suggests.

    variants   further models of the family, of other configs, whose parts some rules are for
    refusals   one for each limit: the suite demands that every limit is tried
    """

    kind: ClassVar[type] = ModelFamily

    def model(self) -> Any:
        raise NotImplementedError("make a tiny model of the family")

    def variants(self) -> Sequence[nn.Module]:
        return ()

    def entries(self, model: Any, degrees: Degrees, options: Mapping[str, Any]) -> list[dict[str, Any]]:
        sizes = {axis: getattr(degrees, axis) for axis in ("dp", "cp", "tp") if getattr(degrees, axis) > 1}
        suggested = suggest_overrides(model, sizes, ep_size=degrees.ep).entries
        return [{"match": one.match, "when": one.when, **one.written()} for one in suggested]

    def default_degrees(self) -> Sequence[Degrees]:
        whole = {"sequence_parallel": False}
        return Degrees(tp=2), Degrees(tp=2, options=whole), Degrees(tp=4, options=whole), Degrees(dp=2, tp=2)

    def test_it_alone_knows_the_model(self) -> None:
        for model in (self.model(), *self.variants()):
            family, _ = find_family(model)
            assert family is not None and family.name == self.name, f"{type(model).__name__} is known by {family}"

    def test_every_rule_hits_a_parameter_or_a_module(self) -> None:
        family = self.descriptor()
        parameters, modules = set[str](), set[str]()
        for model in (self.model(), *self.variants()):
            parameters |= {name for name, _ in model.named_parameters(remove_duplicate=False)}
            modules |= {name for name, _ in model.named_modules()}
        idle = [f"role {p!r}" for p in family.roles if not any(fnmatchcase(name, p) for name in parameters)]
        idle += [f"handler {p!r}" for p in family.handlers if not any(fnmatchcase(name, p) for name in parameters)]
        idle += [f"boundary {p!r}" for p in family.boundaries if not any(fnmatchcase(name, p) for name in modules)]
        assert not idle, f"rules that hit nothing: {', '.join(idle)}"

    def test_what_it_suggests_makes_a_plan(self) -> None:
        for axis, entries in self.descriptor().suggestions.items():
            sizes, ep = ({"dp": 2}, 2) if axis == "ep" else ({axis: 2}, 1)
            model = self.model()
            suggested = suggest_overrides(model, sizes, ep_size=ep)
            assert suggested.entries or not entries, f"nothing of what it suggests for {axis} hits this model"
            build_plan(model, sizes, ep_size=ep, overrides=suggested)

    def test_every_limit_is_tried_by_a_refusal_of_this_suite(self) -> None:
        causes = [limit.cause for limit in self.descriptor().limits]
        tried = [one.cause for one in self.refusals]
        untried = [cause for cause in causes if not any(one in cause for one in tried)]
        assert not untried, f"write a Refusal for each limit; none for: {'; '.join(untried)}"

    def test_a_plan_names_the_family_and_where_it_comes_from(self) -> None:
        plan = build_plan(self.model(), {})
        assert plan.family == self.name and plan.providers[f"family {self.name}"] == str(self._offered()[1])

    def test_heads_or_features_that_tp_can_t_share_are_refused(self) -> None:
        """An odd degree that divides nothing small: the error names the number, and the model's part."""
        try:
            build_plan(self.model(), {"tp": 61}, sequence_parallel=False)
        except HyperparError as error:
            assert "61" in str(error), error
        else:
            raise AssertionError("tp=61 was planned: nothing of this model is cut over tp")
