"""Seven families with experts in nine layouts, against one process: a part of `make parity`. Writes the table of docs/expert-parallel.md.

    python plugins/hyperpar-moe-ep/tests/ep_grid.py                       goes on where it stopped
    python plugins/hyperpar-moe-ep/tests/ep_grid.py --families gpt_oss    these alone
    python plugins/hyperpar-moe-ep/tests/ep_grid.py --again               from the start

Results are kept, one JSON line each, in out/experts.jsonl.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from moe_tools import parity

from hyperpar_core.errors import Refused
from hyperpar_core.testing import RankFailure, close_pools, pool

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "expert-parallel.md"
RESULTS = ROOT / "out" / "experts.jsonl"
FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v3", "glm4_moe", "gpt_oss")
NO_SP: dict[str, Any] = {"sequence_parallel": False}
LAYOUTS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "dp2 ep2": ({"dp": 2, "ep": 2}, {}),
    "tp2 ep2": ({"tp": 2, "ep": 2}, {}),
    "tp2 ep2, no SP": ({"tp": 2, "ep": 2}, NO_SP),
    "cp2 ep2": ({"cp": 2, "ep": 2}, {}),
    "dp4 ep2": ({"dp": 4, "ep": 2}, {}),
    "dp2 tp2 ep4": ({"dp": 2, "tp": 2, "ep": 4}, {}),
    "dp2 tp2 ep4, no SP": ({"dp": 2, "tp": 2, "ep": 4}, NO_SP),
    "dp2 cp2 ep4": ({"dp": 2, "cp": 2, "ep": 4}, {}),
    "dp2 cp2 tp2 ep8": ({"dp": 2, "cp": 2, "tp": 2, "ep": 8}, {}),
}
COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
SECONDS = 150


def ranks_of(layout: str) -> int:
    """How many ranks a layout needs."""
    degrees = LAYOUTS[layout][0]
    return degrees.get("dp", 1) * degrees.get("cp", 1) * degrees.get("tp", 1)


def experts(family: str, count: int) -> dict[str, int]:
    """The config field of a family that makes it have `count` experts."""
    from hyperpar_core.testing import tiny_config

    config = tiny_config(family)
    return {next(name for name in COUNTS if name in config.__dict__ or name in type(config).__annotations__): count}


def run(family: str, layout: str) -> tuple[str, str]:
    """(equal, refused, different or error; its text)."""
    degrees, options = LAYOUTS[layout]
    config = experts(family, 8) if degrees["ep"] == 8 else {}
    try:
        report = pool(ranks_of(layout)).run(parity, family, degrees, config, None, "float32", 16, 1, options, timeout=SECONDS)[0]
        return ("equal", "") if report.ok else ("different", report.text())
    except RankFailure as failure:
        refused = [e for e in failure.exceptions.values() if isinstance(e, Refused)]
        return ("refused", str(refused[0])) if refused else ("error", str(failure)[-1500:])


def main() -> int:
    """0 where everything is equal or refused."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--again", action="store_true")
    options = parser.parse_args()
    RESULTS.parent.mkdir(exist_ok=True)
    if options.again:
        RESULTS.unlink(missing_ok=True)
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    found = {(family, layout): (status, text) for family, layout, status, text in map(json.loads, lines)}
    jobs = [(family, layout) for layout in LAYOUTS for family in options.families.split(",")]
    for job in jobs:
        if job not in found:
            found[job] = run(*job)
            with RESULTS.open("a") as file:
                file.write(json.dumps([*job, *found[job]]) + "\n")
            print(f"{', '.join(job):<36} {found[job][0]:<10} {found[job][1][:1500]}", flush=True)
    close_pools()
    write(found)
    return int(any(found[job][0] not in ("equal", "refused") for job in jobs))


def write(found: dict[tuple[str, str], tuple[str, str]]) -> None:
    """Puts the table between its marks in the page."""
    rows = [f"| layout | {' | '.join(FAMILIES)} |", f"|---|{'---|' * len(FAMILIES)}"]
    for layout in LAYOUTS:
        cells = [found.get((family, layout), ("not run", ""))[0] for family in FAMILIES]
        rows.append(f"| {layout} | {' | '.join(cells)} |")
    for (family, layout), (status, text) in found.items():
        if status != "equal":
            rows.append(f"\n{family}, {layout}: {' '.join(text.split())}")
    page = PAGE.read_text(encoding="utf-8")
    start, end = "<!-- layouts -->\n", "<!-- end of layouts -->"
    before, _, rest = page.partition(start)
    PAGE.write_text(before + start + "\n".join(rows) + "\n" + end + rest.partition(end)[2], encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
