"""A model of 671 billion parameters, planned, explained and proven for 2,048 ranks in one process of a laptop."""

import json
import subprocess
import sys

import pytest

# A process of its own, so that its largest memory is this one's, and processor time, so that a busy machine changes nothing.
CODE = """
import json, resource, time
import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config
from hyperpar_core import build_plan, check_plan, explain, suggest_overrides

with torch.device("meta"):
    model = AutoModelForCausalLM.from_config(DeepseekV3Config(), dtype=torch.bfloat16)
sizes, ep = {"dp": 256, "tp": 8}, 64
start = time.process_time()
plan = build_plan(model, sizes, ep_size=ep, overrides=suggest_overrides(model, sizes, ep_size=ep))
planned = time.process_time() - start
text, block = explain(plan, dp=256), explain(plan, "model.layers.3.mlp", dp=256)
start = time.process_time()
report = check_plan(plan, model, world_size=2048)
print(json.dumps({
    "parameters": sum(p.numel() for p in model.parameters()), "layers": len(model.model.layers),
    "experts": model.config.n_routed_experts, "planned": planned, "checked": time.process_time() - start,
    "gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**30 if __import__("sys").platform == "darwin" else 2**20),
    "ok": report.ok, "ranks": report.ranks, "report": report.text(), "text": text, "block": block,
}))
"""


@pytest.fixture(scope="module")
def found():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_model_is_the_full_one(found):
    assert found["parameters"] > 671e9 and (found["layers"], found["experts"]) == (61, 256)


def test_its_plan_takes_seconds_and_its_proof_for_2048_ranks_little_more_and_few_gigabytes(found):
    assert found["ok"] and found["ranks"] == 2048, found["report"]
    assert found["planned"] < 5
    assert found["checked"] < 90
    assert found["gib"] < 3


def test_explain_says_what_a_rank_holds_and_moves(found):
    title = found["text"].splitlines()[0]
    assert title.startswith("deepseek_v3 671B   dp 256 x tp 8 x ep 64   sequence parallel   24.7 GiB of 1250 GiB per rank")
    (row,) = [line for line in found["text"].splitlines() if line.strip().startswith("mlp") and "5 all-to-all ep" in line]
    # 1,024 tokens of a rank, each to 7.6 of 64 ranks; rows of 7,168 numbers of 2 bytes, out, back, and the same in the backward
    pairs = round(1024 * 64 * (1 - (252 * 251 * 250 * 249 * 248 * 247 * 246 * 245) / (256 * 255 * 254 * 253 * 252 * 251 * 250 * 249)))
    sent = pairs * (4 * 7168 * 2 + 2 * 8 * 2 + 8) + 64 * 8
    assert f"{sent / 2**20:.0f} MiB" in row
    assert "inside: 5 all-to-all ep" in found["block"] and "32x2048x7168" not in found["block"]
    held = next(line for line in found["block"].splitlines() if "experts.down_proj" in line)
    assert held.split()[1] == "256x7168x2048" and held.rstrip().endswith(f"{4 * 7168 * 2048 * 2 / 2**20:.0f} MiB")
