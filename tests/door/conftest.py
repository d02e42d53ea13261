"""Faked and really installed plugins for the tests of the door."""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib
import io
import itertools
import os
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import importlib_metadata
import pytest

from hyperpar_core import plugins

HEADER = """
from hyperpar_core import hookimpl
from hyperpar_core.descriptors import *

@hookimpl
def hyperpar_plugin_info():
    return PluginInfo()
"""
ROOT = Path(plugins.__file__).resolve().parents[2]
_modules = itertools.count()


def wrapper_plugin(*names: str) -> str:
    """Source of a plugin that offers inner wrappers of these names."""
    offered = ", ".join(f"InnerWrapper({name!r}, factory=make)" for name in names)
    return (
        f"{HEADER}\ndef make(*, target_module):\n    return print\n\n"
        f"@hookimpl\ndef hyperpar_inner_wrappers():\n    return [{offered}]\n"
    )


class FakeDistribution(importlib_metadata.Distribution):
    """A distribution that exists only as texts; `name=None`: one whose METADATA is missing."""

    def __init__(self, name: str | None, version: str, entry_points: str) -> None:
        self.texts = {"entry_points.txt": entry_points}
        if name is not None:
            self.texts["METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"

    def read_text(self, filename):
        return self.texts.get(filename)

    def locate_file(self, path):
        return Path(path)


class Door:
    """Makes plugins and loads them, in this process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def module(self, source: str) -> str:
        """A new importable module with this source; returns its name."""
        name = f"door_plugin_{next(_modules)}"
        (self.folder / f"{name}.py").write_text(textwrap.dedent(source))
        importlib.invalidate_caches()
        return name

    def distribution(self, name: str | None = "hyperpar-demo", version: str = "1.0", **points: str) -> FakeDistribution:
        """`points`: {entry point: value}."""
        lines = [f"{point} = {value}" for point, value in points.items()]
        return FakeDistribution(name, version, "\n".join(["[hyperpar]", *lines]))

    def plugin(self, source: str, name="demo", distribution="hyperpar-demo", version="1.0") -> FakeDistribution:
        return self.distribution(distribution, version, **{name: self.module(source)})

    def wrappers(self, *names: str, name="demo", distribution="hyperpar-demo", version="1.0") -> FakeDistribution:
        return self.plugin(wrapper_plugin(*names), name, distribution, version)

    def core(self) -> FakeDistribution:
        """The core's own plugin, as the core's distribution declares it."""
        return self.distribution("hyperpar-core", "0.1.0", core="hyperpar_core.collectives.default_lowerer")

    def load(self, *distributions, **environ: str) -> plugins.Registry:
        return plugins.load(distributions, {f"HYPERPAR_{key}": value for key, value in environ.items()})

    def only(self, source: str):
        """The one plugin with this source, after loading."""
        (found,) = self.load(self.plugin(source)).plugins
        return found

    header = HEADER
    wrapper_source = staticmethod(wrapper_plugin)


@pytest.fixture
def door(tmp_path, monkeypatch) -> Door:
    folder = tmp_path / "modules"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    return Door(folder)


def write_wheel(folder: Path, name: str, version: str, files: dict[str, str], entry_points: dict[str, str]) -> Path:
    """A wheel as pip takes it, written by hand."""
    stem = f"{name.replace('-', '_')}-{version}"
    info = f"{stem}.dist-info"
    points = "\n".join(["[hyperpar]", *(f"{point} = {value}" for point, value in entry_points.items())])
    files = files | {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: by hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": points,
    }
    record = io.StringIO()
    rows = csv.writer(record, lineterminator="\n")
    path = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for file, text in files.items():
            digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
            rows.writerow([file, f"sha256={digest}", len(text.encode())])
            wheel.writestr(file, text)
        rows.writerow([f"{info}/RECORD", "", ""])
        wheel.writestr(f"{info}/RECORD", record.getvalue())
    return path


def pip(*arguments: str) -> None:
    """pip of this environment, offline."""
    command = [sys.executable, "-m", "pip", *arguments]
    environ = os.environ | {"PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def python(code: str, path: list[Path], **environ: str) -> subprocess.CompletedProcess:
    """Runs `code` in a new process of this environment, with `path` and the core of this tree first on its path."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("HYPERPAR_")}
    search = [*map(str, path), str(ROOT), *inherited.get("PYTHONPATH", "").split(os.pathsep)]
    inherited |= {"PYTHONPATH": os.pathsep.join(filter(None, search)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.run(command, env=inherited | environ, capture_output=True, text=True, timeout=120)


class Installer:
    """Really installed plugins, and processes that see them."""

    write_wheel = staticmethod(write_wheel)
    pip = staticmethod(pip)
    python = staticmethod(python)
    wrapper_source = staticmethod(wrapper_plugin)


@pytest.fixture(scope="session")
def installer() -> Installer:
    return Installer()
