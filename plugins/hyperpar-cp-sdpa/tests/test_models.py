"""transformers' models under cp, against one process: logits, loss and every gradient."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from cp_grid import FAMILIES

from hyperpar_core import apply_plan, build_plan, make_mesh
from hyperpar_core.testing import Degrees, check_parity, pool, tiny_batch, tiny_model

RANKS = 4
WRAPPERS = ("sdpa_hf", "sdpa_hf_ring", "sdpa_hf_ulysses", "sdpa_hf_hybrid")
DEGREES = ({"dp": 2, "cp": 2}, {"cp": 4}, {"tp": 2, "cp": 2})
# Each family with two of the twelve forms on degrees, each of those with at least two families; cp_grid.py has them all.
PAIRS = list(itertools.product(WRAPPERS, DEGREES))
SUBSET = [(family, *PAIRS[(5 * i + 6 * turn) % len(PAIRS)]) for i, family in enumerate(FAMILIES) for turn in (0, 1)]


def overrides(wrapper, **options):
    entry = {"match": "*.self_attn", "when": "cp", "inner_target": "self", "inner_wrapper": wrapper}
    return [{**entry, "options": options} if options else entry]


def planned(model, wrapper="sdpa_hf_ring", cp_order="head_tail", **degrees):
    mesh = make_mesh(**degrees)
    return apply_plan(model, build_plan(model, mesh, overrides=overrides(wrapper), cp_order=cp_order), mesh)


# ---- on the ranks


def parity(
    family, wrapper, degrees, dtype=torch.float32, seq=32, batch=None, options=None, extra=None, steps=0, plan_options=None
):
    model = tiny_model(family, dtype, **(extra or {}))
    rows = 2 * degrees.get("dp", 1)
    given = {**tiny_batch(model, batch=rows, seq=seq), **(batch or {})}
    plan = {"overrides": overrides(wrapper, **(options or {}))}
    report = check_parity(model, given, Degrees(**degrees, options=plan | (plan_options or {})), steps=steps)
    return report.ok, report.text()


def moved_positions(family, change, seq, wrapper, position_ids=None, **extra):
    """Positions of the last hidden states that change when the token at `change` does."""
    applied = planned(tiny_model(family, num_hidden_layers=1, **extra), wrapper, dp=2, cp=2)
    ids = torch.arange(seq)[None] + 5
    outs = []
    for token in (ids, ids.index_fill(1, torch.tensor([change]), 200)):
        batch = applied.shard_batch({"input_ids": token} | ({} if position_ids is None else {"position_ids": position_ids}))
        with torch.no_grad():
            outs.append(applied.unshard(applied.model(**batch).logits))
    return torch.nonzero((outs[0] != outs[1]).any(-1)[0]).flatten().tolist(), outs[0].shape[1]


def accumulated(valid, dp, cp):
    """(loss, gradients, counted targets) of two micro-batches over dp x cp, and of one process."""
    model, single = tiny_model("llama"), tiny_model("llama")
    applied = planned(model, dp=dp, cp=cp)
    steps = []
    for step, counts in enumerate(valid):
        ids = torch.randint(3, 200, (len(counts), 16), generator=torch.Generator().manual_seed(step))
        labels = ids.masked_fill(torch.arange(16)[None] >= torch.tensor(counts)[:, None] + 1, -100)
        steps.append({"input_ids": ids, "labels": labels})
    rows = [
        {n: t.chunk(dp)[applied.data_parallel_rank] for n, t in step.items()} for step in steps
    ]
    total, shares = torch.zeros(()), applied.shard_batch(rows)
    for share in shares:
        loss = model(**share).loss
        loss.backward()
        total += applied.reduce_loss(loss)
    targets = sum(sum(counts) for counts in valid)
    expected = torch.zeros(())
    for step in steps:
        logits = single(input_ids=step["input_ids"], use_cache=False).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), step["labels"][:, 1:].flatten(), reduction="sum") / targets
        loss.backward()
        expected += loss.detach()
    gradients = applied.full_gradients()
    largest = max(p.grad.abs().max().item() for p in single.parameters())
    worst = max(
        ((gradients[n] - p.grad).abs().max() / max(p.grad.abs().max().item(), 0.1 * largest)).item()
        for n, p in single.named_parameters()
    )
    return total.item(), expected.item(), worst, int(shares[0]["num_items_in_batch"])


def refusal(kind):
    model = tiny_model("llama", **({"attention_dropout": 0.1} if kind == "dropout" else {}))
    try:
        applied = planned(model, dp=2, cp=2)
        ids = torch.arange(16)[None] + 5
        batch = applied.shard_batch({"input_ids": ids})
        if kind == "no positions":
            del batch["position_ids"]
        elif kind == "not sharded":
            batch = {"input_ids": ids, "position_ids": torch.arange(16)[None]}
        elif kind == "another length":
            batch["input_ids"] = ids
        elif kind == "use_cache":
            batch["use_cache"] = True
        elif kind == "generate":
            model.generate(ids, max_new_tokens=2)
        elif kind == "weights":
            batch["output_attentions"] = True
        elif kind == "logits_to_keep":
            batch["logits_to_keep"] = 1
        elif kind == "documents":
            applied.shard_batch({"input_ids": ids, "cu_seq_lens_q": torch.tensor([0, 4, 16])})
        elif kind == "set elsewhere":
            model.set_attn_implementation("sdpa")
        model(**batch)
    except Exception as error:
        return type(error).__name__, str(error)
    return "no error", ""


def checkpointed(wrapper):
    model, plain = tiny_model("llama"), tiny_model("llama")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    applied = planned(model, wrapper, cp=4)
    batch = tiny_batch(plain, seq=30)
    loss = model(**applied.shard_batch(batch)).loss
    loss.backward()
    plain(**batch, use_cache=False).loss.backward()
    gradients = applied.full_gradients()
    return max(((gradients[n] - p.grad).abs().max() / p.grad.abs().max()).item() for n, p in plain.named_parameters() if "k_proj" not in n)


def compiled(wrapper):
    """(graph breaks, largest relative difference of a gradient) with each layer compiled."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model, plain = tiny_model("llama"), tiny_model("llama")
    applied = planned(model, wrapper, dp=2, cp=2)
    for layer in model.model.layers:
        layer.compile(backend="eager")
    batch = tiny_batch(plain)
    model(**applied.shard_batch({n: t.chunk(2)[applied.data_parallel_rank] for n, t in batch.items()})).loss.backward()
    plain(**batch, use_cache=False).loss.backward()
    gradients = applied.full_gradients()
    worst = max(((gradients[n] - p.grad).abs().max() / p.grad.abs().max()).item() for n, p in plain.named_parameters())
    return dict(torch._dynamo.utils.counters["graph_break"]), worst


