"""What an error says when a name isn't there: known names, the nearest, who ships it, and which plugins failed."""

from __future__ import annotations

import pytest

from hyperpar_core.descriptors import InnerWrapper, LocalComputeFactory, LossFactory
from hyperpar_core.errors import PluginError
from hyperpar_core.plugins import Provider
from hyperpar_core.plugins.known import known_distribution


def said(call, *arguments) -> str:
    with pytest.raises(PluginError) as caught:
        call(*arguments)
    text = str(caught.value)
    assert len(text.splitlines()) <= 8, text
    return text


@pytest.fixture
def sdpa(door):
    return door.wrappers(
        "sdpa_hf", "sdpa_hf_ring", "sdpa_hf_ulysses", name="cp_sdpa", distribution="hyperpar-cp-sdpa", version="0.1.0"
    )


def test_an_unknown_name_lists_the_nearest_and_the_known_ones_with_their_distribution(door, sdpa):
    assert said(door.load(door.core(), sdpa).inner_wrapper, "sdpa_hf_ringg") == (
        "no inner wrapper 'sdpa_hf_ringg'. Nearest: sdpa_hf_ring, sdpa_hf.\n"
        "  Known: sdpa_hf, sdpa_hf_ring, sdpa_hf_ulysses (hyperpar-cp-sdpa 0.1.0). (No plugin failed to load.)"
    )


@pytest.mark.parametrize(
    ("kind", "name", "distribution"),
    [
        (InnerWrapper, "sdpa_hf", "hyperpar-cp-sdpa"),
        (InnerWrapper, "sdpa_hf_ring", "hyperpar-cp-sdpa"),
        (InnerWrapper, "sdpa_qkv_hybrid", "hyperpar-cp-sdpa"),
        (InnerWrapper, "flex_hf", "hyperpar-cp-flex"),
        (LocalComputeFactory, "experts_dispatch", "hyperpar-moe-ep"),
        (LocalComputeFactory, "expert_dispatch", "hyperpar-moe-ep"),
        (LocalComputeFactory, "topk_router", "hyperpar-moe-ep"),
        (LocalComputeFactory, "mixtral_topk_router", "hyperpar-moe-ep"),
        (LocalComputeFactory, "qwen2moe_shared_expert_gate", "hyperpar-moe-ep"),
        (LocalComputeFactory, "deepseekv3_sigmoid_group_shared", "hyperpar-moe-ep"),
        (LocalComputeFactory, "routed_only_softmax_topk", "hyperpar-moe-ep"),
        (LocalComputeFactory, "vocab_parallel_embedding", "hyperpar-vocab-embedding"),
        (LossFactory, "vocab_parallel_cross_entropy", "hyperpar-vocab-embedding"),
        (InnerWrapper, "somebody_s_own", None),
        (LossFactory, "sdpa_hf", None),
    ],
)
def test_the_distribution_that_is_known_to_ship_a_name_is_named(kind, name, distribution):
    assert known_distribution(kind, name) == distribution


def test_a_name_of_a_distribution_that_is_not_there_says_what_to_install(door):
    text = said(door.load(door.core()).inner_wrapper, "flex_hf")
    assert "Known: none.\n  It ships with hyperpar-cp-flex: pip install hyperpar-cp-flex." in text


def test_a_name_of_a_distribution_that_is_switched_off_says_so(door, sdpa):
    text = said(door.load(door.core(), sdpa, DISABLE_PLUGINS="cp_sdpa").inner_wrapper, "sdpa_hf")
    assert "It ships with hyperpar-cp-sdpa, which is installed but disabled." in text
    assert "Switched off by the environment: 'cp_sdpa' (hyperpar-cp-sdpa 0.1.0) disabled." in text
    text = said(door.load(door.core(), sdpa, LOAD_PLUGINS="").inner_wrapper, "anything")
    assert "'cp_sdpa' (hyperpar-cp-sdpa 0.1.0) excluded" in text


def test_a_name_that_a_broken_plugin_might_have_had_raises_that_plugin_s_reason(door):
    broken = door.plugin("import not_there_at_all", "mine", "acme-mine", "3.1")
    text = said(door.load(door.core(), broken).local_compute, "whatever")
    assert "Not loaded: 'mine' (acme-mine 3.1): ModuleNotFoundError: No module named 'not_there_at_all'" in text
    assert "No plugin failed" not in text


def test_many_broken_plugins_still_make_a_short_error(door):
    broken = [door.plugin("1 / 0", f"p{i:02}", f"acme-{i}") for i in range(20)]
    switched_off = [door.wrappers(name=f"q{i:02}", distribution=f"off-{i}") for i in range(20)]
    disabled = ",".join(f"q{i:02}" for i in range(20))
    text = said(door.load(door.core(), *broken, *switched_off, DISABLE_PLUGINS=disabled).inner_wrapper, "sdpa_hf")
    assert "17 more aren't loaded: see `hyperpar plugins`." in text and "and 17 more." in text


def test_a_name_of_another_kind_is_pointed_out(door, sdpa):
    assert "'sdpa_hf' is a inner wrapper." not in said(door.load(sdpa).loss, "sdpa_hf")
    assert "'sdpa_hf' is the name of an inner wrapper." in said(door.load(sdpa).loss, "sdpa_hf")


def test_a_core_without_metadata_is_pointed_out(door, sdpa):
    assert "hyperpar-core itself has no metadata" in said(door.load(sdpa).lowerer, "default")
    assert "hyperpar-core itself" not in said(door.load(door.core()).lowerer, "defualt")


@pytest.mark.parametrize("name", [None, 3, ["sdpa_hf"]])
def test_what_is_no_name_is_a_plugin_error_too(door, sdpa, name):
    assert "no inner wrapper" in said(door.load(sdpa).inner_wrapper, name)


@pytest.mark.parametrize("kind", ["inner_wrapper", "special_handler", "local_compute", "lowerer", "loss"])
def test_every_kind_of_lookup_fails_the_same_way(door, kind):
    assert f"no {kind.replace('_', ' ')} 'x'." in said(getattr(door.load(door.core()), kind), "x")


def test_offers_are_listed_by_name_and_find_does_not_mind(door, sdpa):
    registry = door.load(sdpa, door.wrappers("b", "a"))
    assert [one.name for one, _ in registry.offered(InnerWrapper)] == [
        "a", "b", "sdpa_hf", "sdpa_hf_ring", "sdpa_hf_ulysses",
    ]  # fmt: skip
    assert registry.find(InnerWrapper, "nope") is None
    descriptor, provider = registry.find(InnerWrapper, "sdpa_hf")
    assert (descriptor.name, str(provider)) == ("sdpa_hf", "hyperpar-cp-sdpa 0.1.0")


def test_families_are_listed_by_name_whoever_provides_them(door):
    def family(name):
        offer = f"ModelFamily({name!r}, matches=({name!r},))"
        return f"{door.header}\n@hookimpl\ndef hyperpar_model_families():\n    return [{offer}]\n"

    registry = door.load(door.plugin(family("zeta"), "a", "dist-a"), door.plugin(family("alpha"), "b", "dist-b"))
    assert [(one.name, provider) for one, provider in registry.families()] == [
        ("alpha", Provider("b", "dist-b", "1.0")),
        ("zeta", Provider("a", "dist-a", "1.0")),
    ]
