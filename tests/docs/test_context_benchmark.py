"""The benchmark of context parallel: its formulas hold, and it prints what it promises."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docs" / "benchmarks"))
import context

SHAPES = [context.Shape(1, 8, 4, 256, 8), context.Shape(2, 4, 1, 64, 16), context.Shape(1, 4, 2, 128, 4)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_counted_bytes_are_within_two_percent_of_their_formula(shape: context.Shape) -> None:
    for cp in (2, 4):
        rows = context.rows_of(cp, shape)
        assert [row.form for row in rows] == list(context.FORMS)
        for row in rows:
            assert row.difference < context.BOUND, row
            assert row.peak > 0


def test_forms_that_cannot_deal_the_heads_are_left_out() -> None:
    assert [row.form for row in context.rows_of(4, context.Shape(1, 6, 3, 32, 4))] == ["all-gather", "ring"]


def test_it_prints_a_table_and_paired_ratios_and_fails_where_a_formula_is_wrong(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = ["--cp", "2", "--lengths", "64", "128", "--rounds", "1"]
    assert context.main([*small, "--json", str(tmp_path / "found.json")]) == 0
    out = capsys.readouterr().out
    assert out.count("bytes that leave a rank") == 2 and out.count("x one process: all-gather") == 2
    assert all(needs in out for needs in context.NEEDS.values())
    found = json.loads((tmp_path / "found.json").read_text())
    assert set(found["64"]["ratios"]) == {"all-gather", "ring", "ulysses"}
    right = context.formula
    monkeypatch.setattr(context, "formula", lambda form, cp, shape: tuple(1.03 * x for x in right(form, cp, shape)))
    assert context.main(small) == 1
