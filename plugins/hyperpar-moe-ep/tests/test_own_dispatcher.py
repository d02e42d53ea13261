"""A dispatcher of another distribution: the one that the page shows, built as a wheel, installed, and compared with one process."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
CHECK = '''
import json

from hyperpar_core import Override, build_plan, plugin_report
from hyperpar_core.testing import Degrees, check_parity, close_pools, pool, tiny_batch, tiny_model


def compared(family, name, degrees):
    model = tiny_model(family)
    blocks = [n for n, m in model.named_modules() if hasattr(m, "experts")]
    options = {"overrides": [Override(block, local_compute_fn=name) for block in blocks]}
    report = check_parity(model, tiny_batch(model, batch=2, seq=9), Degrees(**degrees, options=options))
    return report.ok, report.text()


def main():
    found = {one["name"]: one for one in plugin_report()}["all_gather_experts"]
    cases = [("qwen3_moe", "topk_router_all_gather", {"dp": 2, "ep": 2}),
             ("qwen3_moe", "topk_router_all_gather", {"tp": 2, "ep": 2}),
             ("qwen2_moe", "qwen2moe_shared_expert_gate_all_gather", {"tp": 2, "ep": 2})]
    outcomes = [pool(2).run(compared, *case) for case in cases]
    model = tiny_model("mixtral")
    override = Override("*.mlp", local_compute_fn="mixtral_topk_router_all_gather")
    plan = build_plan(model, {"dp": 2}, ep_size=2, overrides=[override])
    close_pools()
    print(json.dumps([found["distribution"], found["registers"]["local_compute_factories"], outcomes, dict(plan.providers)]))
'''


def run(*command, path=(), **environ):
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("HYPERPAR_")}
    search = [*map(str, path), *inherited.get("PYTHONPATH", "").split(os.pathsep)]
    environ = inherited | {"PYTHONPATH": os.pathsep.join(filter(None, search)), "OMP_NUM_THREADS": "1", **environ}
    done = subprocess.run([sys.executable, *command], env=environ, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_dispatcher_of_another_distribution_builds_installs_and_computes_what_one_process_does(tmp_path):
    page = (ROOT / "docs" / "expert-parallel.md").read_text()
    files = dict(re.findall(r"(?ms)^`([\w.]+)`\n\n```\w+\n(.*?)^```", page))
    assert list(files) == ["pyproject.toml", "hyperpar_all_gather_experts.py"]
    source, wheels, site = (tmp_path / name for name in ("source", "wheels", "site"))
    source.mkdir()
    for name, text in files.items():
        (source / name).write_text(text)
    pip = ("-m", "pip", "--disable-pip-version-check", "--no-input")
    run(*pip, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(wheels), str(source), PIP_NO_INDEX="1")
    (wheel,) = wheels.iterdir()
    run(*pip, "install", "--quiet", "--no-deps", "--target", str(site), str(wheel), PIP_NO_INDEX="1")
    (site / "compared_here.py").write_text(CHECK)

    printed = run("-c", "import compared_here; compared_here.main()", path=[site, ROOT], HYPERPAR_STRICT_PLUGINS="1")
    distribution, offered, outcomes, providers = json.loads(printed.splitlines()[-1])
    assert distribution == "hyperpar-all-gather-experts"
    assert "deepseekv3_sigmoid_group_shared_all_gather" in offered and len(offered) == 8
    assert len(outcomes) == 3
    for ranks in outcomes:
        for equal, text in ranks:
            assert equal, text
    assert providers["local_compute mixtral_topk_router_all_gather"] == "hyperpar-all-gather-experts 0.1.0"
