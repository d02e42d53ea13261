"""Checkpoints: what is saved at any degrees is loaded at any others, in order; a save is whole or not there; the rest is refused."""

import json
import os
import random
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from checkpoint_tools import KINDS, adam_of, numbered, planned, wrong_state, wrong_weights
from core_tools import raised, share, step
from torch.distributed.tensor import DTensor

from hyperpar_core.errors import CheckpointError
from hyperpar_core.testing import pool, tiny_batch, tiny_model
from hyperpar_core.train import storage
from hyperpar_core.train.plain_values import decode, encode

DEGREES = {  # (degrees, FSDP2, ep)
    "tp1": ({}, False, 1),
    "tp2": ({"tp": 2}, False, 1),
    "tp4": ({"tp": 4}, False, 1),
    "dp2": ({"dp": 2}, False, 1),
    "fsdp2": ({"dp": 2}, True, 1),
    "fsdp2 x tp2": ({"dp": 2, "tp": 2}, True, 1),
    "dp2 x tp2": ({"dp": 2, "tp": 2}, False, 1),
    "cp2 x tp2": ({"cp": 2, "tp": 2}, False, 1),
    "ep2": ({"dp": 2}, False, 2),
    "fsdp2 x tp2 x ep2": ({"dp": 2, "tp": 2}, True, 2),
    "fsdp2 x cp2 x ep4": ({"dp": 2, "cp": 2}, True, 4),
}
ROUTES = [("fsdp2 x tp2", "tp1"), ("fsdp2 x tp2", "tp4"), ("fsdp2 x tp2", "fsdp2"), ("tp1", "fsdp2 x tp2"),
          ("tp4", "fsdp2 x tp2"), ("fsdp2", "tp2"), ("tp2", "dp2 x tp2")]  # fmt: skip
EXPERT_ROUTES = [("fsdp2 x tp2 x ep2", "tp1"), ("fsdp2 x tp2 x ep2", "fsdp2 x cp2 x ep4"), ("fsdp2 x cp2 x ep4", "ep2"),
                 ("tp4", "fsdp2 x tp2 x ep2"), ("cp2 x tp2", "ep2")]  # fmt: skip


def size(name):
    degrees, _, _ = DEGREES[name]
    return degrees.get("dp", 1) * degrees.get("cp", 1) * degrees.get("tp", 1)


def save(folder, name, kinds):
    degrees, fsdp, ep = DEGREES[name]
    for kind in kinds:
        family, config = KINDS[kind]
        applied = planned(numbered(family, **config), degrees, fsdp=fsdp, ep=ep)
        optimizer = adam_of(applied.model)
        applied.save_checkpoint(f"{folder}/{kind}", optimizer, step=3, extra={"epoch": 2})


def load(folder, name, kinds):
    """{kind: what is wrong} of checkpoints read into models of other weights."""
    degrees, fsdp, ep = DEGREES[name]
    wrong = {}
    for kind in kinds:
        family, config = KINDS[kind]
        applied = planned(numbered(family, scale=0, **config), degrees, fsdp=fsdp, ep=ep)
        optimizer = torch.optim.AdamW(applied.model.parameters(), lr=0.5)
        state = applied.load_checkpoint(f"{folder}/{kind}", optimizer)
        problems = wrong_weights(applied, family, config) + wrong_state(applied.model, optimizer)
        if state != {"step": 3, "epoch": 2}:
            problems.append(state)
        if [(g["lr"], g["betas"]) for g in optimizer.param_groups] != [(0.01, (0.8, 0.9))]:
            problems.append(optimizer.param_groups[0]["lr"])
        if problems:
            wrong[kind] = problems
    return wrong


@pytest.mark.parametrize(("saved", "loaded"), ROUTES, ids=[" to ".join(r) for r in ROUTES])
def test_weights_and_optimizer_state_come_back_in_order_at_other_degrees(tmp_path, saved, loaded):
    pool(size(saved)).run(save, str(tmp_path), saved, list(KINDS), timeout=90)
    assert pool(size(loaded)).run(load, str(tmp_path), loaded, list(KINDS), timeout=90) == [{}] * size(loaded)


