"""A name that was added, renamed or retired: an old plugin gets a note, then one clear refusal, and start-up never crashes."""

from __future__ import annotations

import dataclasses
import logging
import pickle

import pytest

from hyperpar_core import changes, descriptors
from hyperpar_core.changes import Change
from hyperpar_core.errors import PluginError
from hyperpar_core.plugins import call_factory, check_factory, checks, factories, plugin_report

# The fields of API 1.0. What came later stands in the table of changes, so that a plugin that states an older API is told.
FIRST = {
    "PluginInfo": {"api", "requires"},
    "InnerWrapper": {"name", "factory", "forward_style", "needs_axis", "region_dispatch", "summary"},
    "LocalComputeFactory": {"name", "factory", "expects", "needs_axis", "region_dispatch", "summary"},
    "SpecialHandler": {"name", "sections", "summary"},
    "CollectiveLowerer": {"name", "lower", "axes", "backends", "exact", "summary"},
    "LossFactory": {"name", "factory", "needs_axis", "summary"},
    "ModelFamily": {
        "name", "matches", "roles", "boundaries", "handlers", "facts", "suggestions", "limits", "summary",
    },
}  # fmt: skip
CONTEXT = {"module", "target_module", "fqn", "mesh", "tp_mesh", "cp_mesh", "ep_mesh", "contract", "mode", "model"}


@pytest.fixture
def api(monkeypatch):
    """Makes this core one of another API, with further changes."""

    def set_to(version: str, *more: Change) -> None:
        for module in (changes, checks):
            monkeypatch.setattr(module, "API_VERSION", version)
        monkeypatch.setattr(changes, "CHANGES", (*changes.CHANGES, *more))

    return set_to


def only(door, source):
    registry = door.load(door.plugin(source))
    (report,) = plugin_report(registry)
    notes = [note for note in report["notes"] if not note.startswith(("took ", "states no versions"))]
    return registry, report["status"], report["reason"], notes


@pytest.mark.parametrize("kind", FIRST)
def test_a_field_that_api_1_0_did_not_have_stands_in_the_table_with_its_version(kind):
    now = {f.name for f in dataclasses.fields(getattr(descriptors, kind))}
    later = {change.name for change in changes.CHANGES if change.of == kind and change.added != "1.0"}
    assert now == FIRST[kind] | later


def test_a_context_name_that_api_1_0_did_not_have_stands_in_the_table():
    later = {change.name for change in changes.CHANGES if change.of == "factory" and change.added != "1.0"}
    assert set(descriptors.CONTEXT_NAMES) == CONTEXT | later


def test_no_change_is_of_an_api_that_this_core_does_not_have():
    for change in changes.CHANGES:
        assert changes._reached(change.added) and hasattr(descriptors, change.of)


# ---- fields

LOWERER = """
from hyperpar_core import hookimpl
from hyperpar_core.descriptors import CollectiveLowerer, InnerWrapper, PluginInfo

@hookimpl
def hyperpar_plugin_info():
    return PluginInfo(api="{api}")

@hookimpl
def hyperpar_collective_lowerers():
    return [CollectiveLowerer("l", lower=lambda transition: None, exact=False, {field})]
"""


def test_a_field_of_a_newer_api_than_the_plugin_states_is_a_note(door):
    registry, status, _, notes = only(door, LOWERER.format(api="1.0", field="error=0.1"))
    assert status == "loaded" and registry.lowerer("l")[0].error == 0.1
    assert notes == ["it uses CollectiveLowerer.error of core API 1.1 and states 1.0: state 1.1"]
    assert only(door, LOWERER.format(api="1.1", field="error=0.1"))[3] == []
    assert only(door, LOWERER.format(api="1.0", field=""))[3] == []


RENAMED = Change("CollectiveLowerer", "kinds", deprecated="1.2", refused="1.4", instead="backends")
RETIRED = Change("CollectiveLowerer", "priority", deprecated="1.2", refused="1.4")


def test_a_renamed_field_works_with_a_note_and_a_warning(door, api, caplog):
    api("1.3", RENAMED)
    with caplog.at_level(logging.WARNING):
        registry, status, _, notes = only(door, LOWERER.format(api="1.0", field="kinds=('nccl',)"))
    assert status == "loaded" and registry.lowerer("l")[0].backends == ("nccl",)
    assert notes == ["CollectiveLowerer 'l': field 'kinds' is deprecated since core API 1.2: write backends"]
    assert sum("field 'kinds' is deprecated" in record.message for record in caplog.records) == 1


def test_a_retired_field_is_ignored_with_a_note(door, api):
    api("1.3", RETIRED)
    _, status, _, notes = only(door, LOWERER.format(api="1.0", field="priority=3"))
    assert status == "loaded"
    assert notes == ["CollectiveLowerer 'l': field 'priority' is deprecated since core API 1.2: leave it out"]


@pytest.mark.parametrize(("change", "field", "advice"), [(RENAMED, "kinds", "write backends"), (RETIRED, "priority", "leave it out")])
def test_a_name_that_is_gone_leaves_the_plugin_out_with_one_sentence_and_the_others_load(door, api, change, field, advice):
    api("1.4", change)
    source = LOWERER.format(api="1.0", field=f"{field}=()")
    registry = door.load(door.plugin(source), door.wrappers("w", name="other", distribution="hyperpar-other"))
    states = {plugin.provider.plugin: plugin for plugin in registry.plugins}
    assert states["other"].status == "loaded" and states["demo"].status == "broken"
    assert f"CollectiveLowerer: field '{field}' is gone since core API 1.4: {advice}" in states["demo"].reason
    assert "\n" not in states["demo"].reason and "door_plugin_" in states["demo"].reason, "the plugin's own line"


