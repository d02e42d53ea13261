"""Families by forms of context parallel, against one process: part of `make parity`. Writes the table of docs/context-parallel.md.

    python plugins/hyperpar-cp-sdpa/tests/cp_grid.py                          goes on where it stopped
    python plugins/hyperpar-cp-sdpa/tests/cp_grid.py --families llama,qwen3   these alone
    python plugins/hyperpar-cp-sdpa/tests/cp_grid.py --again                  from the start

Each cell is what `hyperpar verify FAMILY --cp 2 --overrides FILE` says; the other families of transformers run once, with what their
adapter suggests (`--suggested`). Results are kept, one JSON line each, in out/context.jsonl.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from hyperpar_core.errors import HyperparError
from hyperpar_core.testing import RankFailure, close_pools, families, verify

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "context-parallel.md"
RESULTS = ROOT / "out" / "context.jsonl"
FAMILIES = (
    "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "olmo2", "olmo3", "glm4", "smollm3", "cohere2",
    "starcoder2", "gpt_oss", "deepseek_v3",
)  # fmt: skip
MODES = {  # column: (degrees, wrapper)
    "cp2 all-gather": ({"cp": 2}, "sdpa_hf"),
    "cp2 ring": ({"cp": 2}, "sdpa_hf_ring"),
    "cp2 Ulysses": ({"cp": 2}, "sdpa_hf_ulysses"),
    "cp4 hybrid": ({"cp": 4}, "sdpa_hf_hybrid"),
    "tp2 cp2 all-gather": ({"tp": 2, "cp": 2}, "sdpa_hf"),
    "tp2 cp2 ring": ({"tp": 2, "cp": 2}, "sdpa_hf_ring"),
    "tp2 cp2 Ulysses": ({"tp": 2, "cp": 2}, "sdpa_hf_ulysses"),
}
SUGGESTED = "cp2 suggested"


def run(family: str, mode: str) -> tuple[str, str]:
    """("equal", "different", "refused" or "error"; the cause)."""
    try:
        if mode == SUGGESTED:
            report = verify(family, cp=2, steps=0, suggested=True, timeout=120)
        else:
            degrees, wrapper = MODES[mode]
            entry = {"match": "*.self_attn", "when": "cp", "inner_target": "self", "inner_wrapper": wrapper}
            report = verify(family, **degrees, steps=1, overrides=[entry], timeout=120)
    except HyperparError as error:
        return "refused", f"{type(error).__name__}: {error}"
    except RankFailure as failure:
        return "error", str(failure)[-1500:]
    return ("equal", "") if report.ok else ("different", report.text())


def known() -> dict[str, list[str]]:
    """{"family, mode": [status, cause]} of earlier runs."""
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    return {entry["job"]: entry["outcome"] for entry in map(json.loads, lines)}


def main() -> int:
    """0 where everything is equal, or refused in a family that isn't in the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", default=",".join([*FAMILIES, *others()]))
    parser.add_argument("--again", action="store_true")
    options = parser.parse_args()
    RESULTS.parent.mkdir(exist_ok=True)
    if options.again:
        RESULTS.unlink(missing_ok=True)
    found = known()
    names = options.families.split(",")
    jobs = [(family, mode) for mode in MODES for family in names if family in FAMILIES]
    jobs += [(family, SUGGESTED) for family in names if family not in FAMILIES]
    for family, mode in jobs:
        key = f"{family}, {mode}"
        if key in found:
            continue
        found[key] = list(run(family, mode))
        with RESULTS.open("a") as file:
            file.write(json.dumps({"job": key, "outcome": found[key]}) + "\n")
        print(f"{key:<32} {found[key][0]:<10} {found[key][1].splitlines()[0] if found[key][1] else ''}", flush=True)
    close_pools()
    write(found)
    right = {mode: ("equal",) for mode in MODES} | {SUGGESTED: ("equal", "refused")}
    return int(any(found[f"{family}, {mode}"][0] not in right[mode] for family, mode in jobs))


def others() -> list[str]:
    """The families that aren't in the table."""
    return [family for family in families() if family not in FAMILIES]


def write(found: dict[str, list[str]]) -> None:
    """Puts the table and the list of the others between their marks in the page."""
    lines = [f"| family | {' | '.join(MODES)} |", "|---" * (len(MODES) + 1) + "|"]
    for family in FAMILIES:
        cells = [found.get(f"{family}, {mode}", ["not run"])[0] for mode in MODES]
        lines.append(f"| {' | '.join([family, *cells])} |")
    by_status: dict[str, list[str]] = {}
    for family in others():
        by_status.setdefault(found.get(f"{family}, {SUGGESTED}", ["not run"])[0], []).append(family)
    rest = [f"- {status} ({len(names)}): {', '.join(names)}" for status, names in sorted(by_status.items())]
    page = PAGE.read_text(encoding="utf-8")
    for name, text in (("families", lines), ("others", rest)):
        start, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        before, _, after = page.partition(start)
        page = f"{before}{start}{chr(10).join(text)}\n{end}{after.partition(end)[2]}"
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
