"""Bad plan files, meshes, arguments and models: each is one clear error, and the model stays as it is."""

from __future__ import annotations

import copy

import pytest
import torch
import yaml
from torch import nn

from hyperpar_core import LossSpec, ShardingPlan, build_plan
from hyperpar_core.errors import HyperparError, OverrideError, PlanError, PluginError, Refused

GONE = object()
MLP = 3  # place of model.layers.0.mlp among the boundaries

# {name: (path into the file, new value, what the message says)}
EDITS = {
    "kind is missing": (("kind",), GONE, "kind is None"),
    "kind is another": (("kind",), "checkpoint", "kind is 'checkpoint'"),
    "version is newer": (("version",), 2, "version 2"),
    "version is missing": (("version",), GONE, "version None"),
    "an unknown key": (("extra",), 1, "unknown key 'extra'"),
    "a key with a typo": (("boundries",), [], "Nearest: boundaries"),
    "no model": (("model",), GONE, "no 'model'"),
    "model is a number": (("model",), 3, "plan.model: expected a name"),
    "model is null": (("model",), None, "plan.model: expected a name"),
    "family is a list": (("family",), ["llama"], "plan.family"),
    "no sizes": (("sizes",), GONE, "no 'sizes'"),
    "sizes is a list": (("sizes",), [2], "plan.sizes: expected a mapping"),
    "sizes has dp": (("sizes", "dp"), 2, "'dp': 2 is no active plan axis"),
    "sizes has ep": (("sizes", "ep"), 2, "'ep': 2 is no active plan axis"),
    "a size of one": (("sizes", "tp"), 1, "'tp': 1"),
    "a size of zero": (("sizes", "tp"), 0, "'tp': 0"),
    "a negative size": (("sizes", "tp"), -2, "'tp': -2"),
    "a size as text": (("sizes", "tp"), "2", "'tp': '2'"),
    "a size as float": (("sizes", "tp"), 2.0, "'tp': 2.0"),
    "a size of true": (("sizes", "tp"), True, "'tp': True"),
    "a null size": (("sizes", "tp"), None, "'tp': None"),
    "sizes in another order": (("sizes",), {"tp": 2, "cp": 2}, "order cp, tp"),
    "ep_size is zero": (("ep_size",), 0, "plan.ep_size"),
    "ep_size is text": (("ep_size",), "1", "plan.ep_size"),
    "ep_size is true": (("ep_size",), True, "plan.ep_size"),
    "sequence_parallel is a number": (("sequence_parallel",), 1, "plan.sequence_parallel: expected true or false"),
    "sequence_parallel is null": (("sequence_parallel",), None, "plan.sequence_parallel"),
    "cp_order is unknown": (("cp_order",), "zigzag", "plan.cp_order: expected head_tail or contiguous"),
    "cp_order is a list": (("cp_order",), ["head_tail"], "plan.cp_order"),
    "loss is a name": (("loss",), "cross_entropy", "plan.loss"),
    "loss has no name": (("loss",), {"options": {}}, "plan.loss"),
    "loss has a key too many": (("loss",), {"name": "x", "option": {}}, "plan.loss"),
    "loss has options in a list": (("loss",), {"name": "x", "options": [1]}, "plan.loss.options"),
    "loss has null options": (("loss",), {"name": "x", "options": None}, "plan.loss.options"),
    "boundaries is a mapping": (("boundaries",), {}, "plan.boundaries: expected a list"),
    "boundaries is null": (("boundaries",), None, "plan.boundaries: expected a list"),
    "no boundary": (("boundaries",), [], "no boundary owns model.embed_tokens.weight"),
    "a boundary is missing": (("boundaries", MLP), GONE, "no boundary owns model.layers.0.mlp.gate_proj.weight"),
    "a boundary is text": (("boundaries", MLP), "mlp", "a boundary is a mapping with an fqn"),
    "a boundary without fqn": (("boundaries", MLP, "fqn"), GONE, "a boundary is a mapping with an fqn"),
    "an fqn that is a number": (("boundaries", MLP, "fqn"), 3, "a boundary is a mapping with an fqn"),
    "an fqn twice": (("boundaries", MLP, "fqn"), "model.layers.0.self_attn", "stands twice"),
    "an fqn with a typo": (("boundaries", MLP, "fqn"), "model.layers.0.mlpp", "no parameter"),
    "an unknown template": (("boundaries", MLP, "template"), "mpl", "Nearest: mlp"),
    "a template by number": (("boundaries", MLP, "template"), 1, "expected a name"),
    "a key of entries": (("boundaries", MLP, "when"), "tp", "unknown key 'when'"),
    "a field with a typo": (("boundaries", MLP, "in_scr"), {}, "Nearest: in_src"),
    "params is a list": (("boundaries", MLP, "params"), ["x"], "expected a mapping"),
    "params is null": (("boundaries", MLP, "params"), None, "expected a mapping"),
    "params lacks one": (("boundaries", MLP, "params", "up_proj.weight"), GONE, "'up_proj.weight' isn't among"),
    "params has one of another model": (("boundaries", MLP, "params", "w.weight"), {}, "no parameter 'w.weight'"),
    "params has another's": (("boundaries", 1, "params"), {"mlp.up_proj.weight": {}}, "owned by two boundaries"),
    "params has a foreign axis": (("boundaries", MLP, "params", "up_proj.weight"), {"pp": "shard(0)"}, "unknown axis 'pp'"),
    "params has dp": (("boundaries", MLP, "params", "up_proj.weight"), {"dp": "shard(0)"}, "'dp' can't stand in a plan"),
    "params has a typo": (("boundaries", MLP, "params", "up_proj.weight", "tp"), "shard0", "is no placement"),
    "params has a partial": (("boundaries", MLP, "params", "up_proj.weight", "tp"), "partial", "replicate or shard(N)"),
    "params has a dim too many": (("boundaries", MLP, "params", "up_proj.weight", "tp"), "shard(2)", "with 2 dims"),
    "param_use of no parameter": (("boundaries", MLP, "param_use"), {"x": {}}, "param_use: 'x' isn't among"),
    "param_grad of no parameter": (("boundaries", MLP, "param_grad"), {"x": {}}, "param_grad: 'x' isn't among"),
    "param_grad has a shared shard": (("boundaries", MLP, "param_grad", "up_proj.weight", "tp"), "shard(0, 2)", "write shard(N)"),
    "in_src lacks an input": (("boundaries", MLP, "in_src"), {}, "in_dst declares 'x'"),
    "in_src has a dim too many": (("boundaries", MLP, "in_src", "x", "tp"), "shard(12)", "at most 5 dims"),
    "in_src by number": (("boundaries", MLP, "in_src"), {1: {}}, "1 is no name"),
    "in_grad of no input": (("boundaries", MLP, "in_grad", "y"), {"tp": "partial"}, "no input 'y'"),
    "in_grad without a transition": (("boundaries", MLP, "in_grad", "x", "tp"), "partial(max)", "only sums"),
    "out_dst lacks an output": (("boundaries", MLP, "out_dst"), {}, "out_src declares 'output'"),
    "out_dst is partial(max)": (("boundaries", MLP, "out_dst", "output", "tp"), "partial(max)", "only sums"),
    "out_names is a text": (("boundaries", 2, "out_names"), "output", "list of names"),
    "out_names is empty": (("boundaries", 2, "out_names"), [], "list of names"),
    "out_names of numbers": (("boundaries", 2, "out_names"), [1, 2], "list of names"),
    "region_dispatch is text": (("boundaries", 0, "region_dispatch"), "false", "expected true or false"),
    "region_dispatch is null": (("boundaries", 0, "region_dispatch"), None, "expected true or false"),
    "inner_wrapper is a list": (("boundaries", 2, "inner_wrapper"), [], "expected a name"),
    "inner_target is a number": (("boundaries", 2, "inner_target"), 0, "expected a name"),
    "inner_out_src is a number": (("boundaries", 2, "inner_out_src"), 0, "expected a name"),
    "inner_out_src has a typo": (("boundaries", 2, "inner_out_src"), "first_out", "expected first_input"),
    "a callable in a file": (("boundaries", 0, "local_compute_fn"), "<callable a:b>", "which a file can't carry"),
    "local_compute_fn is a mapping": (("boundaries", 0, "local_compute_fn"), {"_target_": "x"}, "expected a name"),
    "options is a list": (("boundaries", 0, "options"), [], "expected a mapping"),
    "options by number": (("boundaries", 0, "options"), {1: 2}, "expected a mapping"),
    "an option that is a date": (("boundaries", 0, "options"), {"a": "DATE"}, "expected plain data"),
    "special_handlers by number": (("boundaries", MLP, "special_handlers"), {"up_proj.weight": 1}, "a name"),
    "special_handlers of no parameter": (("boundaries", MLP, "special_handlers"), {"qkv": "x"}, "'qkv' isn't among"),
    "sections is a list": (("boundaries", MLP, "sections"), [], "expected a mapping"),
    "a section without size": (
        ("boundaries", MLP, "sections"), {"up_proj.weight": [{"name": "a", "dim": 0}]}, "name, dim, size, placement",
    ),
    "a section that is text": (("boundaries", MLP, "sections"), {"up_proj.weight": ["a"]}, "name, dim, size, placement"),
    "a section with a typo": (
        ("boundaries", MLP, "sections"),
        {"up_proj.weight": [{"name": "a", "dim": 0, "size": 2, "placement": "cut(0)"}]}, "is no placement",
    ),
    "lowerer is a list": (("boundaries", MLP, "lowerer"), ["default"], "expected a name"),
    "divide by text": (("boundaries", 2, "divide"), {"num_heads": "2"}, "a whole number"),
    "divide by one": (("boundaries", 2, "divide"), {"num_heads": 1}, "at least 2, got 1"),
    "divide by true": (("boundaries", 2, "divide"), {"num_heads": True}, "at least 2, got True"),
    "divide is a list": (("boundaries", 2, "divide"), ["num_heads"], "expected a mapping"),
    "a negative width": (("boundaries", MLP, "features"), {"x": -1}, "at least 0, got -1"),
    "a width as text": (("boundaries", MLP, "features"), {"x": "64"}, "a whole number"),
    "parameters is a list": (("parameters",), [], "{name: [sizes]}"),
    "a shape that is a number": (("parameters", "model.norm.weight"), 64, "{name: [sizes]}"),
    "a shape of texts": (("parameters", "model.norm.weight"), ["64"], "{name: [sizes]}"),
    "a shape with a negative size": (("parameters", "model.norm.weight"), [-1], "{name: [sizes]}"),
    "a shape of booleans": (("parameters", "model.norm.weight"), [True], "{name: [sizes]}"),
    "a parameter is missing": (("parameters", "model.norm.weight"), GONE, "no parameter 'weight'"),
    "a parameter too many": (("parameters", "model.other.weight"), [2], "no boundary owns model.other.weight"),
    "tied is a mapping": (("tied",), {}, "list of lists of names"),
    "tied of one": (("tied",), [["model.norm.weight"]], "list of lists of names"),
    "tied of unknown names": (("tied",), [["a.weight", "b.weight"]], "no parameter 'a.weight'"),
    "providers is a list": (("providers",), [], "plan.providers"),
    "providers of numbers": (("providers",), {"x": 1}, "plan.providers"),
    "notes is a text": (("notes",), "a note", "plan.notes"),
    "notes of numbers": (("notes",), [1], "plan.notes"),
}  # fmt: skip


