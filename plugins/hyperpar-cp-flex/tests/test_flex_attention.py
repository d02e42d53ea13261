"""FlexAttention on ranks, against dense attention in one process."""

import math

import pytest
import torch
from cp_dense import cp_group, differences, held, inputs, mask_of, reference, whole
from hyperpar_cp_flex import block_masks
from hyperpar_cp_flex.attention import _Gather, attention
from hyperpar_cp_flex.block_masks import BLOCK, tiles_of
from hyperpar_cp_sdpa.extend import Parts
from hyperpar_cp_sdpa.masks import bidirectional, causal
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import flex_attention
from transformers.masking_utils import chunked_causal_mask_function, sliding_window_causal_mask_function

from hyperpar_core.batch import ORDERS
from hyperpar_core.collectives.functional import AxisGroup
from hyperpar_core.errors import ApplyError
from hyperpar_core.testing import pool
from hyperpar_core.testing.allocations import allocations

RANKS = 4
FORMS = {"all-gather": lambda cp: 1, "ulysses": lambda cp: cp}
BOUND = {torch.float32: 1e-5, torch.float64: 1e-10}
CPU = torch.device("cpu")


def rule_of(name, size):
    if name == "window":
        return sliding_window_causal_mask_function(size)
    if name == "chunk":
        return chunked_causal_mask_function(size, torch.zeros(2, dtype=torch.long))
    return {"causal": causal, "bidirectional": bidirectional}[name]