@pytest.mark.parametrize(("saved", "loaded"), EXPERT_ROUTES, ids=[" to ".join(r) for r in EXPERT_ROUTES])
def test_experts_come_back_in_order_at_other_degrees(tmp_path, saved, loaded):
    pool(size(saved)).run(save, str(tmp_path), saved, ["experts"], timeout=90)
    assert pool(size(loaded)).run(load, str(tmp_path), loaded, ["experts"], timeout=90) == [{}] * size(loaded)


def trained(folder, name, first, last, seed=0):
    """The mean losses of steps first..last-1, from the checkpoint where there is one; then a checkpoint."""
    degrees, fsdp, ep = DEGREES[name]
    applied = planned(tiny_model("llama", num_key_value_heads=4), degrees, fsdp=fsdp, ep=ep)
    optimizer = torch.optim.AdamW(applied.model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (n + 1))
    state = applied.load_checkpoint(folder, optimizer)
    assert (state["step"] if state else 0) == first
    if state:
        scheduler.load_state_dict(state["scheduler"])
    losses = []
    for i in range(first, last):
        loss = step(applied.model, share(applied, tiny_batch(applied.model, batch=4, seq=8, seed=i)))
        losses.append(float(applied.reduce_loss(loss)))
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    applied.save_checkpoint(folder, optimizer, step=last, extra={"scheduler": scheduler.state_dict()})
    return losses


def test_training_that_goes_on_at_other_degrees_has_the_losses_of_one_run(tmp_path):
    whole = pool(1).run(trained, str(tmp_path / "whole"), "tp1", 0, 6)[0]
    parts = pool(4).run(trained, str(tmp_path / "parts"), "fsdp2 x tp2", 0, 2)[0]
    parts += pool(2).run(trained, str(tmp_path / "parts"), "tp2", 2, 4)[0]
    parts += pool(4).run(trained, str(tmp_path / "parts"), "dp2 x tp2", 4, 6)[0]
    assert whole == pytest.approx(parts, rel=1e-5)


@pytest.mark.parametrize(("first", "points", "how"), [(0, 20, []), (7, 4, ["asynchronous"])], ids=["save", "asynchronous"])
def test_a_run_killed_at_any_point_of_a_save_loses_at_most_the_steps_since_the_last_checkpoint(tmp_path, first, points, how):
    program = [sys.executable, str(Path(__file__).with_name("killed.py")), str(tmp_path), str(first), str(points), *how]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(program, capture_output=True, text=True, timeout=150, env=environment)
    assert (run.stdout, run.returncode) == ("", 0), run.stdout + run.stderr


def kept(folder, keep):
    applied = planned(numbered("llama"), {"tp": 2})
    names = []
    if dist.get_rank() == 0:
        half = Path(folder) / ".writing-step_00000001"
        half.mkdir()
        (half / "tensors-00000.safetensors").write_bytes(b"half")
    dist.barrier()
    empty = applied.load_checkpoint(folder)
    for number in (1, 2, 2, 5):
        applied.save_checkpoint(folder, step=number, keep=keep)
        names.append(sorted(p.name for p in Path(folder).iterdir()))
        dist.barrier()
    older = raised(lambda: applied.save_checkpoint(folder, step=4, keep=keep))
    absent = raised(lambda: applied.load_checkpoint(folder, step=3))
    return empty, names, older, absent, applied.load_checkpoint(folder)["step"], names[-1] == sorted(os.listdir(folder))