def edited(data, path, value):
    data = copy.deepcopy(data)
    inside = data
    for key in path[:-1]:
        inside = inside[key]
    if value is GONE:
        del inside[path[-1]]
    else:
        inside[path[-1]] = value
    return data


@pytest.fixture
def data(meta):
    return build_plan(meta("llama"), {"tp": 2}).to_data()


@pytest.mark.parametrize("name", EDITS)
def test_a_bad_plan_file_is_one_error_that_names_the_field(name, data):
    path, value, says = EDITS[name]
    text = yaml.safe_dump(edited(data, path, value), sort_keys=False).replace("DATE", "2020-01-01")
    with pytest.raises(HyperparError) as caught:
        ShardingPlan.from_yaml(text)
    assert type(caught.value) in (OverrideError, PlanError), type(caught.value)
    assert says in str(caught.value) and len(str(caught.value).splitlines()) <= 9, caught.value


def test_an_unchanged_file_is_read_back(data):
    assert ShardingPlan.from_yaml(yaml.safe_dump(data, sort_keys=False)).to_data() == data


# ---- meshes and arguments

MESHES = {
    "an unknown axis": ({"xp": 2}, PlanError, "unknown mesh axis 'xp'"),
    "a mistyped axis": ({"ttp": 2}, PlanError, "Nearest: tp"),
    "ep as an axis": ({"tp": 2, "ep": 2}, PlanError, "pass ep_size=2"),
    "a pipeline axis": ({"pp": 2, "tp": 2}, Refused, "split the mesh by stage"),
    "a degree of zero": ({"tp": 0}, PlanError, "tp: a degree is a positive whole number, got 0"),
    "a negative degree": ({"tp": -2}, PlanError, "got -2"),
    "half a degree": ({"tp": 2.0}, PlanError, "got 2.0"),
    "a degree as text": ({"tp": "2"}, PlanError, "got '2'"),
    "a degree of true": ({"tp": True}, PlanError, "got True"),
    "a degree of none": ({"tp": None}, PlanError, "got None"),
    "an axis by number": ({1: 2}, PlanError, "unknown mesh axis 1"),
    "a number": (2, PlanError, "expected a DeviceMesh or {axis: degree}"),
    "a list": ([2, 2], PlanError, "expected a DeviceMesh or {axis: degree}"),
    "none": (None, PlanError, "expected a DeviceMesh or {axis: degree}"),
    "a text": ("tp=2", PlanError, "expected a DeviceMesh or {axis: degree}"),
    "heads that don't divide": ({"tp": 3}, Refused, "attention heads can't be split over tp=3"),
    "kv heads that can't be shared": ({"tp": 8}, Refused, "can't be split over tp=8"),
}


