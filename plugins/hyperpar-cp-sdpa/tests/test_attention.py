"""The attention core on ranks, against dense attention in one process."""

import math
from types import SimpleNamespace

import pytest
import torch
from cp_dense import FORMS, cp_group, differences, held, inputs, mask_of, on_ranks, reference, root_mean_squares
from hyperpar_cp_sdpa import kernels
from hyperpar_cp_sdpa.attention import attention
from hyperpar_cp_sdpa.exchange import Parts
from hyperpar_cp_sdpa.masks import bidirectional, causal
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.masking_utils import chunked_causal_mask_function, sliding_window_causal_mask_function

from hyperpar_core.batch import ORDERS
from hyperpar_core.errors import ApplyError, Refused
from hyperpar_core.testing import pool

RANKS = 4
BOUND = {torch.float32: 1e-5, torch.float64: 1e-10}


def rule_of(name, size):
    if name == "window":
        return sliding_window_causal_mask_function(size)
    if name == "chunk":
        return chunked_causal_mask_function(size, torch.zeros(2, dtype=torch.long))
    return {"causal": causal, "bidirectional": bidirectional}[name]


# ---- on the ranks


def compare(cp, form, order, rule, shape, dtype, marks=None, softcap=None, sinks=False, kernel="auto", factor=1.0):
    """The largest relative difference of each of out, dq, dk, dv (and dsinks)."""
    mask = mask_of(rule_of(*rule), order, shape[3], marks)
    tensors = inputs(shape, dtype, factor=factor)
    ours = on_ranks(cp_group(cp), form, tensors, mask, 0.4, softcap, sinks, kernel)
    theirs = reference(tensors, mask, 0.4, softcap, sinks)
    assert all(torch.isfinite(x).all() for x in ours)
    return differences(ours, theirs)


def compare_many(cp, form, dtype):
    worst = []
    marks = torch.ones(2, 24, dtype=torch.long)
    marks[0, :3] = marks[1, -5:] = 0
    packed = torch.tensor([[1] * 7 + [2] * 10 + [3] * 7, [1] * 20 + [0] * 4])
    for order in ORDERS:
        for rule in (("causal", 0), ("bidirectional", 0), ("window", 5), ("chunk", 6)):
            for documents in (None, marks, packed):
                errors = compare(cp, form, order, rule, (2, 4, 2, 24, 8, 6), dtype, documents)
                worst.append((max(errors), order, rule, documents is not None, errors))
    return max(worst)


def half_precision_error(cp, form):
    """(errors over cp, errors of one operator call on the whole) of bfloat16, against float64."""
    mask = mask_of(causal, "head_tail", 256)
    tensors = inputs((1, 4, 2, 256, 16, 16), torch.bfloat16)
    theirs = reference(tensors, mask, 0.25)
    ours = root_mean_squares(on_ranks(cp_group(cp), form, tensors, mask, 0.25), theirs)
    q, k, v, grad, _ = tensors
    out, lse = kernels.forward(q, k, v, None, True, kernels.Scores(0.25))
    alone = root_mean_squares([out, *kernels.backward(grad, q, k, v, out, lse, None, True, kernels.Scores(0.25))], theirs)
    return ours, alone


class Recorder(TorchDispatchMode):
    """Bytes that leave this rank, and the largest tensor of a kind."""

    def __init__(self, ranks):
        super().__init__()
        self.ranks, self.bytes, self.largest, self.collectives = ranks, 0, 0, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name.startswith("_c10d_functional::") and "wait" not in name:
            self.collectives.append(name.partition("::")[2])
            size, x = args[0].element_size(), args[0]
            if "all_to_all" in name:
                self.bytes += sum(args[2]) * size
            elif "all_gather" in name:
                self.bytes += (self.ranks - 1) * x.numel() * size
            elif "reduce_scatter" in name:
                self.bytes += x.numel() * size * (self.ranks - 1) // self.ranks
        self.largest = max([self.largest, *(x.numel() for x in tree_leaves(out) if isinstance(x, torch.Tensor))])
        return out


def traffic(cp, form, shape, rule, order="head_tail"):
    group = cp_group(cp)
    gather, degree = FORMS[form]
    parts = Parts(group, order, shape[3], degree(cp))
    q, k, v, grad, _ = (x if x.ndim == 1 else held(x, 2, order, group) for x in inputs(shape, torch.float32))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    mask = mask_of(rule_of(*rule), order, shape[3])
    with Recorder(cp) as forward:
        out = attention(*leaves, mask, parts, gather=gather)
    with Recorder(cp) as backward:
        out.backward(grad)
    own = own_bytes(parts, shape)
    return (forward.bytes - own, backward.bytes - own, max(forward.largest, backward.largest), forward.collectives)


def own_bytes(parts, shape):
    """What a head exchange sends to the rank itself, which doesn't travel."""
    if parts.ulysses == 1:
        return 0
    return head_elements(parts.group.ranks, parts.ulysses, shape) * 4 // parts.ulysses


