"""What a step holds at once, by the allocator's own log."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hyperpar_core import apply_plan, build_plan, make_mesh
from hyperpar_core.testing import pool
from hyperpar_core.testing.allocations import allocations

CP, LENGTH = 4, 16_384
HEADS, GROUPS, WIDTH = 4, 2, 16
BLOCK = GROUPS * (LENGTH // CP) * 2 * WIDTH * 4  # bytes of the keys and values of one rank


def one_layer():
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=16, hidden_size=HEADS * WIDTH, intermediate_size=32, num_hidden_layers=1, num_attention_heads=HEADS,
            num_key_value_heads=GROUPS, head_dim=WIDTH, max_position_embeddings=LENGTH,
        )
    )  # fmt: skip


def step(model, batch):
    model(**batch, use_cache=False).loss.backward()


def on_a_rank(wrapper):
    model, mesh = one_layer(), make_mesh(cp=CP)
    entry = {"match": "*.self_attn", "when": "cp", "inner_target": "self", "inner_wrapper": wrapper}
    applied = apply_plan(model, build_plan(model, mesh, overrides=[entry]), mesh)
    ids = torch.arange(LENGTH)[None] % 16
    return allocations(step, model, applied.shard_batch({"input_ids": ids, "labels": ids}))


@pytest.fixture(scope="module")
def quarter():
    """A plain step on a quarter of the sequence, in one process."""
    ids = torch.arange(LENGTH // CP)[None] % 16
    return allocations(step, one_layer(), {"input_ids": ids, "labels": ids})


def test_a_layers_step_over_a_ring_holds_little_more_than_one_process_on_a_quarter_of_the_sequence(quarter):
    for seen in pool(CP).run(on_a_rank, "sdpa_hf_ring", timeout=110):
        assert seen.peak <= 1.1 * quarter.peak + 2 * BLOCK, (seen, quarter, BLOCK)
        assert seen.largest < (LENGTH // CP) * LENGTH // 4  # a mask of local x global has four times as many bytes
