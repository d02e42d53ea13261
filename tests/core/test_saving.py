"""Whole tensors under their own names and in their own order, and folders that plain transformers loads."""

import copy
import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from core_tools import planned, raised, share, small, step
from transformers import AutoModelForCausalLM

from hyperpar_core import apply_plan, build_plan, make_mesh
from hyperpar_core.testing import pool, tiny_batch

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm3", "granite", "olmo2", "gemma2")


def whole_tensors(degrees, vocab):
    """What comes back of numbered weights and of gradients, against the original."""
    model = small("llama", vocab_size=vocab, attention_bias=True, mlp_bias=True)
    start = 0
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.arange(start, start + parameter.numel()).view_as(parameter) / 1e5)
            start += parameter.numel()
    single, batch = copy.deepcopy(model), tiny_batch(model, seq=7)
    mesh = make_mesh(**degrees)
    applied = apply_plan(model, build_plan(model, mesh), mesh)
    whole, state = applied.full_parameters(), applied.full_state_dict()
    plain, saved = dict(single.named_parameters()), single.state_dict()
    facts = {
        "names": list(whole) == list(plain) and list(state) == list(saved),
        "values": all(torch.equal(whole[n], plain[n]) for n in plain),
        "full_tensor": all(torch.equal(p.full_tensor(), plain[n]) for n, p in model.named_parameters()),
        "shapes": all(p.shape == plain[n].shape and p.stride() == plain[n].stride() for n, p in model.named_parameters()),
        "state": all(torch.equal(state[n], saved[n]) for n in saved),
        "plain": all(type(v) is torch.Tensor and not v.requires_grad for v in (*whole.values(), *state.values())),
        "own memory": all(v.data_ptr() != p.to_local().data_ptr() for v, p in zip(whole.values(), model.parameters(), strict=True)),
        "none yet": set(applied.full_gradients().values()) == {None},
    }  # fmt: skip
    step(model, applied.shard_batch({n: v.chunk(applied.data_parallel_size)[applied.data_parallel_rank] for n, v in batch.items()}))
    gathered = applied.full_gradients()
    direct = {n: p.grad.full_tensor() for n, p in model.named_parameters()}
    facts["gradients"] = all(torch.equal(gathered[n], direct[n]) and gathered[n].shape == plain[n].shape for n in plain)
    facts["kept"] = all(p.grad is not None and p.grad.placements == p.placements for p in model.parameters())
    return facts


@pytest.mark.parametrize("vocab", [64, 99])
@pytest.mark.parametrize("degrees", [{"tp": 2}, {"dp": 2}, {"dp": 2, "tp": 2}, {"tp": 4}], ids=str)
def test_whole_parameters_and_gradients_have_their_own_names_shapes_values_and_order(degrees, vocab):
    size = degrees.get("dp", 1) * degrees.get("tp", 1)
    for facts in pool(size).run(whole_tensors, degrees, vocab):
        assert all(facts.values()), facts


def saved_and_loaded(folder, families, degrees, config, dtype, options):
    """{family: what is wrong} of folders that the ranks have written and rank 0 reads back."""
    wrong = {}
    for family in families:
        config = {"num_hidden_layers": 2, **config}
        model = small(family, dtype, **config)
        if family in ("gemma2", "smollm3", "granite"):
            model.generation_config.max_new_tokens = 7
        mesh = make_mesh(**degrees)
        plain = {n: v.clone() for n, v in model.state_dict().items()}
        tied = model.config.tie_word_embeddings
        applied = apply_plan(model, build_plan(model, mesh), mesh)
        target = Path(folder) / family
        applied.save_pretrained(target, **options)
        dist.barrier()
        if dist.get_rank() == 0:
            loaded, info = AutoModelForCausalLM.from_pretrained(target, output_loading_info=True, dtype="auto")
            data = json.loads((target / "config.json").read_text())
            state, problems = loaded.state_dict(), []
            if info["missing_keys"] or info["unexpected_keys"] or info["mismatched_keys"]:
                problems.append(str(info))
            problems += [n for n in plain if not (torch.equal(state[n], plain[n]) and state[n].dtype == plain[n].dtype)]
            if type(loaded).__name__ != data["architectures"][0] or str(dtype).split(".")[1] != data["dtype"]:
                problems.append(f"{data['architectures']} {data['dtype']}")
            if (loaded.lm_head.weight is loaded.model.embed_tokens.weight) is not tied:
                problems.append("tied")
            if family == "gemma2" and loaded.generation_config.max_new_tokens != 7:
                problems.append("generation config")
            batch = tiny_batch(loaded, seq=6)
            if not torch.equal(loaded(**batch).logits, small(family, dtype, **config).eval()(**batch).logits):
                problems.append("logits")
            if problems:
                wrong[family] = problems
        dist.barrier()
    return wrong