def head_elements(cp, u, shape):
    batch, heads, groups, length, width, v_width = shape
    return batch * (length // cp) * (heads * width + max(groups, u) * (width + v_width) + heads * v_width)


def counted_work(cp, form, order, length):
    """Query-key pairs that this rank computes, forward and backward, over all heads."""
    pairs = {"forward": 0, "backward": 0}
    real = SimpleNamespace(forward=kernels.forward, backward=kernels.backward)

    def count(kind, q, k, is_causal):
        rows, columns = q.shape[2], k.shape[2]
        pairs[kind] += q.shape[1] * (rows * (rows + 1) // 2 if is_causal else rows * columns)

    def forward(q, k, v, seen, is_causal, scores):
        count("forward", q, k, is_causal)
        return real.forward(q, k, v, seen, is_causal, scores)

    def backward(grad, q, k, v, out, lse, seen, is_causal, scores):
        count("backward", q, k, is_causal)
        return real.backward(grad, q, k, v, out, lse, seen, is_causal, scores)

    kernels.forward, kernels.backward = forward, backward
    try:
        on_ranks(cp_group(cp), form, inputs((1, 4, 4, length, 4, 4), torch.float32), mask_of(causal, order, length), 0.5)
    finally:
        kernels.forward, kernels.backward = real.forward, real.backward
    return pairs


def refused(cp, degree, shape, kernel="auto", length=None):
    group = cp_group(cp)
    q, k, v, _, _ = inputs(shape, torch.float32)
    parts = Parts(group, "contiguous", length or shape[3] * cp, degree)
    try:
        attention(q, k, v, mask_of(causal, "contiguous", parts.length), parts, kernel=kernel)
    except (ApplyError, Refused) as error:
        return type(error).__name__, str(error)
    return "no error", ""


# ---- tests


@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("form", FORMS)
def test_output_and_gradients_are_those_of_dense_attention_for_every_mask_and_order(form, cp, dtype):
    for worst in pool(RANKS).run(compare_many, cp, form, dtype):
        assert worst[0] <= BOUND[dtype], worst


@st.composite
def attention_cases(draw):
    cp = draw(st.sampled_from([2, 4]))
    groups, copies = draw(st.sampled_from([(1, 4), (2, 2), (2, 4), (4, 1), (4, 2)]))
    form = draw(st.sampled_from(sorted(FORMS)))
    length = 2 * cp * draw(st.integers(1, 7))
    marks = None
    if draw(st.booleans()):
        cuts = [sorted(draw(st.lists(st.integers(1, length), max_size=3))) for _ in range(2)]
        marks = torch.stack([torch.bucketize(torch.arange(length), torch.tensor(c, dtype=torch.long), right=True) + 1 for c in cuts])
        marks[:, length - draw(st.integers(0, length // 2)) :] = 0
    shape = (2, groups * copies, groups, length, draw(st.sampled_from([4, 8])), draw(st.sampled_from([4, 6, 8])))
    rule = (draw(st.sampled_from(["causal", "bidirectional", "window", "chunk"])), draw(st.integers(1, 12)))
    return {
        "cp": cp, "form": form, "order": draw(st.sampled_from(ORDERS)), "rule": rule, "shape": shape, "marks": marks,
        "softcap": draw(st.sampled_from([None, None, 2.0])), "sinks": draw(st.booleans()),
        "kernel": draw(st.sampled_from(["auto", "math"])),
    }  # fmt: skip


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(attention_cases())
def test_any_lengths_heads_windows_documents_orders_and_forms_give_dense_attention(case):
    for errors in pool(RANKS).run(compare, dtype=torch.float64, **case):
        assert max(errors) <= 1e-10, errors


@pytest.mark.parametrize("form", FORMS)
def test_sinks_get_the_gradient_of_dense_attention(form):
    for errors in pool(RANKS).run(compare, 4, form, "head_tail", ("window", 5), (2, 4, 2, 16, 8, 8), torch.float64, sinks=True):
        assert len(errors) == 5 and max(errors) <= 1e-10, errors


@pytest.mark.parametrize("form", ["ring", "all-gather"])
def test_the_error_of_bfloat16_does_not_grow_with_the_ring(form):
    (two, alone), *_ = pool(RANKS).run(half_precision_error, 2, form)
    (four, _), *_ = pool(RANKS).run(half_precision_error, 4, form)
    for at_two, at_four, one in zip(two, four, alone, strict=True):
        assert at_four <= 1.1 * at_two
        assert at_two <= math.sqrt(2) * one  # rounded twice, in a block and at the end, where one operator rounds once


def test_scores_a_thousand_times_larger_stay_finite_and_right():
    for kernel in ("auto", "math"):
        for errors in pool(RANKS).run(compare, 4, "ring", "head_tail", ("causal", 0), (1, 4, 2, 32, 8, 8), torch.float32,
                                      kernel=kernel, factor=1000.0):  # fmt: skip
            assert max(errors[:1]) <= 1e-4, errors


@pytest.mark.parametrize("form", FORMS)
def test_every_rank_does_its_share_of_the_causal_work_in_head_tail_order(form):
    length = 256
    total = 4 * length * (length + 1) // 2  # 4 heads
    for pairs in pool(RANKS).run(counted_work, RANKS, form, "head_tail", length):
        for kind, count in pairs.items():
            assert abs(count * RANKS / total - 1) <= 0.05, (kind, count, total / RANKS)


def test_contiguous_order_never_computes_blocks_that_the_mask_excludes():
    counts = [pairs["forward"] for pairs in pool(RANKS).run(counted_work, RANKS, "ring", "contiguous", 64)]
    own = 4 * (16 * 17 // 2)
    assert counts == [own + 4 * rank * 16 * 16 for rank in range(RANKS)]


@pytest.mark.parametrize("heads", [(8, 4), (4, 1)], ids=str)
@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("form", FORMS)
def test_each_form_sends_the_bytes_of_its_formula(form, cp, heads):
    batch, _, groups, length, width, v_width = shape = (2, *heads, 64, 8, 6)
    u = FORMS[form][1](cp)
    ring, kv = cp // u, batch * max(groups, u) * (length // cp) * (width + v_width) * 4
    heads = head_elements(cp, u, shape) * 4 * (u - 1) // u if u > 1 else 0
    for forward, backward, _, _ in pool(RANKS).run(traffic, cp, form, shape, ("causal", 0)):
        assert forward == pytest.approx(heads + (ring - 1) * kv, rel=0.02)
        assert backward == pytest.approx(heads + 2 * (ring - 1) * kv, rel=0.02)


def test_keys_and_values_travel_without_being_expanded_to_the_query_heads():
    for groups in (1, 2, 8):
        (forward, _, _, collectives), *_ = pool(RANKS).run(traffic, RANKS, "ring", (1, 8, groups, 64, 8, 8), ("causal", 0))
        assert forward == 3 * groups * 16 * 16 * 4
        assert collectives == ["all_to_all_single"] * 3


@pytest.mark.parametrize("rule", [("causal", 0), ("bidirectional", 0), ("window", 100)])
@pytest.mark.parametrize("form", ["ring", "all-gather"])
def test_no_tensor_of_local_times_global_size_is_ever_made(form, rule):
    length = 2048
    for _, _, largest, _ in pool(RANKS).run(traffic, RANKS, form, (1, 1, 1, length, 4, 4), rule):
        assert largest <= (length // RANKS) * length // 4


def test_heads_that_ulysses_cannot_deal_are_refused_with_the_degrees_that_work():
    kind, text = pool(RANKS).run(refused, 4, 4, (1, 6, 3, 4, 4, 4))[0]
    assert kind == "Refused"
    assert "6 attention heads" in text and "3 key/value heads" in text and "1, 3, 6" in text


def test_a_kernel_that_cannot_do_it_and_a_length_that_is_not_the_batchs_are_errors():
    kind, text = pool(RANKS).run(refused, 2, 1, (1, 2, 2, 4, 4, 4), kernel="cudnn")[0]
    assert kind == "ApplyError" and "cudnn" in text and "flash, math" in text
    kind, text = pool(RANKS).run(refused, 2, 1, (1, 2, 2, 4, 4, 4), length=10)[0]
    assert kind == "ApplyError" and "10 positions" in text


def test_a_row_that_sees_nothing_of_a_block_has_no_weight_and_no_gradient():
    q, k, v, grad, _ = inputs((1, 2, 1, 4, 8, 8), torch.float32)
    seen = torch.ones(1, 1, 4, 4, dtype=torch.bool)
    seen[0, 0, 2] = False
    for kernel in ("flash", "math"):
        out, lse = kernels.forward(q, k, v, seen, False, kernels.Scores(1.0, kernel=kernel))
        assert (out[:, :, 2] == 0).all() and (lse[:, :, 2] == -math.inf).all() and torch.isfinite(lse[:, :, :2]).all()
        dq, dk, dv = kernels.backward(grad, q, k, v, out, lse, seen, False, kernels.Scores(1.0, kernel=kernel))
        assert (dq[:, :, 2] == 0).all() and all(torch.isfinite(x).all() for x in (dq, dk, dv))


def test_no_queries_or_no_keys_give_nothing():
    for rows, columns in ((0, 3), (3, 0)):
        q, k = torch.zeros(1, 2, rows, 8), torch.zeros(1, 1, columns, 8)
        out, lse = kernels.forward(q, k, k, None, False, kernels.Scores(1.0))
        assert out.shape == (1, 2, rows, 8) and (lse == -math.inf).all()
        assert kernels.backward(out, q, k, k, out, lse, None, False, kernels.Scores(1.0))[1].shape == k.shape
