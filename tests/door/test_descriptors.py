"""A malformed descriptor leaves its plugin out; one sentence names the descriptor, the field and the value."""

from __future__ import annotations

import pytest

from hyperpar_core.descriptors import (
    CollectiveLowerer,
    InnerWrapper,
    Limit,
    LocalComputeFactory,
    LossFactory,
    ModelFamily,
    SpecialHandler,
)
from hyperpar_core.errors import PluginError
from hyperpar_core.plugins.checks import check_descriptor


def make(*, module, scale=1.0):
    return print


def check(*, module, sizes, scale):
    return None


def sections(shape, *, module, param_name, config):
    return []


def lower(transition):
    return None


def holds(config, sizes):
    return False


RIGHT = [
    InnerWrapper("my.wrapper-2", factory=make),
    InnerWrapper("w", factory=make, forward_style="qkv", needs_axis=None, region_dispatch=True, summary="a kernel"),
    InnerWrapper("w", factory=make, check=check),
    LocalComputeFactory("c", factory=make),
    LocalComputeFactory("c", factory=make, expects=(), needs_axis="tp"),
    SpecialHandler("h", sections=sections),
    SpecialHandler("h", sections=lambda shape, **rest: []),
    CollectiveLowerer("l", lower=lower),
    CollectiveLowerer("l", lower=lower, axes=("tp", "cp"), backends=("nccl",), exact=False),
    LossFactory("loss", factory=make),
    ModelFamily("f", matches=("one", "two")),
    ModelFamily(
        "f",
        matches=lambda model: True,
        roles={"*.q_proj.weight": "colwise"},
        boundaries={"*.self_attn": "attention", "*.mixer": {"template": "mlp", "in_dst": {"tp": "replicate"}}},
        handlers={"*.qkv.weight": "packed"},
        facts={"causal": True},
        suggestions={"cp": [{"match": "*.self_attn", "inner_wrapper": "w"}]},
        limits=(Limit("it can't", holds),),
    ),
]


@pytest.mark.parametrize("descriptor", RIGHT, ids=lambda one: type(one).__name__)
def test_a_right_descriptor_is_accepted(descriptor):
    check_descriptor(descriptor)


