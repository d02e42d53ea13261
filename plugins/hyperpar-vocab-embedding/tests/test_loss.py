"""Every rank makes the same full logits, keeps its slice, and is compared with one process on the full ones."""

import math
import pickle
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hyperpar_vocab_embedding.loss import vocab_parallel_cross_entropy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.loss.loss_utils import ForCausalLMLoss

from hyperpar_core.collectives.functional import all_gather
from hyperpar_core.errors import ApplyError, OverrideError, Refused
from hyperpar_core.placement import shard_size
from hyperpar_core.testing import pool

RANKS = 4
BOUND = {torch.float32: 1e-5, torch.float64: 1e-10}
model = SimpleNamespace(loss_function=ForCausalLMLoss)


# ---- on the ranks


def tp_mesh(tp):
    return init_device_mesh("cpu", (RANKS // tp, tp), mesh_dim_names=("dp", "tp"))["tp"]


def sharded(full, mesh):
    """(leaf with this rank's columns, the DTensor made from it)."""
    length, offset = shard_size(full.shape[-1], mesh.size(), mesh.get_local_rank())
    leaf = full[..., offset : offset + length].clone().requires_grad_()
    return leaf, DTensor.from_local(leaf, mesh, (Shard(full.ndim - 1),), shape=full.shape, stride=full.stride())


def loss_and_gradient(tp, full, call, smoothing=0.0, backwards=1):
    """The loss and the gathered gradient, of this rank."""
    mesh = tp_mesh(tp)
    leaf, logits = sharded(full, mesh)
    loss = vocab_parallel_cross_entropy(model=model, tp_mesh=mesh, label_smoothing=smoothing)(logits, **call)
    for _ in range(backwards):
        loss.backward(retain_graph=backwards > 1)
    return loss.detach(), all_gather(leaf.grad, -1, mesh, full.shape[-1])


def with_another_term(tp, full, labels):
    """The gathered gradient of the loss and of a term that is computed from the DTensor of logits."""
    mesh = tp_mesh(tp)
    leaf, logits = sharded(full, mesh)
    loss = vocab_parallel_cross_entropy(model=model, tp_mesh=mesh)(logits, labels, full.shape[-1])
    (loss + 0.1 * logits.logsumexp(-1).pow(2).mean()).backward()
    return all_gather(leaf.grad, -1, mesh, full.shape[-1])


class Recorder(TorchDispatchMode):
    """The collectives that ran, the shapes of all results, and the storages of those with `shape`."""

    def __init__(self, shape):
        super().__init__()
        self.shape, self.collectives, self.shapes, self.alive = torch.Size(shape), [], set(), {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in str(func):
            self.collectives.append(func._schema.name)
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.shapes.add(tuple(tensor.shape))
                if tensor.shape == self.shape:
                    self.alive[tensor.untyped_storage()._cdata] = tensor
        return out


def record(tp, full, labels, smoothing):
    mesh = tp_mesh(tp)
    leaf, logits = sharded(full, mesh)
    rows = full.shape[0] * full.shape[1]
    loss_function = vocab_parallel_cross_entropy(model=model, tp_mesh=mesh, label_smoothing=smoothing)
    passes = []
    with Recorder((rows, leaf.shape[-1])) as forward:
        loss = loss_function(logits, labels, full.shape[-1])
    with Recorder((rows, leaf.shape[-1])) as backward:
        loss.backward()
    given = leaf.untyped_storage()._cdata
    for seen in (forward, backward):
        buffers = len(seen.alive.keys() - {given})
        passes.append((seen.collectives, max(map(math.prod, seen.shapes)), seen.shapes, buffers))
    return passes


def refusal(kind):
    mesh = tp_mesh(2)
    full = torch.randn(1, 3, 8)
    loss_function = vocab_parallel_cross_entropy(model=model, tp_mesh=mesh)
    labels = torch.tensor([[1, 2, 3]])
    if kind == "plain":
        logits = full
    elif kind == "another size":
        logits = sharded(full, tp_mesh(4))[1]
    else:
        placement = {"replicated": Replicate(), "partial": Partial(), "sequence": Shard(1)}[kind]
        logits = DTensor.from_local(full, mesh, (placement,), run_check=False)
    try:
        loss_function(logits, labels, logits.shape[-1])
    except (Refused, ApplyError) as error:
        return type(error).__name__, str(error)
    return "no error", ""


def bad_target(tp, full, target):
    mesh = tp_mesh(tp)
    _, logits = sharded(full, mesh)
    try:
        vocab_parallel_cross_entropy(model=model, tp_mesh=mesh)(logits, None, None, shift_labels=target)
    except IndexError as error:
        return str(error)
    return "no error"


def two_axes(full, labels):
    """Logits on a mesh of two axes, whose tokens are cut over the other one."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    tokens = full.shape[1] // 2
    here = slice(mesh.get_local_rank("cp") * tokens, (mesh.get_local_rank("cp") + 1) * tokens)
    length, offset = shard_size(full.shape[-1], 2, mesh.get_local_rank("tp"))
    leaf = full[:, here, offset : offset + length].clone().requires_grad_()
    logits = DTensor.from_local(leaf, mesh, (Shard(1), Shard(2)), shape=full.shape, stride=full.stride())
    loss_function = vocab_parallel_cross_entropy(model=model, tp_mesh=mesh["tp"])
    loss = loss_function(logits, None, full.shape[-1], shift_labels=labels[:, here], num_items_in_batch=labels.numel())
    loss.backward()
    return loss.detach(), all_gather(all_gather(leaf.grad, 2, mesh["tp"], full.shape[-1]), 1, mesh["cp"])


def compiled(full, labels):
    world = init_device_mesh("cpu", (RANKS // 2, 2), mesh_dim_names=("dp", "tp"))
    if world.get_local_rank("dp"):
        return None  # compiling is slow: one tp group does
    mesh = world["tp"]
    leaf, logits = sharded(full, mesh)
    loss_function = vocab_parallel_cross_entropy(model=model, tp_mesh=mesh, label_smoothing=0.1)
    loss = torch.compile(loss_function, fullgraph=True, backend="aot_eager")(logits, labels, full.shape[-1])
    loss.backward()
    return loss.detach(), all_gather(leaf.grad, -1, mesh, full.shape[-1])


# ---- in the parent


def reference(full, call, smoothing=0.0):
    """torch's own cross entropy on the full logits: (loss, gradient)."""
    leaf = full.clone().requires_grad_()
    ignore_index = call.get("ignore_index", -100)
    targets = call.get("shift_labels")
    if targets is None:
        targets = F.pad(call["labels"], (0, 1), value=ignore_index)[..., 1:]
    items = call.get("num_items_in_batch")
    reduction = "mean" if items is None else "sum"
    wide = leaf if leaf.dtype == torch.float64 else leaf.float()
    options = {"ignore_index": ignore_index, "reduction": reduction, "label_smoothing": smoothing}
    loss = F.cross_entropy(wide.flatten(0, -2), targets.flatten(), **options)
    loss = loss if items is None else loss / items
    loss.backward()
    return loss.detach(), leaf.grad


def assert_equals_reference(results, full, call, smoothing=0.0):
    loss, gradient = reference(full, call, smoothing)
    bound = BOUND[full.dtype]
    for found_loss, found_gradient in results:
        assert found_loss.dtype == loss.dtype and found_gradient.dtype == gradient.dtype
        torch.testing.assert_close(found_loss, loss, rtol=bound, atol=0, equal_nan=True)
        torch.testing.assert_close(found_gradient, gradient, rtol=0, atol=bound * gradient.abs().max().item())
        assert torch.equal(found_loss, results[0][0]) or found_loss.isnan()


def logits_and_labels(vocab, dtype, scale=1, rows=2, tokens=9, ignored=3):
    torch.manual_seed(vocab)
    labels = torch.randint(0, vocab, (rows, tokens))
    labels[:, :4] = torch.tensor([0, vocab - 1, vocab // 2, vocab // 4])  # on the first, the last and other ranks
    labels.view(-1)[torch.randperm(rows * tokens)[:ignored]] = -100
    return torch.randn(rows, tokens, vocab, dtype=dtype) * scale, labels


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("vocab", [99, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1, 1000])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss_and_gradient_are_those_of_cross_entropy_on_the_full_logits(tp, vocab, dtype, scale, smoothing):
    full, labels = logits_and_labels(vocab, dtype, scale)
    call = {"labels": labels, "vocab_size": vocab}
    assert_equals_reference(pool(RANKS).run(loss_and_gradient, tp, full, call, smoothing), full, call, smoothing)


def test_another_term_of_the_logits_adds_its_gradient():
    full, labels = logits_and_labels(11, torch.float64)
    leaf = full.clone().requires_grad_()
    (ForCausalLMLoss(leaf, labels, 11) + 0.1 * leaf.logsumexp(-1).pow(2).mean()).backward()
    for gradient in pool(RANKS).run(with_another_term, 2, full, labels):
        torch.testing.assert_close(gradient, leaf.grad)


@pytest.mark.parametrize("tp", [2, 4])
def test_targets_on_one_rank_only_are_seen_by_all(tp):
    for target in (0, 2, 4):
        full, _ = logits_and_labels(5, torch.float64)
        call = {"labels": torch.full((2, 9), target), "vocab_size": 5}
        assert_equals_reference(pool(RANKS).run(loss_and_gradient, tp, full, call), full, call)


@pytest.mark.parametrize(
    "call",
    [
        {"num_items_in_batch": 7},
        {"num_items_in_batch": torch.tensor(7)},
        {"ignore_index": 3},
        {"shift_labels": torch.tensor([[1, 2, -100, 4, 0, 0, 3, 98, 97]] * 2)},
        {"position_ids": torch.arange(9), "use_cache": False, "output_router_logits": None},
    ],
    ids=lambda call: "+".join(call),
)
def test_the_arguments_mean_what_they_mean_in_transformers(call):
    full, labels = logits_and_labels(99, torch.float32)
    call = {"labels": labels.masked_fill(labels == -100, call.get("ignore_index", -100)), "vocab_size": 99, **call}
    results = pool(RANKS).run(loss_and_gradient, 2, full, call)
    assert_equals_reference(results, full, call)
    torch.testing.assert_close(results[0][0], ForCausalLMLoss(full, **call))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("items", [None, 6])
def test_a_batch_without_any_target_is_what_it_is_in_one_process(smoothing, items):
    full, _ = logits_and_labels(5, torch.float64)
    call = {"labels": torch.full((2, 9), -100), "vocab_size": 5, "num_items_in_batch": items}
    results = pool(RANKS).run(loss_and_gradient, 4, full, call, smoothing)
    assert_equals_reference(results, full, call, smoothing)
    assert all(loss.isnan() if items is None else loss == 0 for loss, _ in results)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_summed_in_float32(dtype):
    full, labels = logits_and_labels(99, dtype, scale=4)
    call = {"labels": labels, "vocab_size": 99}
    loss, gradient = reference(full, call)
    for found_loss, found_gradient in pool(RANKS).run(loss_and_gradient, 4, full, call):
        assert found_loss.dtype == torch.float32 and found_gradient.dtype == dtype
        torch.testing.assert_close(found_loss, loss, rtol=1e-6, atol=0)
        torch.testing.assert_close(found_gradient, gradient, rtol=torch.finfo(dtype).eps, atol=1e-7)


def test_columns_of_minus_infinity_on_whole_ranks_are_left_out_as_in_one_process():
    full, labels = logits_and_labels(8, torch.float64)
    full[..., 4:] = -torch.inf
    call = {"labels": labels % 4, "vocab_size": 8}
    assert_equals_reference(pool(RANKS).run(loss_and_gradient, 2, full, call), full, call)


def test_a_large_offset_of_all_logits_costs_no_digits():
    full, labels = logits_and_labels(99, torch.float32)
    full += 30_000
    call = {"labels": labels, "vocab_size": 99}
    assert_equals_reference(pool(RANKS).run(loss_and_gradient, 4, full, call), full, call)


def test_a_second_backward_over_a_retained_graph_adds_the_same_gradient_again():
    full, labels = logits_and_labels(99, torch.float64)
    call = {"labels": labels, "vocab_size": 99}
    once = pool(RANKS).run(loss_and_gradient, 2, full, call)[0][1]
    twice = pool(RANKS).run(loss_and_gradient, 2, full, call, backwards=2)[0][1]
    assert torch.equal(twice, 2 * once)


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_any_vocab_any_labels_any_smoothing_equals_one_process(data):
    vocab = data.draw(st.integers(1, 40), label="vocab")
    tp = data.draw(st.sampled_from([2, 4]), label="tp")
    smoothing = data.draw(st.sampled_from([0.0, 0.1, 1.0]), label="smoothing")
    targets = data.draw(st.lists(st.just(-100) | st.integers(0, vocab - 1), min_size=1, max_size=6), label="targets")
    full = torch.randn(1, len(targets), vocab, dtype=torch.float64) * data.draw(st.sampled_from([1, 50]), label="scale")
    call = {"labels": None, "shift_labels": torch.tensor([targets]), "num_items_in_batch": 3}
    loss, gradient = reference(full, call, smoothing)
    for found_loss, found_gradient in pool(RANKS).run(loss_and_gradient, tp, full, call, smoothing):
        torch.testing.assert_close(found_loss, loss, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(found_gradient, gradient, rtol=0, atol=1e-12)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_two_all_reduces_forward_none_backward_and_one_local_buffer_at_a_time(smoothing):
    full, labels = logits_and_labels(96, torch.float32)
    local = full.shape[0] * full.shape[1] * 96 // 4
    for forward, backward in pool(RANKS).run(record, 4, full, labels, smoothing):
        assert forward[0] == ["_c10d_functional::all_reduce"] * 2
        assert backward[0] == []
        for _, largest, shapes, buffers in (forward, backward):
            assert largest == local and buffers == 1
            assert not [shape for shape in shapes if 96 in shape]


@pytest.mark.parametrize(
    ("kind", "name", "text"),
    [
        ("plain", "Refused", "logits of shape [1, 3, 8] arrived as a plain tensor"),
        ("replicated", "Refused", "arrived as a DTensor placed"),
        ("partial", "Refused", "arrived as a DTensor placed"),
        ("sequence", "Refused", "arrived as a DTensor placed"),
        ("another size", "ApplyError", "sharded as"),
    ],
)
def test_logits_that_are_not_sharded_over_the_vocab_are_refused_on_every_rank(kind, name, text):
    for found, message in pool(RANKS).run(refusal, kind):
        assert found == name
        assert text in message


@pytest.mark.parametrize("target", [5, -1, 1000])
def test_a_target_outside_the_vocab_is_the_error_of_one_process_on_every_rank(target):
    full = torch.randn(1, 2, 5)
    targets = torch.tensor([[0, target]])
    with pytest.raises(IndexError) as expected:
        F.cross_entropy(full[0], targets[0])
    assert pool(RANKS).run(bad_target, 4, full, targets) == [str(expected.value)] * RANKS


def test_logits_whose_tokens_lie_on_another_axis_give_this_ranks_share():
    full, _ = logits_and_labels(7, torch.float64, tokens=8)
    labels = torch.randint(0, 7, (2, 8))
    results = pool(RANKS).run(two_axes, full, labels)
    loss, gradient = reference(full, {"shift_labels": labels})
    torch.testing.assert_close(results[0][0] + results[2][0], loss)
    for _, found in results:
        torch.testing.assert_close(found, gradient)


def test_it_compiles_without_graph_breaks():
    full, labels = logits_and_labels(9, torch.float64)
    call = {"labels": labels, "vocab_size": 9}
    assert_equals_reference(pool(RANKS).run(compiled, full, labels)[:2], full, call, 0.1)


def test_a_model_with_another_loss_is_refused():
    class Regression:
        @staticmethod
        def loss_function(logits, labels): ...

    with pytest.raises(Refused, match=r"Regression has the loss loss_function; .* ForCausalLMLoss only"):
        vocab_parallel_cross_entropy(model=Regression(), tp_mesh=None)
    with pytest.raises(Refused, match="Linear has no loss_function"):
        vocab_parallel_cross_entropy(model=torch.nn.Linear(2, 2), tp_mesh=None)


@pytest.mark.parametrize("smoothing", [-0.1, 1.5])
def test_a_label_smoothing_out_of_range_is_an_error(smoothing):
    with pytest.raises(OverrideError, match=f"label_smoothing={smoothing}, needed: a number from 0 to 1"):
        vocab_parallel_cross_entropy(model=model, tp_mesh=None, label_smoothing=smoothing)


def made_and_pickled():
    pickle.dumps(vocab_parallel_cross_entropy(model=model, tp_mesh=tp_mesh(2)))
    return True


def test_the_loss_function_pickles():
    assert all(pool(RANKS).run(made_and_pickled))
