"""What entries mean: merging, inserting, globs, conditions, sentinels, every key; in YAML as in Python."""

from __future__ import annotations

import functools

import pytest
import torch
import yaml
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

from hyperpar_core import Override, Overrides, ShardingPlan, build_plan
from hyperpar_core.errors import OverrideError, Refused

ATTN = "model.layers.0.self_attn"
MLP = "model.layers.0.mlp"
R = {"tp": "replicate"}


def own_compute(*, module, factor=1):
    return lambda module, x: x * factor


class Uncallable:
    value = 3


def plan(model, *entries, sizes=None, **options):
    return build_plan(model, sizes or {"tp": 2}, overrides=[Override(**e) for e in entries], **options)


def test_a_glob_is_fnmatch_case_sensitive_and_its_star_crosses_dots(meta):
    changed = plan(meta("llama"), {"match": "m*.mlp", "options": {}, "lowerer": "default"})
    assert [c.fqn for c in changed.boundaries if c.lowerer] == ["model.layers.0.mlp", "model.layers.1.mlp"]
    one = plan(meta("llama"), {"match": "*.[1].ml?", "lowerer": "default"})
    assert [c.fqn for c in one.boundaries if c.lowerer] == ["model.layers.1.mlp"]


def test_entries_for_one_boundary_merge_field_by_field_and_the_later_wins(meta):
    grad = {"x": {"tp": "replicate"}}
    made = plan(
        meta("llama"),
        {"match": MLP, "lowerer": "default", "in_grad": grad},
        {"match": "*.mlp", "lowerer": "none"},
        {"match": MLP, "in_grad": {"x": {"tp": "partial"}}},
    ).boundary(MLP)
    assert made.lowerer is None and made.in_grad == {"x": {"tp": Partial()}}


def test_conditions_must_all_be_active_and_an_inactive_entry_changes_nothing(meta):
    model = meta("llama")
    plain = build_plan(model, {"tp": 2})
    for when, active in (("tp", True), ("sp", True), (["tp", "sp"], True), (["tp", "cp"], False), ("ep", False)):
        made = plan(model, {"match": MLP, "when": when, "lowerer": "default"})
        assert (made.boundary(MLP).lowerer == "default") is active
        assert (made == plain) is not active
    made = plan(model, {"match": MLP, "when": "sp", "lowerer": "default"}, sequence_parallel=False)
    assert made.boundary(MLP).lowerer is None


def test_an_inactive_entry_may_match_a_module_that_is_no_boundary_here_but_not_nothing(meta):
    plan(meta("llama"), {"match": "*.act_fn", "when": "ep", "lowerer": "default"})
    with pytest.raises(OverrideError, match="matches no module"):
        plan(meta("llama"), {"match": "*.act_fm", "when": "ep", "lowerer": "default"})


def test_auto_inherits_none_clears_and_an_empty_mapping_is_empty(meta):
    model = meta("llama")
    fields = [f for f in Override.__dataclass_fields__ if f not in ("match", "when")]
    assert plan(model, {"match": MLP, **dict.fromkeys(fields, "auto")}) == build_plan(model, {"tp": 2})
    embed = "model.embed_tokens"
    whole = {"params": {"weight": {}}, "out_src": {"output": {}}}
    cleared = plan(model, {"match": embed, "local_compute_fn": "none", "region_dispatch": "none", **whole}).boundary(
        embed
    )
    assert cleared.local_compute_fn is None and cleared.region_dispatch is None and not cleared.injects
    nothing = plan(model, {"match": "model.norm", "in_src": {}, "in_dst": {}}).boundary("model.norm")
    assert nothing.in_src == {} and nothing.in_dst == {} and nothing.out_src
    norms = plan(model, {"match": "model.norm", "in_src": "none", "in_dst": "none"}).boundary("model.norm")
    assert norms == nothing


@pytest.mark.parametrize(
    "field", ["options", "params", "in_src", "special_handlers", "lowerer", "out_names", "tp_divide_attrs"]
)
def test_none_in_python_is_none_in_yaml(field):
    assert Override(match="x", **{field: None}) == Override(match="x", **{field: "none"})


def test_a_mapping_replaces_the_field_and_derives_gradients_anew(meta):
    names = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")
    whole = dict.fromkeys(names, R)
    made = plan(
        meta("llama"), {"match": MLP, "params": whole, "out_src": {"output": {}}}, sequence_parallel=False
    ).boundary(MLP)
    assert made.params == {name: {} for name in names}
    assert made.param_grad == {name: {"tp": Replicate()} for name in names}
    assert made.in_grad == {"x": {"tp": Replicate()}}


