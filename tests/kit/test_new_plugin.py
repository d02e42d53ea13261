"""`hyperpar new-plugin` writes, for every kind, a distribution that passes its own tests, ruff and mypy --strict at once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from kit_tools import ROOT, environment, installed, outcomes
from typer.testing import CliRunner

from hyperpar_core.cli import app
from hyperpar_core.new_plugin import KINDS

USAGE = 2
# Tests of a suite that have nothing to do for a kind of plugin.
MAY_SKIP = {
    "test_the_numbers_hold_on_cuda",
    "test_what_can_t_be_done_is_refused_with_its_cause",
    "test_it_is_refused_where_the_axis_that_it_needs_isn_t_active",
    "test_validate_mode_finds_the_placements_that_the_contract_declares",
    "test_a_module_without_what_it_expects_is_refused_with_the_module_s_name",
}


def new(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["new-plugin", *map(str, arguments)])
    return result.exit_code, result.output


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """{kind: the distribution that was written}."""
    folder = tmp_path_factory.mktemp("new")
    made = {kind: folder / f"acme-{kind}" for kind in KINDS}
    for kind, out in made.items():
        code, output = new(f"acme-{kind}", "--kind", kind, "--out", out)
        assert code == 0, output
        assert sorted(output.split()) == sorted(str(path) for path in out.rglob("*") if path.is_file())
    return made


@pytest.fixture(scope="module")
def found(sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """What became of the tests of all of them, each installed as a wheel."""
    site = tmp_path_factory.mktemp("site")
    installed(site, *sources.values())
    folder = sources[KINDS[0]].parent
    names = ",".join(source.name for source in sources.values())
    return outcomes(folder, [source / "tests" for source in sources.values()], environment(site, names))


@pytest.mark.limit(300)
def test_every_kind_passes_its_own_suite_as_an_installed_wheel(found: dict[str, dict[str, str]]) -> None:
    assert set(found) == {"TestBounded", "TestChunked", "TestGateAndUp", "TestTwoSteps", "TestFamily"}
    for suite, tests in found.items():
        assert len(tests) >= 14, f"{suite}: {sorted(tests)}"
        for test, text in tests.items():
            assert text == "passed" or (text == "skipped" and test in MAY_SKIP), f"{suite}: {test}\n{text[-2000:]}"


@pytest.mark.parametrize("kind", KINDS)
def test_ruff_finds_nothing(sources: dict[str, Path], kind: str) -> None:
    done = subprocess.run(["ruff", "check", "--no-cache", "."], cwd=sources[kind], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.limit(200)
def test_mypy_strict_finds_nothing_in_any_of_them(sources: dict[str, Path], tmp_path: Path) -> None:
    packages = [source / source.name.replace("-", "_") for source in sources.values()]
    config = ["--config-file", sources["family"] / "pyproject.toml", "--cache-dir", tmp_path, "--follow-imports=silent"]
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
