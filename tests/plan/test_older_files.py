"""Plan and override files of older versions load, or the error says what changed; a plan says when its plugins have moved on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hyperpar_core import Overrides, ShardingPlan, build_plan
from hyperpar_core.apply.preflight import other_versions
from hyperpar_core.errors import OverrideError
from hyperpar_core.plan import file_versions
from hyperpar_core.plan.file_versions import FileChange
from hyperpar_core.testing import tiny_model

OVERRIDES = "version: 1\nplan_overrides:\n  - {match: '*.mlp', wrapper: none}\n"


def renamed(data):
    entries = [{"inner_wrapper" if k == "wrapper" else k: v for k, v in entry.items()} for entry in data["plan_overrides"]]
    return {**data, "plan_overrides": entries}


@pytest.fixture
def versions(monkeypatch):
    def set_to(version, **texts):
        monkeypatch.setattr(file_versions, "VERSION", version)
        monkeypatch.setattr(file_versions, "CHANGES", texts.get("changes", {}))

    return set_to


def test_a_file_of_an_older_version_is_read_as_what_it_meant(versions):
    versions(3, changes={1: FileChange("wrapper is inner_wrapper", renamed), 2: FileChange("nothing", lambda data: data)})
    (entry,) = Overrides.from_yaml(OVERRIDES).entries
    assert entry.written() == {"inner_wrapper": None}


def test_where_it_can_t_be_read_the_error_says_what_changed(versions):
    changes = {1: FileChange("wrapper is inner_wrapper", renamed), 2: FileChange("cp_order is written, and was a guess.")}
    versions(3, changes=changes)
    with pytest.raises(OverrideError) as caught:
        Overrides.from_yaml(OVERRIDES)
    text = str(caught.value)
    assert "version 1, and this hyperpar reads 3. Since version 2: cp_order is written, and was a guess." in text
    assert "Make a plan anew with build_plan" in text and len(text.splitlines()) == 2


@pytest.mark.parametrize(
    ("version", "said"),
    [("4", "version 4; this hyperpar reads version 1 to 3. It is of a newer hyperpar: update this one."),
     ("0", "version 0; this hyperpar reads version 1 to 3."), ("'1'", "version '1'; this"), ("true", "version True; this")],
)  # fmt: skip
def test_a_version_that_is_none_or_newer_is_refused_by_its_number(versions, version, said):
    versions(3)
    with pytest.raises(OverrideError) as caught:
        Overrides.from_yaml(OVERRIDES.replace("version: 1", f"version: {version}"))
    assert said in str(caught.value)


def test_a_plan_file_without_fields_that_came_later_with_a_default_loads():
    plan = build_plan(tiny_model("llama"), {"tp": 2})
    data = plan.to_data()
    for name in ("tied", "providers", "notes"):
        del data[name]
    assert ShardingPlan.from_data(data).boundaries == plan.boundaries


def test_every_step_between_versions_that_are_read_is_described():
    assert set(file_versions.CHANGES) == set(range(1, file_versions.VERSION))


def test_a_plan_names_the_plugins_that_have_another_version_now():
    plan = build_plan(tiny_model("llama"), {"tp": 2})
    assert other_versions(plan) == [] and "family llama" in plan.providers
    older = replace(plan, providers={**plan.providers, "family llama": "hyperpar-families 0.0.9"})
    (sentence,) = other_versions(older)
    assert sentence.startswith("the plan was made with hyperpar-families 0.0.9, and hyperpar-families ")
    assert "is installed (family llama)" in sentence
