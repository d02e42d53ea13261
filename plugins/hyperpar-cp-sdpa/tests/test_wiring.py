"""How the attention gets into a model and out of it: names, configs that are shared, copies, and modules of one's own."""

import copy
import inspect
import pickle
from importlib.metadata import entry_points

import pluggy
import pytest
import torch
import torch.nn.functional as F
from hyperpar_cp_sdpa import plugin
from hyperpar_cp_sdpa.huggingface import KEY, NAME
from torch import nn

from hyperpar_core import Override, apply_plan, build_plan, hookspecs, make_mesh
from hyperpar_core.descriptors import CONTEXT_NAMES
from hyperpar_core.testing import jitter, pool, tiny_batch, tiny_model

RANKS = 4
NAMES = {
    f"sdpa_{style}{form}": style for style in ("hf", "qkv") for form in ("", "_ring", "_ulysses", "_hybrid")
}  # fmt: skip


def planned(model, mesh, wrapper="sdpa_hf_ring", target="self", match="*.self_attn", out=None, **options):
    entry = {"match": match, "when": "cp", "inner_target": target, "inner_wrapper": wrapper}
    entry |= ({"options": options} if options else {}) | ({"inner_out_src": out} if out else {})
    return apply_plan(model, build_plan(model, mesh, overrides=[entry]), mesh)


# ---- models of one's own


class Core(nn.Module):
    """Queries, keys and values in, attention out."""

    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class Attention(nn.Module):
    """Calls torch's attention itself, or has a child that does."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.head_dim = kind, 8
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(32, 32), nn.Linear(32, 16), nn.Linear(32, 16)
        self.o_proj = nn.Linear(32, 32)
        self.core = Core()

    def forward(self, hidden_states):
        q, k, v = (
            p(hidden_states).unflatten(-1, (-1, 8)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.kind == "child":
            out = self.core(q, k, v)
        elif self.kind == "never":
            out = q
        elif self.kind == "mask":
            seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
        else:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=self.kind != "bidirectional", enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.input_layernorm, self.self_attn = nn.LayerNorm(32), Attention(kind)

    def forward(self, hidden_states):
        return hidden_states + self.self_attn(self.input_layernorm(hidden_states))


class Own(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.embed_tokens = nn.Embedding(64, 32)
        self.layers = nn.ModuleList([Block(kind), Block(kind)])
        self.norm, self.lm_head = nn.LayerNorm(32), nn.Linear(32, 64, bias=False)

    def get_input_embeddings(self):
        return self.embed_tokens

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, input_ids, position_ids=None, attention_mask=None):
        x = self.embed_tokens(input_ids) + torch.sin(position_ids[..., None] * torch.arange(1, 33) / 8)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def own(kind):
    torch.manual_seed(0)
    model = Own(kind)
    jitter(model)
    return model


# ---- on the ranks


def own_model(kind, wrapper, target="self", out=None, seq=16):
    """(largest relative difference of logits and of gradients), or the error."""
    model, single = own(kind), own(kind)
    mesh = make_mesh(cp=RANKS)
    try:
        applied = planned(model, mesh, wrapper, target, out=out)
        ids = torch.arange(2 * seq).reshape(2, seq) % 64
        weights = torch.randn(2, seq, 64, generator=torch.Generator().manual_seed(1))
        share = applied.shard_batch({"input_ids": ids})
        mine = applied.shard_batch({"inputs_embeds": weights})["inputs_embeds"]
        x = model(**share)
        (x * mine).sum().backward()
    except Exception as error:
        return type(error).__name__, str(error)
    expected = single(ids, torch.arange(seq).expand(2, seq))
    (expected * weights).sum().backward()
    logits = applied.unshard(x)
    gradients = applied.full_gradients()
    largest = max(p.grad.abs().max().item() for p in single.parameters())
    return (
        ((logits - expected).abs().max() / expected.abs().max()).item(),
        max(((gradients[n] - p.grad).abs().max() / largest).item() for n, p in single.named_parameters()),
    )


def shared_config():
    """What a model without a plan computes beside a planned one with the same config, before, during and after."""
    first = tiny_model("llama")
    other = type(first)(first.config)
    other.load_state_dict(first.state_dict())
    batch = tiny_batch(first)
    before = other(**batch, use_cache=False).logits
    applied = planned(first, make_mesh(cp=RANKS))
    during_name = other.config._attn_implementation
    during = other(**batch, use_cache=False).logits
    padded = {**batch, "attention_mask": torch.ones(2, 32, dtype=torch.long).index_fill(1, torch.tensor([0, 1]), 0)}
    padded_during = other(**padded, use_cache=False).logits
    share = applied.shard_batch(batch)
    ours = applied.unshard(first(**share).logits)
    applied.undo()
    return {
        "during": torch.equal(before, during),
        "padded": torch.equal(padded_during, other(**padded, use_cache=False).logits),
        "planned": ((ours - before).abs().max() / before.abs().max()).item(),
        "names": (during_name, first.config._attn_implementation),
        "left behind": [n for n, m in first.named_modules() if KEY in m.__dict__],
        "after": torch.equal(first(**batch, use_cache=False).logits, before),
    }


def two_plans():
    first = tiny_model("llama")
    second = type(first)(first.config)
    second.load_state_dict(first.state_dict())
    mesh, batch = make_mesh(cp=RANKS), tiny_batch(first)
    expected = first(**batch, use_cache=False).logits
    one, two = planned(first, mesh), planned(second, mesh, "sdpa_hf")
    one.undo()
    share = two.shard_batch(batch)
    error = ((two.unshard(second(**share).logits) - expected).abs().max() / expected.abs().max()).item()
    name = first.config._attn_implementation
    two.undo()
    return error, name, first.config._attn_implementation


def copies():
    """Largest difference of a deep copy's and a pickled copy's logits from the planned model's, with weights of their own."""
    model = tiny_model("llama")
    applied = planned(model, make_mesh(cp=RANKS))
    share = applied.shard_batch(tiny_batch(model))
    logits = model(**share).logits
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for p in model.model.layers[0].self_attn.parameters():
            p.zero_()
    return torch.equal(twin(**share).logits, logits), not torch.equal(model(**share).logits, logits)


