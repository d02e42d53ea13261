"""What the whole model refuses at a forward, because its numbers would be wrong, and what it gathers instead."""

import copy
import warnings

import pytest
import torch
from core_tools import error_of, part, planned, raised, share, small, step
from torch import nn

from hyperpar_core import Override, apply_plan, build_plan, make_mesh
from hyperpar_core.testing import pool, tiny_batch


class Adapted(nn.Module):
    """A projection with a low-rank adapter beside it."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.a, self.b = nn.Linear(inner.in_features, 2, bias=False), nn.Linear(2, inner.out_features, bias=False)

    def forward(self, x):
        return self.inner(x) + self.b(self.a(x))


def adapted(degrees):
    applied, _, batch = planned("llama", **degrees)
    layer = applied.model.model.layers[0]
    layer.mlp.up_proj = Adapted(layer.mlp.up_proj)
    return raised(lambda: step(applied.model, share(applied, batch)))


@pytest.mark.parametrize("degrees", [{"tp": 2}, {"dp": 2}], ids=str)
def test_parameters_that_came_after_the_plan_are_refused_at_the_first_forward(degrees):
    for kind, text in pool(2).run(adapted, degrees):
        assert kind == "ApplyError" and "3 parameters aren't in the plan" in text and "up_proj.a.weight" in text


def uncounted(degrees, data_parallel, positional):
    applied, _, batch = planned("llama", data_parallel=data_parallel, **degrees)
    rows = part(applied, batch)
    if positional:
        names = ("input_ids", "attention_mask", "position_ids", "past_key_values", "inputs_embeds", "labels")
        return raised(lambda: applied.model(*[rows.get(name) for name in names]))
    return raised(lambda: applied.model(**rows))


@pytest.mark.parametrize("positional", [False, True])
@pytest.mark.parametrize(
    ("degrees", "data_parallel", "refused"),
    [({"dp": 2}, "core", True), ({"dp": 2}, "external", False), ({"tp": 2}, "core", False)],
    ids=["dp2", "dp2 external", "tp2"],
)
def test_labels_without_a_global_count_are_refused_where_the_core_sums_over_dp(degrees, data_parallel, refused, positional):
    for error in pool(2).run(uncounted, degrees, data_parallel, positional):
        assert (error is not None) is refused
        assert not refused or (error[0] == "ApplyError" and "num_items_in_batch" in error[1])


def warned(degrees, how, data_parallel="core"):
    """What two training forwards warn of, by how the batch was made."""
    applied, _, batch = planned("llama", **degrees, data_parallel=data_parallel)
    if how == "counted":
        given = applied.shard_batch(batch)
    elif how == "sharded":
        given = applied.shard_batch({"input_ids": batch["input_ids"]})
    else:
        given = dict(batch)
    given = {name: value for name, value in given.items() if name in ("input_ids", "position_ids", "attention_mask")}
    with warnings.catch_warnings(record=True) as found, torch.set_grad_enabled(how != "no_grad"):
        warnings.simplefilter("always")
        for _ in range(2):
            applied.model.train(how != "eval")(**given)
    return [str(w.message) for w in found if "num_items_in_batch" in str(w.message)]


@pytest.mark.parametrize(
    ("degrees", "how", "data_parallel", "ranks"),
    [
        ({"dp": 2}, "plain", "core", 1),
        ({"dp": 2}, "sharded", "core", 1),
        ({"dp": 2}, "counted", "core", 0),
        ({"dp": 2}, "eval", "core", 0),
        ({"dp": 2}, "no_grad", "core", 0),
        ({"dp": 2}, "plain", "external", 0),
        ({"tp": 2}, "plain", "core", 0),
    ],
    ids=str,
)
def test_a_loss_of_ones_own_without_a_count_is_warned_of_once_by_the_first_rank(degrees, how, data_parallel, ranks):
    first, second = pool(2).run(warned, degrees, how, data_parallel)
    assert len(first) == ranks and second == []
    assert all("2 times too large" in text and f"summed over {next(iter(degrees))}:" in text for text in first)


def hidden_states(sequence_parallel, how, base=False):
    applied, single, batch = planned("llama", tp=2, seq=9, sequence_parallel=sequence_parallel, config={"num_hidden_layers": 2})
    ids, options = {"input_ids": batch["input_ids"]}, {}
    if how == "config":
        applied.model.config.output_hidden_states = True
    else:
        options["output_hidden_states"] = True
    kept = []
    called = applied.model.model if base else applied.model
    error = raised(lambda: kept.append(called(**ids, **options).hidden_states))
    if error:
        return error
    expected = (single.model if base else single)(**ids, output_hidden_states=True).hidden_states
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(kept[0], expected, strict=True))


@pytest.mark.parametrize("base", [False, True], ids=["model", "base model"])
@pytest.mark.parametrize("how", ["argument", "config"])
def test_hidden_states_of_every_layer_are_refused_under_sequence_parallel_and_whole_without(how, base):
    for kind, text in pool(2).run(hidden_states, True, how, base):
        assert kind == "ApplyError" and "output_hidden_states" in text
    assert max(pool(2).run(hidden_states, False, how, base)) < 1e-5


def attentions(sequence_parallel, seq):
    applied, single, batch = planned(
        "llama", tp=2, seq=seq, sequence_parallel=sequence_parallel, config={"attn_implementation": "eager"}
    )
    errors = []
    for model in (applied.model, single):
        model.set_attn_implementation("eager")
    ours = applied.model(**share(applied, batch), output_attentions=True, use_cache=False)
    theirs = single(**batch, output_attentions=True, use_cache=False)
    for a, b in zip(ours.attentions, theirs.attentions, strict=True):
        assert a.shape == b.shape, (a.shape, b.shape)
        errors.append(float((a - b).abs().max()))
    for out in (ours, theirs):
        (out.loss + sum(a[..., 0].pow(2).sum() for a in out.attentions)).backward()
    return max(errors), error_of(applied, single)


@pytest.mark.parametrize("seq", [8, 3, 15])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_attention_weights_are_gathered_over_the_heads_also_with_uneven_sequences(sequence_parallel, seq):
    for error, (gradient, name) in pool(2).run(attentions, sequence_parallel, seq):
        assert error < 1e-5 and gradient < 1e-5, (error, gradient, name)


class Chatty(nn.Module):
    """An MLP that returns something beside its output."""

    def __init__(self, inner, form):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj, self.form = inner.gate_proj, inner.up_proj, inner.down_proj, form

    def forward(self, x):
        gate = self.gate_proj(x)
        out = self.down_proj(gate.sigmoid() * self.up_proj(x))
        return {"tuple": (out, gate), "dict": {"output": out, "gate": gate}, "list": [out, gate]}[self.form]


class Quiet(nn.Module):
    def __init__(self, inner, form):
        super().__init__()
        self.mlp = Chatty(inner, form)

    def forward(self, x):
        out = self.mlp(x)
        return out["output"] if isinstance(out, dict) else out[0]


def extra_outputs(form, declared):
    model = small("llama")
    for layer in model.model.layers:
        layer.mlp = Quiet(layer.mlp, form)
    single, batch, mesh = copy.deepcopy(model), tiny_batch(model, seq=6), make_mesh(tp=2)
    overrides = []
    if declared:
        overrides = [
            Override(
                match="*.mlp.mlp", out_names=["output", "gate"],
                out_src={"output": {"tp": "partial"}, "gate": {"tp": "shard(2)"}},
                out_dst={"output": {"tp": "shard(1)"}, "gate": {}},
            )
        ]  # fmt: skip
    applied = apply_plan(model, build_plan(model, mesh, overrides=overrides), mesh)
    error = raised(lambda: step(model, share(applied, batch)))
    if error:
        return error
    step(single, batch)
    return error_of(applied, single)


@pytest.mark.parametrize("form", ["tuple", "dict", "list"])
def test_an_output_that_the_contract_doesnt_declare_is_refused_with_its_name(form):
    for kind, text in pool(2).run(extra_outputs, form, False):
        assert kind == "ApplyError" and "mlp.mlp" in text
        assert {"tuple": "'output 1'", "dict": "'gate'", "list": "'output 1'"}[form] in text


@pytest.mark.parametrize("form", ["tuple", "dict"])
def test_a_declared_second_output_is_carried_with_its_gradient(form):
    for error, name in pool(2).run(extra_outputs, form, True):
        assert error < 1e-5, name


def wrong_inputs():
    applied, _, batch = planned("llama", tp=2)
    layer, ids = applied.model.model.layers[0], batch["input_ids"]
    x = applied.model.model.embed_tokens(ids)
    other = raised(lambda: layer.mlp(hidden=x))
    kind = raised(lambda: layer.mlp([x]))
    return other, kind


def test_an_input_under_another_name_or_of_another_kind_is_refused():
    for other, kind in pool(2).run(wrong_inputs):
        assert other[0] == "ApplyError" and "'x'" in other[1]
        assert kind[0] == "ApplyError" and "list" in kind[1]


def resized(where):
    applied, _, batch = planned("llama", tp=2)
    model = applied.model
    error = raised(lambda: (model if where == "root" else model.model).resize_token_embeddings(300))
    fine = bool(step(model, share(applied, batch)).isfinite())
    twin = raised(lambda: copy.deepcopy(model).resize_token_embeddings(300))
    applied.undo()
    model.resize_token_embeddings(300)
    return error, fine, twin, model.lm_head.weight.shape[0]


@pytest.mark.parametrize("where", ["root", "base"])
def test_resizing_the_vocab_of_a_planned_model_is_refused_and_works_after_undo(where):
    for error, fine, twin, size in pool(2).run(resized, where):
        for kind, text in (error, twin):
            assert kind == "ApplyError" and "undo()" in text
        assert fine and size == 300


def stray_tokens():
    """A layer that gets other tokens than entered the stack, under an uneven sequence."""
    applied, _, batch = planned("llama", tp=2, seq=9, config={"num_hidden_layers": 2})
    layer = applied.model.model.layers[1]
    layer.register_forward_pre_hook(lambda m, args: (args[0][:, :-1], *args[1:]))
    return raised(lambda: applied.model(input_ids=batch["input_ids"], use_cache=False))


def test_a_layer_that_gets_another_number_of_tokens_than_entered_the_stack_is_refused():
    for kind, text in pool(2).run(stray_tokens):
        assert kind == "ApplyError" and "tokens on rank" in text and "9 entered the stack" in text


def generated(sequence_parallel):
    """Greedy tokens with a cache, one step at a time."""
    applied, single, batch = planned("llama", tp=2, seq=5, sequence_parallel=sequence_parallel)
    tokens = []
    for model in (applied.model, single):
        model.eval()
        ids = batch["input_ids"]
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False, pad_token_id=0)
        tokens.append(out.tolist())
    return tokens[0] == tokens[1], len(tokens[0][0])


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_generation_with_a_cache_gives_the_tokens_of_one_process(sequence_parallel):
    for same, length in pool(2).run(generated, sequence_parallel):
        assert same and length > 5