def test_the_newest_are_kept_half_ones_are_ignored_and_cleared_and_an_older_step_is_refused(tmp_path):
    for empty, names, older, absent, step_, untouched in pool(2).run(kept, str(tmp_path), 2):
        assert empty is None and step_ == 5 and untouched
        assert names == [
            ["step_00000001"], ["step_00000001", "step_00000002"], ["step_00000002", "step_00000002.again-1"],
            ["step_00000002.again-1", "step_00000005"],
        ]  # fmt: skip
        assert older[0] == "CheckpointError" and "holds step 5" in older[1]
        assert absent[0] == "CheckpointError" and "Complete there: 2, 5." in absent[1]


def test_all_are_kept_on_request_and_any_of_them_can_be_loaded(tmp_path):
    for _, names, *_ in pool(2).run(kept, str(tmp_path), None):
        assert len(names[-1]) == 4


def in_the_background(folder):
    """What a caller sees while a save is held up, and what is in the checkpoint then."""
    applied = planned(numbered("llama"), {"tp": 2})
    optimizer = adam_of(applied.model)
    gate, real, facts = threading.Event(), storage.fsync_file, {}

    def held_up(path):
        gate.wait(40)
        real(path)

    storage.fsync_file = held_up
    try:
        handle = applied.save_checkpoint(folder, optimizer, step=1, asynchronous=True)
        facts["returns at once"] = not handle.done()
        facts["not there yet"] = not list(Path(folder).glob("step_*"))
        with torch.no_grad():
            for parameter in applied.model.parameters():
                parameter.mul_(0)
        loss = step(applied.model, share(applied, tiny_batch(applied.model, seq=8)))  # collectives of its own meanwhile
        facts["trains meanwhile"] = bool(loss.isfinite())
        late = raised(lambda: handle.result(timeout=0.01))
        facts["says so"] = late is not None and late[0] == "TimeoutError"
        threading.Timer(0.2, gate.set).start()
        second = applied.save_checkpoint(folder, optimizer, step=2, asynchronous=True)
        facts["the second waits"] = handle.done()
        facts["a path"] = handle.result().name == "step_00000001" and second.result().name == "step_00000002"
    finally:
        storage.fsync_file = real
    applied.load_checkpoint(folder, optimizer, step=1)
    facts["as it was then"] = not wrong_weights(applied, "llama", {}) and not wrong_state(applied.model, optimizer)
    return facts


def test_a_save_in_the_background_holds_what_was_there_and_the_next_one_waits_for_it(tmp_path):
    for facts in pool(2).run(in_the_background, str(tmp_path)):
        assert all(facts.values()), facts


def failing_in_the_background(folder):
    applied = planned(numbered("llama"), {"tp": 2})
    real = storage.fsync_file

    def broken(path):
        if dist.get_rank() == 1:
            raise OSError("disk full")

    storage.fsync_file = broken
    try:
        handle = applied.save_checkpoint(folder, step=1, asynchronous=True)
        asked = raised(handle.result)
        unseen = applied.save_checkpoint(folder, step=2, asynchronous=True)
        while not unseen.done():
            pass
        late = raised(lambda: applied.save_checkpoint(folder, step=3))
        at_once = raised(lambda: applied.save_checkpoint(folder, step=3))
    finally:
        storage.fsync_file = real
    applied.save_checkpoint(folder, step=4)
    return [asked, late, at_once], sorted(os.listdir(folder)) if dist.get_rank() == 0 else ["step_00000004"]


def test_an_error_on_one_rank_surfaces_on_all_and_leaves_nothing_behind(tmp_path):
    for errors, names in pool(2).run(failing_in_the_background, str(tmp_path)):
        for error in errors:
            assert error[0] == "CheckpointError" and "rank 1 of the mesh says" in error[1] and "disk full" in error[1]
        assert names == ["step_00000004"]


