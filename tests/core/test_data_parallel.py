"""The loss is the mean over all tokens of all ranks and micro-batches, and gradients are its gradients."""

import pytest
import torch
import torch.distributed as dist
from core_tools import error_of, gradients, part, planned, raised, share, step, worst

from hyperpar_core.errors import ApplyError
from hyperpar_core.testing import pool, replica_differences, tiny_batch


def uneven(degrees, valid):
    """Each dp rank's row keeps only its number of labels."""
    applied, single, _ = planned("llama", seq=16, **degrees)
    batch = tiny_batch(single, batch=len(valid), seq=16)
    for row, count in enumerate(valid):
        batch["labels"][row, count + 1 :] = -100
    mine = share(applied, batch)
    ours = step(applied.model, mine)
    theirs = step(single, batch)
    total = applied.reduce_loss(ours)
    losses = float(ours), float(total), float(theirs)
    return int(mine["num_items_in_batch"]), *losses, error_of(applied, single), replica_differences(applied.model)


@pytest.mark.parametrize(
    ("degrees", "valid"),
    [({"dp": 2}, (3, 13)), ({"dp": 2}, (13, 0)), ({"dp": 3}, (3, 13, 0)), ({"dp": 2, "tp": 2}, (0, 13))],
    ids=str,
)
def test_ranks_with_few_many_and_no_labels_have_the_global_token_mean(degrees, valid):
    size = degrees.get("dp", 1) * degrees.get("tp", 1)
    results = pool(size).run(uneven, degrees, valid)
    for count, own, total, reference, (error, name), differing in results:
        assert count == sum(valid)
        assert own == own and abs(total - reference) < 1e-5 * reference
        assert error < 1e-5 and differing == [], name
    tp = degrees.get("tp", 1)
    assert abs(sum(own for _, own, *_ in results[::tp]) - results[0][2]) < 1e-5


def micro_batches(degrees):
    """Three micro-batches with 2, 11 and 0 targets a row on the first rank, more on the second."""
    applied, single, _ = planned("llama", seq=12, **degrees)
    batches = [tiny_batch(single, batch=applied.data_parallel_size, seq=12, seed=seed) for seed in range(3)]
    for batch, count in zip(batches, (2, 11, 0), strict=True):
        batch["labels"][0, count + 1 :] = -100
    tokens = sum(int((b["labels"][:, 1:] != -100).sum()) for b in batches)
    shares = applied.shard_batch([part(applied, b) for b in batches])
    counts = {int(s["num_items_in_batch"]) for s in shares}
    own = sum(step(applied.model, s) for s in shares)
    reference = sum(step(single, b, num_items_in_batch=tokens) for b in batches)
    return counts == {tokens}, float(applied.reduce_loss(own) - reference), error_of(applied, single)


@pytest.mark.parametrize("degrees", [{"dp": 2}, {"tp": 2}], ids=str)
def test_a_list_of_micro_batches_is_counted_together(degrees):
    for counted, difference, (error, name) in pool(2).run(micro_batches, degrees):
        assert counted and abs(difference) < 1e-5 and error < 1e-5, name


def some_labels(which):
    """What each dp rank gets where only the ranks `which` have labels."""
    applied, _, batch = planned("llama", dp=2, checks=None)
    mine = part(applied, batch)
    if dist.get_rank() not in which:
        del mine["labels"]
    error = raised(lambda: applied.shard_batch(mine))
    return error or ("num_items_in_batch" in applied.shard_batch(mine))


def test_labels_on_some_dp_ranks_alone_are_an_error_on_all_and_none_at_all_are_fine():
    for kind, text in pool(2).run(some_labels, [1], timeout=30):
        assert kind == "RankMismatch" and "1 of 2 dp ranks brought labels" in text
    assert pool(2).run(some_labels, [], timeout=30) == [False, False]
    assert pool(2).run(some_labels, [0, 1], timeout=30) == [True, True]


def refused_on(rank_, what):
    """What each rank is told where the batch of one dp rank can't be taken, and the number of targets of the next step."""
    applied, _, batch = planned("llama", dp=2)
    mine = part(applied, batch)
    bad = {"labels": {**mine, "labels": mine["labels"][:, 1:]}, "no batch": None, "empty": []}[what]
    error = raised(lambda: applied.shard_batch(bad if dist.get_rank() == rank_ else mine))
    return error, int(applied.shard_batch(mine)["num_items_in_batch"])