class NoInstall:
    """What a factory returns, and can't be installed."""

    def __call__(self, module, *args, **kwargs):
        raise AssertionError

    def install(self, module):
        raise RuntimeError("no room")


def never_installed(*, target_module):
    return NoInstall()


def failed_apply():
    """The second layer fails after the first has changed the config's attention function."""
    model = tiny_model("llama")
    mesh = make_mesh(cp=RANKS)
    over = {"match": "model.layers.1.self_attn", "inner_target": "self", "inner_wrapper": never_installed, "region_dispatch": False}
    entries = [{"match": "model.layers.0.self_attn", "inner_target": "self", "inner_wrapper": "sdpa_hf_ring"}, over]
    plan = build_plan(model, mesh, overrides=[Override(**entry) for entry in entries])
    try:
        apply_plan(model, plan, mesh)
    except Exception as error:
        return type(error).__name__, str(error), model.config._attn_implementation
    return "no error", "", ""


# ---- tests


def test_the_plugin_implements_known_hooks_only_and_offers_four_forms_in_two_styles():
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    manager.register(plugin)
    manager.check_pending()
    (offered,) = manager.hook.hyperpar_inner_wrappers()
    assert {wrapper.name: wrapper.forward_style for wrapper in offered} == NAMES
    assert all(wrapper.needs_axis == "cp" and not wrapper.region_dispatch for wrapper in offered)
    for wrapper in offered:
        options = set(inspect.signature(wrapper.factory).parameters) - CONTEXT_NAMES
        assert options == {"kernel"} | ({"ulysses_degree"} if "hybrid" in wrapper.name else set())


def test_the_entry_point_leads_to_the_plugin():
    (entry,) = entry_points(group="hyperpar", name="cp_sdpa")
    assert entry.load() is plugin


def test_a_model_that_shares_the_config_computes_as_before_and_undo_gives_the_name_back():
    for seen in pool(RANKS).run(shared_config):
        assert seen["during"] and seen["padded"] and seen["after"], seen
        assert seen["planned"] <= 1e-5
        assert seen["names"] == (NAME, "sdpa") and not seen["left behind"]


def test_of_two_plans_on_one_config_the_second_survives_the_undo_of_the_first():
    for error, during, after in pool(RANKS).run(two_plans):
        assert error <= 1e-5
        assert (during, after) == (NAME, "sdpa")


def test_a_deep_copy_of_a_planned_model_attends_with_its_own_weights():
    for same, changed in pool(RANKS).run(copies):
        assert same and changed


def test_an_apply_that_fails_leaves_the_config_as_it_was():
    for kind, text, name in pool(RANKS).run(failed_apply):
        assert kind == "RuntimeError" and "no room" in text
        assert name == "sdpa"


@pytest.mark.parametrize("wrapper", ["sdpa_hf", "sdpa_hf_ring", "sdpa_hf_hybrid"])
@pytest.mark.parametrize("kind", ["causal", "bidirectional"])
def test_a_module_that_calls_torchs_attention_itself_is_that_of_one_process(kind, wrapper):
    for logits, gradients in pool(RANKS).run(own_model, kind, wrapper):
        assert logits <= 1e-5 and gradients <= 1e-5


@pytest.mark.parametrize("wrapper", ["sdpa_qkv", "sdpa_qkv_ring", "sdpa_qkv_hybrid"])
def test_a_child_that_is_called_with_queries_keys_and_values_is_that_of_one_process(wrapper):
    for logits, gradients in pool(RANKS).run(own_model, "child", wrapper, "core", "first_input"):
        assert logits <= 1e-5 and gradients <= 1e-5


def test_a_causal_module_that_calls_torchs_attention_may_end_in_padding_and_another_may_not():
    for logits, gradients in pool(RANKS).run(own_model, "causal", "sdpa_hf_ring", seq=13):
        assert logits <= 1e-5 and gradients <= 1e-5
    for kind, text in pool(RANKS).run(own_model, "bidirectional", "sdpa_hf_ring", seq=13):
        assert kind == "ApplyError" and "padding" in text and "layers.0.self_attn" in text


@pytest.mark.parametrize(("kind", "words"), [("never", "never came to"), ("mask", "attention mask")])
def test_a_module_that_is_not_reached_or_brings_a_local_mask_is_an_error(kind, words):
    for name, text in pool(RANKS).run(own_model, kind, "sdpa_hf_ring"):
        assert name == "ApplyError" and words in text and "layers.0.self_attn" in text


def test_wrappers_can_be_pickled():
    from hyperpar_cp_sdpa.wrappers import ContextParallel

    from hyperpar_core.collectives.functional import AxisGroup

    made = ContextParallel("layers.0", AxisGroup("cp", 4, 1), "ring", 1, "auto", True)
    assert pickle.loads(pickle.dumps(made)).__dict__ == made.__dict__
