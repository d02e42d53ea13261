"""Calls that would do something else on a planned model than they say: refused, with the call to use instead."""

import pytest
import torch
from core_tools import planned, raised, share, step
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainingArguments

from hyperpar_core import apply_plan, build_plan, make_mesh
from hyperpar_core.testing import pool


def saved(folder):
    applied, single, _ = planned("llama", tp=2)
    refused = raised(lambda: applied.model.save_pretrained(folder))
    applied.save_pretrained(folder)
    loaded = type(single).from_pretrained(folder)
    same = all(torch.equal(a, b) for a, b in zip(loaded.state_dict().values(), single.state_dict().values(), strict=True))
    applied.undo()
    return refused, same, raised(lambda: applied.model.save_pretrained(folder))


def test_the_models_own_save_pretrained_is_refused_and_works_again_after_undo(tmp_path):
    for (kind, text), same, after in pool(2).run(saved, tmp_path):
        assert kind == "ApplyError" and "applied.save_pretrained(folder)" in text
        assert same and after is None


class Rows(torch.utils.data.Dataset):
    def __init__(self, batch):
        self.batch = batch

    def __len__(self):
        return 8

    def __getitem__(self, i):
        return {name: value[0] for name, value in self.batch.items()}


def trainer(degrees, folder):
    applied, _, batch = planned("llama", **degrees)
    arguments = TrainingArguments(str(folder), max_steps=1, report_to=[], use_cpu=True, per_device_train_batch_size=2)
    return raised(lambda: Trainer(applied.model, arguments, train_dataset=Rows(batch)).train())


@pytest.mark.parametrize("degrees", [{"tp": 2}, {"dp": 2}], ids=str)
def test_transformers_trainer_is_refused_before_its_first_step(degrees, tmp_path):
    for kind, text in pool(2).run(trainer, degrees, tmp_path):
        assert kind == "ApplyError" and "Trainer" in text and "applied.shard_batch" in text


def in_ddp(degrees, data_parallel):
    applied, _, batch = planned("llama", data_parallel=data_parallel, **degrees)
    return raised(lambda: step(DistributedDataParallel(applied.model), share(applied, batch)))


def test_ddp_around_a_model_whose_sums_are_the_cores_is_refused_and_runs_where_they_are_external():
    for kind, text in pool(2).run(in_ddp, {"dp": 2}, "core"):
        assert kind == "ApplyError" and "external" in text
    assert pool(2).run(in_ddp, {"dp": 2}, "external") == [None, None]


def early(when, name):
    """An optimizer that was made before a call that replaces parameters: (its step, the step of one made after)."""
    if when == "apply_plan":
        from core_tools import small

        from hyperpar_core.testing import tiny_batch

        model = small("llama")
        batch = tiny_batch(model)
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1)
        mesh = make_mesh(dp=2)
        applied = apply_plan(model, build_plan(model, mesh), mesh)
    else:
        applied, _, batch = planned("llama", dp=2)
        optimizer = getattr(torch.optim, name)(applied.model.parameters(), lr=0.1)
        getattr(applied, when)()
    if when != "undo":
        step(applied.model, applied.shard_batch(batch))
    weights = [p.detach().clone() for p in applied.model.parameters()]
    error = raised(optimizer.step)
    same = all(torch.equal(a, b) for a, b in zip(weights, applied.model.parameters(), strict=True))
    late = getattr(torch.optim, name)(applied.model.parameters(), lr=0.1)
    return error, same, raised(late.step)


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
@pytest.mark.parametrize("when", ["apply_plan", "fully_shard", "undo"])
def test_an_optimizer_that_was_made_too_early_is_refused_at_its_first_step(when, name):
    for (kind, text), same, late in pool(2).run(early, when, name):
        assert kind == "ApplyError" and f"made before {when}" in text
        assert same and late is None


def not_elementwise(family, degrees, ep, make):
    """(the error of an optimizer's first step, whether the weights are as they were)."""
    from core_tools import small

    from hyperpar_core import suggest_overrides
    from hyperpar_core.testing import tiny_batch

    model, mesh = small(family), make_mesh(**degrees)
    plan = build_plan(model, mesh, ep_size=ep, overrides=suggest_overrides(model, mesh, ep_size=ep))
    applied = apply_plan(model, plan, mesh)
    step(model, share(applied, tiny_batch(model, batch=2, seq=8)))
    if make == "transformers":
        from transformers.optimization import Adafactor

        optimizer = Adafactor(model.parameters(), lr=1e-2, relative_step=False)
    elif make == "Muon":
        inside = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n and "lm_head" not in n]
        optimizer = torch.optim.Muon(inside, lr=1e-2)
    else:
        optimizer = getattr(torch.optim, make)(model.parameters(), lr=1e-2)
    before = [p.detach().clone() for p in model.parameters()]
    error = raised(lambda: optimizer.step(lambda: torch.zeros(())) if make == "LBFGS" else optimizer.step())
    return error, all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize(
    ("family", "degrees", "ep", "make", "text"),
    [
        ("phi3", {"tp": 2}, 1, "Muon", "qkv_proj.weight is held in sections"),
        ("llama", {"tp": 2}, 1, "Adafactor", "whole rows"),
        ("olmoe", {"dp": 2}, 2, "Adafactor", "whole rows"),
        ("llama", {"dp": 2}, 1, "transformers", "whole rows"),
        ("olmoe", {"dp": 2}, 2, "LBFGS", "several meshes"),
    ],
)
def test_an_optimizer_that_is_not_elementwise_is_refused_where_a_plan_would_change_what_it_computes(family, degrees, ep, make, text):
    for (kind, said), same in pool(2).run(not_elementwise, family, degrees, ep, make):
        assert kind == "ApplyError" and text in said and same


@pytest.mark.parametrize(("family", "make"), [("llama", "Muon"), ("phi3", "LBFGS"), ("phi3", "AdamW")])
def test_the_others_step(family, make):
    for error, same in pool(2).run(not_elementwise, family, {"tp": 2}, 1, make):
        assert error is None and (not same or make == "LBFGS")
