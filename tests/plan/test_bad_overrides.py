"""Bad override files and entries: each is one clear error that names the thing, and the model stays as it is."""

from __future__ import annotations

import dataclasses

import pytest

from hyperpar_core import Override, Overrides, build_plan
from hyperpar_core.errors import HyperparError, OverrideError, PlanError, PluginError

ATTN = "model.layers.0.self_attn"
MLP = "model.layers.0.mlp"
GOOD = "{match: '*.mlp', when: tp}"


def top(entries):
    return f"version: 1\nplan_overrides: [{entries}]"


def nested(depth):
    return "[" * depth + "]" * depth


# {name: (text, what the message says)}
FILES = {
    "empty": ("\n", "empty"),
    "only a comment": ("# nothing\n", "empty"),
    "a list at the top": ("- match: x\n- match: y", "mapping at the top, got a list"),
    "a text at the top": ("just words\nand more", "mapping at the top, got a str"),
    "a number at the top": ("3\n", "mapping at the top, got a int"),
    "no version": ("plan_overrides: []\n", "version None"),
    "version 2": ("version: 2\nplan_overrides: []", "version 2; this hyperpar reads version 1"),
    "version 0": ("version: 0\nplan_overrides: []", "version 0"),
    "version as text": ("version: '1'\nplan_overrides: []", "version '1'"),
    "version as float": ("version: 1.0\nplan_overrides: []", "version 1.0"),
    "version true": ("version: true\nplan_overrides: []", "version True"),
    "version as list": ("version: [1]\nplan_overrides: []", "version [1]"),
    "no entries key": ("version: 1\n", "plan_overrides must be a list"),
    "misspelt entries key": ("version: 1\nplan_override: []", "Nearest: plan_overrides"),
    "entries as mapping": ("version: 1\nplan_overrides: {match: x}", "must be a list"),
    "entries as text": ("version: 1\nplan_overrides: x", "must be a list"),
    "entries null": ("version: 1\nplan_overrides:", "must be a list"),
    "a plan file": ("version: 1\nkind: plan\nboundaries: []", "this is a plan file"),
    "an extra key": ("version: 1\nplan_overrides: []\nextra: 1", "unknown key 'extra'"),
    "a key that is a number": ("version: 1\nplan_overrides: []\n7: 1", "unknown key 7"),
    "the same key twice": ("version: 1\nversion: 1\nplan_overrides: []", "'version' stands twice"),
    "the same field twice": (top("{match: x, when: tp, when: cp}"), "'when' stands twice"),
    "the same parameter twice": (top("{match: x, params: {w: {}, w: {}}}"), "'w' stands twice"),
    "a mapping as key": ("version: 1\n{a: b}: 1", "line 2"),
    "a list as key": ("version: 1\n? [a, b]\n: 1", "a key must be plain text"),
    "an alias": ("version: 1\nplan_overrides: &x [*x]", "aliases aren't read"),
    "a YAML bomb": (
        "a: &a [x, x, x, x]\nb: &b [*a, *a, *a, *a]\nc: &c [*b, *b, *b, *b]\nversion: 1\nplan_overrides: [*c]",
        "aliases aren't read",
    ),
    "a python object": ("version: 1\nplan_overrides: !!python/object/apply:os.system ['true']", "not readable as YAML"),
    "a python name": (top("{match: x, inner_wrapper: !!python/name:os.system }"), "not readable as YAML"),
    "a python tuple": (top("{match: x, when: !!python/tuple [tp]}"), "not readable as YAML"),
    "an unknown tag": (top("{match: !thing x}"), "not readable as YAML"),
    "a boolean tag on a word": (top("{match: x, region_dispatch: !!bool maybe}"), "not readable as YAML"),
    "an integer tag on a word": (top("{match: x, options: {a: !!int word}}"), "not readable as YAML"),
    "a timestamp tag on a word": (top("{match: x, options: {a: !!timestamp word}}"), "not readable as YAML"),
    "an impossible date": (top("{match: x, options: {a: 2020-13-45}}"), "not readable as YAML"),
    "a merge key of a number": (top("{match: x, <<: 3}"), "not readable as YAML"),
    "two documents": ("version: 1\n---\nversion: 1", "not readable as YAML"),
    "a tab as indent": ("version: 1\nplan_overrides:\n\t- match: x", "not readable as YAML"),
    "an open bracket": ("version: 1\nplan_overrides: [", "not readable as YAML"),
    "an open quote": ('version: 1\nplan_overrides: "', "not readable as YAML"),
    "a control character": ("version: 1\nplan_overrides: \x07", "not readable as YAML"),
    "a number of 5000 digits": (top("{match: x, options: {a: " + "9" * 5000 + "}}"), "not readable as YAML"),
    "nested 5000 deep": (f"version: 1\nplan_overrides: {nested(5000)}", "nest"),
    "nested 100 deep": (top("{match: x, options: {a: " + nested(100) + "}}"), "32 levels deep"),
    "a colon too many": ("version: 1: 2", "not readable as YAML"),
    "a file that isn't there": ("no_such_file.yaml", "No such file"),
    "a file that isn't there, as JSON": ("no_such_file.json", "No such file"),
    "an entry that is text": (top("self_attn"), "an entry is a mapping"),
    "an entry that is a list": (top("[match, x]"), "an entry is a mapping"),
    "an entry that is null": (top("~"), "an entry is a mapping"),
    "an entry without match": (top("{when: tp}"), "no match"),
    "an empty entry": (top("{}"), "no match"),
    "the second entry is wrong": (top(f"{GOOD}, {{when: tp}}"), "plan_overrides[1]"),
}


