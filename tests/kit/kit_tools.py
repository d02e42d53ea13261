"""Distributions in folders of their own, and their tests in a process that sees them."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# {class: {test: "passed", "skipped", or how it failed}}
Outcomes = dict[str, dict[str, str]]
# Tests of a suite that have nothing to do for some plugins.
MAY_SKIP = {
    "test_the_numbers_hold_on_cuda",
    "test_what_can_t_be_done_is_refused_with_its_cause",
    "test_it_is_refused_where_the_axis_that_it_needs_isn_t_active",
    "test_validate_mode_finds_the_placements_that_the_contract_declares",
    "test_a_module_without_what_it_expects_is_refused_with_the_module_s_name",
}


# What pip asks of setuptools, without a process for each question.
BUILD = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"


def installed(site: Path, wheels: Path, *sources: Path) -> None:
    """Builds each distribution into a wheel, and installs the wheels into a folder as pip does."""
    environ = os.environ | {"PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}

    def run(folder: Path, *command: object) -> None:
        words = [sys.executable, *map(str, command)]
        done = subprocess.run(words, env=environ, cwd=folder, capture_output=True, text=True, timeout=400)
        assert done.returncode == 0, done.stdout + done.stderr

    for source in sources:
        run(source, "-c", BUILD, wheels)
    built = sorted(wheels.glob("*.whl"))
    assert len(built) == len(sources)
    run(wheels, "-m", "pip", "install", "--quiet", "--no-deps", "--target", site, *built)


def environment(site: Path, plugins: str | None = None) -> dict[str, str]:
    """What a process needs to see `site` and this tree's core. plugins: the only external ones; None: all."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("HYPERPAR_")}
    search = [str(site), str(ROOT), *inherited.get("PYTHONPATH", "").split(os.pathsep)]
    inherited |= {"PYTHONPATH": os.pathsep.join(filter(None, search)), "OMP_NUM_THREADS": "1"}
    return inherited if plugins is None else inherited | {"HYPERPAR_LOAD_PLUGINS": plugins}


def failures(tests: dict[str, str]) -> str:
    """What failed of one class, and what was skipped that had something to do."""
    bad = {t: text for t, text in tests.items() if text != "passed" and not (text == "skipped" and t in MAY_SKIP)}
    return "\n\n".join(f"{test}\n{text[-2000:]}" for test, text in bad.items())


def outcomes(folder: Path, tests: Iterable[str | Path], environ: dict[str, str]) -> Outcomes:
    """What became of `tests`; a test with parameters stands under its first failure. `folder`: where pytest runs and leaves results."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib", "--rootdir", folder]
    results = folder / "results.xml"
    done = subprocess.run(
        [*map(str, command), f"--junitxml={results}", *map(str, tests)],
        env=environ, cwd=folder, capture_output=True, text=True, timeout=560,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stdout[-4000:] + done.stderr[-2000:]
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for case in ET.parse(results).iter("testcase"):
        name, test = case.attrib["classname"].rpartition(".")[2], case.attrib["name"].partition("[")[0]
        bad = [one for one in case if one.tag in ("failure", "error")]
        outcome = bad[0].text or "failed" if bad else "skipped" if case.find("skipped") is not None else "passed"
        if found[name].get(test, "passed") in ("passed", "skipped"):
            found[name][test] = outcome
    return dict(found)
