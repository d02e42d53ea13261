"""A third party's distribution, end to end: a model that transformers doesn't know, with a packed parameter, attention and experts."""

from __future__ import annotations

import pytest
from kit_tools import ROOT, environment, installed, outcomes

SOURCE = ROOT / "docs" / "examples" / "third_party"
SUITES = {"TestFamily", "TestPacked", "TestContext", "TestExperts", "TestSums"}
MAY_SKIP = {
    "test_the_numbers_hold_on_cuda",
    "test_what_can_t_be_done_is_refused_with_its_cause",
    "test_validate_mode_finds_the_placements_that_the_contract_declares",
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """What became of its own tests, with its wheel installed and no other plugin let in."""
    site, folder = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("run")
    copy = folder / "acme-nimbus"
    for path in SOURCE.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            target = copy / path.relative_to(SOURCE)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    installed(site, copy)
    return outcomes(folder, [copy / "tests"], environment(site, "acme-nimbus"))


@pytest.mark.limit(300)
def test_a_third_party_s_family_passes_every_suite_also_at_tp2_cp2_ep2(found: dict[str, dict[str, str]]) -> None:
    assert set(found) == SUITES
    wrong = {f"{suite}: {test}": text for suite, tests in found.items() for test, text in tests.items()
             if text != "passed" and not (text == "skipped" and test in MAY_SKIP)}  # fmt: skip
    assert not wrong, "\n\n".join(f"{test}\n{text[-2000:]}" for test, text in wrong.items())
