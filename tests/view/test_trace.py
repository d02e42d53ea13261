"""A traced step: what it sends is what the plan says, boundary by boundary, and nothing stays behind."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise

import pytest
import torch

from hyperpar_core import Override, Overrides, apply_plan, build_plan, make_mesh, suggest_overrides
from hyperpar_core.testing import tiny_batch, tiny_model
from hyperpar_core.view.recorder import MODEL, SUMS
from hyperpar_core.view.traffic import gradient_sums, movements, predict

SEQUENCE = 16


def planned(family, degrees, ep=1, changes=None, **options):
    model = tiny_model(family, **(changes or {}))
    mesh = make_mesh(**degrees)
    overrides = suggest_overrides(model, mesh, ep_size=ep)
    applied = apply_plan(model, build_plan(model, mesh, overrides=overrides, ep_size=ep, **options), mesh, checks=None)
    return applied, applied.shard_batch(tiny_batch(model, batch=2, seq=SEQUENCE))


def rows_of_a_step(family, degrees, ep, changes, options):
    """(what the plan says, what was recorded): {(boundary, direction, collective): (count, bytes)}, and both totals."""
    applied, batch = planned(family, degrees, ep, changes, **options)
    with applied.trace(show=False) as trace:
        applied.model(**batch, use_cache=False).loss.backward()
    said, seen = Counter(), Counter()
    for contract in applied.plan.boundaries:
        for m in movements(applied.plan, contract, 2, SEQUENCE, 4):
            if m.tensor != "loss":
                said[contract.fqn, m.direction, m.collective] += 1
                said[contract.fqn, m.direction, m.collective, "bytes"] += m.bytes
    for one in gradient_sums(applied.plan, 4, degrees.get("dp", 1)):
        said[SUMS, "backward", "all_reduce"] += 1
        said[SUMS, "backward", "all_reduce", "bytes"] += one.bytes
    for one in trace.sent:
        if one.boundary != MODEL:
            seen[one.boundary, one.phase, one.collective] += 1
            seen[one.boundary, one.phase, one.collective, "bytes"] += one.bytes
    losses = [(one.collective, one.bytes) for one in trace.sent if one.boundary == MODEL]
    return said, seen, losses, predict(applied.plan, 2, SEQUENCE, bytes_per_element=4, dp=degrees.get("dp", 1)), trace.totals()


CASES = {
    "tp": ("llama", {"tp": 2}, 1, {}, {"sequence_parallel": False}),
    "sequence parallel": ("qwen3", {"tp": 2}, 1, {}, {}),
    "loss parallel": ("llama", {"tp": 2}, 1, {}, {"loss_parallel": True}),
    "dp": ("llama", {"dp": 2}, 1, {}, {}),
    "cp": ("llama", {"cp": 2}, 1, {}, {}),
    "ep": ("qwen3_moe", {"tp": 2}, 2, {"num_experts_per_tok": 4}, {}),
    "shared expert": ("qwen2_moe", {"tp": 2}, 2, {"num_experts_per_tok": 4}, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_each_boundary_sends_what_the_plan_says_in_the_direction_that_it_says(ranks2, case):
    for said, seen, losses, predicted, totals in ranks2.run(rows_of_a_step, *CASES[case]):
        assert seen == said and seen
        assert totals == predicted
        parallel = [("all_reduce", 2 * SEQUENCE * 4), ("all_reduce", 2 * 2 * SEQUENCE * 4)]
        assert losses == (parallel if case == "loss parallel" else [])


def test_on_four_ranks_too(ranks4):
    for said, seen, *_ in ranks4.run(rows_of_a_step, "qwen3_moe", {"cp": 2, "tp": 2}, 4, {"num_experts_per_tok": 4}, {}):
        assert seen == said and len(seen) > 20


def state_of(model):
    """Everything that hooks and modes could leave behind."""
    hooks = {n: [len(getattr(m, h)) for h in HOOKS] for n, m in model.named_modules()}
    own = {n: sorted(m.__dict__) for n, m in model.named_modules()}
    tensors = {n: (p._backward_hooks and len(p._backward_hooks), id(type(p))) for n, p in model.named_parameters()}
    classes = {n: id(type(m)) for n, m in model.named_modules()}
    return hooks, own, tensors, classes, torch.utils._python_dispatch._len_torch_dispatch_stack()


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def before_and_after(fails):
    applied, batch = planned("llama", {"tp": 2})
    model = applied.model
    model(**batch).loss.backward()
    model.zero_grad()
    before = state_of(model)
    plain = model(**batch).loss
    try:
        with applied.trace(statistics=True, show=False) as trace:
            inside = state_of(model)
            traced = model(**batch).loss
            if fails:
                raise KeyError("on purpose")
            traced.backward()
    except KeyError:
        pass
    recorded = len(trace.sent), len(trace.spans), len(trace.statistics)
    model(**batch).loss.backward()
    assert recorded == (len(trace.sent), len(trace.spans), len(trace.statistics)) and all(recorded)
    grads = {n: g.clone() for n, g in applied.full_gradients().items()}
    undone = applied.undo()
    return before == state_of_now(model, before), before != inside, torch.equal(plain, traced), type(undone).__name__, len(grads)


def state_of_now(model, before):
    """After undo, classes are the model's own again; all the rest was as before the trace."""
    now = state_of(model)
    return (now[0], before[1], before[2], before[3], now[4])


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_stays_behind_and_the_numbers_are_the_same(ranks2, fails):
    for same, differed_inside, equal, undone, gradients in ranks2.run(before_and_after, fails):
        assert same and differed_inside and equal and undone == "LlamaForCausalLM" and gradients