def refused(folder):
    """{case: (error, whether the model was left alone)}."""
    applied = planned(numbered("llama", num_key_value_heads=4), {"tp": 2})
    optimizer = adam_of(applied.model)
    applied.save_checkpoint(f"{folder}/good", optimizer, step=1)
    applied.save_checkpoint(f"{folder}/no optimizer", step=1)
    mine = dist.get_rank()
    cases = {
        "extra differs": lambda: applied.save_checkpoint(folder, step=1, extra={"rng": mine}),
        "a pickle": lambda: applied.save_checkpoint(folder, step=1, extra={"sampler": object()}),
        "one rank's pickle": lambda: applied.save_checkpoint(folder, step=1, rank_extra={"x": object() if mine else 0}),
        "step is taken": lambda: applied.save_checkpoint(folder, step=1, extra={"step": 1}),
        "no step": lambda: applied.save_checkpoint(folder, step=-1),
        "no number": lambda: applied.save_checkpoint(folder, step=1, keep=0),
        "no optimizer": lambda: applied.load_checkpoint(f"{folder}/no optimizer", optimizer),
        "steps differ": lambda: applied.save_checkpoint(folder, step=1 + mine),
    }
    other = {
        "wider": (numbered("llama", num_key_value_heads=4, intermediate_size=96), {}),
        "deeper": (numbered("llama", num_key_value_heads=4, num_hidden_layers=2), {}),
        "another family": (numbered("gpt2"), {}),
        "tied": (numbered("llama", num_key_value_heads=4, tie_word_embeddings=True), {}),
        "bfloat16": (numbered("llama", num_key_value_heads=4, dtype=torch.bfloat16), {}),
    }
    found = {name: raised(case) for name, case in cases.items()}
    for name, (model, _) in other.items():
        into = planned(model, {"tp": 2})
        before = into.full_state_dict()
        found[name] = raised(lambda into=into: into.load_checkpoint(f"{folder}/good"))
        after = into.full_state_dict()
        assert all(torch.equal(after[n], before[n]) for n in before), name
    names = [n for n, _ in applied.model.named_parameters()]
    halves = [list(applied.model.parameters())[:3], list(applied.model.parameters())[3:]]
    parts = torch.optim.AdamW([{"params": halves[0]}])
    found["fewer parameters"] = raised(lambda: applied.load_checkpoint(f"{folder}/good", parts))
    two = torch.optim.AdamW([{"params": halves[0]}, {"params": halves[1]}])
    two.load_state_dict({**two.state_dict(), "state": {}})
    applied.save_checkpoint(f"{folder}/two", two, step=1)
    found["groups"] = raised(lambda: applied.load_checkpoint(f"{folder}/two", optimizer))
    left = [p.name for p in Path(folder).iterdir() if p.name not in ("good", "two", "no optimizer")]
    return found, names, left


EXPECTED = {
    "extra differs": "extra['rng'] differs", "a pickle": "extra['sampler'] is a builtins.object", "one rank's pickle": "rank 1 of the mesh",
    "step is taken": "'step' is taken", "no step": "step=-1", "no number": "keep=0", "no optimizer": "saved without an optimizer",
    "steps differ": "step differs", "wider": "(96, 64) float32 in the model and (128, 64) float32", "deeper": "the checkpoint lacks 9",
    "another family": "the model lacks", "tied": "is tied to lm_head.weight in the model", "bfloat16": "bfloat16 in the model and",
    "fewer parameters": "that this one lacks", "groups": "which were in groups 0 and 1",
}  # fmt: skip


def test_what_doesnt_fit_is_one_error_on_every_rank_and_changes_nothing(tmp_path):
    for found, names, left in pool(2).run(refused, str(tmp_path)):
        assert set(found) == set(EXPECTED) and left == [] and names
        for case, text in EXPECTED.items():
            assert found[case] is not None, case
            kind, said = found[case]
            assert kind == "CheckpointError" and text in said and len(said.splitlines()) <= 8, (case, said)