@pytest.mark.parametrize("what", ["labels", "no batch", "empty"])
@pytest.mark.parametrize("rank_", [0, 1])
def test_a_batch_that_one_dp_rank_cant_take_is_an_error_on_all(rank_, what):
    for rank, ((kind, text), targets) in enumerate(pool(2).run(refused_on, rank_, what, timeout=30)):
        assert kind == ("ApplyError" if rank == rank_ else "RankMismatch")
        assert rank == rank_ or "the batch of 1 of 2 dp ranks was refused" in text
        assert targets > 0


def no_batches():
    applied, _, batch = planned("llama", dp=2)
    return [raised(lambda given=given: applied.shard_batch(given)) for given in (batch["input_ids"], [batch["input_ids"]], None, "ids")]


def test_what_is_no_batch_is_said_to_be_none():
    for errors in pool(2).run(no_batches):
        assert [kind for kind, _ in errors] == ["ApplyError"] * 4
        assert [text.rpartition(" ")[2] for _, text in errors] == ["Tensor.", "Tensor.", "NoneType.", "str."]


def left_to_the_caller(degrees):
    """Under "external" a rank's gradients are its own; summed by hand they are the reference's."""
    applied, single, batch = planned("llama", data_parallel="external", seq=9, **degrees)
    step(applied.model, share(applied, batch))
    step(single, batch)
    own = {n: g.clone() for n, g in applied.full_gradients().items()}
    for gradient in own.values():
        dist.all_reduce(gradient, group=applied.mesh.get_group("dp"))
    alone, _ = error_of(applied, single)
    kinds = {type(p).__name__ for p in applied.model.parameters()}
    return worst(gradients(single), own), alone, kinds


@pytest.mark.parametrize("degrees", [{"dp": 2}, {"dp": 2, "tp": 2}], ids=str)
def test_external_data_parallel_leaves_each_ranks_gradients_for_the_caller_to_sum(degrees):
    size = degrees.get("dp", 1) * degrees.get("tp", 1)
    for (summed, name), alone, kinds in pool(size).run(left_to_the_caller, degrees):
        assert summed < 1e-5, name
        assert alone > 0.05
        assert kinds == ({"DTensor"} if "tp" in degrees else {"Parameter"})


def labelless():
    applied, single, batch = planned("llama", dp=2, seq=9)
    rows = part(applied, {"input_ids": batch["input_ids"]})
    mine = applied.shard_batch(rows)
    ours = applied.model(**mine)
    theirs = single(**rows)
    positions = mine["position_ids"].tolist() == [list(range(9))] * len(rows["input_ids"])
    return sorted(mine), ours.loss, float((ours.logits - theirs.logits).abs().max()), positions


def test_a_batch_without_labels_gets_positions_and_no_loss():
    for names, loss, difference, positions in pool(2).run(labelless):
        assert names == ["input_ids", "position_ids"] and loss is None and difference < 1e-5 and positions


def what_shard_batch_adds():
    applied, _, batch = planned("llama", dp=2, seq=9)
    rows = part(applied, batch)
    mine = applied.shard_batch(rows)
    shifted = torch.cat([rows["labels"][:, 1:], torch.full_like(rows["labels"][:, :1], -100)], 1)
    mask = torch.ones_like(rows["input_ids"])
    masked = applied.shard_batch({**rows, "attention_mask": mask})
    own = applied.shard_batch({**rows, "shift_labels": shifted.clamp(max=5)})
    facts = [
        torch.equal(mine["shift_labels"], shifted), torch.equal(mine["labels"], rows["labels"]),
        "position_ids" not in masked and masked["attention_mask"] is mask,
        torch.equal(own["shift_labels"], shifted.clamp(max=5)),
        set(rows) == {"input_ids", "labels"}, (applied.data_parallel_rank, applied.data_parallel_size) == (dist.get_rank(), 2),
    ]  # fmt: skip
    errors = []
    for bad in ([], {"labels": rows["labels"]}, {**rows, "num_items_in_batch": 3}, {**rows, "labels": rows["labels"][:, :-1]}):
        try:
            applied.shard_batch(bad)
        except ApplyError as error:
            errors.append(str(error))
    return facts, errors


def test_shard_batch_adds_shifted_labels_a_count_and_positions_and_refuses_what_it_cant_count():
    for facts, errors in pool(2).run(what_shard_batch_adds):
        assert facts == [True] * 6
        assert len(errors) == 4
        for text, error in zip(("empty list", "input_ids", "num_items_in_batch", "labels has 8"), errors, strict=True):
            assert text in error
