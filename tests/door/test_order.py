"""Nothing depends on the order of installation, on how many plugins there are, or on what other plugins do wrong."""

from __future__ import annotations

import json
import random
import sys
import time
import types

import importlib_metadata
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hyperpar_core import hookimpl, plugins
from hyperpar_core.descriptors import InnerWrapper, LossFactory, PluginInfo
from hyperpar_core.plugins.registry import normalise


def report_without_times(registry):
    """As JSON: a plugin's load time, and the note that it is long, may differ; every report can be printed as JSON."""
    rows = []
    for one in plugins.plugin_report(registry):
        row = {key: value for key, value in one.items() if key != "seconds"}
        rows.append({**row, "notes": [note for note in row["notes"] if not note.startswith("took ")]})
    return json.dumps(rows)


def install_folder(folder, name, version, entry_point, value, files):
    """What an installer leaves in a folder of the path."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(f"[hyperpar]\n{entry_point} = {value}\n")
    for file, text in files.items():
        (folder / file).write_text(text)


def test_fifty_shuffles_of_the_install_order_give_one_report_and_one_digest(door, tmp_path, monkeypatch):
    names = {
        **{f"good{i}": door.wrapper_source(f"w{i}", f"v{i}") for i in range(8)},
        "clash_a": door.wrapper_source("contested"),
        "clash_b": door.wrapper_source("contested", "other"),
        "broken": "raise OSError('no device')",
        "malformed": door.wrapper_source("with space"),
    }
    folders = []
    for index, (name, source) in enumerate(names.items()):
        folder = tmp_path / "site" / f"{(index * 7) % 12:02}"
        module = f"order_{name}"
        # two distributions share the entry point name of the first
        point = "good0" if name == "good1" else name
        install_folder(folder, f"acme-{name}", f"{index}.0", point, module, {f"{module}.py": source})
        monkeypatch.syspath_prepend(str(folder))
        folders.append(str(folder))
    shuffled, outcomes = random.Random(0), set()
    for _ in range(50):
        shuffled.shuffle(folders)
        found = list(importlib_metadata.distributions(path=folders))
        shuffled.shuffle(found)
        registry = plugins.load(found, {})
        outcomes.add((report_without_times(registry), str(registry.digest_items())))
    ((report, digest),) = outcomes
    statuses = {one["distribution"]: one["status"] for one in json.loads(report)}
    assert sorted(name for name, status in statuses.items() if status == "loaded") == [
        f"acme-good{i}" for i in range(2, 8)
    ]
    assert digest == str([(f"good{i}", f"acme-good{i}", f"{i}.0") for i in range(2, 8)])


def test_two_hundred_plugins_load_in_less_than_a_second_of_work(door, tmp_path, monkeypatch):
    folder = tmp_path / "site"
    for index in range(200):
        files = {f"many_{index}.py": door.wrapper_source(f"w{index}")}
        install_folder(folder, f"acme-{index}", "1.0", f"p{index}", f"many_{index}", files)
    monkeypatch.syspath_prepend(str(folder))
    for index in range(200):
        __import__(f"many_{index}")  # imports are the plugins' own time
    start = time.process_time()
    registry = plugins.load(importlib_metadata.distributions(path=[str(folder)]), {})
    seconds = time.process_time() - start  # of this process: other work on the machine is no fault of the loader
    assert len(registry.offered(InnerWrapper)) == 200
    assert seconds < 1, seconds


# ---- no failure of one plugin changes what another registers


def make(*, target_module):
    return print


class Plugin:
    """A plugin object: good, or bad in one of the ways below."""

    def __init__(self, fault: str, names: frozenset[str]) -> None:
        self.fault, self.names = fault, names

    @hookimpl
    def hyperpar_plugin_info(self):
        if self.fault == "info raises":
            raise RuntimeError
        api = "9.0" if self.fault == "newer" else "1.0"
        return PluginInfo(api=api, requires=("torch>=99",) if self.fault == "torch" else ())

    @hookimpl
    def hyperpar_inner_wrappers(self):
        if self.fault == "hook raises":
            raise KeyError("x")
        if self.fault == "returns None":
            return None
        if self.fault == "malformed":
            return [InnerWrapper(name, factory=make, needs_axis="dp") for name in (*self.names, "one")]
        return [InnerWrapper(name, factory=make) for name in sorted(self.names)]

    @hookimpl
    def hyperpar_losses(self):
        return [3] if self.fault == "other kind" else [LossFactory(f"loss_{name}", factory=make) for name in self.names]


class UnknownHook(Plugin):
    @hookimpl
    def hyperpar_teleport(self):
        return []


class Exits(Plugin):
    @hookimpl
    def hyperpar_model_families(self):
        raise SystemExit


FAULTS = [
    "good", "import", "info raises", "newer", "torch", "hook raises", "returns None", "malformed", "other kind",
    "unknown hook", "exits",
]  # fmt: skip
CLASSES = {"unknown hook": UnknownHook, "exits": Exits}


@pytest.fixture
def pool(monkeypatch):
    module = types.ModuleType("door_pool")
    monkeypatch.setitem(sys.modules, "door_pool", module)
    return module


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_failure_of_one_plugin_changes_what_another_registers(door, pool, data):
    faults = data.draw(st.lists(st.sampled_from(FAULTS), min_size=1, max_size=8))
    distributions = []
    for index, fault in enumerate(faults):
        names = frozenset(f"w{index}_{j}" for j in range(data.draw(st.integers(0, 2))))
        setattr(pool, f"plugin_{index}", CLASSES.get(fault, Plugin)(fault, names))
        value = "door_no_such_module" if fault == "import" else f"door_pool:plugin_{index}"
        distributions.append(door.distribution(f"acme-{index}", "1.0", **{f"p{index}": value}))
    good = [one for one, fault in zip(distributions, faults, strict=True) if fault == "good"]
    mixed = plugins.load(data.draw(st.permutations(distributions)), {})
    alone = plugins.load(good, {})
    assert (
        mixed.digest_items() == alone.digest_items() == sorted((f"p{i}", f"acme-{i}", "1.0") for i in indices(faults))
    )
    for kind in (InnerWrapper, LossFactory):
        assert mixed.offered(kind) == alone.offered(kind)
    statuses = {one["name"]: one["status"] for one in plugins.plugin_report(mixed)}
    assert statuses == {f"p{i}": "loaded" if fault == "good" else "broken" for i, fault in enumerate(faults)}


def indices(faults):
    return [index for index, fault in enumerate(faults) if fault == "good"]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_clashing_plugins_go_out_together_and_nobody_else(door, pool, data):
    """The rule, said anew: out goes who shares its name; of the rest, who shares a wrapper's name."""
    count = data.draw(st.integers(1, 6))
    chosen = [
        (
            data.draw(st.sampled_from(["p", "q", "r", f"own{i}"])),
            data.draw(st.frozensets(st.sampled_from("abcdefgh"), max_size=2)),
        )
        for i in range(count)
    ]
    distributions = []
    for index, (name, wrappers) in enumerate(chosen):
        setattr(pool, f"plugin_{index}", Plugin("good", wrappers))
        distributions.append(door.distribution(f"acme-{index}", "1.0", **{name: f"door_pool:plugin_{index}"}))
    alone = [one for one in enumerate(chosen) if sum(one[1][0] == other[0] for other in chosen) == 1]
    expected = {
        f"acme-{i}" for i, (_, wrappers) in alone if not any(wrappers & others for j, (_, others) in alone if j != i)
    }
    registry = plugins.load(data.draw(st.permutations(distributions)), {})
    assert {item[1] for item in registry.digest_items()} == expected


@pytest.mark.parametrize("name", ["Hyperpar_CP.sdpa", "hyperpar-cp-sdpa", "HYPERPAR--cp__sdpa"])
def test_a_distribution_has_one_spelling(name):
    assert normalise(name) == "hyperpar-cp-sdpa"
