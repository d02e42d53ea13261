"""Distributions that are right: one written by `new-plugin` for each kind, the third party's, and that of docs/write-a-plugin.md.

They are installed once, and their tests run in one process.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parent))

from kit_tools import ROOT, Outcomes, environment, installed, outcomes

from hyperpar_core.cli import app
from hyperpar_core.new_plugin import KINDS

NAMED = re.compile(r"^`([\w./]+)`\n\n```\w+\n(.*?)^```", re.MULTILINE | re.DOTALL)  # a file on a page
THIRD_PARTY = ROOT / "docs" / "examples" / "third_party"


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """{kind: the distribution that was written}, and "third party" and "page"."""
    folder = tmp_path_factory.mktemp("sources")
    made = {kind: folder / f"acme-{kind}" for kind in KINDS}
    for kind, out in made.items():
        result = CliRunner().invoke(app, ["new-plugin", f"acme-{kind}", "--kind", kind, "--out", str(out)])
        assert result.exit_code == 0, result.output
        assert sorted(result.output.split()) == sorted(str(path) for path in out.rglob("*") if path.is_file())
    copy = folder / "acme-nimbus"  # pip leaves its build beside what it builds
    shutil.copytree(THIRD_PARTY, copy, ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg-info"))
    page = folder / "hyperpar-norms"
    for name, text in NAMED.findall((ROOT / "docs" / "write-a-plugin.md").read_text(encoding="utf-8")):
        (page / name).parent.mkdir(parents=True, exist_ok=True)
        (page / name).write_text(text)
    return made | {"third party": copy, "page": page}


@pytest.fixture(scope="session")
def found(sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """What became of the tests of all of them, each installed as a wheel, with no other plugin let in."""
    site = tmp_path_factory.mktemp("site")
    installed(site, tmp_path_factory.mktemp("wheels"), *sources.values())
    names = ",".join(source.name for source in sources.values())
    folder = next(iter(sources.values())).parent
    return outcomes(folder, [source / "tests" for source in sources.values()], environment(site, names))
