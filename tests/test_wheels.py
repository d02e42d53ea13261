"""Every distribution of the repository builds to a wheel whose metadata is right."""

from __future__ import annotations

import configparser
import email
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# {distribution: its folder}
DISTRIBUTIONS = {
    "hyperpar-core": ROOT,
    **{path.parent.name: path.parent for path in sorted(ROOT.glob("plugins/*/pyproject.toml"))},
}


def test_the_plugins_of_this_version_are_there() -> None:
    assert {"hyperpar-families", "hyperpar-vocab-embedding"} <= set(DISTRIBUTIONS)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_a_distribution_builds_to_a_wheel_with_its_files_and_metadata(name: str, tmp_path: Path) -> None:
    folder, package = DISTRIBUTIONS[name], name.replace("-", "_")
    source = tmp_path / "source"
    source.mkdir()
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        if (folder / file).exists():
            shutil.copy(folder / file, source)
    shutil.copytree(folder / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    done = subprocess.run([*build, "--wheel-dir", tmp_path, source], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name == f"{package}-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        files = set(archive.namelist())
        info = f"{package}-0.1.0.dist-info"
        metadata = email.message_from_string(archive.read(f"{info}/METADATA").decode())
        points = configparser.ConfigParser()
        points.read_string(archive.read(f"{info}/entry_points.txt").decode())

    sources = {str(path.relative_to(source)) for path in (source / package).rglob("*.*")}
    assert sources <= files, f"left out of the wheel: {sorted(sources - files)}"
    assert f"{package}/py.typed" in files
    assert (metadata["Name"], metadata["Version"], metadata["License-Expression"]) == (name, "0.1.0", "Apache-2.0")
    assert metadata["Requires-Python"] == ">=3.11"
    assert str(metadata.get_payload()).strip(), "the README is empty"
    needs = {line for line in metadata.get_all("Requires-Dist") or [] if "extra ==" not in line}
    assert all("<" in need and ">=" in need for need in needs), f"a range without an end: {needs}"
    names = {re.split("[<>=]", need)[0] for need in needs}
    if name == "hyperpar-core":
        assert names == {"torch", "transformers", "pluggy", "numpy", "pyyaml", "importlib-metadata"}
        assert dict(points["console_scripts"]) == {"hyperpar": "hyperpar_core.cli:main"}
    else:
        assert "hyperpar-core" in names
    ((_, target),) = points["hyperpar"].items()
    module = target.split(":")[0].replace(".", "/")
    assert module.startswith(package) and {f"{module}.py", f"{module}/__init__.py"} & files