@pytest.mark.parametrize(("degrees", "dtype"), [({"tp": 2}, torch.float32), ({"dp": 2}, torch.bfloat16)], ids=str)
def test_a_saved_folder_loads_in_plain_transformers_bit_for_bit(tmp_path, degrees, dtype):
    results = pool(2).run(saved_and_loaded, str(tmp_path), FAMILIES, degrees, {}, dtype, {}, timeout=110)
    assert results == [{}, {}]


@pytest.mark.parametrize("vocab", [64, 99])
@pytest.mark.parametrize("tp", [2, 4])
def test_a_tied_uneven_vocab_is_saved_once_and_whole(tmp_path, vocab, tp):
    config = {"vocab_size": vocab, "tie_word_embeddings": True}
    results = pool(tp).run(saved_and_loaded, str(tmp_path), ("llama",), {"tp": tp}, config, torch.float32, {})
    assert results == [{}] * tp
    assert json.loads((tmp_path / "llama" / "config.json").read_text())["vocab_size"] == vocab


def test_options_go_to_transformers_own_save_pretrained(tmp_path):
    options = {"max_shard_size": "50KB"}
    assert pool(2).run(saved_and_loaded, str(tmp_path), ("llama",), {"tp": 2}, {}, torch.float32, options) == [{}, {}]
    assert len(list((tmp_path / "llama").glob("*.safetensors"))) > 1


def failing_write(folder):
    applied, _, batch = planned("llama", tp=2)
    first = raised(lambda: applied.save_pretrained(Path(folder) / "file" / "below"))
    works = bool(step(applied.model, share(applied, batch)).isfinite())
    shutil.rmtree(Path(folder) / "good", ignore_errors=True) if dist.get_rank() == 0 else None
    applied.save_pretrained(Path(folder) / "good")
    return first, works


def test_a_write_that_fails_on_the_writing_rank_raises_on_every_rank_and_training_goes_on(tmp_path):
    (tmp_path / "file").write_text("no folder")
    for error, works in pool(2).run(failing_write, str(tmp_path)):
        assert error is not None and error[0] == "CheckpointError" and "rank 0 of the mesh says" in error[1] and works
    assert (tmp_path / "good" / "config.json").exists()


def after_training(folder):
    """A folder saved after a step holds the trained weights, and the model goes on unchanged."""
    applied, _, batch = planned("qwen3", tp=2)
    mine = share(applied, batch)
    optimizer = torch.optim.SGD(applied.model.parameters(), lr=0.1)
    step(applied.model, mine)
    optimizer.step()
    attributes = sorted(applied.model.__dict__)
    applied.save_pretrained(folder)
    dist.barrier()
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    whole = applied.full_parameters()
    same = all(torch.equal(whole[n], p) for n, p in loaded.named_parameters())
    return same, attributes == sorted(applied.model.__dict__), bool(step(applied.model, mine).isfinite())


def test_trained_weights_are_saved_and_the_model_goes_on(tmp_path):
    assert pool(2).run(after_training, str(tmp_path)) == [(True, True, True)] * 2
