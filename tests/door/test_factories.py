"""A factory gets the context that it asks for by name and the options that its signature accepts, and nothing else."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from hyperpar_core.descriptors import CONTEXT_NAMES, InnerWrapper
from hyperpar_core.errors import ApplyError, PluginError, Refused
from hyperpar_core.plugins import call_check, call_factory, check_factory

WHERE = "layers.0.mlp: local compute 'mine'"


def forward(module, x):
    return x


def with_options(*, module, tp_mesh=None, top_k, scale=1.0):
    def compute(module, x):
        return x * top_k * scale, tp_mesh

    return compute


def context(**more):
    return {"module": nn.Linear(2, 2), "tp_mesh": "the tp mesh", "cp_mesh": None, "fqn": "layers.0.mlp"} | more


def test_a_factory_gets_what_it_asks_for_and_its_options():
    seen = {}

    def factory(*, fqn, cp_mesh, scale, shift=3):
        seen.update(locals())
        return forward

    assert call_factory(factory, context(), {"scale": 2}, WHERE) is forward
    assert {key: seen[key] for key in ("fqn", "cp_mesh", "scale", "shift")} == {
        "fqn": "layers.0.mlp", "cp_mesh": None, "scale": 2, "shift": 3,
    }  # fmt: skip


def test_what_was_made_runs():
    compute = call_factory(with_options, context(), {"top_k": 2, "scale": 0.5}, WHERE)
    assert compute(None, 3) == (3.0, "the tp mesh")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "missing option top_k. Options: top_k, scale."),
        ({"top_k": 1, "topk": 2}, "unknown option 'topk'. Options: top_k, scale."),
        ({"top_k": 1, "mesh": 2}, "option 'mesh' is a name that the core itself passes. Options: top_k, scale."),
        ({"top_k": 1, "module": 2}, "option 'module' is a name that the core itself passes."),
    ],
)
def test_options_are_checked_against_the_signature_at_plan_time_and_at_apply_time(options, text):
    for check in (
        lambda: check_factory(with_options, options, WHERE),
        lambda: call_factory(with_options, context(), options, WHERE),
    ):
        with pytest.raises(PluginError) as caught:
            check()
        assert str(caught.value).startswith(f"{WHERE}: {text}")


def test_a_factory_without_options_says_that_there_are_none():
    with pytest.raises(PluginError, match=r"unknown option 'x'\. Options: none\."):
        check_factory(lambda *, module: forward, {"x": 1}, WHERE)


def test_all_missing_options_are_named():
    with pytest.raises(PluginError, match=r"missing options a, b\. Options: a, b, c\."):
        check_factory(lambda *, module, a, b, c=1: forward, {}, WHERE)


def swallows_everything(*, module, **options):
    return forward


def takes_the_rest(*rest, module):
    return forward


def positional_only(module, /):
    return forward


@pytest.mark.parametrize(
    ("factory", "text"),
    [
        (swallows_everything, r"takes \*\*options: every option must stand in the signature"),
        (takes_the_rest, r"takes \*rest: context and options are passed by name"),
        (positional_only, "takes module by position only"),
        (3, "has no signature to check"),
    ],
)
def test_a_signature_that_can_not_be_checked_is_refused(factory, text):
    with pytest.raises(PluginError, match=text):
        check_factory(factory, {}, WHERE)
    with pytest.raises(PluginError, match=text):
        call_factory(factory, context(), {}, WHERE)


def test_context_that_is_not_given_here_is_an_error_unless_it_has_a_default():
    with pytest.raises(
        PluginError, match=r"asks for ep_mesh, model, which isn't given here. Given: cp_mesh, fqn, module"
    ):
        call_factory(lambda *, ep_mesh, model: forward, context(), {}, WHERE)
    assert call_factory(lambda *, ep_mesh=None: forward, context(), {}, WHERE) is forward
    check_factory(lambda *, ep_mesh, model: forward, {}, WHERE)
    with pytest.raises(PluginError, match="asks for module"):
        check_factory(lambda *, module: forward, {}, WHERE, available=CONTEXT_NAMES - {"module"})


def test_partials_classes_and_callable_objects_are_factories_too():
    class Made:
        def __init__(self, *, fqn, scale=1):
            self.fqn, self.scale = fqn, scale

        def __call__(self, module, x):
            return x * self.scale

    assert call_factory(Made, context(), {"scale": 3}, WHERE)(None, 2) == 6
    partial = functools.partial(with_options, top_k=4)
    assert call_factory(partial, context(), {}, WHERE)(None, 2)[0] == 8


def test_an_error_in_the_factory_names_the_boundary_and_keeps_its_cause():
    def factory(*, module):
        return module.not_there

    with pytest.raises(
        PluginError, match=rf"{WHERE}: the factory raised AttributeError: .*not_there.*\.py:\d+"
    ) as caught:
        call_factory(factory, context(), {}, WHERE)
    assert isinstance(caught.value.__cause__, AttributeError)


def test_an_error_of_hyperpar_passes_through_a_factory_unchanged():
    def factory(*, module):
        raise ApplyError("expected children gate and experts, found: proj")

    with pytest.raises(ApplyError, match=r"^expected children"):
        call_factory(factory, context(), {}, WHERE)


@pytest.mark.parametrize("made", [None, 3, "forward"])
def test_a_factory_that_returns_no_function_is_an_error(made):
    with pytest.raises(PluginError, match=rf"returned {made!r}; it must return fn\(module, \*args, \*\*kwargs\)"):
        call_factory(lambda: made, context(), {}, WHERE)


# ---- closing over a module


def by_closure(*, module):
    return lambda _, x: module(x)


def by_child(*, module):
    child = [module.inner]
    return lambda _, x: child[0](x)


def by_default(*, module):
    def compute(_, x, own=module):
        return own(x)

    return compute


def by_partial(*, module):
    return functools.partial(lambda own, _, x: own(x), module)


def by_bound_method(*, module):
    return module.forward


def by_attribute(*, module):
    class Compute:
        def __init__(self):
            self.own = module

        def __call__(self, _, x):
            return self.own(x)

    return Compute()


def by_attribute_of_a_method_s_owner(*, module):
    return by_attribute(module=module).__call__


def by_helper(*, module):
    def helper(x):
        return module(x)

    return lambda _, x: helper(x)


@pytest.mark.parametrize(
    "factory",
    [
        by_closure, by_child, by_default, by_partial, by_bound_method, by_attribute, by_attribute_of_a_method_s_owner,
        by_helper,
    ],
)  # fmt: skip
def test_what_a_factory_returns_holds_no_module_of_the_model(factory):
    module = nn.Linear(2, 2)
    module.inner = nn.Linear(2, 2)
    with pytest.raises(PluginError, match=r"holds a module \(.*: Linear\)") as caught:
        call_factory(factory, {"module": module}, {}, WHERE)
    assert len(str(caught.value).splitlines()) == 2


def test_a_handed_in_module_counts_even_without_weights_and_a_stateless_one_of_the_plugin_does_not():
    with pytest.raises(PluginError, match="holds a module"):
        call_factory(by_closure, {"module": nn.SiLU()}, {}, WHERE)
    activation = nn.SiLU()
    made = call_factory(lambda: lambda module, x: activation(x), context(), {}, WHERE)
    assert made(None, torch.zeros(1)).item() == 0


def test_numbers_meshes_and_functions_may_be_closed_over():
    made = call_factory(with_options, context(), {"top_k": 1}, WHERE)
    assert made(None, 1) == (1.0, "the tp mesh")


def test_a_function_that_refers_to_itself_is_no_trap():
    def factory():
        def compute(module, x):
            return x if x == 0 else compute(module, x - 1)

        return compute

    assert call_factory(factory, context(), {}, WHERE)(None, 3) == 0


def test_a_check_gets_what_it_asks_for_and_options_set_or_by_default():
    def check(*, fqn, sizes, top_k, scale):
        raise Refused(f"{fqn}: {sizes} {top_k} {scale}")

    wrapper = InnerWrapper("w", factory=with_options, check=check)
    with pytest.raises(Refused, match=r"^layers\.0: {'tp': 2} 3 1\.0$"):
        call_check(wrapper, {"fqn": "layers.0", "sizes": {"tp": 2}, "module": None}, {"top_k": 3}, "layers.0: w")
    call_check(InnerWrapper("w", factory=with_options), {}, {"top_k": 3}, "layers.0: w")


def test_an_error_in_a_check_names_the_boundary_and_keeps_its_cause():
    def check(*, fqn):
        raise KeyError("heads")

    with pytest.raises(PluginError, match=r"^layers\.0: w: its check raised KeyError: 'heads'") as caught:
        call_check(InnerWrapper("w", factory=with_options, check=check), {"fqn": "layers.0"}, {}, "layers.0: w")
    assert isinstance(caught.value.__cause__, KeyError)
