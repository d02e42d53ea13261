"""Masks in one process: the blocks are exactly what the rule leaves."""

import pytest
import torch
from cp_dense import mask_of
from hyperpar_cp_sdpa import masks
from hyperpar_cp_sdpa.masks import bidirectional, causal, positions
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.masking_utils import chunked_causal_mask_function, sliding_window_causal_mask_function

from hyperpar_core.batch import ORDERS, spans

CPU = torch.device("cpu")


def rules(draw):
    kind = draw(st.sampled_from(["causal", "bidirectional", "window", "chunk"]))
    if kind == "window":
        return sliding_window_causal_mask_function(draw(st.integers(1, 9)))
    if kind == "chunk":
        return chunked_causal_mask_function(draw(st.integers(2, 9)), torch.zeros(2, dtype=torch.long))
    return causal if kind == "causal" else bidirectional


def documents(draw, length):
    """[2, length], or None."""
    kind = draw(st.sampled_from(["none", "padding", "several"]))
    if kind == "none":
        return None
    if kind == "padding":
        marks = torch.ones(2, length, dtype=torch.long)
        marks[0, : draw(st.integers(0, length))] = 0
        marks[1, length - draw(st.integers(0, length)) :] = 0
        return marks
    cuts = [sorted(draw(st.lists(st.integers(1, length), max_size=3))) for _ in range(2)]
    return torch.stack([torch.bucketize(torch.arange(length), torch.tensor(c, dtype=torch.long), right=True) + 1 for c in cuts])


@st.composite
def cases(draw):
    ranks = draw(st.sampled_from([1, 2, 4]))
    length = 2 * ranks * draw(st.integers(1, 6))
    return ranks, mask_of(rules(draw), draw(st.sampled_from(ORDERS)), length, documents(draw, length))


@settings(max_examples=80, deadline=None)
@given(cases())
def test_blocks_cover_what_the_mask_allows_once_and_nothing_that_it_excludes(case):
    ranks, mask = case
    every = torch.arange(mask.length)
    allowed = mask.seen(every, every)
    for rank in range(ranks):
        ours = spans(mask.order, ranks, rank, mask.length)
        for source in range(ranks):
            theirs = spans(mask.order, ranks, source, mask.length)
            rows = positions(ours, 0, mask.length, CPU)
            columns = positions(theirs, 0, mask.length, CPU)
            expected = allowed[:, :, rows][..., columns]
            found = torch.zeros_like(expected, dtype=torch.long)
            for block in mask.blocks(ours, theirs, CPU):
                area = found[:, :, block.q0 : block.q1, block.k0 : block.k1]
                seen = mask.block_mask(block, ours, theirs, CPU)
                if seen is None:
                    seen = torch.ones_like(area, dtype=torch.bool)
                    seen = seen.tril() if block.kind == "causal" else seen
                assert seen.any(), "a block of which nothing is seen"
                area += seen
            assert torch.equal(found, expected.long())


@pytest.mark.parametrize("order", ORDERS)
def test_a_causal_mask_is_made_of_whole_and_triangular_blocks_alone(order):
    for ranks in (1, 2, 4):
        mask = mask_of(causal, order, 96)
        for rank in range(ranks):
            ours = spans(order, ranks, rank, 96)
            for source in range(ranks):
                blocks = mask.blocks(ours, spans(order, ranks, source, 96), CPU)
                assert len(blocks) <= 1
                assert all(block.kind == ("causal" if source == rank else "full") for block in blocks)


def test_tiles_of_a_long_window_are_skipped_and_no_more_than_one_tile_is_evaluated_at_once(monkeypatch):
    monkeypatch.setattr(masks, "LEAF", 32)
    mask = mask_of(sliding_window_causal_mask_function(40), "contiguous", 512)
    largest = []
    seen = masks.Mask.seen
    monkeypatch.setattr(masks.Mask, "seen", lambda self, q, k: largest.append(len(q) * len(k)) or seen(self, q, k))
    blocks = mask.blocks(((0, 512),), ((0, 512),), CPU)
    assert max(largest) <= 32 * 32
    # of each row of 16 tiles, at most three touch a window of 40
    assert sum(block.pairs for block in blocks) <= 3 * 16 * 32 * 32
