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


def installed(site: Path, *sources: Path) -> None:
    """Installs distributions into a folder as pip does: each is built into a wheel first."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--target"]
    environ = os.environ | {"PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    done = subprocess.run([*command, site, *sources], env=environ, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr


def environment(site: Path, plugins: str | None = None) -> dict[str, str]:
    """What a process needs to see `site` and this tree's core. plugins: the only external ones; None: all."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("HYPERPAR_")}
    search = [str(site), str(ROOT), *inherited.get("PYTHONPATH", "").split(os.pathsep)]
    inherited |= {"PYTHONPATH": os.pathsep.join(filter(None, search)), "OMP_NUM_THREADS": "1"}
    return inherited if plugins is None else inherited | {"HYPERPAR_LOAD_PLUGINS": plugins}


def outcomes(folder: Path, tests: Iterable[str | Path], environ: dict[str, str]) -> dict[str, dict[str, str]]:
    """{class: {test: "passed", "skipped", or how it failed}}, a test with parameters under its first failure.

    `folder`: where pytest runs, with the file of results.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib", "--rootdir", folder]
    results = folder / "results.xml"
    done = subprocess.run(
        [*map(str, command), f"--junitxml={results}", *map(str, tests)],
        env=environ, cwd=folder, capture_output=True, text=True, timeout=280,
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