def entry(match=MLP, **fields):
    return {"match": match, **fields}


LAYOUTS = ("params", "in_src", "in_dst", "in_grad", "out_src", "out_dst")
WHOLE = {"x": {"tp": "replicate"}}
# {name: (entry, error, what the message says)}
ENTRIES = {
    # match
    "match is a number": (entry(7), OverrideError, "got 7"),
    "match is a list": (entry([ATTN]), OverrideError, "match must be"),
    "match is empty": (entry(""), OverrideError, "match must be"),
    "match is blank": (entry("  "), OverrideError, "match must be"),
    "match has a typo": (entry("model.layers.0.self_atn"), OverrideError, "Nearest: model.layers.0.self_attn"),
    "a glob has a typo": (entry("*.self_atn"), OverrideError, "Nearest: *.self_attn"),
    "match in the wrong case": (entry("*.MLP"), OverrideError, "matches no module"),
    "match has a layer too many": (entry("model.layers.2.mlp"), OverrideError, "matches no module"),
    "match is a parameter": (entry(f"{MLP}.up_proj.weight"), OverrideError, "matches no module"),
    "match has a dot too many": (entry(f"{MLP}."), OverrideError, "matches no module"),
    "a glob over no boundary": (entry("*.act_fn"), OverrideError, "none is a boundary of this plan"),
    "an open bracket in a glob": (entry("*.mlp["), OverrideError, "matches no module"),
    # when
    "when is unknown": (entry(when="pp"), OverrideError, "unknown condition 'pp'"),
    "when is dp": (entry(when="dp"), OverrideError, "unknown condition 'dp'"),
    "when has a typo": (entry(when=["cp", "tpp"]), OverrideError, "unknown condition 'tpp'"),
    "when is a number": (entry(when=2), OverrideError, "got 2"),
    "when is true": (entry(when=True), OverrideError, "got True"),
    "when is empty": (entry(when=[]), OverrideError, "got []"),
    "when is a mapping": (entry(when={"tp": 2}), OverrideError, "when: expected"),
    "when is none": (entry(when="none"), OverrideError, "unknown condition 'none'"),
    "when holds a list": (entry(when=[["tp"]]), OverrideError, "unknown condition"),
    # keys
    "an unknown key": (entry(parameters={}), OverrideError, "unknown key 'parameters'"),
    "a key with a typo": (entry(inner_wraper="x"), OverrideError, "Nearest: inner_wrapper"),
    "a key in upper case": (entry(Params={}), OverrideError, "unknown key 'Params'"),
    "a field of contracts": (entry(divide={"a": 2}), OverrideError, "unknown key 'divide'"),
    "the template": (entry(template="mlp"), OverrideError, "unknown key 'template'"),
    "_target_ in an entry": (entry(_target_="os.system"), OverrideError, "YAML doesn't import Python"),
    "_target_ in a field": (entry(local_compute_fn={"_target_": "a.b"}), OverrideError, "_target_ isn't read"),
    "_target_ in options": (entry(options={"_target_": "a.b"}), OverrideError, "_target_ isn't read"),
    # layouts, in every field
    **{
        f"{field} {name}": (entry(**{field: value}), OverrideError, says)
        for field in LAYOUTS
        for name, value, says in (
            ("is a list", ["x"], f"{field}: expected a mapping"),
            ("is a text", "replicate", f"{field}: expected a mapping"),
            ("has a layout that is a text", {"x": "shard(0)"}, "mapping of axis to placement"),
            ("has dp", {"x": {"dp": "shard(0)"}}, "'dp' can't stand in a plan"),
            ("has edp", {"x": {"edp": "shard(0)"}}, "'edp' can't stand in a plan"),
            ("has a foreign axis", {"x": {"pp": "shard(0)"}}, "unknown axis 'pp'"),
            ("has a placement with a typo", {"x": {"tp": "shart(0)"}}, "'shart(0)' is no placement"),
            ("has no value", None, "no value; write none"),
        )
    },
    "an axis with a number for a placement": (entry(in_src={"x": {"tp": 0}}), OverrideError, "0 is no placement"),
    "a shard without a dim": (entry(in_src={"x": {"tp": "shard"}}), OverrideError, "'shard' is no placement"),
    "a shard of half a dim": (entry(in_src={"x": {"tp": "shard(0.5)"}}), OverrideError, "is no placement"),
    "a shard of a name": (entry(in_src={"x": {"tp": "shard(q)"}}), OverrideError, "is no placement"),
    "a shard of two dims": (entry(in_src={"x": {"tp": "shard(0, 2)"}}), OverrideError, "write shard(N)"),
    "a replicate of a dim": (entry(in_src={"x": {"tp": "replicate(0)"}}), OverrideError, "is no placement"),
    "a partial of a mean": (entry(in_src={"x": {"tp": "partial(mean)"}}), OverrideError, "is no placement"),
    "a null placement": (entry(in_src={"x": {"tp": None}}), OverrideError, "is no placement"),
    "a list of placements": (entry(in_src={"x": {"tp": ["shard(0)"]}}), OverrideError, "is no placement"),
    "a layout by number": (entry(in_src={0: {"tp": "shard(0)"}}), OverrideError, "0 is no name"),
    "an axis by number": (entry(in_src={"x": {1: "shard(0)"}}), OverrideError, "unknown axis 1"),
    # what the layouts say
    "params drops some": (entry(params={"up_proj.weight": {}}), OverrideError, "drops gate_proj.weight, down_proj.weight"),
    "params is none": (entry(params="none"), OverrideError, "drops gate_proj.weight"),
    "params has a name too many": (entry(params={"q.weight": {}}), OverrideError, "no parameter 'q.weight' here"),
    "params has a full name": (entry(params={f"{MLP}.up_proj.weight": {}}), OverrideError, "no parameter"),
    "a dim of a parameter out of range": (
        entry(params={n: {"tp": "shard(2)"} for n in ("gate_proj.weight", "up_proj.weight", "down_proj.weight")}),
        OverrideError, "shard(2), of a parameter with 2 dims",
    ),
    "a negative dim out of range": (
        entry(params={n: {"tp": "shard(-3)"} for n in ("gate_proj.weight", "up_proj.weight", "down_proj.weight")}),
        OverrideError, "shard(-3), of a parameter with 2 dims",
    ),
    "a partial parameter": (
        entry(params={n: {"tp": "partial"} for n in ("gate_proj.weight", "up_proj.weight", "down_proj.weight")}),
        OverrideError, "a parameter is held as replicate or shard(N)",
    ),
    "a dim of an input out of range": (entry(in_src={"x": {"tp": "shard(9)"}}), OverrideError, "at most 5 dims"),
    "an input that forward lacks": (
        entry(in_src={"hidden": {}}, in_dst={"hidden": {}}), OverrideError, "forward takes x",
    ),
    "in_src without in_dst": (entry(in_src={"x": {}, "y": {}}), OverrideError, "in_src declares 'y', and in_dst doesn't"),
    "in_dst without in_src": (entry(in_dst={"x": {}, "y": {}}), OverrideError, "in_dst declares 'y', and in_src doesn't"),
    "in_src cleared alone": (entry(in_src="none"), OverrideError, "in_dst declares 'x', and in_src doesn't"),
    "out_dst without out_src": (entry(out_dst={"output": {}, "z": {}}), OverrideError, "out_dst declares 'z'"),
    "out_src cleared alone": (entry(out_src={}), OverrideError, "out_dst declares 'output'"),
    "in_grad of no input": (entry(in_grad={"y": {"tp": "partial"}}), OverrideError, "no input 'y'"),
    "an input is sharded and made partial": (
        entry(in_src={"x": {"tp": "shard(1)"}}, in_dst={"x": {"tp": "partial"}}), PlanError, "no transition",
    ),
    "a maximum": (entry(out_src={"output": {"tp": "partial(max)"}}), PlanError, "only sums are differentiated"),
    "a neighbour disagrees": (
        entry(in_src={"x": {}}, in_dst={"x": {}}), OverrideError, "nothing else in its layer yields that",
    ),
    "what leaves is taken by none": (
        entry(out_dst={"output": {}}), OverrideError, "nothing else in its layer takes that",
    ),
    "the embedding leaves a shard": (
        entry("model.embed_tokens", out_dst={"output": {"tp": "shard(1)"}}), OverrideError, "must see the whole sequence",
    ),
    "tied parameters held apart": (
        entry("lm_head", params={"weight": {}}, out_src={"output": {}}), PlanError, "held alike",
    ),
    # names
    "out_names is a text": (entry(out_names="output"), OverrideError, "list of different names"),
    "out_names is empty": (entry(out_names=[]), OverrideError, "list of different names"),
    "out_names twice": (entry(out_names=["output", "output"]), OverrideError, "list of different names"),
    "out_names of numbers": (entry(out_names=[1]), OverrideError, "list of different names"),
    "out_names without a layout": (entry(out_names=["output", "z"]), OverrideError, "'z' has no layout"),
    "inner_target is a number": (entry(inner_target=3), OverrideError, "expected a name"),
    "inner_target is empty": (entry(inner_target=""), OverrideError, "expected a name"),
    "inner_wrapper is a mapping": (entry(inner_wrapper={"name": "x"}), OverrideError, "expected a name"),
    "inner_wrapper is a list": (entry(inner_wrapper=["a", "b"]), OverrideError, "expected a name"),
    "local_compute_fn is true": (entry(local_compute_fn=True), OverrideError, "expected a name"),
    "lowerer is a list": (entry(lowerer=["default"]), OverrideError, "expected a name"),
    "region_dispatch is a text": (entry(region_dispatch="false"), OverrideError, "expected true or false"),
    "region_dispatch is a number": (entry(region_dispatch=0), OverrideError, "expected true or false"),
    "inner_out_src is a number": (entry(inner_out_src=1), OverrideError, "expected first_input"),
    "inner_out_src has a typo": (entry(inner_out_src="first_inptu"), OverrideError, "expected first_input"),
    "inner_out_src of a foreign axis": (entry(inner_out_src={"pp": "shard(0)"}), OverrideError, "unknown axis 'pp'"),
    # injections
    "a wrapper that isn't there": (
        entry(ATTN, inner_target="self", inner_wrapper="demo_pp"), PluginError, "Nearest: demo_cp",
    ),
    "a local compute that isn't there": (entry(local_compute_fn="demo_plian"), PluginError, "Nearest: demo_plain"),
    "a lowerer that isn't there": (entry(lowerer="defualt"), PluginError, "Nearest: default"),
    "a lowerer for other axes": (entry(lowerer="demo_lowerer"), OverrideError, "works over ep, and active are tp"),
    "a handler that isn't there": (entry(special_handlers={"up_proj.weight": "halvse"}), PluginError, "no special handler"),
    "a handler for no parameter": (entry(special_handlers={"qkv": "demo_halves"}), OverrideError, "no parameter 'qkv' here"),
    "a handler by number": (entry(special_handlers={"up_proj.weight": 1}), OverrideError, "name of a handler"),
    "handlers as a list": (entry(special_handlers=["demo_halves"]), OverrideError, "expected a mapping"),
    "a wrapper as a local compute": (entry(local_compute_fn="demo_cp"), PluginError, "the name of an inner wrapper"),
    "a wrapper without target": (entry(ATTN, inner_wrapper="demo_probe"), OverrideError, "write inner_target: self"),
    "a target without wrapper": (entry(ATTN, inner_target="self"), OverrideError, "inner_target without inner_wrapper"),
    "a child without inner_out_src": (
        entry(ATTN, inner_target="q_proj", inner_wrapper="demo_probe"), OverrideError, "needs inner_out_src",
    ),
    "a child that isn't there": (
        entry(ATTN, inner_target="q_prjo", inner_wrapper="demo_probe", inner_out_src="first_input"),
        OverrideError, "Nearest: q_proj",
    ),
    "inner_out_src for self": (
        entry(ATTN, inner_target="self", inner_wrapper="demo_probe", inner_out_src="first_input"),
        OverrideError, "speaks of a child",
    ),
    "a wrapper over an inactive axis": (
        entry(ATTN, inner_target="self", inner_wrapper="demo_cp"), OverrideError, "demo_cp works over cp, and cp is 1",
    ),
    "experts over an inactive axis": (
        entry(local_compute_fn="demo_experts", options={"capacity": 1}), OverrideError, "ep",
    ),
    "a wrapper and a local compute": (
        entry(inner_target="self", inner_wrapper="demo_probe", local_compute_fn="demo_plain"),
        OverrideError, "exclude each other",
    ),
    "a local compute where its children aren't": (
        entry(ATTN, local_compute_fn="demo_plain"), OverrideError, "has no gate_proj",
    ),
    "another region_dispatch than stated": (
        entry(local_compute_fn="demo_plain", region_dispatch=False), OverrideError, "demo_plain states true",
    ),
    "region_dispatch without injection": (entry(region_dispatch=True), OverrideError, "leave it out"),
    "options without injection": (entry(options={"a": 1}), OverrideError, "options a would go to nothing"),
    "an unknown option": (entry(local_compute_fn="demo_plain", options={"a": 1}), PluginError, "unknown option 'a'"),
    "an option with a typo": (
        entry(ATTN, inner_target="self", inner_wrapper="demo_probe", options={"cuasal": 1}), PluginError, "'cuasal'",
    ),
    "an option that the core passes": (
        entry(local_compute_fn="demo_plain", options={"tp_mesh": 1}), PluginError, "a name that the core itself passes",
    ),
    "options as a list": (entry(options=["a"]), OverrideError, "expected a mapping"),
    "options by number": (entry(options={1: 2}), OverrideError, "expected a mapping"),
    "an option that isn't plain": (entry(options={"a": {1, 2}}), OverrideError, "expected plain data"),
    "an option by number, deeper": (entry(options={"a": {1: 2}}), OverrideError, "expected plain data"),
    "Python code that isn't trusted": (
        entry(local_compute_fn="os:system"), OverrideError, "trusted_modules=['os']",
    ),
    # attributes
    "an attribute that isn't there": (entry(ATTN, tp_divide_attrs=["num_head"]), OverrideError, "no attribute 'num_head'"),
    "an attribute that is no count": (entry(ATTN, tp_divide_attrs=["head_dim"]), OverrideError, "is no count"),
    "a layer's number": (entry(ATTN, tp_divide_attrs=["layer_idx"]), OverrideError, "is no count"),
    "an attribute that is a float": (entry(ATTN, tp_divide_attrs=["scaling"]), OverrideError, "no whole number"),
    "an attribute that is a boolean": (entry(ATTN, tp_divide_attrs=["is_causal"]), OverrideError, "no whole number"),
    "an attribute twice": (entry(MLP, tp_divide_attrs=["hidden_size", "hidden_size"]), OverrideError, "twice"),
    "a divisor of nothing": (entry(MLP, tp_divide_attrs={"hidden_size": 0}), OverrideError, "at least 2, got 0"),
    "a divisor of one": (entry(MLP, tp_divide_attrs={"hidden_size": 1}), OverrideError, "at least 2, got 1"),
    "a divisor as text": (entry(MLP, tp_divide_attrs={"hidden_size": "2"}), OverrideError, "got '2'"),
    "a divisor of true": (entry(MLP, tp_divide_attrs={"hidden_size": True}), OverrideError, "got True"),
    "a divisor that tp isn't a multiple of": (entry(MLP, tp_divide_attrs={"hidden_size": 4}), OverrideError, "divides tp=2"),
    "attributes by number": (entry(MLP, tp_divide_attrs=[1]), OverrideError, "list of attributes"),
    "attributes as a number": (entry(MLP, tp_divide_attrs=2), OverrideError, "list of attributes"),
    # inserting
    "an incomplete insert": (entry(f"{MLP}.act_fn", params={}), OverrideError, "A draft, to be made right"),
    "an insert of nothing": (entry("model.rotary_emb"), OverrideError, "missing: params, in_src, in_dst, out_src, out_dst"),
    "an insert without its parameter": (
        entry(f"{MLP}.up_proj", params={}, in_src={}, in_dst={}, out_src={}, out_dst={}),
        OverrideError, "drops weight",
    ),
    "an insert with another's parameter": (
        entry(f"{MLP}.up_proj", params={"bias": {}}, in_src={}, in_dst={}, out_src={}, out_dst={}),
        OverrideError, "no parameter 'bias' here",
    ),
}  # fmt: skip


