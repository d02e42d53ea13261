"""Every product of dp, cp, tp and ep on four ranks, and four on eight, against one process: part of `make parity`.

    python tests/train/products.py           goes on where it stopped
    python tests/train/products.py --again   from the start

Loss, logits and every gradient, weights after three SGD steps, and replicas bitwise after three AdamW steps. Results are kept, one
JSON line each, in out/products.jsonl; the table goes to docs/products.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from hyperpar_core import make_mesh, suggest_overrides
from hyperpar_core.testing import Degrees, RankFailure, check_parity, close_pools, pool, tiny_batch, tiny_model

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "products.md"
RESULTS = ROOT / "out" / "products.jsonl"
FAMILIES = {"llama": False, "qwen3_moe": True, "olmoe": True}  # {family: whether it has experts}
STEPS = 3


@dataclass(frozen=True)
class Product:
    """One job: a family at some degrees."""

    family: str
    dp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    @property
    def ranks(self) -> int:
        return self.dp * self.cp * self.tp

    def text(self) -> str:
        return f"{self.family} " + " x ".join(f"{a}{n}" for a in ("dp", "cp", "tp", "ep") if (n := getattr(self, a)) > 1)


def products(ranks: int) -> list[Product]:
    """Every product on so many ranks; without experts ep is 1."""
    sizes = [d for d in range(1, ranks + 1) if ranks % d == 0]
    return [
        Product(family, dp, cp, tp, ep)
        for family, experts in FAMILIES.items()
        for dp, cp, tp in product(sizes, repeat=3)
        if dp * cp * tp == ranks
        for ep in (sizes if experts else [1])
        if ep <= 4  # experts of the tiny models
    ]


ON_EIGHT = [
    Product(family, *degrees, ep if experts else 1)
    for family, experts in FAMILIES.items()
    for degrees, ep in (((2, 2, 2), 4), ((2, 1, 4), 2), ((4, 1, 2), 4), ((1, 4, 2), 2))
]


def compared(job: Product, steps: int = STEPS) -> str:
    """On every rank: "" where all is equal to one process, else the report."""
    model = tiny_model(job.family, num_key_value_heads=4)
    mesh = make_mesh(dp=job.dp, cp=job.cp, tp=job.tp)
    overrides = suggest_overrides(model, mesh, ep_size=job.ep)
    degrees = Degrees(job.dp, job.cp, job.tp, job.ep, {"overrides": overrides})
    batch = tiny_batch(model, batch=max(2, job.dp), seq=16)
    report = check_parity(model, batch, degrees, steps=steps, title=job.text())
    return "" if report.ok else report.text()


def main() -> int:
    """0 where everything is equal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--again", action="store_true")
    options = parser.parse_args()
    RESULTS.parent.mkdir(exist_ok=True)
    if options.again:
        RESULTS.unlink(missing_ok=True)
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    found = {entry["job"]: entry["differs"] for entry in map(json.loads, lines)}
    jobs = [*products(4), *ON_EIGHT]
    for job in jobs:
        if job.text() in found:
            continue
        try:
            found[job.text()] = pool(job.ranks).run(compared, job, timeout=150)[0]
        except RankFailure as failure:
            found[job.text()] = str(failure)[-1500:]
        with RESULTS.open("a") as file:
            file.write(json.dumps({"job": job.text(), "differs": found[job.text()]}) + "\n")
        print(f"{job.text():<32} {found[job.text()] or 'equal'}", flush=True)
    close_pools()
    write(jobs, found)
    return int(any(found[job.text()] for job in jobs))


def write(jobs: list[Product], found: dict[str, str]) -> None:
    """Puts the table between its marks in the page."""
    rows = ["| ranks | degrees | " + " | ".join(FAMILIES) + " |", "|---|---|" + "---|" * len(FAMILIES)]
    degrees = dict.fromkeys((job.ranks, job.text().partition(" ")[2]) for job in sorted(jobs, key=lambda job: job.ranks))
    for ranks, text in degrees:
        cells = []
        for family in FAMILIES:
            outcome = found.get(f"{family} {text}")
            cells.append("" if outcome is None else outcome.splitlines()[-1] if outcome else "equal")
        rows.append(f"| {ranks} | {text} | {' | '.join(cells)} |")
    start, end = "<!-- products -->\n", "<!-- end of products -->"
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(start)
    PAGE.write_text(before + start + "\n".join(rows) + "\n" + end + rest.partition(end)[2], encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
