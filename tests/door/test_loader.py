"""The laws of the loader, on plugins that are faked in this process."""

from __future__ import annotations

import logging
import re
import threading

import pytest

from hyperpar_core import hookspecs, plugins
from hyperpar_core.descriptors import API_VERSION, CollectiveLowerer
from hyperpar_core.errors import PluginError
from hyperpar_core.plugins import loader
from hyperpar_core.plugins.registry import KINDS, Provider


def statuses(registry):
    return {plugin.provider.plugin: plugin.status for plugin in registry.plugins}


def wrapper_names(registry):
    return [one["registers"]["inner_wrappers"] for one in plugins.plugin_report(registry) if one["registers"]]


def test_a_good_plugin_registers_what_it_offers_and_a_lookup_says_who_provides_it(door):
    registry = door.load(door.wrappers("b", "a", name="demo", distribution="hyperpar-demo", version="1.2"))
    descriptor, provider = registry.inner_wrapper("a")
    assert descriptor.name == "a"
    assert provider == Provider("demo", "hyperpar-demo", "1.2")
    assert wrapper_names(registry) == [["a", "b"]]


def test_every_hook_has_a_kind_of_descriptor_or_is_the_plugin_info():
    specs = {name for name in vars(hookspecs) if name.startswith("hyperpar_")}
    assert specs == {kind.hook for kind in KINDS.values()} | {"hyperpar_plugin_info"}


def test_the_default_lowerer_comes_through_the_door_like_any_plugin(door):
    registry = door.load(door.core())
    descriptor, provider = registry.lowerer("default")
    assert isinstance(descriptor, CollectiveLowerer)
    assert provider == Provider("core", "hyperpar-core", "0.1.0")
    assert registry.digest_items() == [("core", "hyperpar-core", "0.1.0")]


# ---- broken plugins: (source after the header, what the reason says)

