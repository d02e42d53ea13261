"""The report of the plugins and of the environment, as data and as text."""

from __future__ import annotations

import json
import re
import sys

import pytest

from hyperpar_core import plugins
from hyperpar_core.plugins import loader
from hyperpar_core.view.plugins_view import env_report, env_text, plugins_text

KEYS = ["name", "distribution", "version", "entry_point", "status", "reason", "notes", "seconds", "registers"]


@pytest.fixture
def registry(door):
    losses = "@hookimpl\ndef hyperpar_losses():\n    return [LossFactory('ce', factory=lambda *, model: print)]\n"
    return door.load(
        door.core(),
        door.plugin(door.wrapper_source("ring", "all_gather") + losses, "good", "hyperpar-good", "0.2"),
        door.plugin("1 / 0", "bad", "hyperpar-bad"),
        door.wrappers("a", name="off", distribution="hyperpar-off"),
        door.wrappers("b", name="out", distribution="hyperpar-out"),
        DISABLE_PLUGINS="off",
        LOAD_PLUGINS="good,bad,off",
    )


def test_the_report_says_of_every_plugin_what_became_of_it_and_is_json(registry):
    report = plugins.plugin_report(registry)
    assert json.loads(json.dumps(report)) == report
    assert [list(one) for one in report] == [KEYS] * 5
    by_name = {one["name"]: one for one in report}
    assert list(by_name) == ["bad", "core", "good", "off", "out"]
    assert {name: one["status"] for name, one in by_name.items()} == {
        "bad": "broken", "core": "loaded", "good": "loaded", "off": "disabled", "out": "excluded",
    }  # fmt: skip
    assert by_name["good"]["registers"] == {"inner_wrappers": ["all_gather", "ring"], "losses": ["ce"]}
    assert by_name["core"]["registers"] == {"collective_lowerers": ["default"]}
    assert by_name["bad"]["registers"] == by_name["off"]["registers"] == {}
    assert by_name["off"]["reason"] == "named in HYPERPAR_DISABLE_PLUGINS"
    assert by_name["out"]["reason"] == "not named in HYPERPAR_LOAD_PLUGINS"
    assert by_name["good"]["seconds"] > 0 == by_name["off"]["seconds"]


@pytest.mark.parametrize("with_rich", [True, False])
def test_the_table_shows_every_plugin_and_why_one_is_left_out(registry, monkeypatch, with_rich):
    if not with_rich:
        for module in ("rich.console", "rich.table"):
            monkeypatch.setitem(sys.modules, module, None)
    text = plugins_text(plugins.plugin_report(registry), width=160)
    header, *rows = text.splitlines()
    assert header.split() == ["plugin", "distribution", "status", "load", "registers"]
    cells = [row.split() for row in rows[:5]]
    assert [row[0] for row in cells] == ["bad", "core", "good", "off", "out"]
    assert "inner wrappers: all_gather, ring; losses: ce" in rows[2]
    assert "hyperpar-good 0.2" in rows[2]
    assert "named in HYPERPAR_DISABLE_PLUGINS" in rows[3]
    assert any(row.startswith("bad: ZeroDivisionError: division by zero") for row in rows[5:])
    assert not any(line != line.rstrip() for line in text.splitlines())


def test_no_plugin_is_said_in_words():
    assert plugins_text([]) == "no plugin is installed"


def notes(registry):
    return {one["name"]: one["notes"] for one in plugins.plugin_report(registry)}


PRIVATE = """
import hyperpar_core.plan.build
from hyperpar_core import plan, hookimpl, build_plan
from hyperpar_core.apply.applier import install
from hyperpar_core.collectives import functional, transition
from hyperpar_core.collectives.functional import all_reduce
from hyperpar_core.testing import ranks
from hyperpar_core.errors import Refused
def later():
    from hyperpar_core.hookspecs import hookspec
"""


def test_imports_of_the_core_s_private_modules_are_noted_with_their_line(door):
    package = door.folder / "nosy"
    package.mkdir()
    (package / "__init__.py").write_text(door.wrapper_source("a"))
    (package / "part.py").write_text(PRIVATE)
    found = notes(door.load(door.distribution("acme-nosy", "1.0", nosy="nosy")))["nosy"]
    assert found == [
        f"imports the core's private module hyperpar_core.{name} (nosy/part.py:{line})"
        for name, line in [
            ("plan.build", 2), ("plan", 3), ("apply.applier", 4), ("collectives", 5), ("hookspecs", 10),
        ]
    ]  # fmt: skip


def test_a_plugin_of_one_file_is_read_too_and_the_core_s_own_may_do_what_it_likes(door):
    nosy = door.plugin(door.wrapper_source("a") + "import hyperpar_core.apply\n")
    found = notes(door.load(door.core(), nosy, door.wrappers("b", name="clean", distribution="acme-clean")))
    assert found["core"] == found["clean"] == []
    (note,) = found["demo"]
    assert note.startswith("imports the core's private module hyperpar_core.apply (door_plugin_")


def test_a_slow_plugin_is_noted_with_its_time(door, monkeypatch):
    monkeypatch.setattr(loader, "SLOW", 0.05)
    slow = door.plugin("import time; time.sleep(0.06)\n" + door.wrapper_source("a"))
    registry = door.load(slow, door.wrappers("b", name="fast", distribution="acme-fast"))
    assert notes(registry) == {"demo": ["took 0.1 s to load: import heavy modules in the factories"], "fast": []}
    assert "demo: took 0.1 s" in plugins_text(plugins.plugin_report(registry))


def test_a_plugin_that_states_no_versions_is_noted(door):
    source = "from hyperpar_core import hookimpl\n@hookimpl\ndef hyperpar_losses():\n    return []\n"
    assert notes(door.load(door.plugin(source))) == {"demo": ["states no versions: implement hyperpar_plugin_info"]}


def test_the_environment_report_has_what_a_report_of_a_fault_needs(monkeypatch):
    monkeypatch.setenv("HYPERPAR_LOAD_PLUGINS", "")
    plugins.reset()
    try:
        report = env_report()
    finally:
        plugins.reset()
    assert json.loads(json.dumps(report)) == report
    assert report["environment"] == {"HYPERPAR_LOAD_PLUGINS": ""}
    assert report["libraries"]["torch"].startswith("2.")
    assert {one["status"] for one in report["plugins"]} <= {"loaded", "excluded"}
    text = env_text(report)
    for word in ("python", "torch", "transformers", "core API", "cuda", "gloo", "nccl", "HYPERPAR_LOAD_PLUGINS"):
        assert any(line.startswith(word) for line in text.splitlines()), word


def test_the_environment_report_reads_well_with_a_gpu_and_a_broken_plugin():
    report = {
        "python": "3.11.7", "platform": "Linux", "cpu_count": 8, "api": "1.0",
        "libraries": {"torch": "2.13.0", "safetensors": None},
        "cuda": {"available": True, "version": "13.0", "devices": ["H200", "H200"]},
        "backends": {"gloo": True, "nccl": "2.27.3"},
        "plugins": [{"name": "x", "distribution": "acme", "version": "1", "status": "broken", "reason": "no licence"}],
        "environment": {},
    }  # fmt: skip
    lines = [line.split(None, 1) for line in env_text(report).splitlines()]
    assert ["torch", "2.13.0"] in lines and ["safetensors", "not installed"] in lines
    assert ["cuda", "13.0, H200, H200"] in lines and ["nccl", "2.27.3"] in lines
    assert re.search("(?m)^plugin x +acme 1, broken: no licence$", env_text(report))
    assert re.search("(?m)^HYPERPAR_ variables +none$", env_text(report))
