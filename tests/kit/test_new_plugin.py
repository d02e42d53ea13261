"""`hyperpar new-plugin` writes, for every kind, a distribution that passes its own tests, ruff and mypy --strict at once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from kit_tools import ROOT, Outcomes, failures
from typer.testing import CliRunner

from hyperpar_core.cli import app
from hyperpar_core.new_plugin import KINDS

USAGE = 2
SUITES = {
    "inner-wrapper": "TestBounded", "local-compute": "TestChunked", "special-handler": "TestGateAndUp", "lowerer": "TestTwoSteps",
    "family": "TestFamily",
}  # fmt: skip
# Of mypy alone, kept from one run to the next: torch and the core are read once.
CACHE = ROOT / ".mypy_cache" / "new-plugin"


def new(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["new-plugin", *map(str, arguments)])
    return result.exit_code, result.output


@pytest.mark.limit(600)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_passes_its_own_suite_as_an_installed_wheel(found: Outcomes, kind: str) -> None:
    assert len(found[SUITES[kind]]) >= 14
    assert failures(found[SUITES[kind]]) == ""


@pytest.mark.limit(600)
def test_the_example_of_the_page_on_plugins_passes_the_suite_that_the_page_shows(found: Outcomes) -> None:
    assert len(found["TestMaxNorm"]) >= 14
    assert failures(found["TestMaxNorm"]) == ""


@pytest.mark.parametrize("kind", KINDS)
def test_ruff_finds_nothing(sources: dict[str, Path], kind: str) -> None:
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "."]
    done = subprocess.run(command, cwd=sources[kind], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.limit(420)
def test_mypy_strict_finds_nothing_in_any_of_them(sources: dict[str, Path], tmp_path: Path) -> None:
    packages = [sources[kind] / sources[kind].name.replace("-", "_") for kind in KINDS]
    config = ["--config-file", sources["family"] / "pyproject.toml", "--cache-dir", CACHE, "--follow-imports=silent"]
    command = [sys.executable, "-m", "mypy", *config, *packages]  # the sources of the core are checked elsewhere
    environ = os.environ | {"MYPYPATH": str(ROOT)}
    done = subprocess.run([*map(str, command)], env=environ, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "strict = true" in (sources["family"] / "pyproject.toml").read_text()


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("Acme", "small letters, digits and single hyphens"),
        ("acme_ring", "small letters"),
        ("acme--ring", "single hyphens"),
        ("1st", "is no name for a distribution"),
        ("../acme", "is no name for a distribution"),
        ("json", "a word or a module of Python itself"),
        ("class", "a word or a module of Python itself"),
        ("torch", "a module 'torch' is installed already"),
        ("hyperpar-core", "a module 'hyperpar_core' is installed already"),
    ],
)
def test_a_name_that_can_t_be_is_refused_and_nothing_is_written(name: str, cause: str, tmp_path: Path) -> None:
    code, output = new(name, "--kind", "lowerer", "--out", tmp_path / "out")
    assert code == USAGE and cause in " ".join(output.split())
    assert not list(tmp_path.iterdir())


def test_a_folder_that_exists_and_an_unknown_or_missing_kind_are_refused(tmp_path: Path) -> None:
    (tmp_path / "acme-x").mkdir()
    code, output = new("acme-x", "--kind", "family", "--out", tmp_path / "acme-x")
    assert code == USAGE and "exists already" in " ".join(output.split())
    assert not list((tmp_path / "acme-x").iterdir())
    for arguments in (["acme-x", "--kind", "loss"], ["acme-x"]):
        code, output = new(*arguments)
        assert code == USAGE and "inner-wrapper" in output