BROKEN = {
    "raises at import": ("raise RuntimeError('no licence')", r"RuntimeError: no licence \(.*door_plugin_\d+\.py:\d+\)"),
    "exits at import": ("raise SystemExit(3)", "SystemExit: 3"),
    "lacks a dependency": ("import not_there_at_all", "ModuleNotFoundError: No module named 'not_there_at_all'"),
    "is no Python": ("def (", "SyntaxError"),
    "needs a newer core's name": ("from hyperpar_core.descriptors import Hologram", "ImportError: .*'Hologram'"),
    "raises an error that can't be printed": (
        "class Odd(Exception):\n    def __str__(self):\n        raise ValueError\nraise Odd",
        r"Odd: \(no text\)",
    ),
    "hook raises": (
        "@hookimpl\ndef hyperpar_losses():\n    return [1 / 0]",
        r"hyperpar_losses raised ZeroDivisionError: division by zero \(.*door_plugin_\d+\.py:\d+\)",
    ),
    "hook exits": ("import sys\n@hookimpl\ndef hyperpar_losses():\n    sys.exit('bye')", "SystemExit: bye"),
    "hook returns nothing": (
        "@hookimpl\ndef hyperpar_losses():\n    pass",
        "hyperpar_losses returned None, expected a list of LossFactory",
    ),
    "hook returns one descriptor": (
        "@hookimpl\ndef hyperpar_losses():\n    return LossFactory('l', factory=lambda *, model: print)",
        r"hyperpar_losses returned LossFactory\(.*, expected a list of LossFactory",
    ),
    "hook returns another kind": (
        "@hookimpl\ndef hyperpar_losses():\n    return [InnerWrapper('l', factory=lambda *, target_module: print)]",
        r"hyperpar_losses returned \[InnerWrapper\(.*, expected a list of LossFactory",
    ),
    "hook is a generator": ("@hookimpl\ndef hyperpar_losses():\n    yield 1", "hyperpar_losses returned <generator"),
    "unknown hook": (
        "@hookimpl\ndef hyperpar_inner_wrapper():\n    return []",
        rf"unknown hook 'hyperpar_inner_wrapper' \(core API {API_VERSION}, nearest: hyperpar_inner_wrappers\)",
    ),
    "argument of an older core": (
        "@hookimpl\ndef hyperpar_losses(config, model=None):\n    return []",
        r"hyperpar_losses\(config, model=None\) asks for config: hooks of core API [\d.]+ take no arguments",
    ),
    "unmarked hook": (
        "def hyperpar_losses():\n    return []",
        r"hyperpar_losses isn't marked with @hookimpl \(from hyperpar_core import hookimpl\)",
    ),
    "wrapper hook": (
        "@hookimpl(wrapper=True)\ndef hyperpar_losses():\n    return (yield)",
        "hyperpar_losses is marked wrapper, which does nothing",
    ),
    "ordered hook": (
        "@hookimpl(tryfirst=True)\ndef hyperpar_losses():\n    return []",
        "hyperpar_losses is marked tryfirst, which does nothing",
    ),
    "malformed descriptor": (
        "@hookimpl\ndef hyperpar_losses():\n    return [LossFactory('no spaces please', factory=print)]",
        "LossFactory has name 'no spaces please'",
    ),
    "one name twice": (
        "@hookimpl\ndef hyperpar_losses():\n    return 2 * [LossFactory('x', factory=lambda *, model: print)]",
        "it offers two loss descriptors named 'x'",
    ),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_plugin_is_left_out_whole_with_its_reason_and_stops_no_other(door, fault, caplog):
    source, reason = BROKEN[fault]
    bad = door.plugin(door.wrapper_source("bad_one") + source + "\n", "bad", "hyperpar-bad", "0.3")
    good = door.wrappers("good_one", name="good", distribution="hyperpar-good")
    registry = door.load(bad, good)
    assert statuses(registry) == {"bad": "broken", "good": "loaded"}
    (broken,) = [plugin for plugin in registry.plugins if plugin.status == "broken"]
    assert re.search(reason, broken.reason), broken.reason
    assert registry.inner_wrapper("good_one")
    assert registry.digest_items() == [("good", "hyperpar-good", "1.0")]
    (warning,) = caplog.records
    assert warning.levelno == logging.WARNING
    assert "plugin 'bad' (hyperpar-bad 0.3) is left out: " in warning.message
    with pytest.raises(PluginError, match=re.escape(broken.reason)):
        registry.inner_wrapper("bad_one")


@pytest.mark.parametrize("fault", BROKEN)
def test_strict_mode_raises_at_once_what_is_broken(door, fault):
    source, reason = BROKEN[fault]
    bad = door.plugin(door.wrapper_source("bad_one") + source + "\n", "bad", "hyperpar-bad", "0.3")
    with pytest.raises(PluginError, match=rf"plugin 'bad' \(hyperpar-bad 0.3\) is broken: (?s:.*){reason}"):
        door.load(bad, STRICT_PLUGINS="1")


def test_strict_mode_says_nothing_where_nothing_is_broken(door, caplog):
    assert statuses(door.load(door.wrappers("a"), STRICT_PLUGINS="1")) == {"demo": "loaded"}
    assert not caplog.records


@pytest.mark.parametrize(
    "value", ["no_such_module_at_all", "not a module!", "json:no_such_attribute", "os.path:sep", "json"]
)
def test_an_entry_point_that_leads_to_no_plugin_is_broken(door, value):
    (plugin,) = door.load(door.distribution(demo=value)).plugins
    assert plugin.status == "broken" and plugin.reason


def test_the_traceback_of_a_broken_import_is_the_cause_of_the_error_for_a_name(door):
    registry = door.load(door.plugin("import not_there_at_all"))
    with pytest.raises(PluginError) as caught:
        registry.loss("x")
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_a_plugin_object_works_as_well_as_a_module(door):
    source = f"""{door.header}
class Offer:
    @hookimpl
    def hyperpar_losses(self):
        return [LossFactory("mine", factory=lambda *, model: print)]
offer = Offer()
"""
    registry = door.load(door.distribution(demo=f"{door.module(source)}:offer"))
    assert registry.loss("mine")
    (plugin,) = door.load(door.distribution(demo=f"{door.module(source)}:Offer")).plugins
    assert "asks for self" in plugin.reason


def test_an_optional_hook_of_a_newer_core_is_no_fault(door):
    source = door.wrapper_source("a") + "@hookimpl(optionalhook=True)\ndef hyperpar_future():\n    return []\n"
    assert door.load(door.plugin(source)).inner_wrapper("a")


def test_a_hook_under_another_function_name_counts(door):
    source = "@hookimpl(specname='hyperpar_losses')\ndef mine():\n    return [LossFactory('m', factory=make)]\n"
    registry = door.load(door.plugin(f"{door.header}\n{source}\ndef make(*, model):\n    return print\n"))
    assert registry.loss("m")


# ---- versions

INFO = """
from hyperpar_core import hookimpl
from hyperpar_core.descriptors import *

@hookimpl
def hyperpar_plugin_info():
"""


@pytest.mark.parametrize(
    ("api", "accepted"), [(API_VERSION, True), ("1.0", True), ("1.99", False), ("2.0", False), ("0.9", False)]
)
def test_a_plugin_for_another_core_api_is_left_out_in_one_sentence_with_both_versions(door, api, accepted):
    plugin = door.only(f"{INFO}    return PluginInfo(api={api!r})\n")
    assert (plugin.status == "loaded") == accepted
    if not accepted:
        assert plugin.reason == f"it was written for core API {api}, this core has API {API_VERSION}"


def test_a_plugin_for_a_newer_core_hears_of_the_version_and_not_of_its_newer_hooks_and_arguments(door):
    source = f"{INFO}    return PluginInfo(api='2.0')\n@hookimpl\ndef hyperpar_holograms(depth):\n    return []\n"
    assert "core API 2.0" in door.only(source + "@hookimpl\ndef hyperpar_losses(model):\n    return []\n").reason


@pytest.mark.parametrize(
    ("requires", "reason"),
    [
        ("('torch>=2.9', 'transformers>=5,<6')", None),
        ("('torch>=2.9; python_version < \"3\"', 'no-such-thing; python_version < \"3\"')", None),
        ("('torch>=99',)", r"it needs torch>=99, and torch 2\.\S+ is installed"),
        ("('torch', 'transformers<4')", r"it needs transformers<4, and transformers 5\.\S+ is installed"),
        ("('no-such-thing>=1',)", "it needs no-such-thing>=1, and no-such-thing isn't installed"),
        ("('torch >> 2',)", "'torch >> 2', which is no PEP 508 requirement"),
        ("(3,)", "3, which is no PEP 508 requirement"),
        ("('torch[extra]>=2',)", "write a plain range"),
        ("'torch>=2'", "PluginInfo.requires is 'torch>=2', expected a tuple"),
    ],
)
def test_the_torch_and_transformers_that_a_plugin_accepts_are_checked(door, requires, reason):
    plugin = door.only(f"{INFO}    return PluginInfo(requires={requires})\n")
    assert plugin.status == ("broken" if reason else "loaded"), plugin.reason
    if reason:
        assert re.search(reason, plugin.reason), plugin.reason
        assert "\n" not in plugin.reason


@pytest.mark.parametrize("info", ["None", "'1.0'", "PluginInfo(api='one')", "PluginInfo(api=1)"])
def test_a_malformed_plugin_info_is_a_reason(door, info):
    assert "PluginInfo" in door.only(f"{INFO}    return {info}\n").reason


# ---- one name twice


def test_the_same_plugin_found_twice_is_one(door):
    value = door.module(door.wrapper_source("a"))
    copies = [
        door.distribution(name, "1.0", demo=value) for name in ("hyperpar-demo", "Hyperpar_Demo", "hyperpar.demo")
    ]
    registry = door.load(*copies)
    assert registry.digest_items() == [("demo", "hyperpar-demo", "1.0")]
    assert len(registry.plugins) == 1


def test_of_two_versions_of_one_distribution_the_first_on_the_path_counts_as_for_imports(door):
    new, old = door.wrappers("new", version="2.0"), door.wrappers("old", version="1.0")
    assert door.load(new, old).digest_items() == [("demo", "hyperpar-demo", "2.0")]


def test_two_plugins_under_one_name_are_both_left_out_naming_both_distributions(door):
    one = door.wrappers("x", name="same", distribution="hyperpar-one")
    two = door.wrappers("y", name="same", distribution="hyperpar-two", version="2.0")
    other = door.wrappers("z", name="other", distribution="hyperpar-other")
    registry = door.load(one, two, other)
    assert registry.digest_items() == [("other", "hyperpar-other", "1.0")]
    claim = "plugin name 'same' is claimed by 'same' (hyperpar-one 1.0) and by 'same' (hyperpar-two 2.0)"
    assert [plugin.reason.split(":")[0] for plugin in registry.plugins if plugin.status == "broken"] == [claim, claim]
    with pytest.raises(PluginError, match=re.escape(claim)):
        registry.inner_wrapper("x")
    with pytest.raises(PluginError, match=re.escape(claim)):
        door.load(one, two, other, STRICT_PLUGINS="1")
    assert door.load(one, two, DISABLE_PLUGINS="hyperpar-one").inner_wrapper("y")


def test_two_descriptors_under_one_name_leave_both_plugins_out_naming_both_distributions(door):
    one = door.wrappers("shared", "mine", name="one", distribution="hyperpar-one")
    two = door.wrappers("shared", name="two", distribution="hyperpar-two")
    other = door.wrappers("other", name="other", distribution="hyperpar-other")
    for distributions in [(one, two, other), (other, two, one)]:
        registry = door.load(*distributions)
        assert statuses(registry) == {"one": "broken", "other": "loaded", "two": "broken"}
        claim = "inner wrapper 'shared' is claimed by 'one' (hyperpar-one 1.0) and by 'two' (hyperpar-two 1.0)"
        for name in ("shared", "mine"):
            with pytest.raises(PluginError, match=re.escape(claim)):
                registry.inner_wrapper(name)
        assert registry.inner_wrapper("other")
    with pytest.raises(PluginError, match=re.escape(claim)):
        door.load(one, two, STRICT_PLUGINS="1")
    assert door.load(one, two, DISABLE_PLUGINS="two").inner_wrapper("mine")


def test_a_chain_of_clashes_leaves_every_party_out_whatever_the_order(door):
    names = {"a": ("x",), "b": ("x", "y"), "c": ("y", "z"), "d": ("z",), "e": ("w",)}
    made = [door.wrappers(*offers, name=name, distribution=f"hyperpar-{name}") for name, offers in names.items()]
    for distributions in (made, made[::-1]):
        assert [item[0] for item in door.load(*distributions).digest_items()] == ["e"]


def test_descriptors_of_two_kinds_may_share_a_name(door):
    source = door.wrapper_source("same") + (
        "@hookimpl\ndef hyperpar_losses():\n    return [LossFactory('same', factory=lambda *, model: print)]\n"
    )
    registry = door.load(door.plugin(source))
    assert registry.inner_wrapper("same") and registry.loss("same")


def test_nobody_takes_the_core_s_own_names_away(door):
    hook = "@hookimpl\ndef hyperpar_collective_lowerers():\n    return [CollectiveLowerer('default', len)]\n"
    lowerer = f"{door.header}\n{hook}"
    for name in ("core", "mine"):
        registry = door.load(door.core(), door.plugin(lowerer, name, "hyperpar-mine"))
        assert registry.lowerer("default")[1].distribution == "hyperpar-core"
        (broken,) = [plugin for plugin in registry.plugins if plugin.status == "broken"]
        assert "hyperpar-core 0.1.0" in broken.reason and "hyperpar-mine 1.0" in broken.reason


# ---- damaged installations


def test_one_unreadable_entry_points_file_hides_no_other_plugin(door):
    damaged = door.distribution("hyperpar-damaged")
    damaged.texts["entry_points.txt"] = "[hyperpar]\nthis line has no equals sign"
    stranger = door.distribution("somebody-else")
    stranger.texts["entry_points.txt"] = "[console_scripts]\nnonsense"
    registry = door.load(stranger, damaged, door.wrappers("a"))
    assert registry.inner_wrapper("a")
    assert statuses(registry) == {"demo": "loaded", "hyperpar-damaged": "broken"}


def test_a_distribution_without_metadata_is_broken_and_a_sound_copy_of_it_loads(door):
    value = door.module(door.wrapper_source("a"))
    registry = door.load(door.distribution(None, demo=value), door.distribution("hyperpar-demo", "1.0", demo=value))
    assert registry.digest_items() == [("demo", "hyperpar-demo", "1.0")]
    assert [plugin.reason for plugin in registry.plugins if plugin.status == "broken"] == [
        "its metadata has no name and version: install it again"
    ]


# ---- the environment


@pytest.fixture
def three(door):
    return (
        door.core(),
        door.wrappers("a", name="cp_one", distribution="hyperpar-cp-one"),
        door.wrappers("b", name="two", distribution="acme-two"),
    )


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, {"cp_one": "loaded", "two": "loaded"}),
        ({"DISABLE_PLUGINS": ""}, {"cp_one": "loaded", "two": "loaded"}),
        ({"DISABLE_PLUGINS": "cp_one"}, {"cp_one": "disabled", "two": "loaded"}),
        ({"DISABLE_PLUGINS": "hyperpar_cp_one, two"}, {"cp_one": "disabled", "two": "disabled"}),
        ({"LOAD_PLUGINS": ""}, {"cp_one": "excluded", "two": "excluded"}),
        ({"LOAD_PLUGINS": "two"}, {"cp_one": "excluded", "two": "loaded"}),
        ({"LOAD_PLUGINS": "Acme.Two"}, {"cp_one": "excluded", "two": "loaded"}),
        ({"LOAD_PLUGINS": "cp_one,two", "DISABLE_PLUGINS": "two"}, {"cp_one": "loaded", "two": "disabled"}),
    ],
)
def test_plugins_are_switched_by_entry_point_or_distribution_and_the_core_s_own_always_loads(
    door, three, environ, expected
):
    registry = door.load(*three, **environ)
    assert statuses(registry) == {"core": "loaded", **expected}
    assert registry.lowerer("default")
    assert [name for name, _, _ in registry.digest_items()] == [
        "core", *(name for name, status in expected.items() if status == "loaded"),
    ]  # fmt: skip


