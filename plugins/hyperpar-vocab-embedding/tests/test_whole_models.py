"""The embedding and the loss inside whole models, as a plan chooses them."""

import copy

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch.distributed.device_mesh import init_device_mesh

from hyperpar_core import LossSpec, apply_plan, build_plan
from hyperpar_core.testing import pool

RANKS = 4
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
}


def make(family, vocab, tied):
    sizes = {**SMALL, "vocab_size": vocab, "pad_token_id": vocab // 2, "tie_word_embeddings": tied}
    torch.manual_seed(0)
    if family == "gemma3":  # scaled embedding, soft-capped logits
        model = transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**sizes, final_logit_softcapping=20.0))
    else:
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def losses_and_gradients(family, vocab, tied, tp):
    """((loss, gradients) in parallel, the same in one process, the names of what the plan chose)."""
    reference = make(family, vocab, tied)
    model = copy.deepcopy(reference)
    degrees = {"dp": RANKS // tp, "tp": tp} if tp < RANKS else {"tp": tp}
    mesh = init_device_mesh("cpu", tuple(degrees.values()), mesh_dim_names=tuple(degrees))
    loss_spec = LossSpec("vocab_parallel_cross_entropy", {"label_smoothing": 0.1})
    plan = build_plan(model, mesh, loss_parallel=loss_spec)
    applied = apply_plan(model, plan, mesh, data_parallel="external")
    ids = torch.arange(18).reshape(2, 9) % vocab
    labels = ids.clone()
    labels[0, :3] = -100
    loss = model(input_ids=ids, labels=labels, num_items_in_batch=14, use_cache=False).loss
    loss.backward()
    logits = reference(input_ids=ids, use_cache=False).logits[:, :-1]
    expected = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), label_smoothing=0.1)
    expected.backward()
    chosen = [boundary.local_compute_fn for boundary in plan.boundaries if boundary.local_compute_fn]
    return (
        (loss.detach(), applied.full_gradients()),
        (expected.detach(), {name: parameter.grad for name, parameter in reference.named_parameters()}),
        chosen,
    )


@pytest.mark.parametrize(
    ("family", "vocab", "tied", "tp"), [("llama", 99, False, 2), ("llama", 5, True, 4), ("gemma3", 99, True, 2)]
)
def test_loss_and_every_gradient_of_a_whole_model_are_those_of_one_process(family, vocab, tied, tp):
    results = pool(RANKS).run(losses_and_gradients, family, vocab, tied, tp)
    for (loss, gradients), (expected, reference), chosen in results:
        assert chosen == ["vocab_parallel_embedding"]
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
        floor = 1e-6 * max(gradient.abs().max().item() for gradient in reference.values())
        for name, gradient in reference.items():
            bound = max(1e-5 * gradient.abs().max().item(), floor)
            assert (gradients[name] - gradient).abs().max() <= bound, name
