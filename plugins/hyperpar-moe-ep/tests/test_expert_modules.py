"""Experts that are modules of a list: stacked for the run, under their own names for everybody else."""

import copy

import pytest
import torch
import toy_moe
from safetensors.torch import load_file
from toy_moe import ToyMoE
from transformers import PreTrainedConfig, PreTrainedModel

from hyperpar_core import Override, apply_plan, build_plan, explain, make_mesh, suggest_overrides
from hyperpar_core.errors import ApplyError, CheckpointError, Refused
from hyperpar_core.testing import Degrees, check_parity, pool, tiny_batch


@pytest.fixture
def site(tmp_path):
    return toy_moe.write_distribution(tmp_path)


def parity(folder, degrees, seq, steps, options):
    with toy_moe.installed(folder):
        model = ToyMoE()
        degrees = Degrees(**degrees)
        sizes = {"dp": degrees.dp, "tp": degrees.tp}
        options = {"overrides": suggest_overrides(model, sizes, ep_size=degrees.ep), **options}
        batch = tiny_batch(model, batch=2 * degrees.dp, seq=seq)
        report = check_parity(model, batch, Degrees(degrees.dp, 1, degrees.tp, degrees.ep, options), steps=steps)
        return report.ok, report.text()


@pytest.mark.parametrize(
    ("degrees", "seq", "options"),
    [
        ({"dp": 2, "ep": 2}, 12, {}),
        ({"tp": 2, "ep": 2}, 13, {}),
        ({"tp": 2, "ep": 2}, 12, {"sequence_parallel": False}),
        ({"tp": 2}, 12, {}),
        ({"dp": 2, "tp": 2, "ep": 4}, 2, {}),
        ({"dp": 2, "tp": 2, "ep": 2}, 12, {}),
    ],
    ids=str,
)
def test_they_compute_what_one_process_does(site, degrees, seq, options):
    ranks = degrees.get("dp", 1) * degrees.get("tp", 1)
    for equal, text in pool(ranks).run(parity, site, degrees, seq, 3, options):
        assert equal, text


def names_and_weights(folder):
    """What isn't as it was: while the plan is on, after undo, in a copy, under FSDP's own name for things."""
    wrong = []
    with toy_moe.installed(folder):
        model = ToyMoE()
        single, batch = copy.deepcopy(model), tiny_batch(model, batch=2, seq=12)
        before = model.state_dict()
        before = {name: value.clone() for name, value in before.items()}
        mesh = make_mesh(dp=2)
        plan = build_plan(model, mesh, ep_size=2, overrides=suggest_overrides(model, mesh, ep_size=2))
        applied = apply_plan(model, plan, mesh)
        held = [name for name, _ in model.named_parameters() if ".experts." in name]
        rows = {k: v.chunk(2)[applied.data_parallel_rank] for k, v in batch.items()}
        model(**applied.shard_batch(rows)).loss.backward()
        single(**batch).loss.backward()
        for what, found in (("full_parameters", applied.full_parameters()), ("full_state_dict", applied.full_state_dict())):
            if list(found) != list(before) or any(not torch.equal(found[name], value) for name, value in before.items()):
                wrong.append(what)
        gradients = applied.full_gradients()
        if list(gradients) != list(before):
            wrong.append("names of gradients")
        wrong += [n for n, p in single.named_parameters() if not torch.allclose(gradients[n], p.grad, rtol=1e-4, atol=1e-6)]
        twin = copy.deepcopy(model)
        with torch.no_grad():
            if not torch.allclose(twin(batch["input_ids"]).logits, single(batch["input_ids"]).logits, rtol=1e-4, atol=1e-5):
                wrong.append("a copy")
        changed = {name: value + 1 for name, value in before.items()}
        applied.load_full_state_dict(changed)
        if any(not torch.equal(found, changed[name]) for name, found in applied.full_parameters().items()):
            wrong.append("what was loaded")
        applied.undo()
        after = model.state_dict()
        if list(after) != list(before) or any(not torch.equal(after[name], value) for name, value in changed.items()):
            wrong.append("undo")
        if not isinstance(model.layers[0].moe.experts, torch.nn.ModuleList) or any(p.requires_grad is False for p in model.parameters()):
            wrong.append("the list")
        model(**batch).loss.backward()
    return held, wrong


