"""The comparer: what is within the bound is equal, what is beyond isn't, and the first part is named."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hyperpar_core.testing import (
    Bounds,
    compare,
    merge,
    no_float32_casts,
    record_reference,
    tiny_batch,
    tiny_model,
)


class Norm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return self.weight * x / x.pow(2).mean(-1, keepdim=True).sqrt()


class Mlp(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, hidden):
        return self.down(self.up(hidden).relu())


class Mixer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.q_norm, self.out = Norm(width), nn.Linear(width, width)

    def forward(self, hidden, scale=None):
        return self.out(self.q_norm(hidden).cumsum(1) * scale), None


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.mixer, self.mlp = Mixer(width), Mlp(width)

    def forward(self, hidden):
        hidden = hidden + self.mixer(hidden, scale=0.1)[0]
        return hidden + self.mlp(hidden)


class Toy(nn.Module):
    def __init__(self, vocab=20, width=8):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(2))
        self.head = nn.Linear(width, vocab)

    def forward(self, input_ids, labels):
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.head(hidden)
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return SimpleNamespace(loss=loss, logits=logits)


BOUNDARIES = {
    "embed": ["output"],
    **{f"layers.{i}.{part}": ["output", "weights"] for i in (0, 1) for part in ("mixer", "mlp")},
    "head": ["output"],
}
FORWARD = list(BOUNDARIES)
BACKWARD = ["head", "layers.1.mlp", "layers.1.mixer", "layers.0.mlp", "layers.0.mixer", "embed"]


class Scaled(torch.autograd.Function):
    """Multiplies the forward and the gradient, each by its own number."""

    @staticmethod
    def forward(ctx, x, forward, backward):
        ctx.backward = backward
        return x * forward

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.backward, None, None


def toy(dtype=torch.float32):
    torch.manual_seed(0)
    return Toy().to(dtype)


def record(model, steps=0):
    ids = torch.randint(20, (2, 6), generator=torch.Generator().manual_seed(1))
    return record_reference(model, {"input_ids": ids, "labels": ids}, boundaries=BOUNDARIES, steps=steps)


@pytest.fixture(scope="module")
def reference():
    return record(toy(), steps=2)


def with_gradient(reference, name, value):
    return replace(reference, gradients={**reference.gradients, name: value})


def nudged(tensor, fraction):
    """A copy whose largest element is off by `fraction` of itself."""
    copied = tensor.clone()
    copied.view(-1)[copied.abs().argmax()] *= 1 + fraction
    return copied


def test_a_record_equals_itself_and_the_report_says_so(reference):
    report = compare(reference, [reference, replace(reference, rank=1)], title="toy   tp 2")
    assert report.ok and report.first is None
    assert report.text().splitlines() == [
        "toy   tp 2",
        f"  loss      equal ({float(reference.loss):.6f})",
        "  logits    equal (largest difference 0e+00)",
        "  gradients 17 of 17 equal",
        "  weights   17 of 17 equal after 2 SGD steps",
        "  replicas  bitwise equal, also after 2 AdamW steps",
    ]


def test_boundaries_are_recorded_in_execution_order(reference):
    assert [fqn for fqn, _, _ in reference.outputs] == FORWARD
    assert [fqn for fqn, _, _ in reference.input_gradients] == BACKWARD[:-1]


def test_the_gradient_of_a_boundarys_input_is_that_of_this_use_alone(reference):
    model, cut = toy(), []
    mixer = model.layers[1].mixer

    def forward(hidden, scale, inner=mixer.forward):
        cut.append(hidden.detach().requires_grad_())
        return inner(cut[0], scale=scale)

    mixer.forward = forward
    record(model)
    alone = reference.input_gradients["layers.1.mixer", "hidden", 0]
    assert torch.allclose(cut[0].grad, alone, atol=1e-7) and alone.abs().max() > 1e-3


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-5), (torch.float64, 1e-10)])
@pytest.mark.parametrize("field", ["loss", "logits"])
def test_a_difference_just_above_the_bound_fails_and_just_below_passes(dtype, bound, field):
    ours = record(toy(dtype))
    value = getattr(ours, field)
    assert compare(ours, [replace(ours, **{field: nudged(value, 0.8 * bound)})]).ok
    assert not compare(ours, [replace(ours, **{field: nudged(value, 1.25 * bound)})]).ok


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-5), (torch.float64, 1e-10)])
def test_every_gradient_has_the_bound_and_the_floor_of_the_largest_gradient(dtype, bound):
    ours = record(toy(dtype))
    largest = max(float(g.abs().max()) for g in ours.gradients.values())
    for name, gradient in ours.gradients.items():
        allowed = max(bound * float(gradient.abs().max()), 0.1 * bound * largest)
        for factor, ok in ((0.8, True), (1.25, False)):
            off = gradient.clone()
            off.view(-1)[gradient.abs().argmin()] += factor * allowed
            assert compare(ours, [with_gradient(ours, name, off)]).ok is ok, (name, factor)


def test_a_weight_after_the_steps_that_is_off_fails_and_its_boundary_is_named(reference):
    name = "layers.0.mlp.up.weight"
    weights = {**reference.weights, name: nudged(reference.weights[name], 2e-5)}
    report = compare(reference, [replace(reference, weights=weights)])
    assert list(report.differing("weight")) == [name]
    assert (report.first.phase, report.first.fqn) == ("weights", "layers.0.mlp")


def test_a_missing_gradient_is_named(reference):
    report = compare(reference, [with_gradient(reference, "head.bias", None)])
    assert report.differing("gradient")["head.bias"][0].text() == "missing"
    assert "bias  missing on rank 0" in report.text()


def test_a_gradient_that_the_reference_lacks_passes_only_as_zeros(reference):
    ours = with_gradient(reference, "head.bias", None)
    assert compare(ours, [with_gradient(reference, "head.bias", torch.zeros(20))]).ok
    assert not compare(ours, [reference]).ok


def test_another_shape_and_a_nan_are_differences_never_equal(reference):
    bias = reference.gradients["head.bias"]
    nan = bias.clone()
    nan[3] = float("nan")
    for wrong, note in ((bias[:-1], "shape (19,), the reference's is (20,)"), (nan, "not finite")):
        report = compare(reference, [with_gradient(reference, "head.bias", wrong)])
        assert report.differing("gradient")["head.bias"][0].note == note
    broken = with_gradient(reference, "head.bias", nan)
    assert not compare(broken, [broken]).ok


def test_one_rank_that_differs_is_enough_and_is_named(reference):
    off = replace(with_gradient(reference, "head.bias", 2 * reference.gradients["head.bias"]), rank=1)
    report = compare(reference, [reference, off])
    assert list(report.differing("gradient")["head.bias"]) == [1]
    assert "bias  relative difference 1, 2 times the reference on rank 1" in report.text()


def test_merged_reports_of_the_ranks_are_one_report(reference):
    off = replace(with_gradient(reference, "head.bias", 2 * reference.gradients["head.bias"]), rank=1)
    both = compare(reference, [reference, off])
    assert merge([compare(reference, [reference]), compare(reference, [off])]) == both


def test_replicas_that_differ_fail_by_themselves_and_are_named(reference):
    name = "gradient of layers.1.mixer.q_norm.weight"
    report = compare(reference, [replace(reference, replicas=(name,))])
    assert not report.ok and report.replicas == (name,)
    assert (report.first.phase, report.first.fqn) == ("replicas", "layers.1.mixer")
    assert f"replicas  {name} differs between ranks" in report.text()
    later = compare(reference, [replace(reference, replicas=("head.bias after 2 AdamW steps",))])
    assert (later.ok, later.first.phase, later.first.fqn) == (False, "replicas", "head")


@pytest.mark.parametrize("fqn", FORWARD)
def test_a_fault_in_a_forward_alone_names_the_boundary_where_it_enters(reference, fqn):
    model = toy()
    output = lambda x: Scaled.apply(x, 1.001, 1.0)  # noqa: E731
    model.get_submodule(fqn).register_forward_hook(
        lambda m, a, out: (output(out[0]), *out[1:]) if isinstance(out, tuple) else output(out)
    )
    report = compare(reference, [record(model)])
    first = report.first
    assert not report.ok
    assert (first.phase, first.fqn, first.forward_equal) == ("forward", fqn, FORWARD.index(fqn))


@pytest.mark.parametrize("fqn", BACKWARD[:-1])
def test_a_fault_in_a_backward_alone_names_the_boundary_where_it_enters(reference, fqn):
    model = toy()
    inner = model.get_submodule(fqn)
    inner.forward = lambda x, *a, _f=inner.forward, **k: _f(Scaled.apply(x, 1.0, 1.001), *a, **k)
    report = compare(reference, [record(model)])
    first = report.first
    assert not report.ok and not report.differing("logits")
    assert (first.phase, first.fqn) == ("backward", fqn)
    assert (first.forward_equal, first.backward_equal) == (len(FORWARD), BACKWARD.index(fqn))


@pytest.mark.parametrize(
    "name", ["embed.weight", "layers.0.mixer.q_norm.weight", "layers.1.mlp.up.bias", "head.weight"]
)
def test_a_fault_in_one_gradient_alone_names_the_boundary_that_owns_the_parameter(reference, name):
    model = toy()
    model.get_parameter(name).register_hook(lambda grad: 2 * grad)
    report = compare(reference, [record(model)])
    assert list(report.differing("gradient")) == [name]
    owner = max((fqn for fqn in BOUNDARIES if name.startswith(fqn + ".")), key=len)
    assert (report.first.phase, report.first.fqn) == ("backward", owner)
    assert report.first.backward_equal == BACKWARD.index(owner)


def test_of_two_faults_in_the_backward_the_one_that_runs_first_is_named(reference):
    model = toy()
    for name in ("layers.0.mlp.up.weight", "layers.1.mixer.out.bias"):
        model.get_parameter(name).register_hook(lambda grad: 2 * grad)
    assert compare(reference, [record(model)]).first.fqn == "layers.1.mixer"


def test_a_fault_in_the_loss_alone_is_called_one_of_the_loss(reference):
    report = compare(reference, [replace(reference, loss=reference.loss * 2)])
    assert (report.first.phase, report.first.fqn) == ("loss", "")


def test_the_text_says_which_ranks_what_the_contract_says_and_where(reference):
    name = "layers.1.mixer.q_norm.weight"
    gradient = reference.gradients[name]
    torch.manual_seed(3)
    parts = [gradient * torch.rand_like(gradient) for _ in range(2)]
    records = [
        replace(with_gradient(reference, name, part), rank=rank, replicas=(f"gradient of {name}",))
        for rank, part in enumerate(parts)
    ]
    text = compare(reference, records, hints={name: "contract says gradient replicate over tp"}).text().splitlines()
    assert text[2] == "  gradients 16 of 17 equal"
    assert text[5] == (
        "  first part: backward of layers.1.mixer (execution order: forward 6 boundaries equal, backward 2 equal)"
    )
    assert text[6].startswith("    q_norm.weight  relative difference 0.")
    assert " on rank 0, 0." in text[6] and text[6].endswith(" on rank 1; replicas differ")
    assert text[7] == "    contract says gradient replicate over tp, and its replicas differ: it is partial"
    assert len(text) == 8


def test_the_json_carries_the_verdict_the_place_and_every_difference(reference):
    off = with_gradient(reference, "head.bias", 2 * reference.gradients["head.bias"])
    data = json.loads(compare(reference, [off]).to_json())
    assert data["ok"] is False and data["first"]["fqn"] == "head"
    assert data["comparisons"][0]["differences"][0]["name"] == "head.bias"
    assert data["comparisons"][0]["equal"]["gradient"] == 16


def test_positions_that_dont_count_arent_compared(reference):
    rows = torch.ones(2, 6, dtype=torch.bool)
    rows[1, 0] = False
    logits = reference.logits.clone()
    logits[1, 0] += 1
    assert compare(reference, [replace(reference, logits=logits)], rows=rows).ok
    assert not compare(reference, [replace(reference, logits=logits)]).ok


def test_a_dtype_without_a_bound_is_refused():
    with pytest.raises(ValueError, match=r"not for torch\.bfloat16"):
        Bounds.of(torch.bfloat16)


def test_within_no_float32_casts_a_float64_tensor_stays_float64_and_others_are_cast_as_ever():
    x, half = torch.rand(4, dtype=torch.float64), torch.rand(4, dtype=torch.bfloat16)
    with no_float32_casts():
        kept = [
            x.float(), x.to(torch.float32), x.to("cpu", torch.float32), x.to(dtype=torch.float32),
            x.type(torch.float32), x.softmax(0, dtype=torch.float32),
            nn.functional.softmax(x, dim=0, dtype=torch.float32),
            torch.zeros_like(x, dtype=torch.float32), x.sum(dtype=torch.float32),
        ]  # fmt: skip
        assert {t.dtype for t in kept} == {torch.float64}
        assert half.float().dtype == half.to(torch.float32).dtype == torch.float32
        assert x.half().dtype == torch.float16
        assert torch.arange(3).float().dtype == torch.float32
    assert x.float().dtype == torch.float32


def test_over_slices_the_loss_is_the_token_mean_and_the_auxiliary_loss_the_mean_of_the_slices():
    options = {"output_router_logits": True, "router_aux_loss_coef": 0.1}
    model, expected = (tiny_model("mixtral", torch.float64, **options) for _ in range(2))
    batch = tiny_batch(model, batch=4, seq=9)
    batch["labels"][3, 2:] = -100
    boundaries = {"model.layers.0.self_attn": ["output"]}
    sliced = record_reference(model, batch, slices=2, boundaries=boundaries)
    with no_float32_casts():
        whole = expected(**batch, use_cache=False)
        parts = [expected(input_ids=ids, labels=ids, use_cache=False).aux_loss for ids in batch["input_ids"].chunk(2)]
        loss = whole.loss - 0.1 * whole.aux_loss + 0.1 * sum(parts) / 2
        loss.backward()
    assert abs(loss.item() - whole.loss.item()) > 1e-6
    wanted = replace(sliced, loss=loss.detach(), gradients={n: p.grad for n, p in expected.named_parameters()})
    report = compare(wanted, [sliced])
    assert report.ok, report.text()
    once = record_reference(tiny_model("mixtral", torch.float64, **options), batch, boundaries=boundaries)
    for boundary, tensor in once.outputs.items():
        assert torch.allclose(sliced.outputs[boundary], tensor, rtol=0, atol=1e-12)


def test_the_steps_are_sgd_steps_on_the_same_batch(reference):
    model = toy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    ids = torch.randint(20, (2, 6), generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        optimizer.zero_grad()
        model(ids, ids).loss.backward()
        optimizer.step()
    for name, weight in model.named_parameters():
        assert torch.allclose(weight, reference.weights[name], rtol=0, atol=1e-6)
        assert not torch.allclose(toy().get_parameter(name), reference.weights[name], rtol=0, atol=1e-5)
