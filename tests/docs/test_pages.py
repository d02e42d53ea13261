"""What the pages say holds: Python blocks, scripts under torchrun, hyperpar commands, quoted errors, links."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    str(path.relative_to(ROOT))
    for pattern in ("*.md", "docs/**/*.md", "plugins/*/*.md")
    for path in ROOT.glob(pattern)
    if path.name != "CHANGELOG.md"
)
# Their examples are plugins, which tests/door, tests/kit and test_plugin_pages.py install and run.
PLUGIN_PAGES = {
    "docs/hooks.md", "docs/write-a-plugin.md", "docs/cookbook.md", "docs/tutorial-family.md", "docs/examples/third_party/README.md",
}  # fmt: skip
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SCRIPT = re.compile(r"# (\w+\.py): torchrun --nproc-per-node (\d+) (\w+\.py)\n")
LIMIT = 300  # seconds; every rank of a script imports torch and transformers
LANGUAGES = {"python", "bash", "sh", "text", "toml", "yaml"}


def blocks(page: str, language: str) -> list[str]:
    return [text for name, text in FENCE.findall((ROOT / page).read_text(encoding="utf-8")) if name == language]


def run(command: list[str], folder: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT - 10)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


RUN = [page for page in PAGES if page not in PLUGIN_PAGES and blocks(page, "python")]
SCRIPTS = {
    f"{page}: {found[1]}": (text, found[1], found[2])
    for page in RUN
    for text in blocks(page, "python")
    if (found := SCRIPT.match(text))
}


@pytest.mark.parametrize("page", PAGES)
def test_every_code_block_says_its_language(page: str) -> None:
    named = [language for language, _ in FENCE.findall((ROOT / page).read_text(encoding="utf-8"))]
    assert set(named) <= LANGUAGES


COMMANDS = [
    (page, line.split("  #")[0].strip())
    for page in PAGES
    if page not in PLUGIN_PAGES
    for text in blocks(page, "bash")
    for line in text.splitlines()
    if line.startswith("hyperpar ")
]


@pytest.mark.limit(LIMIT)
@pytest.mark.parametrize(("page", "command"), COMMANDS)
def test_a_hyperpar_command_of_a_page_exits_with_0(page: str, command: str, tmp_path: Path) -> None:
    code = "import sys; from hyperpar_core.cli import main; sys.exit(main())"
    run([sys.executable, "-c", code, *command.split()[1:]], tmp_path)


@pytest.mark.limit(LIMIT)
@pytest.mark.parametrize("page", [page for page in RUN if any(not SCRIPT.match(t) for t in blocks(page, "python"))])
def test_the_python_blocks_of_a_page_run_in_order(page: str, tmp_path: Path) -> None:
    lines = [text for text in blocks(page, "python") if not SCRIPT.match(text)]
    (tmp_path / "page.py").write_text("\n".join(lines))
    run([sys.executable, "page.py"], tmp_path)


@pytest.mark.limit(LIMIT)
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_of_a_page_runs_under_torchrun(script: str, tmp_path: Path) -> None:
    text, name, ranks = SCRIPTS[script]
    (tmp_path / name).write_text(text)
    run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks, name], tmp_path)


def test_a_script_was_found() -> None:
    assert len(SCRIPTS) >= 2


def sentences(folder: Path) -> Iterator[str]:
    """Every string of the sources, the values of f-strings as '...'."""
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                yield "".join(str(v.value) if isinstance(v, ast.Constant) else "..." for v in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_troubleshooting_quotes_messages_that_the_sources_can_raise() -> None:
    quoted = re.findall(r"^### `(.+)`$", (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(quoted) > 10
    said = [" ".join(text.split()) for part in ("hyperpar_core", "plugins") for text in sentences(ROOT / part)]
    for message in quoted:
        pattern = re.compile(".*".join(re.escape(part) for part in message.split("...")))
        assert any(pattern.search(text) for text in said), f"nothing raises {message!r}"


@pytest.mark.parametrize("page", PAGES)
def test_every_link_to_a_file_leads_somewhere(page: str) -> None:
    prose = re.sub(r"`[^`\n]*`", "", (ROOT / page).read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)#:]+)\)", prose):
        assert ((ROOT / page).parent / target).exists(), target
