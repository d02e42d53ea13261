"""What shard_batch hands to each rank, without ranks: batches without labels need no communication."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from hyperpar_core.batch import ORDERS, multiple, spans
from hyperpar_core.collectives.functional import AxisGroup
from hyperpar_core.errors import ApplyError
from hyperpar_core.testing import tiny_model
from hyperpar_core.train.batch import shard_batch

LLAMA = tiny_model("llama", num_hidden_layers=1)


def shares(batch, ranks, order="head_tail", model=LLAMA):
    return [shard_batch(model, batch, {"cp": AxisGroup("none", ranks, rank)}, order) for rank in range(ranks)]


def joined(parts, name, ranks, order):
    """The whole of what the ranks hold, by the positions that each says it holds."""
    local = parts[0][name].shape[1]
    out = torch.full((parts[0][name].shape[0], local * ranks, *parts[0][name].shape[2:]), -7)
    for rank, part in enumerate(parts):
        offset = 0
        for start, size in spans(order, ranks, rank, local * ranks):
            out[:, start : start + size] = part[name][:, offset : offset + size]
            offset += size
    return out


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.sampled_from([2, 3, 4]), st.sampled_from(ORDERS), st.integers(1, 3))
def test_every_token_is_on_one_rank_with_its_position_and_padding_only_behind(tokens, ranks, order, rows):
    ids = torch.arange(rows * tokens).reshape(rows, tokens) % 200 + 5
    parts = shares({"input_ids": ids}, ranks, order)
    padded = -(-tokens // multiple(order, ranks)) * multiple(order, ranks)
    whole = joined(parts, "input_ids", ranks, order)
    assert whole.shape == (rows, padded)
    assert torch.equal(whole[:, :tokens], ids)
    assert torch.equal(joined(parts, "position_ids", ranks, order)[:, :tokens], torch.arange(tokens).expand(rows, tokens))
    for part in parts:
        assert torch.equal(part["attention_mask"], (torch.arange(padded) < tokens).long().expand(rows, padded))
        assert part["input_ids"].shape == (rows, padded // ranks)


def test_head_tail_order_gives_each_rank_a_part_from_the_front_and_its_mirror_from_the_back():
    assert [spans("head_tail", 4, rank, 16) for rank in range(4)] == [
        ((0, 2), (14, 2)), ((2, 2), (12, 2)), ((4, 2), (10, 2)), ((6, 4),),
    ]  # fmt: skip
    assert [spans("contiguous", 4, rank, 16) for rank in range(4)] == [((0, 4),), ((4, 4),), ((8, 4),), ((12, 4),)]


@pytest.mark.parametrize("order", ORDERS)
def test_documents_come_from_positions_that_restart_and_from_document_ids(order):
    positions = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 6, 7, 8]])
    expected = torch.tensor([[1, 1, 1, 2, 2, 3, 3, 3, 3], [1] * 9])
    ids = torch.arange(18).reshape(2, 9)
    for batch in ({"position_ids": positions}, {"document_ids": expected * 10}):
        for part in shares({"input_ids": ids, **batch}, 2, order):
            assert torch.equal(part["attention_mask"][:, :9], expected) and (part["attention_mask"][:, 9:] == 0).all()
            assert "document_ids" not in part
    given_ids = joined(shares({"input_ids": ids, "document_ids": expected}, 2, order), "position_ids", 2, order)
    assert torch.equal(given_ids[:, :9], positions)


def test_positions_beside_an_attention_mask_are_no_documents_as_in_one_process():
    positions = torch.tensor([[1, 1, 0, 1, 2, 3, 4, 5]])
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1]])
    part = shares({"input_ids": mask, "position_ids": positions, "attention_mask": mask}, 2)[0]
    assert torch.equal(part["attention_mask"], mask)


class NoMask(nn.Module):
    def forward(self, input_ids, position_ids=None):
        return input_ids


class NoAdapter(nn.Module):
    def forward(self, input_ids, position_ids=None, attention_mask=None):
        return input_ids


def gpt2():
    return GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=32, n_positions=32))


def stretched():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    return LlamaForCausalLM(
        LlamaConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=32, intermediate_size=8,
                    max_position_embeddings=8, rope_parameters=rope)
    )  # fmt: skip


IDS = torch.arange(12)[None]
DOCUMENTS = torch.cat([torch.arange(5), torch.arange(7)])[None]
LEFT = (torch.arange(12) > 2).long()[None]


@pytest.mark.parametrize(
    ("batch", "model", "words"),
    [
        ({"input_ids": IDS, "position_ids": DOCUMENTS}, NoAdapter, ["several documents", "NoAdapter"]),
        ({"input_ids": IDS[:, :10]}, NoMask, ["attention_mask", "NoMask", "multiple of 4"]),
        ({"input_ids": IDS, "attention_mask": LEFT}, gpt2, ["padded on the left", "position_ids"]),
        ({"input_ids": IDS, "attention_mask": torch.ones(1, 1, 12, 12)}, None, ["attention_mask", "other masks"]),
        ({"input_ids": IDS, "cu_seq_lens_q": torch.tensor([0, 5, 12])}, None, ["cu_seq_lens_q", "position_ids that restart"]),
        ({"input_ids": IDS, "use_cache": True}, None, ["use_cache"]),
        ({"input_ids": IDS, "num_items_in_batch": 3}, None, ["num_items_in_batch"]),
        ({"input_ids": IDS, "document_ids": IDS[:, :3]}, None, ["document_ids has 3 tokens"]),
        ({"input_ids": IDS}, stretched, ["12 positions", "beyond 8", "rope_type"]),
        ({"input_ids": torch.arange(12)}, None, ["[batch, sequence]"]),
    ],
)
def test_a_batch_that_cannot_be_cut_rightly_is_refused_with_its_cause(batch, model, words):
    with pytest.raises(ApplyError) as error:
        shares(batch, 2, model=LLAMA if model is None else model())
    assert all(word in str(error.value) for word in words), str(error.value)
    assert len(str(error.value).splitlines()) <= 8