def test_negative_dims_count_from_the_end_and_stay_as_written(meta):
    names = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")
    params = dict(zip(names, ({"tp": "shard(-2)"}, {"tp": "shard(-2)"}, {"tp": "shard(-1)"}), strict=True))
    made = plan(meta("llama"), {"match": MLP, "params": params})
    assert made.boundary(MLP).params["down_proj.weight"] == {"tp": Shard(-1)}
    assert ShardingPlan.from_yaml(made.to_yaml()) == made


def test_axes_that_arent_active_and_replication_said_aloud_make_no_other_plan(meta):
    names = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")
    derived = ("shard(0)", "shard(0)", "shard(1)")
    params = {n: {"tp": p, "ep": "replicate"} for n, p in zip(names, derived, strict=True)}
    made = plan(meta("llama"), {"match": MLP, "params": params, "in_dst": {"x": {"tp": "replicate", "cp": "shard(1)"}}})
    assert made == build_plan(meta("llama"), {"tp": 2})


def test_a_row_wise_bias_is_still_added_once_when_params_repeats_what_was_derived(meta):
    model = meta("llama", mlp_bias=True)
    derived = build_plan(model, {"tp": 2}).boundary(MLP)
    repeated = plan(model, {"match": MLP, "params": derived.params}).boundary(MLP)
    assert repeated == derived and repeated.param_use == {"down_proj.bias": {"tp": Partial()}}


def test_yaml_and_python_mean_the_same(meta, demo, tmp_path):
    entry = Override(
        match=MLP, when=["tp", "sp"], local_compute_fn="demo_plain", in_grad={"x": {"tp": Partial()}},
        out_names=["output"], lowerer="default", tp_divide_attrs={"intermediate_size": 2}, special_handlers={},
    )  # fmt: skip
    text = Overrides((entry,)).to_yaml(tmp_path / "o.yaml")
    assert Overrides.from_yaml(text) == Overrides((entry,)) == Overrides.from_yaml(tmp_path / "o.yaml")
    plans = [
        build_plan(meta("llama"), {"tp": 2}, overrides=value)
        for value in (
            entry,
            [entry],
            Overrides((entry,)),
            text,
            tmp_path / "o.yaml",
            str(tmp_path / "o.yaml"),
            [entry.to_data()],
        )
    ]
    assert all(made == plans[0] for made in plans)
    assert plans[0].boundary(MLP).divide == {"intermediate_size": 2}


def test_inner_out_src_is_first_input_a_layout_or_layouts_by_output(meta, demo):
    for value in ("first_input", {"tp": "shard(-1)"}, {"output": {"tp": "shard(-1)"}}):
        entry = {"match": ATTN, "inner_target": "q_proj", "inner_wrapper": "demo_probe", "inner_out_src": value}
        made = plan(meta("llama"), entry)
        assert Overrides.from_yaml(Overrides((Override(**entry),)).to_yaml()).entries == (Override(**entry),)
        assert ShardingPlan.from_yaml(made.to_yaml()) == made


# ---- inserting


def up_proj(**fields):
    return {
        "match": f"{MLP}.up_proj", "params": {"weight": {"tp": "shard(0)"}}, "in_src": {"input": R}, "in_dst": {"input": R},
        "out_src": {"output": {"tp": "shard(-1)"}}, "out_dst": {"output": {"tp": "shard(-1)"}}, **fields,
    }  # fmt: skip


def test_an_insert_makes_a_boundary_that_owns_its_parameters_alone(meta):
    made = plan(meta("llama"), up_proj())
    inner, outer = made.boundary(f"{MLP}.up_proj"), made.boundary(MLP)
    assert inner.template == "custom" and list(inner.params) == ["weight"]
    assert "up_proj.weight" not in outer.params and set(outer.params) == {"gate_proj.weight", "down_proj.weight"}
    assert made.owner(f"{MLP}.up_proj.weight") == (inner, "weight")
    assert inner.in_grad == {"input": {"tp": Partial()}}
    order = [c.fqn for c in made.boundaries]
    assert order.index(MLP) + 1 == order.index(f"{MLP}.up_proj")


def test_a_glob_hits_an_inserted_boundary_wherever_it_stands_and_an_insert_merges_over_entries(meta):
    entry = up_proj()
    head = {k: entry[k] for k in ("match", "params", "in_src", "in_dst")}
    tail = {k: entry[k] for k in ("match", "out_src", "out_dst")}
    made = plan(meta("llama"), {"match": "*.up_proj", "lowerer": "default"}, head, tail)
    assert made.boundary(f"{MLP}.up_proj").lowerer == "default"


def test_an_insert_whose_condition_doesnt_hold_inserts_nothing(meta):
    assert plan(meta("llama"), up_proj(when="cp")) == build_plan(meta("llama"), {"tp": 2})