def test_names_shapes_and_order_are_the_models_own_and_undo_brings_the_list_back(site):
    for held, wrong in pool(2).run(names_and_weights, site):
        assert held[:4] == [f"layers.0.moe.experts.{name}" for name in ("scale", "w1_weight", "w1_bias", "w2_weight")]
        assert wrong == []


def through_a_checkpoint(site, folder):
    """Names in the checkpoint that ep 2 wrote, and whether ep 1, which leaves the list as it is, reads the same weights."""
    with toy_moe.installed(site):
        mesh = make_mesh(dp=2)
        models = [ToyMoE(seed=0), ToyMoE(seed=1)]
        first, second = (
            apply_plan(model, build_plan(model, mesh, ep_size=ep, overrides=suggest_overrides(model, mesh, ep_size=ep)), mesh)
            for model, ep in zip(models, (2, 1), strict=True)
        )
        before = first.full_parameters()
        first.save_checkpoint(folder, step=1)
        second.load_checkpoint(folder)
        after = second.full_parameters()
        return list(after) == list(before) and all(torch.equal(after[name], value) for name, value in before.items())


def test_a_checkpoint_has_their_own_names_at_any_degree(site, tmp_path):
    assert pool(2).run(through_a_checkpoint, site, str(tmp_path / "steps")) == [True, True]