def refused(error, says, function):
    """The one error of `function`: of class `error`, saying `says`, short, and hyperpar's own."""
    with pytest.raises(HyperparError) as caught:
        function()
    assert isinstance(caught.value, error), type(caught.value)
    text = str(caught.value)
    assert says in text, text
    assert len(text.splitlines()) <= 9 and "Traceback" not in text and "object at 0x" not in text
    return text


@pytest.mark.parametrize("name", FILES)
def test_a_bad_file_is_one_error_that_says_what_is_wrong(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text, says = FILES[name]
    refused(OverrideError, says, lambda: Overrides.from_yaml(text))
    refused(OverrideError, says, lambda: Overrides.of(text))
    if not text.startswith("no_such"):
        path = tmp_path / "file.yaml"
        path.write_text(text)
        refused(OverrideError, says, lambda: Overrides.from_yaml(path))


@pytest.mark.parametrize("name", ENTRIES)
def test_a_bad_entry_is_one_error_that_names_it_and_leaves_the_model_alone(name, meta, demo, untouched):
    written, error, says = ENTRIES[name]
    model = meta("llama", tie_word_embeddings=True)
    before = untouched(model)
    refused(error, says, lambda: build_plan(model, {"tp": 2}, overrides=[written]))
    assert untouched(model) == before


FIELDS = {field.name for field in dataclasses.fields(Override)}
IN_PYTHON = [
    n for n, (e, _, says) in ENTRIES.items() if set(e) <= FIELDS and None not in e.values() and "_target_" not in says
]


@pytest.mark.parametrize("name", [n for n in IN_PYTHON if n != "_target_ in a field"])
def test_a_bad_entry_is_as_bad_in_python(name, meta, demo):
    written, error, says = ENTRIES[name]
    refused(
        error,
        says,
        lambda: build_plan(meta("llama", tie_word_embeddings=True), {"tp": 2}, overrides=[Override(**written)]),
    )


OBJECTS = [3, {"match": "x"}, b"x", object(), [3], [None], ["model.layers"], [["match"]]]


@pytest.mark.parametrize("value", OBJECTS, ids=lambda v: type(v).__name__ + repr(v)[:12].replace("object at", ""))
def test_what_is_no_list_of_entries_is_an_error(value):
    with pytest.raises(OverrideError):
        Overrides.of(value)


def test_a_file_that_is_no_text_or_too_large_or_a_folder_is_an_error(tmp_path):
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "large.yaml").write_text("#" * (16 * 2**20 + 1))
    refused(OverrideError, "not UTF-8", lambda: Overrides.from_yaml(tmp_path / "binary.yaml"))
    refused(OverrideError, "larger than 16 MiB", lambda: Overrides.from_yaml(tmp_path / "large.yaml"))
    refused(OverrideError, "directory", lambda: Overrides.from_yaml(tmp_path))
    refused(OverrideError, "larger than 16 MiB", lambda: Overrides.from_yaml("\n" + "#" * (16 * 2**20)))
    refused(OverrideError, "mapping at the top", lambda: Overrides.from_yaml("x" * 5000))
    refused(OverrideError, "not readable", lambda: Overrides.from_yaml("a\0b"))