def test_the_outer_boundary_may_not_keep_a_parameter_of_an_inserted_one(meta):
    derived = build_plan(meta("llama"), {"tp": 2}).boundary(MLP).params
    with pytest.raises(OverrideError, match=r"no parameter 'up_proj.weight' here"):
        plan(meta("llama"), up_proj(), {"match": MLP, "params": derived})


def test_an_incomplete_insert_prints_a_draft_that_is_complete(meta):
    with pytest.raises(OverrideError) as caught:
        plan(meta("llama"), {"match": f"{MLP}.up_proj", "params": {"weight": {}}})
    draft = yaml.safe_load(str(caught.value).partition("\n")[2])
    assert draft[0]["in_src"] == {"input": R} and draft[0]["params"] == {"weight": R}
    made = plan(meta("llama"), draft[0], sequence_parallel=False)
    assert made.boundary(f"{MLP}.up_proj").params == {"weight": {}}


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.second(self.first(x))


FIRST = {
    "match": "first", "params": {"weight": {"tp": "shard(0)"}, "bias": {"tp": "shard(0)"}}, "in_src": {"input": R},
    "in_dst": {"input": R}, "out_src": {"output": {"tp": "shard(-1)"}}, "out_dst": {"output": {"tp": "shard(-1)"}},
}  # fmt: skip
SECOND = {
    "match": "second", "params": {"weight": {"tp": "shard(1)"}, "bias": R}, "in_src": {"input": {"tp": "shard(-1)"}},
    "in_dst": {"input": {"tp": "shard(-1)"}}, "out_src": {"output": {"tp": "partial"}}, "out_dst": {"output": R},
}  # fmt: skip


def test_without_deriving_a_plan_is_what_the_entries_insert(meta):
    made = plan(Two(), FIRST, SECOND, derive=False)
    assert [c.fqn for c in made.boundaries] == ["first", "second"]
    assert made.boundary("second").params == {"weight": {"tp": Shard(1)}, "bias": {}}
    with pytest.raises(Refused, match=r"second\.weight, second\.bias"):
        plan(Two(), FIRST, derive=False)
    with pytest.raises(OverrideError, match="none is a boundary"):
        plan(Two(), {**FIRST, "match": "fi*"}, derive=False)
    ignored = plan(meta("llama"), up_proj()).boundary(f"{MLP}.up_proj")
    assert ignored.template == "custom"


# ---- Python code


def test_a_callable_needs_region_dispatch_and_stands_in_no_file(meta):
    with pytest.raises(OverrideError, match="a callable needs region_dispatch"):
        plan(meta("llama"), {"match": MLP, "local_compute_fn": own_compute})
    entry = {"match": MLP, "local_compute_fn": own_compute, "region_dispatch": True, "options": {"factor": 2}}
    made = plan(meta("llama"), entry)
    assert made.boundary(MLP).local_compute_fn is own_compute and made.digest() == plan(meta("llama"), entry).digest()
    with pytest.raises(OverrideError, match="can't be written to YAML"):
        Overrides((Override(**entry),)).to_yaml()
    with pytest.raises(OverrideError, match="a Python callable, which a file can't carry"):
        ShardingPlan.from_yaml(made.to_yaml())


def test_a_callable_object_has_a_name_without_an_address(meta):
    entry = {"match": MLP, "local_compute_fn": functools.partial(own_compute, factor=3), "region_dispatch": True}
    data = plan(meta("llama"), entry).boundary(MLP).to_data()
    assert data["local_compute_fn"] == "<callable functools:partial>"


