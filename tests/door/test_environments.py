"""Whole environments: what one pip command brings, and ranks whose environments differ."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import sysconfig
import time
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

APPLY = """
import sys, time, torch.distributed as dist
from datetime import timedelta
from hyperpar_core import apply_plan, build_plan, make_mesh
from hyperpar_core.errors import RankMismatch
from hyperpar_core.testing.zoo import tiny_model
dist.init_process_group("gloo", timeout=timedelta(seconds=90))
mesh, model = make_mesh(tp=2), tiny_model("llama")
plan = build_plan(model, mesh, sequence_parallel=False)
time.sleep(float(sys.argv[1]) * dist.get_rank())
dist.barrier() if sys.argv[1] == "0" else None
start = time.monotonic()
try:
    apply_plan(model, plan, mesh)
    print("applied")
except RankMismatch as error:
    print(f"{time.monotonic() - start:.1f}", error)
"""


def bare_environment(folder: Path) -> Path:
    """A new environment's Python: it sees what this one has, but for hyperpar and its plugins."""
    venv.create(folder, symlinks=True, with_pip=False)
    here = Path(sysconfig.get_paths()["purelib"])
    linked = folder / "linked"
    linked.mkdir()
    for entry in here.iterdir():
        if "hyperpar" not in entry.name.lower():
            (linked / entry.name).symlink_to(entry)
    site = next((folder / "lib").glob("python*/site-packages"))
    (site / "linked.pth").write_text(str(linked))
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wheels of the core and of hyperpar-cp-sdpa."""
    folder = tmp_path_factory.mktemp("wheels")
    sources = [str(ROOT), str(ROOT / "plugins" / "hyperpar-cp-sdpa")]
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    subprocess.run([*command, *sources], check=True, cwd=folder)
    return folder


@pytest.mark.limit(240)
def test_installing_the_context_plugin_alone_brings_the_core(wheels: Path, tmp_path: Path) -> None:
    python = bare_environment(tmp_path / "env")
    run = [str(python), "-m", "pip", "install", "--quiet", "--no-index", "--find-links", str(wheels), "hyperpar-cp-sdpa"]
    subprocess.run(run, check=True)
    show = "import json, hyperpar_core; print(json.dumps([hyperpar_core.__file__, hyperpar_core.plugin_report()]))"
    found = subprocess.run([str(python), "-c", show], check=True, capture_output=True, text=True, cwd=tmp_path)
    file, report = json.loads(found.stdout.splitlines()[-1])
    assert Path(file).is_relative_to(tmp_path)
    assert {(r["distribution"], r["status"]) for r in report} == {("hyperpar-core", "loaded"), ("hyperpar-cp-sdpa", "loaded")}
    wrappers = next(r["registers"]["inner_wrappers"] for r in report if r["distribution"] == "hyperpar-cp-sdpa")
    assert "sdpa_hf" in wrappers


def two_ranks(environments: list[dict[str, str]], late: float, tmp_path: Path) -> list[str]:
    """The last line that each of two ranks prints; rank 1 comes `late` seconds after rank 0."""
    script = tmp_path / "apply.py"
    script.write_text(APPLY)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(late)],
            env={**os.environ, **job, "RANK": str(rank), **extra}, stdout=subprocess.PIPE, text=True, cwd=tmp_path,
        )
        for rank, extra in enumerate(environments)
    ]  # fmt: skip
    try:
        return [rank.communicate(timeout=200)[0].strip() for rank in ranks]
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()


@pytest.mark.limit(240)
def test_ranks_with_different_plugins_installed_are_refused_on_every_rank(tmp_path: Path) -> None:
    extra = tmp_path / "site" / "acme_probe-3.1.dist-info"
    extra.mkdir(parents=True)
    (extra / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-probe\nVersion: 3.1\n")
    (extra / "entry_points.txt").write_text("[hyperpar]\nprobe = acme_probe\n")
    (extra.parent / "acme_probe.py").write_text(
        "from hyperpar_core import hookimpl\n\n\n@hookimpl\ndef hyperpar_inner_wrappers():\n    return []\n"
    )
    with_probe = {"PYTHONPATH": os.pathsep.join([str(extra.parent), os.environ.get("PYTHONPATH", "")])}
    for text in two_ranks([{}, with_probe], 0, tmp_path):
        seconds, _, message = text.partition(" ")
        assert float(seconds) < 5
        assert "ranks 0 and 1" in message or "ranks 1 and 0" in message
        assert "probe: " in message and "acme-probe 3.1" in message and "missing" in message


@pytest.mark.limit(240)
def test_ranks_that_come_apart_in_time_agree(tmp_path: Path) -> None:
    start = time.monotonic()
    assert two_ranks([{}, {}], 20, tmp_path) == ["applied", "applied"]
    assert time.monotonic() - start > 20
