"""A third party's distribution, end to end: a model that transformers doesn't know, with a packed parameter, attention and experts."""

from __future__ import annotations

import pytest
from kit_tools import Outcomes, failures

SUITES = ("TestNimbus", "TestPacked", "TestContext", "TestExperts", "TestSums")


@pytest.mark.limit(600)
@pytest.mark.parametrize("suite", SUITES)
def test_what_a_third_party_offers_passes_its_suite_the_family_also_at_tp2_cp2_ep2(found: Outcomes, suite: str) -> None:
    assert len(found[suite]) >= 14
    assert failures(found[suite]) == ""