def stepped(ep, steps, folder, save=None, load=False, skip=False):
    """The weights after `steps` steps at `ep`, from a checkpoint where `load` is one."""
    mesh, model = make_mesh(dp=2), ToyMoE(seed=int(load))
    plan = build_plan(model, mesh, ep_size=ep, overrides=suggest_overrides(model, mesh, ep_size=ep))
    applied = apply_plan(model, plan, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if load:
        applied.load_checkpoint(folder, optimizer=optimizer)
    if skip:  # as if no token had ever chosen it
        model.layers[0].moe.experts[3].requires_grad_(False)
    for number in range(steps):
        rows = tiny_batch(model, batch=4, seq=24, seed=number + 3 * load)
        rows = {k: v.chunk(2)[applied.data_parallel_rank] for k, v in rows.items()}
        model(**applied.shard_batch(rows)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if save is not None:
        applied.save_checkpoint(folder, step=save, optimizer=optimizer)
    return applied.full_parameters()


def go_on_at(site, folder, first, second):
    """The largest relative difference of a weight between a run that stays at ep 1 and one that goes from `first` to `second`."""
    with toy_moe.installed(site):
        stepped(first, 3, folder, save=3)
        ours = stepped(second, 2, folder, load=True)
        stepped(1, 3, folder + "-stays", save=3)
        theirs = stepped(1, 2, folder + "-stays", load=True)
    return max(float((ours[name] - value).abs().max() / value.abs().max()) for name, value in theirs.items())


@pytest.mark.parametrize(("first", "second"), [(2, 1), (1, 2)])
def test_an_optimizers_state_goes_from_a_stack_to_single_experts_and_back(site, tmp_path, first, second):
    for error in pool(2).run(go_on_at, site, str(tmp_path / "steps"), first, second):
        assert error <= 1e-5


def unequal(site, folder):
    with toy_moe.installed(site):
        stepped(1, 2, folder, save=2, skip=True)
        try:
            stepped(2, 1, folder, load=True)
        except CheckpointError as error:
            return str(error)
    return ""


def test_experts_that_were_not_stepped_together_are_an_error_over_ep(site, tmp_path):
    for text in pool(2).run(unequal, site, str(tmp_path / "steps")):
        assert "layers.0.moe.experts.3." in text and text.endswith("Load without the optimizer, or with ep=1."), text


class HubConfig(PreTrainedConfig):
    model_type = "hub_toy"
    vocab_size: int = toy_moe.VOCAB


class HubToy(PreTrainedModel):
    """The same for transformers' Hub: a folder has its weights."""

    config_class = HubConfig

    def __init__(self, config):
        super().__init__(config)
        inner = ToyMoE()
        self.layers, self.norm, self.embed, self.head = inner.layers, inner.norm, inner.embed, inner.head
        self.post_init()

    def get_input_embeddings(self):
        return self.embed

    def get_output_embeddings(self):
        return self.head

    forward = ToyMoE.forward


def saved(site, folder):
    """Whether a folder that ep 2 wrote holds every tensor under its own name, and plain transformers loads it."""
    with toy_moe.installed(site):
        model = HubToy(HubConfig())
        with torch.no_grad():
            for i, parameter in enumerate(model.parameters()):
                parameter.copy_(torch.arange(parameter.numel()).view(parameter.shape) + 1000.0 * i)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        mesh = make_mesh(dp=2)
        plan = build_plan(model, mesh, ep_size=2, overrides=suggest_overrides(model, mesh, ep_size=2))
        apply_plan(model, plan, mesh).save_pretrained(folder)
        written = load_file(f"{folder}/model.safetensors")
        loaded = HubToy.from_pretrained(folder).state_dict()
        return [set(found) == set(before) and all(torch.equal(found[n], v) for n, v in before.items()) for found in (written, loaded)]


def test_a_saved_folder_has_their_own_names_and_plain_transformers_loads_it(site, tmp_path):
    assert pool(2).run(saved, site, str(tmp_path / "folder")) == [[True, True]] * 2


def under_fsdp(folder):
    with toy_moe.installed(folder):
        model = ToyMoE()
        single, batch = copy.deepcopy(model), tiny_batch(model, batch=8, seq=6)
        mesh = make_mesh(dp=4)
        applied = apply_plan(model, build_plan(model, mesh, ep_size=2, overrides=suggest_overrides(model, mesh, ep_size=2)), mesh)
        applied.fully_shard()
        rows = {k: v.chunk(4)[applied.data_parallel_rank] for k, v in batch.items()}
        model(**applied.shard_batch(rows)).loss.backward()
        single(**batch).loss.backward()
        gradients = applied.full_gradients()
        return [n for n, p in single.named_parameters() if not torch.allclose(gradients[n], p.grad, rtol=1e-4, atol=1e-6)]


def test_under_fsdp_their_gradients_are_those_of_one_process(site):
    assert pool(4).run(under_fsdp, site) == [[]] * 4


def test_a_plan_says_what_a_rank_holds_of_them(site):
    with toy_moe.installed(site):
        model = ToyMoE()
        plan = build_plan(model, {"dp": 2, "tp": 2}, ep_size=4, overrides=suggest_overrides(model, {"dp": 2, "tp": 2}, ep_size=4))
    assert plan.boundary("layers.0.moe").to_data()["stacked"] == {"experts": 4}
    assert type(plan).from_yaml(plan.to_yaml()) == plan
    text = explain(plan, "layers.0.moe.experts.0.w1.weight")
    (row,) = [line for line in text.splitlines() if "experts.w1_weight" in line]
    assert row.split()[1:3] == ["4x48x32", "S(0)"] and row.split()[-2:] == ["3", "KiB"]


def failing(site):
    """Whether an apply that fails at its last step leaves the list, its modules and its parameters as they were."""
    from hyperpar_core.apply import applier

    with toy_moe.installed(site):
        model = ToyMoE()
        lists = [layer.moe.experts for layer in model.layers]
        before = {name: id(p) for name, p in model.named_parameters()}
        mesh, original = make_mesh(dp=2), applier._Installer._install_loss
        plan = build_plan(model, mesh, ep_size=2, overrides=suggest_overrides(model, mesh, ep_size=2))
        applier._Installer._install_loss = lambda self: 1 / 0
        try:
            apply_plan(model, plan, mesh)
        except ZeroDivisionError:
            same = all(layer.moe.experts is was for layer, was in zip(model.layers, lists, strict=True))
            return same and before == {name: id(p) for name, p in model.named_parameters()}
        finally:
            applier._Installer._install_loss = original


def test_an_apply_that_fails_leaves_the_list_as_it_was(site):
    assert pool(2).run(failing, site) == [True, True]


def unlike(model):
    model.layers[1].moe.experts[2] = toy_moe.Expert(bias=False)
    return r"layers\.1\.moe\.experts\.2 isn't like layers\.1\.moe\.experts\.0"


def wider(model):
    model.layers[0].moe.experts[3].w2 = torch.nn.Linear(48, 33)
    return r"layers\.0\.moe\.experts\.3 isn't like .*w2\.weight \(\(33, 48\)"


def accounting(model):
    model.layers[0].moe.experts[0].register_buffer("seen", torch.zeros(1))
    return "experts have buffers"


def late_accounting(model):
    model.layers[0].moe.experts[2].register_buffer("seen", torch.zeros(1))
    return r"experts\.2 isn't like .*buffers \['seen'\]"


def factor(model):
    for i, expert in enumerate(model.layers[0].moe.experts):
        expert.factor = 1.0 + i
    return r"experts\.1 isn't like .*: factor 2\.0, expert 0 has 1\.0"


def activation(model):
    for i, expert in enumerate(model.layers[1].moe.experts):
        expert.act = torch.nn.functional.gelu if i == 3 else torch.nn.functional.silu
    return r"layers\.1\.moe\.experts\.3 isn't like .*: act .*gelu.*, expert 0 has silu"


def closure(model):
    for i, expert in enumerate(model.layers[1].moe.experts):
        expert.act = lambda x, i=i: x * i
    return r"experts\.1 isn't like .*: act "


def old_forward(model):
    for expert in model.layers[0].moe.experts:
        before = expert.forward
        expert.forward = lambda x, before=before: before(x) * 2
    return r"experts\.1 isn't like .*: forward "


def submodule(model):
    for i, expert in enumerate(model.layers[1].moe.experts):
        expert.act = torch.nn.SiLU() if i % 2 else torch.nn.GELU()
    return r"experts\.1 isn't like .*: act SiLU, expert 0 has GELU"


def slope(model):
    for i, expert in enumerate(model.layers[1].moe.experts):
        expert.act = torch.nn.LeakyReLU(0.1 + 0.1 * (i // 2))
    return r"experts\.2 isn't like .*: act\.negative_slope 0\.2, expert 0 has 0\.1"


def hook(model):
    model.layers[0].moe.experts[1].w2.register_forward_hook(lambda module, args, out: out * 3)
    return r"experts\.1 isn't like .*: w2\._forward_hooks"


def outside(model):
    for expert in model.layers[0].moe.experts:
        expert.parts = [model.norm]
    return r"experts\.1 isn't like .*: parts "


def tied(model):
    experts = model.layers[0].moe.experts
    experts[1].w1.weight = experts[0].w1.weight
    return r"experts\.0\.w1\.weight and .*experts\.1\.w1\.weight are one parameter"


def tied_outside(model):
    model.layers[0].moe.experts[2].scale = model.norm.weight
    return r"experts\.2\.scale and norm\.weight are one parameter"


UNLIKE = [unlike, wider, accounting, late_accounting, factor, activation, closure, old_forward, submodule, slope, hook, outside,
          tied, tied_outside]  # fmt: skip


@pytest.mark.parametrize("change", UNLIKE)
def test_experts_that_are_not_alike_are_refused_when_the_plan_is_made(site, change):
    with toy_moe.installed(site):
        model = ToyMoE()
        match = change(model)
        before = [id(p) for p in model.parameters()]
        with pytest.raises(Refused, match=match) as refused:
            build_plan(model, {"dp": 2}, ep_size=2, overrides=suggest_overrides(model, {"dp": 2}, ep_size=2))
    assert len(str(refused.value).splitlines()) <= 8 and [id(p) for p in model.parameters()] == before


def changed_later(folder):
    """The error of a plan whose experts get other attributes before it is applied."""
    with toy_moe.installed(folder):
        model, mesh = ToyMoE(), make_mesh(dp=2)
        plan = build_plan(model, mesh, ep_size=2, overrides=suggest_overrides(model, mesh, ep_size=2))
        model.layers[0].moe.experts[1].factor = 2.0
        try:
            apply_plan(model, plan, mesh)
        except Refused as error:
            return str(error)


def test_experts_that_are_made_unlike_after_the_plan_are_refused_as_it_is_applied(site):
    for error in pool(2).run(changed_later, site):
        assert "experts.1 isn't like" in error and "factor" in error


def with_attributes(folder):
    """Parity of experts with equal attributes of all kinds: activations, configs, methods, hooks."""

    class Rich(toy_moe.Expert):
        def forward(self, x):
            return self.w2(self.act(self.gate(self.w1(x)))) * self.scale * self.config["factor"]

        def half(self, x):
            return x / 2

    class RichMoE(ToyMoE):
        def __init__(self):
            super().__init__()
            for layer in self.layers:
                for expert in layer.moe.experts:
                    expert.__class__ = Rich
                    expert.act, expert.gate, expert.config = torch.nn.SiLU(), expert.half, {"factor": 2.0, "own": [1, 2]}
                    expert.w2.register_forward_hook(doubled)

    with toy_moe.installed(folder):
        model = RichMoE()
        overrides = suggest_overrides(model, {"dp": 2}, ep_size=2)
        report = check_parity(model, tiny_batch(model, batch=4, seq=12), Degrees(2, 1, 1, 2, {"overrides": overrides}), steps=1)
        return report.ok, report.text()


def doubled(module, args, out):
    return out * 2


def test_experts_with_equal_attributes_methods_and_hooks_are_alike(site):
    for equal, text in pool(2).run(with_attributes, site):
        assert equal, text


def test_a_number_of_experts_that_ep_does_not_divide_is_refused(site):
    with toy_moe.installed(site), pytest.raises(Refused, match=r"layers\.0\.moe\.experts: 4 experts .* ep=3"):
        build_plan(ToyMoE(), {"dp": 3}, ep_size=3, overrides=suggest_overrides(ToyMoE(), {"dp": 3}, ep_size=3))


def wrong_calls(folder, kind):
    """The error of a forward of a block that keeps accounts, or calls an expert twice."""

    class Twice(toy_moe.Block):
        def forward(self, x):
            return super().forward(x)[0] + super().forward(x)[0], None

    class Counts(toy_moe.Block):
        def forward(self, x):
            self.count += 1
            return super().forward(x)

    class InPlace(toy_moe.Block):
        def forward(self, x):
            return super().forward(x.mul_(1.1))

    class Collects(toy_moe.Block):
        def forward(self, x):
            out, logits = super().forward(x)
            self.seen.append(logits.mean())
            return out, logits

    class Keeps(toy_moe.Block):
        def forward(self, x):
            out, logits = super().forward(x)
            self.gate.last = logits.detach()
            return out, logits

    class Numbers(toy_moe.Block):
        def forward(self, x):
            self.calls += 1
            return super().forward(x)

    kinds = {"twice": Twice, "counts": Counts, "in place": InPlace, "collects": Collects, "keeps": Keeps, "numbers": Numbers}
    with toy_moe.installed(folder):
        model = ToyMoE()
        for layer in model.layers:
            layer.moe.__class__ = kinds.get(kind, toy_moe.Block)
            layer.moe.seen, layer.moe.calls = [], 0
            if kind == "counts":
                layer.moe.register_buffer("count", torch.zeros(()))
            if kind == "hook":
                layer.moe.gate.register_forward_hook(lambda module, args, out: None)
        mesh = make_mesh(dp=2)
        apply_plan(model, build_plan(model, mesh, ep_size=2, overrides=[Override("*.moe", local_compute_fn="expert_modules")]), mesh)
        try:
            model(torch.arange(6)[None])
        except ApplyError as error:
            return str(error)


@pytest.mark.parametrize(
    ("kind", "text"),
    [("twice", "is called twice"), ("counts", "changes the buffer count"), ("hook", "moe.gate has a forward hook"),
     ("in place", "changes its input 0"), ("collects", "changes the attribute seen"), ("keeps", "changes the attribute gate.last"),
     ("numbers", "changes the attribute calls")],
)  # fmt: skip
def test_a_block_that_two_passes_would_change_is_an_error(site, kind, text):
    for error in pool(2).run(wrong_calls, site, kind):
        assert text in error


def in_inference_mode(folder):
    with toy_moe.installed(folder):
        model, ids = ToyMoE(), torch.arange(12).view(2, 6)
        single, mesh = copy.deepcopy(model), make_mesh(dp=2)
        apply_plan(model, build_plan(model, mesh, ep_size=2, overrides=suggest_overrides(model, mesh, ep_size=2)), mesh)
        with torch.inference_mode():
            return torch.allclose(model(ids).logits, single(ids).logits, rtol=1e-4, atol=1e-5)


def test_they_run_in_inference_mode_where_tensors_count_no_changes(site):
    assert pool(2).run(in_inference_mode, site) == [True, True]