@pytest.mark.parametrize("name", MESHES)
def test_a_bad_mesh_is_one_error_that_names_the_axis(name, meta, untouched):
    sizes, error, says = MESHES[name]
    model = meta("llama")
    before = untouched(model)
    with pytest.raises(error) as caught:
        build_plan(model, sizes)
    assert says.lower() in str(caught.value).lower() and untouched(model) == before


ARGUMENTS = {
    "an unknown order": ({"cp_order": "zigzag"}, PlanError, "known: head_tail, contiguous"),
    "no order": ({"cp_order": None}, PlanError, "cp_order is None"),
    "an order that is a list": ({"cp_order": []}, PlanError, "cp_order is []"),
    "sequence_parallel as text": ({"sequence_parallel": "yes"}, PlanError, "expected True or False"),
    "sequence_parallel as a number": ({"sequence_parallel": 1}, PlanError, "expected True or False"),
    "derive as a number": ({"derive": 0}, PlanError, "derive is 0"),
    "loss_parallel as text": ({"loss_parallel": "demo_loss"}, PlanError, "expected True, False or LossSpec"),
    "loss_parallel as none": ({"loss_parallel": None}, PlanError, "expected True, False or LossSpec"),
    "an unknown loss": ({"loss_parallel": LossSpec("demo_los")}, PluginError, "Nearest: demo_loss"),
    "an unknown option of a loss": ({"loss_parallel": LossSpec("demo_loss", {"scael": 1})}, PluginError, "'scael'"),
    "an option that isn't plain": (
        {"loss_parallel": LossSpec("demo_loss", {"scale": object})},
        OverrideError,
        "plain data",
    ),
    "an expert degree of zero": ({"ep_size": 0}, PlanError, "got 0"),
    "an expert degree as text": ({"ep_size": "2"}, PlanError, "got '2'"),
    "an expert degree that the ranks aren't a multiple of": ({"ep_size": 3}, Refused, "ep must divide"),
    "an expert degree without experts": ({"ep_size": 2}, Refused, "Leave ep_size out"),
    "trusted_modules as text": ({"trusted_modules": "os"}, PlanError, "list of module names"),
    "trusted_modules of numbers": ({"trusted_modules": [1]}, PlanError, "list of module names"),
    "overrides as a number": ({"overrides": 3}, OverrideError, "got 3"),
    "overrides as a mapping": ({"overrides": {"match": "x"}}, OverrideError, "list of Override objects"),
    "overrides in a missing file": ({"overrides": "missing.yaml"}, OverrideError, "No such file"),
    "nothing derived, nothing inserted": ({"derive": False}, Refused, "parameters have no owner"),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_bad_argument_is_one_error_that_names_it(name, meta, demo, untouched):
    options, error, says = ARGUMENTS[name]
    model = meta("llama")
    before = untouched(model)
    with pytest.raises(error) as caught:
        build_plan(model, {"tp": 2}, **options)
    assert says in str(caught.value), caught.value
    assert untouched(model) == before


def test_a_sharded_loss_needs_tp_and_a_sharded_head(meta, demo):
    with pytest.raises(Refused, match="tp is 1"):
        build_plan(meta("llama"), {"dp": 2}, loss_parallel=True)
    whole = {"match": "lm_head", "params": {"weight": {}}, "out_src": {"output": {}}, "out_dst": {"output": {}}}
    with pytest.raises(Refused, match="the output head is replicated"):
        build_plan(meta("llama"), {"tp": 2}, loss_parallel=True, overrides=[whole])


# ---- models


class Stray(nn.Module):
    """A parameter that no rule recognises."""

    def __init__(self):
        super().__init__()
        self.own = nn.Parameter(torch.zeros(3))

    def forward(self, x):
        return x + self.own


MODELS = {
    "no module": (lambda: "llama", {"tp": 2}, PlanError, "takes a torch.nn.Module, got 'llama'"),
    "a class": (lambda: nn.Linear, {"tp": 2}, PlanError, "takes a torch.nn.Module"),
    "none": (lambda: None, {"tp": 2}, PlanError, "takes a torch.nn.Module, got None"),
    "layers that nothing knows": (
        lambda: nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(2, 2)])}), {"tp": 2}, Refused, "2 parameters have no owner",
    ),
    "one module in two places": (lambda: nn.ModuleList([nn.Linear(2, 2)] * 2), {"dp": 2}, Refused, "0 and 1 are one module"),
    "no layers": (lambda: nn.ModuleDict({"up_proj": nn.Linear(2, 2)}), {"tp": 2}, Refused, "0 layers and no list"),
    "a parameter of its own": (Stray, {"dp": 2}, Refused, "own"),
    "an unknown linear": (lambda: nn.Sequential(nn.Linear(2, 2)), {"dp": 2}, Refused, "0.weight, 0.bias"),
    "layers without a norm": (
        lambda: nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"up_proj": nn.Linear(2, 2)})])}),
        {"tp": 2}, Refused, "no final norm",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_cant_be_planned_is_refused_with_what_is_missing(name):
    make, sizes, error, says = MODELS[name]
    with pytest.raises(error) as caught:
        build_plan(make(), sizes)
    assert says in str(caught.value), caught.value


@pytest.mark.parametrize(
    ("family", "changes", "tp", "says"),
    [
        ("llama", {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 48}, 2, "3"),
        ("llama", {"num_key_value_heads": 3, "num_attention_heads": 6, "hidden_size": 96}, 2, "3 key/value heads"),
        ("llama", {"intermediate_size": 99}, 2, "99 intermediate features"),
        ("phi3", {"intermediate_size": 3}, 2, "3 intermediate features"),
        ("qwen3", {"num_attention_heads": 6, "num_key_value_heads": 2}, 4, "6 attention heads"),
        ("mistral", {"intermediate_size": 6}, 4, "6 intermediate features"),
    ],
)
def test_sizes_that_dont_divide_are_refused_with_the_degrees_that_do(family, changes, tp, says, meta):
    with pytest.raises(Refused) as caught:
        build_plan(meta(family, **changes), {"tp": tp})
    text = str(caught.value)
    assert says in text and f"can't be split over tp={tp}" in text and "Degrees of tp that work here" in text
    assert "model.layers.0" in text