def documents_of(length):
    """None, padding on either side, and several documents with padding behind."""
    marks = torch.ones(2, length, dtype=torch.long)
    marks[0, : length // 8] = marks[1, -length // 5 :] = 0
    cut = length // 3
    packed = torch.tensor([[1] * cut + [2] * (length - 2 * cut) + [3] * cut, [1] * (length - 4) + [0] * 4])
    return None, marks, packed


# ---- on the ranks


def compare(cp, form, order, rule, shape, dtype, documents=None, softcap=None, sinks=False, kernel="auto"):
    """The largest relative difference of the output. Not traced first: that takes a second for each new mask."""
    flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True
    group = cp_group(cp)
    mask = mask_of(rule_of(*rule), order, shape[3], documents)
    tensors = inputs(shape, dtype)
    q, k, v = (held(x, 2, order, group) for x in tensors[:3])
    parts = Parts(group, order, shape[3], FORMS[form](cp))
    out = attention(
        q, k, v, mask, parts, scale=0.4, softcap=softcap, sinks=tensors[4] if sinks else None, kernel=kernel
    )
    flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = False
    expected = reference(tensors, mask, 0.4, softcap, sinks)[0]
    return differences([whole(out, 2, order, group)], [expected])[0]


def compare_many(cp, form, dtype):
    worst = []
    for order in ORDERS:
        for rule in (("causal", 0), ("bidirectional", 0), ("window", 5), ("chunk", 6)):
            for documents in documents_of(24):
                error = compare(cp, form, order, rule, (2, 4, 2, 24, 8, 6), dtype, documents)
                worst.append((error, order, rule, documents is not None))
    return max(worst)


def largest_allocation(length):
    """Bytes; and what the output was."""
    group = cp_group(RANKS)
    q, k, v = (held(x, 2, "head_tail", group) for x in inputs((1, 1, 1, length, 4, 4), torch.float32)[:3])
    mask = mask_of(causal, "head_tail", length)
    return allocations(attention, q, k, v, mask, Parts(group, "head_tail", length)).largest


def gathered_gradient(dtype):
    """The gradient of this rank's part, where rank r's loss weighs everything by r + 1."""
    group = cp_group(RANKS)
    x = torch.ones(1, 1, 2, 3, dtype=dtype, requires_grad=True)
    (_Gather.apply(x, group) * (group.rank + 1)).sum().backward()
    return x.grad.dtype, x.grad.unique().tolist()


# ---- tests


@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("form", FORMS)
def test_the_output_is_that_of_dense_attention_for_every_mask_and_order(form, cp, dtype):
    for worst in pool(RANKS).run(compare_many, cp, form, dtype):
        assert worst[0] <= BOUND[dtype], worst


@pytest.mark.parametrize("form", FORMS)
def test_scale_soft_cap_and_sinks_are_exact_together(form):
    for softcap, sinks in ((2.0, False), (None, True), (2.0, True)):
        for documents in documents_of(16):
            for error in pool(RANKS).run(
                compare, 4, form, "head_tail", ("window", 5), (2, 4, 4, 16, 8, 8), torch.float64, documents, softcap, sinks
            ):
                assert error <= 1e-10, (softcap, sinks)


@pytest.mark.parametrize("form", FORMS)
def test_more_queries_than_one_strip_and_tiles_that_are_cut_short_are_exact(form):
    length = 4 * (BLOCK + 20)
    for rule in (("window", 150), ("causal", 0)):
        for error in pool(RANKS).run(compare, 2, form, "head_tail", rule, (2, 2, 2, length, 4, 4), torch.float64, documents_of(length)[2]):
            assert error <= 1e-10


@pytest.mark.limit(240)
def test_the_compiled_kernel_skips_tiles_and_computes_the_same():
    length = 5 * BLOCK + 20  # whole, partial and empty tiles, and tiles that are cut short
    mask = mask_of(sliding_window_causal_mask_function(300), "contiguous", length, documents_of(length)[2])
    tensors = inputs((2, 4, 2, length, 16, 16), torch.float32)
    parts = Parts(AxisGroup("none", 1, 0), "contiguous", length)
    out = attention(*tensors[:3], mask, parts, scale=0.4, softcap=2.0, kernel="compiled")
    expected = reference(tensors, mask, 0.4, 2.0)[0]
    seen = documents_of(length)[2] != 0  # a row that sees nothing is 0 in one and anything in the other
    assert differences([out.transpose(1, 2)[seen]], [expected.transpose(1, 2)[seen]])[0] <= 1e-5


def test_no_tensor_of_local_times_global_size_is_ever_made():
    length = 2048
    for size in pool(RANKS).run(largest_allocation, length):
        assert size <= 4 * (length // RANKS) * length // 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_of_gathered_keys_are_summed_over_the_ranks(dtype):
    for kind, values in pool(RANKS).run(gathered_gradient, dtype):
        assert kind == dtype and values == [10.0]


def test_a_forward_that_needs_gradients_is_one_clear_error_on_the_cpu():
    q = torch.randn(1, 2, 4, 8)
    mask, parts = mask_of(causal, "contiguous", 4), Parts(AxisGroup("none", 1, 0), "contiguous", 4)
    for learning in range(4):
        tensors = [x.clone().requires_grad_(i == learning) for i, x in enumerate((q, q, q, torch.zeros(2)))]
        with pytest.raises(ApplyError, match=r"layers\.0: FlexAttention has no backward on cpu"):
            attention(*tensors[:3], mask, parts, sinks=tensors[3], where="layers.0: ")
        with torch.no_grad():
            attention(*tensors[:3], mask, parts, sinks=tensors[3])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="FlexAttention has a backward on CUDA only")
@pytest.mark.parametrize("documents", [0, 1, 2])
@pytest.mark.parametrize("rule", ["causal", "bidirectional", "window", "chunk"])
def test_gradients_are_those_of_dense_attention_on_cuda(rule, documents):
    length = 3 * BLOCK + 40
    marks = documents_of(length)[documents]
    marks = None if marks is None else marks.cuda()
    made = rule_of(rule, 150) if rule != "chunk" else chunked_causal_mask_function(150, torch.zeros(2, dtype=torch.long, device="cuda"))
    mask = mask_of(made, "contiguous", length, marks)
    tensors = [x.cuda() for x in inputs((2, 4, 2, length, 32, 32), torch.float32)]
    q, k, v, grad, sinks = (x.clone().requires_grad_() for x in tensors)
    parts = Parts(AxisGroup("none", 1, 0), "contiguous", length)
    out = attention(q, k, v, mask, parts, scale=0.4, softcap=3.0, sinks=sinks)
    out.backward(grad.detach())
    every = torch.arange(length, device="cuda")
    wanted = [x.detach().double().clone().requires_grad_() for x in tensors]
    copies = [x.repeat_interleave(2, 1) for x in wanted[1:3]]
    scores = 3.0 * torch.tanh(wanted[0] @ copies[0].transpose(-1, -2) * 0.4 / 3.0)
    scores = scores.masked_fill(~mask.seen(every, every), -math.inf)
    scores = torch.cat([scores, wanted[4][None, :, None, None].expand(2, 4, length, 1)], -1)
    expected = scores.softmax(-1)[..., :length] @ copies[1]
    expected.backward(tensors[3].double())
    pairs = differences([out.detach(), *(x.grad for x in (q, k, v, sinks))], [expected.detach(), *(wanted[i].grad for i in (0, 1, 2, 4))])
    assert max(pairs) <= 2e-3, pairs  # its kernels multiply in tf32


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_tiles_cover_what_the_mask_allows_and_whole_ones_are_seen_whole(data):
    length = data.draw(st.integers(8, 60))
    rule = rule_of(data.draw(st.sampled_from(["causal", "bidirectional", "window", "chunk"])), data.draw(st.integers(1, 30)))
    mask = mask_of(rule, "contiguous", length, documents_of(length)[data.draw(st.integers(0, 2))])
    rows, columns = (torch.randperm(length)[: data.draw(st.integers(1, length))] for _ in range(2))
    block, area = block_masks.BLOCK, block_masks.AREA
    block_masks.BLOCK, block_masks.AREA = 4, 16
    try:
        tiles = tiles_of(mask, rows, columns)
    finally:
        block_masks.BLOCK, block_masks.AREA = block, area
    seen = mask.seen(rows, columns)
    assert not (tiles.partial & tiles.whole).any()
    for i in range(tiles.whole.shape[-2]):
        for j in range(tiles.whole.shape[-1]):
            tile = seen[:, :, 4 * i : 4 * i + 4, 4 * j : 4 * j + 4]
            cut_short = tile.shape[-2:] != (4, 4)
            assert torch.equal(tiles.whole[:, :, i, j], tile.all(-1).all(-1) & (not cut_short))
            assert torch.equal(tiles.partial[:, :, i, j] | tiles.whole[:, :, i, j], tile.any(-1).any(-1))


def test_a_block_mask_lists_the_tiles_of_its_queries_those_first():
    mask = mask_of(sliding_window_causal_mask_function(BLOCK), "contiguous", 4 * BLOCK)
    every = torch.arange(4 * BLOCK)
    tiles = tiles_of(mask, every, every)
    found = tiles.block_mask(BLOCK, 3 * BLOCK)
    assert found.kv_num_blocks.tolist() == [[[2, 2]]] and found.full_kv_num_blocks.tolist() == [[[0, 0]]]
    assert found.kv_indices[0, 0, :, :2].tolist() == [[0, 1], [1, 2]]
    assert found.shape[-2:] == (2 * BLOCK, 4 * BLOCK)
    whole_tiles = tiles_of(mask_of(causal, "contiguous", 4 * BLOCK), every, every).block_mask()
    assert whole_tiles.kv_num_blocks.tolist() == [[[1, 1, 1, 1]]] and whole_tiles.full_kv_num_blocks.tolist() == [[[0, 1, 2, 3]]]