def two_meshes():
    """The first difference of each of two models on meshes of their own, which run in turns, and whose configs are one."""
    first = tiny_model("llama")
    second = type(first)(first.config)
    second.load_state_dict(first.state_dict())
    plain = tiny_model("llama")
    batch = tiny_batch(plain)
    plain(**batch, use_cache=False).loss.backward()
    expected = {name: p.grad for name, p in plain.named_parameters()}
    ring, ulysses = planned(first, "sdpa_hf_ring", cp=4), planned(second, "sdpa_hf_ulysses", dp=2, cp=2)
    shares = ring.shard_batch(batch), ulysses.shard_batch({n: t.chunk(2)[ulysses.data_parallel_rank] for n, t in batch.items()})
    losses = [applied.model(**share).loss for applied, share in zip((ring, ulysses), shares, strict=True)]
    for loss in losses:
        loss.backward()
    largest = max(gradient.abs().max() for gradient in expected.values())
    found = []
    for applied in (ring, ulysses):
        gradients = applied.full_gradients()
        found.append(max(((gradients[n] - g).abs().max() / max(g.abs().max(), 0.1 * largest)).item() for n, g in expected.items()))
    return found


def autocast(wrapper):
    """Relative difference of the loss under bfloat16 autocast from one process's."""
    model, plain = tiny_model("llama"), tiny_model("llama")
    applied = planned(model, wrapper, cp=4)
    batch = tiny_batch(plain)
    with torch.autocast("cpu", torch.bfloat16):
        ours = applied.reduce_loss(model(**applied.shard_batch(batch)).loss)
        theirs = plain(**batch, use_cache=False).loss
    return abs(ours.item() / theirs.item() - 1)