def test_what_is_switched_off_is_never_imported(door):
    bomb = door.plugin("raise AssertionError('imported')")
    assert statuses(door.load(bomb, DISABLE_PLUGINS="demo", STRICT_PLUGINS="1")) == {"demo": "disabled"}
    assert statuses(door.load(bomb, LOAD_PLUGINS="", STRICT_PLUGINS="1")) == {"demo": "excluded"}


@pytest.mark.parametrize(
    "environ", [{"DISABLE_PLUGINS": "cp_on"}, {"LOAD_PLUGINS": "cp_on"}, {"DISABLE_PLUGINS": "core"}]
)
def test_a_name_in_the_environment_that_switches_nothing_is_warned_of_and_raised_in_strict_mode(
    door, three, environ, caplog
):
    door.load(*three, **environ)
    ((variable, name),) = environ.items()
    assert f"HYPERPAR_{variable} names {name!r}, which is no external plugin" in caplog.text
    with pytest.raises(PluginError, match=f"HYPERPAR_{variable} names {name!r}"):
        door.load(*three, STRICT_PLUGINS="1", **environ)


@pytest.mark.parametrize("variable", ["STRICT_PLUGINS", "TRACE_PLUGINS"])
def test_a_flag_that_is_neither_1_nor_0_is_an_error(door, variable):
    with pytest.raises(PluginError, match=f"HYPERPAR_{variable} is 'yes': write 1 or 0"):
        door.load(**{variable: "yes"})
    assert door.load(**{variable: "0"}).plugins == ()