WRONG = [
    (InnerWrapper("", factory=make), "InnerWrapper has name ''"),
    (InnerWrapper(None, factory=make), "InnerWrapper has name None"),
    (InnerWrapper("a b", factory=make), "has name 'a b'"),
    (InnerWrapper("module:object", factory=make), "has name 'module:object'"),
    (InnerWrapper("3d", factory=make), "has name '3d'"),
    (InnerWrapper("auto", factory=make), "has name 'auto'"),
    (InnerWrapper("None", factory=make), "has name 'None'"),
    (InnerWrapper("w", factory=None), "InnerWrapper 'w': factory is None, expected a callable"),
    (InnerWrapper("w", factory=lambda *, module, **rest: print), r"the factory takes \*\*rest"),
    (InnerWrapper("w", factory=lambda *rest: print), r"the factory takes \*rest"),
    (InnerWrapper("w", factory=lambda module, /: print), "takes module by position only"),
    (
        InnerWrapper("w", factory=make, forward_style="huggingface"),
        "forward_style is 'huggingface', expected 'hf' or 'qkv'",
    ),
    (InnerWrapper("w", factory=make, needs_axis="dp"), "needs_axis is 'dp', expected None or one of cp, tp, ep"),
    (InnerWrapper("w", factory=make, needs_axis=("cp", "tp")), "needs_axis is "),
    (InnerWrapper("w", factory=make, region_dispatch="no"), "region_dispatch is 'no', expected True or False"),
    (InnerWrapper("w", factory=make, summary=None), "summary is None, expected a text"),
    (InnerWrapper("w", factory=make, check="heads"), "check is 'heads', expected a callable"),
    (InnerWrapper("w", factory=make, check=lambda *, cp_mesh: None), "expected one that asks for contract, .*, not cp_mesh"),
    (InnerWrapper("w", factory=make, check=lambda *, sizes, limit: None), ", scale, sizes, target_module only, not limit"),
    (InnerWrapper("w", factory=make, check=lambda **all: None), r"the check takes \*\*all"),
    (LocalComputeFactory("c", factory=3), "LocalComputeFactory 'c': factory is 3"),
    (LocalComputeFactory("c", factory=make, expects="gate"), "expects is 'gate', expected a tuple of attribute names"),
    (LocalComputeFactory("c", factory=make, expects=(1,)), "expects is "),
    (LocalComputeFactory("c", factory=make, region_dispatch=0), "region_dispatch is 0"),
    (SpecialHandler("h", sections=[]), r"SpecialHandler 'h': sections is \[\], expected a callable"),
    (
        SpecialHandler("h", sections=lambda shape: []),
        r"sections can't be called as sections\(shape, \*, module, param_name",
    ),
    (
        SpecialHandler("h", sections=lambda shape, module, param_name, config, more: []),
        "sections can't be called as .*more",
    ),
    (CollectiveLowerer("l", lower="x"), "CollectiveLowerer 'l': lower is 'x'"),
    (CollectiveLowerer("l", lower=lambda: None), r"lower can't be called as lower\(transition\)"),
    (CollectiveLowerer("l", lower=lower, axes=("dp",)), "axes is .*'dp'"),
    (CollectiveLowerer("l", lower=lower, axes="tp"), "axes is 'tp', expected a tuple of cp, tp, ep"),
    (CollectiveLowerer("l", lower=lower, backends="nccl"), "backends is 'nccl'"),
    (CollectiveLowerer("l", lower=lower, exact=None), "exact is None"),
    (LossFactory("loss", factory="x"), "LossFactory 'loss': factory is 'x'"),
    (LossFactory("loss", factory=make, needs_axis="vocab"), "needs_axis is 'vocab'"),
    (ModelFamily("f", matches="one"), "ModelFamily 'f': matches is 'one', expected a tuple of model types"),
    (ModelFamily("f", matches=()), "matches is "),
    (ModelFamily("f", matches=("one",), roles={"*": "column"}), r"role of '\*' is 'column', expected one of colwise"),
    (ModelFamily("f", matches=("one",), roles=["colwise"]), "roles is .*expected {pattern: role}"),
    (
        ModelFamily("f", matches=("one",), boundaries={"*": "attn"}),
        "template of '.*' is 'attn', expected one of attention",
    ),
    (ModelFamily("f", matches=("one",), boundaries={"*": {"template": "x"}}), "template of '.*' is 'x'"),
    (ModelFamily("f", matches=("one",), boundaries={"*": ["mlp"]}), "boundaries is "),
    (ModelFamily("f", matches=("one",), handlers={"*": make}), "handlers is "),
    (ModelFamily("f", matches=("one",), facts={1: True}), "facts is "),
    (ModelFamily("f", matches=("one",), suggestions={"cp": ["x"]}), r"suggestion for 'cp' is \['x'\]"),
    (ModelFamily("f", matches=("one",), suggestions={"dp": []}), "suggestion for 'dp'"),
    (ModelFamily("f", matches=("one",), suggestions={"cp": {"match": "*"}}), "suggestions is "),
    (ModelFamily("f", matches=("one",), limits=[Limit("a", holds)]), "limits is "),
    (ModelFamily("f", matches=("one",), limits=("a",)), "limits is "),
    (ModelFamily("f", matches=("one",), limits=(Limit("", holds),)), "limits is "),
]


@pytest.mark.parametrize(("descriptor", "text"), WRONG)
def test_a_wrong_field_is_named_with_its_value(descriptor, text):
    with pytest.raises(PluginError, match=text) as caught:
        check_descriptor(descriptor)
    assert "\n" not in str(caught.value)
