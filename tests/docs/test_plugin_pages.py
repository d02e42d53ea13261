"""Pages whose blocks are plugins: the cookbook is installed and runs, the tutorial quotes files that tests/kit installs and runs."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import typer

from hyperpar_core import Overrides
from hyperpar_core.cli import app
from hyperpar_core.hookspecs import hyperpar_plugin_info
from hyperpar_core.plugins.registry import KINDS

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
NAMED = re.compile(r"^`([\w./]+)`\n\n```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def loaded(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


build = loaded(DOCS / "build.py")
PAGES = [str(page) for page in build.pages(ROOT)]


# ---- the cookbook


def test_the_cookbook_has_a_complete_plugin_for_every_kind() -> None:
    plugins = NAMED.findall((DOCS / "cookbook.md").read_text(encoding="utf-8"))
    for kind in KINDS.values():
        assert sum(f"def {kind.hook}()" in source for _, source in plugins) == 1, kind.noun
    for name, source in plugins:
        assert f"def {hyperpar_plugin_info.__name__}()" in source and name.startswith("acme_")


@pytest.mark.limit(200)
def test_every_block_of_the_cookbook_runs_with_its_plugins_installed(tmp_path: Path) -> None:
    page = (DOCS / "cookbook.md").read_text(encoding="utf-8")
    plugins = NAMED.findall(page)
    site = tmp_path / "site"
    for name, source in plugins:
        point = name.removesuffix(".py")
        info = site / f"{point}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {point.replace('_', '-')}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[hyperpar]\n{point} = {point}\n")
        (site / name).write_text(source)
    sources = {source for _, source in plugins}
    uses = [text for language, text in FENCE.findall(page) if language == "python" and text not in sources]
    assert len(uses) >= 5
    (tmp_path / "page.py").write_text("\n".join(uses))
    search = os.pathsep.join([str(site), str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    only = ",".join(name.removesuffix(".py") for name, _ in plugins)
    environ = os.environ | {"PYTHONPATH": search, "OMP_NUM_THREADS": "1", "HYPERPAR_STRICT_PLUGINS": "1", "HYPERPAR_LOAD_PLUGINS": only}
    done = subprocess.run([sys.executable, "page.py"], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=190)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "model.layers.1.mlp: 1 calls" in done.stdout and done.stdout.rstrip().endswith("cooked")


# ---- the tutorial


def test_the_tutorial_quotes_the_files_of_the_distribution_word_for_word() -> None:
    quotes = NAMED.findall((DOCS / "tutorial-family.md").read_text(encoding="utf-8"))
    assert len(quotes) >= 7
    for name, text in quotes:
        assert text in (DOCS / "examples" / "third_party" / name).read_text(encoding="utf-8"), f"{name} has no such lines:\n{text}"


def test_the_tutorial_names_every_file_of_the_distribution() -> None:
    page = (DOCS / "tutorial-family.md").read_text(encoding="utf-8")
    files = sorted(path.name for path in (DOCS / "examples/third_party/acme_nimbus").glob("*.py") if path.stem != "__init__")
    assert files and [name for name in files if f"acme_nimbus/{name}" not in page] == []


# ---- all pages


def test_every_page_builds_its_tables_render_its_links_lead_to_pages_and_headings_and_the_readme_leads_to_it(tmp_path: Path) -> None:
    assert build.faults(ROOT) == []
    written = build.build(tmp_path, ROOT)
    assert len(written) == len(PAGES) > 15
    for path in written:
        assert "<h1" in path.read_text(encoding="utf-8"), path
    hrefs = re.findall(r'href="([^"]+\.html)', (tmp_path / "README.html").read_text(encoding="utf-8"))
    assert len(hrefs) > 10 and all((tmp_path / href).exists() for href in hrefs)


WRONG = {
    "nowhere": ("[x](y.md)", "y.md leads nowhere"),
    "heading": ("[x](README.md#there)", "no such heading"),
    "table": ("text\n\n| a |\n| - | - |\n| b |\n", "1 tables are written, 0 render"),
    "open": ("\n```python\nx = 1\n", "a code block isn't closed"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_fault_of_a_page_is_found(fault: str, tmp_path: Path) -> None:
    text, said = WRONG[fault]
    (tmp_path / "README.md").write_text(f"# Title\n\n{text}\n")
    assert any(said in line for line in build.faults(tmp_path))
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "lost.md").write_text("# Lost\n")
    assert "docs/lost.md: no page leads to it" in build.faults(tmp_path)


@pytest.mark.parametrize("page", PAGES)
def test_every_override_file_on_a_page_is_read(page: str) -> None:
    for language, text in FENCE.findall((ROOT / page).read_text(encoding="utf-8")):
        if language == "yaml" and "plan_overrides" in text:
            assert Overrides.from_yaml(text if text.lstrip().startswith("version") else f"version: 1\n{text}").entries


COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


@pytest.mark.parametrize("page", PAGES)
def test_every_hyperpar_command_on_a_page_exists_with_its_options(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    lines = [line for language, block in FENCE.findall(text) if language in ("bash", "sh", "") for line in block.splitlines()]
    lines += re.findall(r"`(hyperpar [^`]+)`", text)
    for line in lines:
        words = line.split("  #")[0].split()
        if len(words) < 2 or words[0] != "hyperpar":
            continue
        command = COMMANDS.get(words[1])
        assert command is not None, line
        known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)} | {"--help"}
        assert {word for word in words if word.startswith("--")} <= known, line
