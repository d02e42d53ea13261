"""Whatever is in a file: it is read, or it is one HyperparError. Nothing else comes out."""

from __future__ import annotations

import json

import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from hyperpar_core import Overrides, ShardingPlan, build_plan, diff, explain
from hyperpar_core.errors import HyperparError
from hyperpar_core.testing import tiny_config

FUZZ = settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
OVERRIDES = {
    "version": 1,
    "plan_overrides": [
        {
            "match": "*.mlp", "when": ["tp", "sp"], "lowerer": "default", "tp_divide_attrs": {"intermediate_size": 2},
            "in_grad": {"x": {"tp": "partial"}}, "out_names": ["output"], "options": {}, "special_handlers": {},
            "in_src": {"x": {"tp": "shard(1)"}}, "in_dst": {"x": {"tp": "replicate"}},
        },
        {"match": "model.norm", "region_dispatch": False, "params": {"weight": {"tp": "replicate"}}},
    ],
}  # fmt: skip
WORDS = (
    "tp", "cp", "ep", "dp", "self", "none", "auto", "shard(0)", "shard(-9)", "partial(max)", "x", "output", "weight",
    "model.norm", "model.layers.0.mlp", "*", "*.mlp", "", "default", "first_input", "a:b", "_target_", "\0", "é",
)  # fmt: skip
LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 9), st.floats(), st.sampled_from(WORDS), st.text(max_size=4), st.dates(),
    st.binary(max_size=2),
)  # fmt: skip
KEYS = st.one_of(st.sampled_from((*WORDS, "fqn", "params", "in_src", "match", "when")), st.integers(0, 2), st.none())
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(KEYS, inner, max_size=2), max_leaves=4
)


def places(data, path=()):
    """Every path into nested data."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from places(value, (*path, key))


@st.composite
def mutations(draw, data, most=3):
    """`data` with one to `most` places changed, removed, renamed or added to."""
    data = json.loads(json.dumps(data))
    for _ in range(draw(st.integers(1, most))):
        path = draw(st.sampled_from(list(places(data)) or [()]))
        inside = data
        for key in path[:-1]:
            inside = inside[key]
        if not path:
            continue
        how = draw(st.sampled_from(("change", "remove", "rename", "add")))
        if how == "change":
            inside[path[-1]] = draw(VALUES)
        elif how == "remove":
            del inside[path[-1]]
        elif isinstance(inside, dict):
            inside[draw(KEYS)] = inside.pop(path[-1]) if how == "rename" else draw(VALUES)
        else:
            inside.insert(0, draw(VALUES))
        if not all(isinstance(key, (str, int)) and not isinstance(key, bool) for p in places(data) for key in p):
            break  # JSON has no such key: the file is made from what there is
    return data


@pytest.fixture(scope="module")
def model():
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(tiny_config("llama"))


def written(data):
    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True)


@FUZZ
@given(text=st.text(alphabet="aver: 1[]{}-\n\t!&*<|>'\"#%@,?~0.\\", max_size=80))
def test_any_text_is_read_or_refused(text):
    for read in (Overrides.from_yaml, ShardingPlan.from_yaml):
        try:
            read("\n" + text)
        except HyperparError as error:
            assert str(error) and len(str(error)) < 2000


@FUZZ
@given(data=mutations(OVERRIDES))
def test_any_change_of_an_override_file_is_planned_or_refused(data, model):
    try:
        read = Overrides.from_yaml(written(data))
        assert Overrides.from_yaml(read.to_yaml()) == read
        plan = build_plan(model, {"tp": 2}, overrides=read)
        explain(plan)
        assert ShardingPlan.from_yaml(plan.to_yaml()) == plan
    except HyperparError as error:
        assert str(error) and len(str(error)) < 2000


@pytest.fixture(scope="module")
def plan(model):
    return build_plan(model, {"tp": 2}, loss_parallel=True)


@FUZZ
@given(data=st.data())
def test_any_change_of_a_plan_file_is_read_or_refused(data, plan):
    try:
        read = ShardingPlan.from_yaml(written(data.draw(mutations(plan.to_data()))))
    except HyperparError as error:
        assert str(error) and len(str(error)) < 2000
        return
    assert ShardingPlan.from_yaml(read.to_yaml()) == read
    assert (diff(plan, read) == "") is (read.digest() == plan.digest())
    assert explain(read)