def untouched():
    """Hooks and modes before, inside and after a trace."""
    applied, batch = planned("llama", {"tp": 2})
    before = state_of(applied.model)
    with applied.trace(show=False):
        applied.model(**batch).loss.backward()
    return before == state_of(applied.model), sum(sum(h) for h in before[0].values()), before[4]


def test_a_model_that_is_not_traced_has_no_hook_and_no_mode(ranks2):
    assert set(ranks2.run(untouched)) == {(True, 0, 0)}


def poisoned(module, x):
    from hyperpar_core import original_forward

    out = original_forward(module, x)
    return torch.where(torch.arange(out.shape[1])[:, None] == 3, torch.nan, out)


def make_poisoned(*, module):
    return poisoned


def statistics_of(poison):
    entry = Override(match="model.layers.1.mlp", local_compute_fn=make_poisoned, region_dispatch=True)
    model = tiny_model("llama")
    plan = build_plan(model, {"tp": 2}, overrides=Overrides((entry,) if poison else ()))
    applied = apply_plan(model, plan, make_mesh(tp=2), checks=None)
    batch = applied.shard_batch(tiny_batch(model, batch=2, seq=SEQUENCE))
    inputs = {}
    handle = model.model.norm.register_forward_pre_hook(lambda m, args: inputs.update(norm=args[0].detach().clone()))
    with applied.trace(statistics=True, show=False) as trace:
        model(**batch)
    handle.remove()
    norm = next(s for s in trace.statistics if (s.boundary, s.side) == ("model.norm", "in"))
    return trace.first_nonfinite(), norm, inputs["norm"], trace.table(), {s.boundary for s in trace.statistics}


def test_statistics_are_those_of_the_tensors_at_each_boundary(ranks2):
    for first, norm, x, table, boundaries in ranks2.run(statistics_of, False):
        assert first is None
        expected = (x.mean().item(), x.std(correction=0).item(), x.abs().max().item())
        assert (norm.mean, norm.std, norm.absmax) == pytest.approx(expected) and norm.nan == norm.infinite == 0
        assert "absmax" in table and {"model.embed_tokens", "model.layers.1.mlp", "lm_head"} <= boundaries


def test_the_first_tensor_that_is_not_finite_names_where_a_run_diverged(ranks2):
    (first, *_), (later, *_) = ranks2.run(statistics_of, True)
    assert (first.boundary, first.side, first.infinite) == ("model.layers.1.mlp", "out", 0) and first.nan > 0
    assert (later.boundary, later.side) == ("model.norm", "out")  # its own tokens are finite, until all are gathered


def saved(path):
    applied, batch = planned("qwen3", {"tp": 2})
    with applied.trace(show=False) as trace:
        applied.model(**batch).loss.backward()
    trace.save(path)
    return len(trace.sent), len(trace.spans), trace.table()


def test_a_saved_trace_is_what_the_chrome_format_asks_for(ranks2, tmp_path):
    results = ranks2.run(saved, str(tmp_path / "trace.json"))
    data = json.loads((tmp_path / "trace.json").read_text())
    assert set(data) == {"traceEvents", "displayTimeUnit"} and data["displayTimeUnit"] == "ms"
    events = data["traceEvents"]
    named = [e for e in events if e["ph"] == "M"]
    assert {(e["pid"], e["args"]["name"]) for e in named} >= {(0, "rank 0"), (1, "rank 1"), (0, "collectives")}
    complete = [e for e in events if e["ph"] == "X"]
    assert len(complete) + len(named) == len(events)
    for event in complete:
        assert set(event) == {"name", "cat", "ph", "ts", "dur", "pid", "tid", "args"}
        assert event["ts"] >= 0 and event["dur"] >= 0 and isinstance(event["name"], str)
    for rank, (sent, spans, table) in enumerate(results):
        own = [e for e in complete if e["pid"] == rank]
        assert (sum(e["tid"] == 1 for e in own), sum(e["tid"] == 0 for e in own)) == (sent, spans)
        assert f"rank {rank}: " in table and "model.layers.{0-1}" in table and "(gradient sums)" in table
        assert len(table.splitlines()) < 20 and max(map(len, table.splitlines())) < 150
    # collectives lie inside the step, and spans of one thread don't overlap
    for rank in (0, 1):
        spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in complete if e["pid"] == rank and e["tid"] == 0)
        assert all(b[0] >= a[1] - 0.01 for a, b in pairwise(spans))


def checkpointed():
    applied, batch = planned("llama", {"tp": 2})
    with applied.trace(show=False) as plain:
        applied.model(**batch).loss.backward()
    applied.model.gradient_checkpointing_enable({"use_reentrant": False})
    with applied.trace(show=False) as again:
        applied.model(**batch).loss.backward()
    phases = Counter(one.phase for one in again.sent)
    forward = sum(one.phase == "forward" and ".layers." in one.boundary for one in again.sent)
    return plain.totals() == again.totals(), phases["recompute"], forward


def test_what_a_checkpointed_layer_computes_again_is_told_apart(ranks2):
    for same, again, forward in ranks2.run(checkpointed):
        assert same and again == forward - 2 > 0  # nobody needs the last sum of each of the two layers again


def compiled():
    applied, _ = planned("llama", {"tp": 2})
    applied.model.model.layers[0].compile()
    with applied.trace():
        pass


def test_a_compiled_layer_is_refused(ranks2):
    with pytest.raises(Exception, match=r"model\.layers\.0 is compiled"):
        ranks2.run(compiled)


def test_the_table_is_printed_on_rank_0_where_asked_for(capsys):
    applied, batch = planned("llama", {})
    with applied.trace():
        applied.model(**batch).loss.backward()
    assert capsys.readouterr().out.startswith("llama, rank 0: ")