def test_a_name_is_refused_where_it_stands_at_the_top_of_a_module_too(door, api):
    api("1.4", RENAMED)
    top = LOWERER.format(api="1.0", field="") + "\nX = CollectiveLowerer('x', lower=print, kinds=())\n"
    _, status, reason, _ = only(door, top)
    assert status == "broken" and "field 'kinds' is gone since core API 1.4: write backends" in reason


def test_the_old_and_the_new_name_of_one_field_together_are_refused(door, api):
    api("1.3", RENAMED)
    _, status, reason, _ = only(door, LOWERER.format(api="1.0", field="kinds=(), backends=()"))
    assert status == "broken" and "kinds and backends are one field; write backends alone" in reason


def test_a_field_of_a_newer_core_is_one_sentence_with_the_fields_that_are_there(door):
    _, status, reason, _ = only(door, LOWERER.format(api="1.0", field="colour='red'"))
    assert status == "broken"
    assert "CollectiveLowerer has no field 'colour' in core API 1.1 (fields: axes, backends, error, exact, lower" in reason


def test_a_descriptor_made_with_an_old_name_pickles_and_compares_as_any_other(api):
    api("1.3", RENAMED)
    old = descriptors.CollectiveLowerer("l", print, kinds=("nccl",))
    assert old == descriptors.CollectiveLowerer("l", print, backends=("nccl",)) == pickle.loads(pickle.dumps(old))
    assert changes.deprecated_names(old) == ("kinds",)


# ---- context names of factories

WRAPPER = """
from hyperpar_core import hookimpl
from hyperpar_core.descriptors import InnerWrapper, PluginInfo

def factory(*, target_module, {asks}):
    return ({returns}).__str__

@hookimpl
def hyperpar_plugin_info():
    return PluginInfo(api="{api}")

@hookimpl
def hyperpar_inner_wrappers():
    return [InnerWrapper("w", factory)]
"""
MESH = Change("factory", "whole_mesh", deprecated="1.2", refused="1.4", instead="mesh")
CLOCK = Change("factory", "clock", deprecated="1.2", refused="1.4")


def made(registry, context, options):
    return call_factory(registry.inner_wrapper("w")[0].factory, context, options, "here")()


def test_a_renamed_context_name_gets_the_value_of_the_new_one_with_a_note(door, api):
    api("1.3", MESH)
    source = WRAPPER.format(api="1.0", asks="whole_mesh, scale=1", returns="whole_mesh, scale")
    registry, status, _, notes = only(door, source)
    assert status == "loaded"
    assert notes == ["InnerWrapper 'w': the factory asks for 'whole_mesh', deprecated since core API 1.2: ask for mesh"]
    assert made(registry, {"target_module": None, "mesh": "M"}, {"scale": 2}) == "('M', 2)"
    with pytest.raises(PluginError, match=r"unknown option 'whole_mesh'. Options: scale."):
        check_factory(registry.inner_wrapper("w")[0].factory, {"whole_mesh": 1}, "here")


def test_a_retired_context_name_gets_none_with_a_note(door, api):
    api("1.3", CLOCK)
    registry, status, _, notes = only(door, WRAPPER.format(api="1.0", asks="clock", returns="clock,"))
    assert status == "loaded"
    assert notes == ["InnerWrapper 'w': the factory asks for 'clock', deprecated since core API 1.2: do without it"]
    assert made(registry, {"target_module": None}, {}) == "(None,)"


def test_a_context_name_that_is_gone_leaves_the_plugin_out_with_one_sentence(door, api):
    api("1.4", MESH, CLOCK)
    for asks, advice in (("whole_mesh", "ask for mesh"), ("clock", "do without it")):
        _, status, reason, _ = only(door, WRAPPER.format(api="1.0", asks=asks, returns="1"))
        assert status == "broken"
        assert reason == f"InnerWrapper 'w': the factory asks for '{asks}', which is gone since core API 1.4: {advice}"


DEVICE = Change("factory", "device", added="1.2")


def test_an_option_that_a_newer_core_made_a_context_name_stays_the_old_plugin_s_option_with_a_note(door, api, monkeypatch):
    api("1.2", DEVICE)
    monkeypatch.setattr(factories, "CONTEXT_NAMES", factories.CONTEXT_NAMES | {"device"})
    source = WRAPPER.format(api="1.1", asks="device='cpu'", returns="device,")
    registry, status, _, notes = only(door, source)
    assert status == "loaded"
    assert notes == ["InnerWrapper 'w': its option 'device' has had the name of a context since core API 1.2: rename the option"]
    context = {"target_module": None, "device": "the core's"}
    assert made(registry, context, {"device": "mine"}) == "('mine',)" and made(registry, context, {}) == "('cpu',)"
    newer, _, _, notes = only(door, WRAPPER.format(api="1.2", asks="device", returns="device,"))
    assert notes == [] and made(newer, context, {}) == "(\"the core's\",)"
