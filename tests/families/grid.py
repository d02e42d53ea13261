"""Every family in every mode, against one process: `make parity`. Writes the tables of docs/families.md.

    python tests/families/grid.py                       goes on where it stopped
    python tests/families/grid.py --families phi3,gpt2  these alone
    python tests/families/grid.py --again               from the start

Results are kept, one JSON line each, in out/families.jsonl.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from family_tools import Job, Outcome, ranks_of, run_jobs
from hyperpar_families import dense, moe, recurrent
from hyperpar_families.refused import REFUSED

from hyperpar_core.testing import RankFailure, close_pools, families, pool

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "families.md"
RESULTS = ROOT / "out" / "families.jsonl"
MODES = ("tp2", "tp2 SP", "tp4", "float64 SP")
ADAPTERS = [f for f in (*dense.FAMILIES, *moe.FAMILIES, *recurrent.FAMILIES) if f not in REFUSED and f.name in families()]
SECONDS = 120  # for one family in one mode


def key(job: Job) -> str:
    return f"{job.family}, {job.mode}"


def known(path: Path) -> dict[str, Outcome]:
    lines = path.read_text().splitlines() if path.exists() else []
    data = [json.loads(line) for line in lines]
    return {entry["job"]: Outcome.from_json(json.dumps(entry["outcome"])) for entry in data}


def run(job: Job) -> Outcome:
    """One job on a pool that lives on for the next."""
    try:
        return pool(ranks_of(job.mode)).run(run_jobs, [job], timeout=SECONDS)[0][0]
    except RankFailure as failure:
        return Outcome("error", str(failure)[-1500:])


def main() -> int:
    """0 where everything is equal or refused."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", default=",".join(f.name for f in ADAPTERS))
    parser.add_argument("--again", action="store_true")
    options = parser.parse_args()
    names = options.families.split(",")
    RESULTS.parent.mkdir(exist_ok=True)
    found = {} if options.again else known(RESULTS)
    if options.again:
        RESULTS.unlink(missing_ok=True)
    jobs = [Job(name, mode, saved=mode == "tp2") for mode in MODES for name in names]
    for job in jobs:
        if key(job) in found:
            continue
        outcome = run(job)
        if job.mode == "float64 SP" and outcome.status == "refused":
            outcome = run(Job(job.family, "float64"))
        found[key(job)] = outcome
        with RESULTS.open("a") as file:
            file.write(json.dumps({"job": key(job), "outcome": json.loads(outcome.to_json())}) + "\n")
        print(f"{key(job):<32} {outcome.status:<10} {outcome.text.splitlines()[0] if outcome.text else ''}", flush=True)
    close_pools()
    write(found)
    return int(any(found[key(job)].status not in ("equal", "refused") for job in jobs))


def write(found: dict[str, Outcome]) -> None:
    """Puts the tables between their marks in the page."""
    page = PAGE.read_text(encoding="utf-8")
    tables = {"families": table(found), "causes": causes(found), "refused": refused()}
    for name, text in tables.items():
        start, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        before, _, rest = page.partition(start)
        page = f"{before}{start}{text}{end}{rest.partition(end)[2]}"
    PAGE.write_text(page, encoding="utf-8")


def table(found: dict[str, Outcome]) -> str:
    lines = ["| family | tp2 | tp2 SP | tp4 | float64 | sharded | what is its own |", "|---|---|---|---|---|---|---|"]
    for family in ADAPTERS:
        outcomes = [found.get(key(Job(family.name, mode))) for mode in MODES]
        cells = [outcome.status if outcome else "not run" for outcome in outcomes]
        share = f"{outcomes[0].sharded:.1%}" if outcomes[0] and outcomes[0].sharded else ""
        lines.append(f"| {' | '.join([family.name, *cells, share, family.summary])} |")
    return "\n".join(lines) + "\n"


def causes(found: dict[str, Outcome]) -> str:
    lines = []
    for family in ADAPTERS:
        for mode in MODES:
            outcome = found.get(key(Job(family.name, mode)))
            if outcome and outcome.status != "equal" and mode != "float64 SP":
                text = " ".join(outcome.text.split()).removeprefix(f"{family.name}: ")
                lines.append(f"- {family.name}, {mode}: {text}")
    return "\n".join(lines) + "\n"


def refused() -> str:
    return "".join(f"- {f.name}, {f.summary}\n" for f in REFUSED)


if __name__ == "__main__":
    sys.exit(main())