def test_yaml_names_code_of_trusted_modules_only(meta, monkeypatch, tmp_path):
    (tmp_path / "trusted_code.py").write_text("def make(*, module):\n    return print\n\nvalue = 3\n")
    (tmp_path / "broken_code.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(name, *modules):
        entry = {"match": MLP, "local_compute_fn": name, "region_dispatch": True}
        return plan(meta("llama"), entry, trusted_modules=modules)

    made = make("trusted_code:make", "trusted_code").boundary(MLP).local_compute_fn
    assert made.__module__ == "trusted_code"
    for name, modules, says in (
        ("trusted_code:make", (), "names Python code"),
        ("trusted_code:make", ("trusted",), "names Python code"),
        ("trusted_code:nothing", ("trusted_code",), "can't be loaded: AttributeError"),
        ("trusted_code:value", ("trusted_code",), "can't be called"),
        ("broken_code:make", ("broken_code",), "can't be loaded: ZeroDivisionError"),
        ("missing_code:make", ("missing_code",), "can't be loaded: ModuleNotFoundError"),
    ):
        with pytest.raises(OverrideError, match=says):
            make(name, *modules)


# ---- attributes and handlers


def test_tp_divide_attrs_adds_to_what_is_automatic_and_none_takes_all_away(meta):
    model = meta("gpt2")
    automatic = build_plan(model, {"tp": 2}, sequence_parallel=False).boundary("transformer.h.0.attn").divide
    assert automatic

    def divided(value, **options):
        entry = {"match": "transformer.h.0.attn", "tp_divide_attrs": value}
        return plan(model, entry, sequence_parallel=False, **options).boundary("transformer.h.0.attn").divide

    assert divided(["embed_dim"]) == {**automatic, "embed_dim": 2} == divided({"embed_dim": 2})
    assert divided("none") == {} and divided({}) == automatic
    with pytest.raises(OverrideError, match="is divided by 2 already"):
        divided([next(iter(automatic))])
    assert divided(["embed_dim"], sizes={"dp": 2}) == {}


def test_a_handler_cuts_its_parameter_into_sections_that_say_how_it_is_held(meta, demo):
    made = plan(meta("llama"), {"match": MLP, "special_handlers": {"up_proj.weight": "demo_halves"}})
    contract = made.boundary(MLP)
    assert [s.name for s in contract.sections["up_proj.weight"]] == ["a", "b"]
    assert contract.params["up_proj.weight"] == {"tp": Shard(0)}
    assert made.providers["special_handler demo_halves"] == "hyperpar-demo 1.0"
    assert ShardingPlan.from_yaml(made.to_yaml()) == made


def test_a_packed_parameter_without_its_handler_needs_a_placement(meta):
    model = meta("phi3")
    derived = build_plan(model, {"tp": 2}).boundary(ATTN)
    assert derived.sections
    with pytest.raises(OverrideError, match=r"without its handler, qkv_proj\.weight needs a placement"):
        plan(model, {"match": ATTN, "special_handlers": "none"})
    whole = {"out_src": {"output": R, "attn_weights": R}, "tp_divide_attrs": "none"}
    made = plan(
        model, {"match": ATTN, "special_handlers": {}, "params": {"qkv_proj.weight": R, "o_proj.weight": R}, **whole}
    )
    assert made.boundary(ATTN).sections == {} and made.boundary(ATTN).params["qkv_proj.weight"] == {}
    with pytest.raises(OverrideError, match="decides how it is held"):
        plan(model, {"match": ATTN, "params": {"qkv_proj.weight": R, "o_proj.weight": {"tp": "shard(1)"}}})


def test_entries_are_frozen_and_print_as_they_are_written():
    entry = Override(match="x", when="tp")
    assert "INHERIT" in repr(entry) and entry.written() == {}
    with pytest.raises(AttributeError):
        entry.match = "y"
    assert torch.is_grad_enabled()


WEIGHTS = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")


def mlp_weights(*placements, **fields):
    return {"match": "*.mlp", "params": {n: {"tp": p} for n, p in zip(WEIGHTS, placements, strict=True)}, **fields}


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        (mlp_weights("replicate", "replicate", "replicate"), "out_src is partial over tp, and with whole weights"),
        (mlp_weights("shard(0)", "shard(0)", "shard(0)"), "cut together"),
        (mlp_weights("shard(0)", "replicate", "shard(1)"), "cut together"),
        (mlp_weights("shard(0)", "shard(0)", "shard(1)", out_src={"output": R}), "out_src is replicate over tp, and with its weights cut"),
        ({"match": "*.mlp", "in_dst": {"x": {"tp": "shard(1)"}}}, "in_dst is shard.1. over tp"),
    ],
)  # fmt: skip
def test_placements_over_tp_that_dont_agree_inside_a_boundary_are_refused(meta, entry, said):
    with pytest.raises(OverrideError, match=said):
        plan(meta("llama"), entry)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_placements_over_tp_that_agree_are_taken(meta, sequence_parallel):
    options = {"sequence_parallel": sequence_parallel}
    as_derived = plan(meta("llama"), mlp_weights("shard(0)", "shard(-2)", "shard(1)"), **options)
    assert as_derived.boundary(MLP).out_src == {"output": {"tp": Partial()}}
    whole = plan(meta("llama"), mlp_weights(*["replicate"] * 3, out_src={"output": R}), **options)
    assert whole.boundary(MLP).out_src == {"output": {}}
    if sequence_parallel:
        tokens = {"tp": "shard(1)"}
        cut = mlp_weights(*["replicate"] * 3, in_dst={"x": tokens}, out_src={"output": tokens})
        assert plan(meta("llama"), cut).boundary(MLP).in_dst == {"x": {"tp": Shard(1)}}


def test_a_bias_of_whole_weights_is_whole_on_every_rank(meta):
    model = meta("llama", mlp_bias=True)
    params = {name: R for name, _ in model.get_submodule(MLP).named_parameters()}
    made = plan(model, {"match": "*.mlp", "params": params, "out_src": {"output": R}}).boundary(MLP)
    assert made.param_use == {}