# ---- tests


@pytest.mark.parametrize("degrees", [{"dp": 2, "cp": 2}, {"cp": 4}, {"cp": 2, "tp": 2}], ids=str)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_llama_is_that_of_one_process(wrapper, degrees):
    for ok, text in pool(RANKS).run(parity, "llama", wrapper, degrees, extra={"num_key_value_heads": 4}):
        assert ok, text


@pytest.mark.parametrize("wrapper", ["sdpa_hf_ring", "sdpa_hf_ulysses"])
def test_llama_with_grouped_heads_in_float64_and_contiguous_order_is_that_of_one_process(wrapper):
    for ok, text in pool(RANKS).run(parity, "llama", wrapper, {"cp": 4}, torch.float64, steps=3, plan_options={"cp_order": "contiguous"}):
        assert ok, text


@pytest.mark.parametrize(("family", "wrapper", "degrees"), SUBSET, ids=str)
def test_families_with_windows_soft_caps_norms_and_layers_without_rotary_are_those_of_one_process(family, wrapper, degrees):
    for ok, text in pool(RANKS).run(parity, family, wrapper, degrees):
        assert ok, text


@pytest.mark.parametrize("degrees", [{"cp": 2, "tp": 2}, {"cp": 4}], ids=str)
@pytest.mark.parametrize("wrapper", ["sdpa_hf_ring", "sdpa_hf_ulysses"])
def test_gpt_oss_with_its_sinks_and_window_is_that_of_one_process(wrapper, degrees):
    for ok, text in pool(RANKS).run(parity, "gpt_oss", wrapper, degrees):
        assert ok, text


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_are_those_of_one_process(side):
    mask = torch.ones(2, 30, dtype=torch.long)
    mask[0, :7] = mask[1, :0] = 0
    mask = mask if side == "left" else mask.flip(1)
    ids = tiny_batch(tiny_model("llama"), seq=30)["input_ids"]
    batch = {"attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    for ok, text in pool(RANKS).run(parity, "llama", "sdpa_hf_ring", {"cp": 4}, seq=30, batch=batch):
        assert ok, text


@pytest.mark.parametrize("seq", [3, 15, 17])
@pytest.mark.parametrize("wrapper", ["sdpa_hf", "sdpa_hf_ring"])
def test_lengths_that_must_be_padded_even_fewer_than_the_parts_are_those_of_one_process(seq, wrapper):
    for ok, text in pool(RANKS).run(parity, "llama", wrapper, {"cp": 4}, seq=seq):
        assert ok, text


def test_two_models_on_different_meshes_of_one_process_run_in_turns():
    for found in pool(RANKS).run(two_meshes):
        assert max(found) <= 1e-5


@pytest.mark.parametrize(("family", "dtype"), [("llama", torch.float32), ("mistral", torch.float32), ("mistral", torch.float64)], ids=str)
def test_packed_documents_are_those_of_one_process(family, dtype):
    positions = torch.stack([torch.cat([torch.arange(7), torch.arange(24)]), torch.cat([torch.arange(20), torch.arange(11)])])
    for ok, text in pool(RANKS).run(parity, family, "sdpa_hf_ring", {"cp": 4}, dtype, seq=31, batch={"position_ids": positions}):
        assert ok, text


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_window_of_four_lets_a_token_move_four_positions(wrapper):
    for moved, _ in pool(RANKS).run(moved_positions, "mistral", 0, 16, wrapper, sliding_window=4):
        assert moved == [0, 1, 2, 3]


@pytest.mark.parametrize("wrapper", ["sdpa_hf_ring", "sdpa_hf_ulysses"])
def test_a_token_of_one_document_moves_no_other_document_and_none_is_dropped(wrapper):
    positions = torch.cat([torch.arange(6), torch.arange(9)])[None]
    for moved, length in pool(RANKS).run(moved_positions, "llama", 2, 15, wrapper, positions):
        assert moved == [2, 3, 4, 5] and length == 15
    for moved, _ in pool(RANKS).run(moved_positions, "llama", 8, 15, wrapper, positions):
        assert moved == list(range(8, 15))


@pytest.mark.parametrize("degrees", [(2, 2), (1, 4)])
def test_targets_are_counted_over_ranks_and_micro_batches_and_none_is_lost(degrees):
    full = [[15, 15], [15, 15]]
    uneven = [[3, 13], [0, 1]]
    for valid in (full, uneven):
        for loss, expected, worst, count in pool(RANKS).run(accumulated, valid, *degrees):
            assert count == sum(map(sum, valid))
            assert loss == pytest.approx(expected, rel=1e-5)
            assert worst <= 1e-5


@pytest.mark.parametrize("wrapper", ["sdpa_hf", "sdpa_hf_ring", "sdpa_hf_ulysses"])
def test_layers_that_are_computed_again_in_the_backward_give_the_same_gradients(wrapper):
    for worst in pool(RANKS).run(checkpointed, wrapper):
        assert worst <= 1e-5


@pytest.mark.parametrize("wrapper", ["sdpa_hf", "sdpa_hf_ring", "sdpa_hf_ulysses"])
def test_compiled_layers_have_no_graph_break_and_the_same_gradients(wrapper):
    for breaks, worst in pool(RANKS).run(compiled, wrapper, timeout=180):
        assert not breaks
        assert worst <= 1e-5


def test_under_autocast_the_loss_is_that_of_one_process_up_to_bfloat16():
    for difference in pool(RANKS).run(autocast, "sdpa_hf_ring"):
        assert difference <= 2**-8


def test_sharded_logits_and_cp_together_give_the_loss_of_one_process():
    for ok, text in pool(RANKS).run(
        parity, "llama", "sdpa_hf_ring", {"cp": 2, "tp": 2}, seq=30, plan_options={"loss_parallel": True}
    ):
        assert ok, text


@pytest.mark.parametrize(
    ("kind", "error", "words"),
    [
        ("no positions", "ApplyError", ["no position_ids", "shard_batch"]),
        ("not sharded", "ApplyError", ["shard_batch", "no attention_mask"]),
        ("another length", "ApplyError", ["shard_batch", "cp=2"]),
        ("use_cache", "ApplyError", ["use_cache"]),
        ("generate", "ApplyError", ["generate()", "cp"]),
        ("weights", "ApplyError", ["output_attentions"]),
        ("logits_to_keep", "ApplyError", ["logits_to_keep", "unshard"]),
        ("documents", "ApplyError", ["cu_seq_lens_q", "document_ids"]),
        ("set elsewhere", "ApplyError", ["self_attn", "set_attn_implementation"]),
        ("dropout", "Refused", ["model.layers.0.self_attn", "dropout", "0.1"]),
    ],
)
def test_what_would_go_wrong_in_silence_is_refused(kind, error, words):
    for name, text in pool(RANKS).run(refusal, kind):
        assert name == error, text
        assert all(word in text for word in words), text
        assert len(text.splitlines()) <= 8


