"""The same laws against plugins that pip really installed, each seen by a process of its own."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"

REPORT = """
import json
from hyperpar_core import plugin_report
print(json.dumps(plugin_report()))
"""


def report(text):
    return {one["distribution"]: one for one in json.loads(text)}


@pytest.fixture(scope="module")
def site(installer, tmp_path_factory):
    """A folder into which pip installed a good, a broken and two clashing plugins."""
    folder = tmp_path_factory.mktemp("site")
    wheels = tmp_path_factory.mktemp("wheels")
    plugins = {
        "acme-good": ("good", installer.wrapper_source("acme_ring")),
        "acme-broken": ("broken", "import not_there_at_all\n"),
        "acme-one": ("one", installer.wrapper_source("contested")),
        "acme-two": ("two", installer.wrapper_source("contested")),
    }
    built = [
        installer.write_wheel(wheels, name, "1.5", {f"acme_{point}.py": source}, {point: f"acme_{point}"})
        for name, (point, source) in plugins.items()
    ]
    installer.pip("install", "--quiet", "--no-deps", "--target", str(folder), *map(str, built))
    return folder


@pytest.fixture(scope="module")
def seen(installer, site):
    """What one process sees of them: lines of output, and what it wrote to stderr."""
    code = """
    import json, os, sys, traceback
    import hyperpar_core

    print(json.dumps([name for name in sys.modules if name.startswith("acme_")]))
    print(json.dumps(hyperpar_core.plugin_report()))
    from hyperpar_core import plugins

    print(plugins.get_registry().inner_wrapper("acme_ring")[1])
    os.environ |= {"HYPERPAR_STRICT_PLUGINS": "1", "HYPERPAR_DISABLE_PLUGINS": "acme-one"}
    plugins.reset()
    try:
        plugins.get_registry()
    except hyperpar_core.errors.PluginError:
        print(json.dumps(traceback.format_exc()))
    """
    done = installer.python(code, [site], HYPERPAR_TRACE_PLUGINS="1")
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), done.stderr


def test_one_broken_and_one_good_plugin_installed_the_good_one_works_and_the_warning_names_the_other(seen):
    lines, stderr = seen
    found = report(lines[1])
    assert {name: one["status"] for name, one in found.items() if name.startswith("acme")} == {
        "acme-good": "loaded", "acme-broken": "broken", "acme-one": "broken", "acme-two": "broken",
    }  # fmt: skip
    assert found["acme-good"]["registers"] == {"inner_wrappers": ["acme_ring"]}
    assert lines[2] == "acme-good 1.5"
    assert "plugin 'broken' (acme-broken 1.5) is left out: ModuleNotFoundError: No module named 'not_there" in stderr
    for name in ("acme-one", "acme-two"):
        assert "'one' (acme-one 1.5) and by 'two' (acme-two 1.5)" in found[name]["reason"]


def test_importing_the_core_imports_no_plugin_and_the_first_question_does(seen):
    lines, stderr = seen
    assert json.loads(lines[0]) == []
    assert re.search(r"hyperpar: 'good' \(acme-good 1.5\) in \d+\.\d{3} s: inner wrapper acme_ring", stderr)


def test_strict_mode_in_the_environment_raises_with_the_plugin_s_own_traceback(seen):
    text = json.loads(seen[0][3])
    assert "PluginError: plugin 'broken' (acme-broken 1.5) is broken: ModuleNotFoundError" in text
    assert re.search(r'File ".*acme_broken.py", line 1', text)


def test_a_plugin_that_is_installed_linked_and_a_source_checkout_at_once_is_one(installer, site, tmp_path):
    linked, copy, checkout = (tmp_path / name for name in ("linked", "copy", "checkout"))
    linked.symlink_to(site, target_is_directory=True)
    shutil.copytree(site, copy)
    checkout.mkdir()
    shutil.copy(site / "acme_good.py", checkout)
    egg = checkout / "acme_good.egg-info"
    egg.mkdir()
    (egg / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: Acme_Good\nVersion: 1.6.dev0\n")
    (egg / "entry_points.txt").write_text("[hyperpar]\ngood = acme_good\n")
    path = [checkout, site, linked, copy]
    done = installer.python(REPORT, path, HYPERPAR_LOAD_PLUGINS="good", HYPERPAR_STRICT_PLUGINS="1")
    assert done.returncode == 0, done.stderr
    found = [one for one in json.loads(done.stdout) if one["name"] == "good"]
    assert [(one["status"], one["version"]) for one in found] == [("loaded", "1.6.dev0")]


# ---- the tutorial


CORE = {
    "METADATA": "Metadata-Version: 2.1\nName: hyperpar-core\nVersion: 0.1.0\n",
    "entry_points.txt": "[hyperpar]\ncore = hyperpar_core.collectives.default_lowerer\n",
}
ERRORS = """
from hyperpar_core import errors

for right, wrong in [
    ("inner_wrapper: max_norm", "inner_wrapper: max_nrom"),
    ("limit: 1000", "limt: 1000"),
    ("limit: 1000", ""),
]:
    try:
        build_plan(LlamaForCausalLM(config), mesh, overrides=Overrides.from_yaml(OVERRIDES.replace(right, wrong)))
        raised = ""
    except errors.HyperparError as error:
        raised = f"{type(error).__name__}: {error}"
    print(json.dumps(raised))
"""


def test_the_tutorial_s_distribution_builds_installs_runs_and_raises_the_errors_that_it_shows(installer, tmp_path):
    page = (DOCS / "write-a-plugin.md").read_text()
    files = re.findall(r"(?ms)^`([\w.]+)`\n\n```\w+\n(.*?)^```", page)
    assert [name for name, _ in files] == ["pyproject.toml", "hyperpar_norms.py"]
    source, site, core = (tmp_path / name for name in ("source", "site", "core/hyperpar_core-0.1.0.dist-info"))
    # the core's own plugin has to be there, whether or not this checkout is installed
    for folder, texts in [(source, dict(files)), (core, CORE)]:
        folder.mkdir(parents=True)
        for name, text in texts.items():
            (folder / name).write_text(text)
    installer.pip("install", "--quiet", "--no-deps", "--no-build-isolation", "--target", str(site), str(source))
    (use,) = (block for block in re.findall(r"(?ms)^```python\n(.*?)^```", page) if "OVERRIDES" in block)
    environ = {"HYPERPAR_LOAD_PLUGINS": "norms", "HYPERPAR_STRICT_PLUGINS": "1"}
    done = installer.python(REPORT + use + ERRORS, [site, core.parent], **environ)
    assert done.returncode == 0, done.stderr
    listed, shape, *raised = done.stdout.splitlines()
    norms = report(listed)["hyperpar-norms"]
    assert (norms["name"], norms["version"], norms["status"], norms["notes"]) == ("norms", "0.1.0", "loaded", [])
    assert norms["registers"] == {"inner_wrappers": ["max_norm"]}
    assert shape == "(1, 6, 64)"
    misspelt, unknown, missing = map(json.loads, raised)
    # the closing words stand after whatever else this environment has to say
    (shown,) = re.findall(r"(?ms)^```text\n(.*?) \(No plugin failed to load\.\)\n```", page)
    assert misspelt.startswith(shown)
    assert "unknown option 'limt'. Options: limit." in unknown
    assert "missing option limit" in missing