def another_class(folder, old):
    """{class: the error of loading what AdamW saved}; `old`: from a checkpoint that doesn't say what saved it."""
    applied = planned(numbered("llama"), {"tp": 2})
    scheduled = adam_of(applied.model)
    torch.optim.lr_scheduler.LambdaLR(scheduled, lambda step: 1.0)
    applied.save_checkpoint(folder, scheduled, step=1)
    dist.barrier()
    if old and dist.get_rank() == 0:
        path = Path(folder, "step_00000001", "checkpoint.json")
        index = json.loads(path.read_text())
        for group in index["optimizer"]["groups"]:
            del group["optimizer"]
        path.write_text(json.dumps(index))
    dist.barrier()
    found = {}
    for name in ("AdamW", "Adam", "SGD"):
        optimizer = getattr(torch.optim, name)(applied.model.parameters(), lr=0.5)
        found[name] = raised(lambda optimizer=optimizer: applied.load_checkpoint(folder, optimizer))
        assert found[name] is None or (not optimizer.state and optimizer.param_groups[0]["lr"] == 0.5)
    return found


def test_state_that_another_class_of_optimizer_saved_is_refused(tmp_path):
    for found in pool(2).run(another_class, str(tmp_path), False):
        assert found["AdamW"] is None
        for name in ("Adam", "SGD"):
            kind, text = found[name]
            assert kind == "CheckpointError" and f"group 0 is of {name}, and was saved by AdamW" in text


def test_a_checkpoint_that_does_not_say_what_saved_it_is_judged_by_the_names_of_options(tmp_path):
    for found in pool(2).run(another_class, str(tmp_path), True):
        assert found["AdamW"] is None and found["SGD"][0] == "CheckpointError" and "only one of them has" in found["SGD"][1]


def stale_optimizer(folder):
    applied = planned(numbered("llama"), {"dp": 2})
    optimizer = torch.optim.AdamW(applied.model.parameters())
    applied.fully_shard()
    return raised(lambda: applied.save_checkpoint(folder, optimizer, step=1))


def test_an_optimizer_of_parameters_that_the_model_no_longer_has_is_refused(tmp_path):
    for kind, text in pool(2).run(stale_optimizer, str(tmp_path)):
        assert kind == "CheckpointError" and "make the optimizer after them" in text


def other_optimizers(folder, degrees, save):
    """(several in a list with a tensor as rate, state that has no place in the whole), here saved, there loaded."""
    applied = planned(numbered("llama", scale=1 if save else 0, num_key_value_heads=4), degrees)
    named = list(applied.model.named_parameters())
    rate = torch.tensor(0.25 if save else 0.5)
    momentum = torch.optim.SGD([p for n, p in named if "mlp" in n], lr=0.125 if save else 1.0, momentum=0.9)
    adam = torch.optim.AdamW([{"params": [p for n, p in named if "mlp" not in n], "weight_decay": 0.1}], lr=rate, foreach=False)
    if not save:
        applied.load_checkpoint(folder, [momentum, adam])
        wrong = [p.shape for p, s in momentum.state.items() if not torch.equal(s["momentum_buffer"].to_local(), p.to_local() * 3)]
        group = adam.param_groups[0]
        rates = momentum.param_groups[0]["lr"], float(rate), group["lr"] is rate
        return wrong, len(momentum.state), len(adam.state), *rates, group["foreach"]
    for parameter in (p for n, p in named if "mlp" in n):
        momentum.state[parameter]["momentum_buffer"] = parameter.detach() * 3
    applied.save_checkpoint(folder, [momentum, adam], step=1)
    factored = torch.optim.AdamW(applied.model.parameters())
    factored.state[named[0][1]]["row"] = torch.zeros(5)
    return raised(lambda: applied.save_checkpoint(f"{folder}/no", factored, step=1))


def test_several_optimizers_their_numbers_and_tensor_rates_come_back_and_factored_state_is_refused(tmp_path):
    for kind, text in pool(2).run(other_optimizers, str(tmp_path), {"tp": 2}, True):
        assert kind == "CheckpointError" and "optimizer state row/model.embed_tokens.weight is (5,) float32" in text
    for found in pool(2).run(other_optimizers, str(tmp_path), {"dp": 2}, False):
        assert found == ([], 3, 0, 0.125, 0.25, True, False)