def test_trace_prints_each_load_with_its_time(door, capsys):
    bad = door.plugin("import not_there_at_all", "bad", "hyperpar-bad")
    door.load(door.wrappers("a"), bad, TRACE_PLUGINS="1")
    first, second = capsys.readouterr().err.splitlines()
    assert re.fullmatch(
        r"hyperpar: 'bad' \(hyperpar-bad 1.0\) in \d\.\d{3} s: left out: ModuleNotFoundError: .*", first
    )
    assert re.fullmatch(r"hyperpar: 'demo' \(hyperpar-demo 1.0\) in \d\.\d{3} s: inner wrapper a", second)
    door.load(door.wrappers("a"))
    assert capsys.readouterr().err == ""


# ---- once per process


@pytest.fixture
def process(door, monkeypatch):
    """A process in which only `found` is installed; what this one had loaded is back afterwards."""
    found = []
    for variable in ("LOAD", "DISABLE", "STRICT", "TRACE"):
        monkeypatch.delenv(f"HYPERPAR_{variable}_PLUGINS", raising=False)
    monkeypatch.setattr(loader.importlib_metadata, "distributions", lambda: found)
    monkeypatch.setattr(loader, "_process", loader._Process())
    return found


def test_the_registry_loads_once_per_process_until_it_is_reset(door, process):
    process.append(door.wrappers("a"))
    first = plugins.get_registry()
    process.append(door.wrappers("b", name="later", distribution="hyperpar-later"))
    assert plugins.get_registry() is first
    plugins.reset()
    assert plugins.get_registry().inner_wrapper("b")


def test_threads_that_ask_at_once_get_one_registry(door, process):
    process.append(door.plugin("import time; time.sleep(0.1)\n" + door.wrapper_source("a")))
    got, start = [], threading.Barrier(4)

    def ask():
        start.wait()
        got.append(plugins.get_registry())

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 4 and len(set(map(id, got))) == 1


def test_a_plugin_that_asks_for_the_plugins_while_they_load_is_broken(door, process):
    process.append(door.plugin("from hyperpar_core.plugins import get_registry\nget_registry()"))
    (plugin,) = plugins.get_registry().plugins
    assert "asks for the plugins while they are loading" in plugin.reason


def test_a_strict_failure_is_raised_again_at_the_next_call(door, process, monkeypatch):
    process.append(door.plugin("import not_there_at_all"))
    monkeypatch.setenv("HYPERPAR_STRICT_PLUGINS", "1")
    for _ in range(2):
        with pytest.raises(PluginError, match="not_there_at_all"):
            plugins.get_registry()