def after_a_forward(folder):
    """FSDP leaves the last parameters whole after a forward without a backward."""
    applied = planned(numbered("llama", num_key_value_heads=4), {"dp": 2}, fsdp=True)
    optimizer = adam_of(applied.model)
    with torch.no_grad():
        applied.model(**applied.shard_batch({"input_ids": torch.zeros(1, 8, dtype=torch.long)}))
    whole = sum(not isinstance(p, DTensor) for p in applied.model.parameters())
    applied.save_checkpoint(folder, optimizer, step=1)
    other = planned(numbered("llama", scale=0, num_key_value_heads=4), {"tp": 2})
    again = torch.optim.AdamW(other.model.parameters())
    other.load_checkpoint(folder, again)
    return whole, wrong_weights(other, "llama", {"num_key_value_heads": 4}) + wrong_state(other.model, again)


def test_a_save_right_after_a_forward_under_fsdp_holds_shards(tmp_path):
    for whole, wrong in pool(2).run(after_a_forward, str(tmp_path)):
        assert whole > 0 and wrong == []


def own_state(folder, degrees, values):
    applied = planned(numbered("llama"), degrees)
    if values:
        own = {"seed": 10 + dist.get_rank(), "torch": torch.get_rng_state()}
        applied.save_checkpoint(folder, step=1, extra={"sampler": [1, (2, "x")]}, rank_extra=own)
    return applied.load_checkpoint(folder)


def test_each_rank_gets_its_own_extra_back_at_the_same_degrees_and_at_others_none(tmp_path):
    for rank, state in enumerate(pool(2).run(own_state, str(tmp_path), {"tp": 2}, True)):
        assert state["seed"] == 10 + rank and state["sampler"] == [1, (2, "x")] and state["torch"].dtype == torch.uint8
    for degrees, ranks in (({"dp": 2}, 2), ({}, 1)):
        for state in pool(ranks).run(own_state, str(tmp_path), degrees, False):
            assert state == {"step": 1, "sampler": [1, (2, "x")]}


def test_values_come_back_as_they_were():
    values = {
        "python": random.getstate(), "numpy": np.random.RandomState(1).get_state(), "torch": torch.get_rng_state(),
        "floats": [0.1, float("inf"), float("nan"), -0.0], 3: None, (1, 2): b"\x00\xff", "bool": True, "empty": torch.empty(0, 3),
        "bfloat16": torch.tensor([[1.5]], dtype=torch.bfloat16), "number": np.float32(0.3), "scalar": torch.tensor(2),
        "array": np.arange(6).reshape(2, 3)[:, ::2],
    }  # fmt: skip
    back = decode(json.loads(json.dumps(encode(values, "extra"))))
    assert list(back) == list(values) and repr(back) == repr(values)
    assert back["bfloat16"].dtype == torch.bfloat16 and back["empty"].shape == (0, 3) and type(back["number"]) is np.float32
    assert back["array"].dtype == values["array"].dtype and random.setstate(back["python"]) is None


@pytest.mark.parametrize("value", [{1, 2}, lambda: 0, np.array([object()]), Path("x")], ids=["set", "function", "objects", "path"])
def test_a_value_that_only_a_pickle_holds_is_refused_by_its_place(value):
    with pytest.raises(CheckpointError, match=r"extra\['a'\]\[1\] is a .*pickles aren't written"):
        encode({"a": [0, value]}, "extra")


def damaged(folder, how):
    applied = planned(numbered("llama"), {"tp": 2})
    optimizer = adam_of(applied.model)
    applied.save_checkpoint(folder, optimizer, step=1)
    applied.save_checkpoint(folder, optimizer, step=2)
    dist.barrier()
    newest = Path(folder) / "step_00000002"
    kinds = {p.suffix for p in newest.iterdir()}
    index = json.loads((newest / "checkpoint.json").read_text())
    dist.barrier()
    if dist.get_rank() == 0:
        if how == "truncated":
            os.truncate(newest / "tensors-00001.safetensors", 100)
        elif how == "missing":
            (newest / "tensors-00001.safetensors").unlink()
        elif how == "index":
            (newest / "checkpoint.json").write_text("{")
        elif how == "newer":
            (newest / "checkpoint.json").write_text(json.dumps({**index, "version": 99}))
        elif how == "outside":
            (newest / "checkpoint.json").write_text(json.dumps({**index, "files": {"../x": 3}}))
    dist.barrier()
    return raised(lambda: applied.load_checkpoint(folder, optimizer)), kinds, applied.load_checkpoint(folder, step=1)["step"]


@pytest.mark.parametrize(
    ("how", "text"),
    [("truncated", "has 100 bytes instead of"), ("missing", "is missing"), ("index", "checkpoint.json can't be read"),
     ("newer", "format 99"), ("outside", "outside its folder")],
)  # fmt: skip
def test_a_damaged_checkpoint_is_said_to_be_and_holds_no_pickle(tmp_path, how, text):
    for error, kinds, older in pool(2).run(damaged, str(tmp_path), how):
        assert error[0] == "CheckpointError" and text in error[1] and older == 1
        assert kinds == {".safetensors", ".json"}


def canonical_names(folder):
    applied = planned(numbered("phi3", num_key_value_heads=4), {"tp": 2})
    applied.save_checkpoint(folder, adam_of(applied.model), step=1)
    return {n: list(p.shape) for n, p in numbered("phi3", num_key_value_heads=4).named_parameters()}


def test_a_checkpoint_holds_whole_parameters_under_their_names_before_the_plan(tmp_path):
    shapes = pool(2).run(canonical_names, str(tmp_path))[0]
    held = json.loads((tmp_path / "step_00000001" / "checkpoint.json").read_text())["tensors"]
    for space in ("model/", "optimizer/exp_avg/", "optimizer/exp_avg_sq/"):
        assert {n.removeprefix(space): e["shape"] for n, e in held.items() if n.startswith(space)} == shapes
    assert sum(torch.Size(part[1]).numel() for part in held["model/model.norm.weight"]["parts"]) == 64  # written by one rank


def storages():
    """Bytes of parameters, gradients and optimizer state on this rank, and what its share of each is."""
    applied = planned(tiny_model("llama", hidden_size=256, num_key_value_heads=4), {"dp": 2, "tp": 2}, fsdp=True)
    optimizer = torch.optim.AdamW(applied.model.parameters())
    step(applied.model, share(applied, tiny_batch(applied.model, batch=4, seq=8)))
    optimizer.step()
    parameters = list(applied.model.parameters())
    held = {
        "parameters": parameters, "gradients": [p.grad for p in parameters],
        "exp_avg": [optimizer.state[p]["exp_avg"] for p in parameters],
        "exp_avg_sq": [optimizer.state[p]["exp_avg_sq"] for p in parameters],
    }  # fmt: skip
    due = 0.0
    for name in applied.plan.parameters:
        contract, own = applied.plan.owner(name)
        cut = 2 if any(type(p).__name__ == "Shard" for p in contract.params[own].values()) else 1
        due += 4 * torch.Size(applied.plan.parameters[name]).numel() / cut / 2  # tp's cut, and FSDP's over dp
    real = {}
    for what, tensors in held.items():
        assert all(isinstance(t, DTensor) for t in tensors)
        memory = {t._local_tensor.untyped_storage().data_ptr(): t._local_tensor.untyped_storage().nbytes() for t in tensors}
        real[what] = sum(memory.values())
    return real, due


def test_parameters_gradients_and_optimizer_state_at_fsdp2_x_tp2_are_each_ranks_share():
    for real, due in pool(4).run(storages):
        for what, size_ in real.items():
            assert due <= size_ <= 1.05 * due, (what, size_, due)
