"""What can't work is refused when the plan is made, by the name of its layer, on the meta device and without ranks."""

import copy
import re

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from hyperpar_core import build_plan
from hyperpar_core.errors import HyperparError, Refused
from hyperpar_core.testing import tiny_model

LAYER = "model.layers.0.self_attn"


def llama(**fields):
    sizes = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3, "num_hidden_layers": 1, "vocab_size": 32}
    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(**{**sizes, "intermediate_size": 48, **fields}))


def refused(model, sizes, wrapper, **options):
    """The error of build_plan; the model is as it was."""
    entry = {"match": "*.self_attn", "when": "cp", "inner_target": "self", "inner_wrapper": wrapper}
    before = copy.deepcopy(model.config.to_dict())
    with pytest.raises(HyperparError) as error:
        build_plan(model, sizes, overrides=[entry | ({"options": options} if options else {})])
    assert model.config.to_dict() == before and model.config._attn_implementation == "sdpa"
    assert len(str(error.value).splitlines()) <= 8
    return type(error.value).__name__, str(error.value)


@pytest.mark.parametrize("style", ["hf", "qkv"])
@pytest.mark.parametrize(
    ("sizes", "wrapper", "options", "words"),
    [
        ({"cp": 4}, "ulysses", {}, ["6 attention heads with 3 key/value heads", "4 ranks", "1, 3, 6"]),
        ({"cp": 2, "tp": 3}, "ulysses", {}, []),
        ({"cp": 4, "tp": 3}, "ulysses", {}, ["2 attention heads with 1 key/value heads", "1, 2"]),
        ({"cp": 4}, "hybrid", {"ulysses_degree": 3}, ["ulysses_degree 3", "cp=4", "1, 2, 4"]),
        ({"cp": 4}, "hybrid", {"ulysses_degree": "two"}, ["ulysses_degree 'two'", "1, 2, 4"]),
        ({"cp": 4}, "hybrid", {"ulysses_degree": 4}, ["6 attention heads", "4 ranks"]),
        ({"cp": 2}, "ring", {"kernel": "fast"}, ["kernel 'fast'", "auto, math, flash"]),
    ],
)  # fmt: skip
def test_heads_degrees_and_kernels(sizes, wrapper, options, words, style):
    name = f"sdpa_{style}_{wrapper}"
    if not words:  # 2 heads of each tp rank, dealt to 2: right
        entry = {"match": "*.self_attn", "when": "cp", "inner_target": "self", "inner_wrapper": name}
        assert build_plan(llama(), sizes, overrides=[entry]).sizes == sizes
        return
    kind, text = refused(llama(), sizes, name, **options)
    assert kind in ("Refused", "PlanError") and text.startswith(f"{LAYER}: "), text
    assert all(word in text for word in words), text


@pytest.mark.parametrize("kernel", ["flash", "efficient", "cudnn"])
def test_a_kernel_that_knows_no_soft_cap(kernel):
    model = llama()
    model.get_submodule(LAYER).attn_logit_softcapping = 50.0  # as Gemma 2's attention has it
    kind, text = refused(model, {"cp": 2}, "sdpa_hf", kernel=kernel)
    assert kind == "Refused" and text.startswith(f"{LAYER}: kernel '{kernel}' can't compute a soft cap") and "50.0" in text
    entry = {"match": "*.self_attn", "when": "cp", "inner_target": "self", "inner_wrapper": "sdpa_hf", "options": {"kernel": "math"}}
    assert build_plan(model, {"cp": 2}, overrides=[entry]).boundaries
    assert build_plan(llama(), {"cp": 2}, overrides=[entry | {"options": {"kernel": kernel}}]).boundaries


@pytest.mark.parametrize("wrapper", ["sdpa_hf", "sdpa_hf_ring", "sdpa_hf_ulysses", "sdpa_hf_hybrid", "sdpa_qkv_ring"])
def test_attention_dropout(wrapper):
    kind, text = refused(llama(attention_dropout=0.1), {"cp": 2}, wrapper)
    assert kind == "Refused" and text.startswith(f"{LAYER}: attention dropout is 0.1"), text


class OwnAttention(nn.Module):
    """Has no config: what is to be known of its heads and its dropout, it says itself."""

    def __init__(self, **fields):
        super().__init__()
        self.q_proj, self.o_proj = nn.Linear(8, 8), nn.Linear(8, 8)
        for name, value in fields.items():
            setattr(self, name, value)

    def forward(self, hidden_states):
        return self.o_proj(self.q_proj(hidden_states))


class OwnLayer(nn.Module):
    def __init__(self, convolves=False, **fields):
        super().__init__()
        self.self_attn, self.mix = OwnAttention(**fields), nn.Conv1d(8, 8, 3, padding=2) if convolves else nn.Identity()

    def forward(self, hidden_states):
        return self.self_attn(self.mix(hidden_states.mT)[..., : hidden_states.shape[1]].mT)


class Own(nn.Module):
    def __init__(self, **fields):
        super().__init__()
        self.config = copy.deepcopy(llama().config)
        self.config._attn_implementation = "sdpa"
        self.layers = nn.ModuleList([OwnLayer(**fields)])
        self.norm = nn.LayerNorm(8)

    def forward(self, hidden_states):
        return self.norm(self.layers[0](hidden_states))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_heads": 6, "num_kv_heads": 3}, "6 attention heads with 3 key/value heads"),
        ({"n_heads": 6}, "6 attention heads with 6 key/value heads"),
        ({"attn_dropout": nn.Dropout(0.5)}, "attention dropout is 0.5"),
    ],
)
def test_a_module_without_a_config_says_its_heads_and_dropout_itself(fields, words):
    kind, text = refused(Own(**fields), {"cp": 4}, "sdpa_hf_ulysses")
    assert kind == "Refused" and text.startswith("layers.0.self_attn: ") and words in text, text


class Stubborn(LlamaConfig):
    """A config that keeps its attention function, as a few families' do."""

    @property
    def _attn_implementation(self):
        return "sdpa"

    @_attn_implementation.setter
    def _attn_implementation(self, value):
        pass


def test_a_config_that_keeps_its_attention_function():
    model = llama()
    for module in model.modules():
        if hasattr(module, "config"):
            module.config.__class__ = Stubborn
    kind, text = refused(model, {"cp": 2}, "sdpa_hf_ring")
    assert kind == "Refused" and text.startswith(f"{LAYER}: Stubborn doesn't take another attention function"), text


def test_linear_attention_with_and_without_a_wrapper():
    model = tiny_model("qwen3_next")
    linear = next(name for name, _ in model.named_modules() if name.endswith("linear_attn"))
    entry = {"match": "*.self_attn", "when": "cp", "inner_target": "self", "inner_wrapper": "sdpa_hf_ring"}
    with pytest.raises(Refused, match=rf"cp=2 is active, and '{re.escape(linear)}'.* is linear attention"):
        build_plan(model, {"cp": 2}, overrides=[entry])
    with pytest.raises(Refused, match=rf"^{re.escape(linear)}: Qwen3NextGatedDeltaNet is linear attention"):
        build_plan(model, {"cp": 2}, overrides=[entry, {**entry, "match": linear}])


def test_a_convolution_along_the_sequence():
    layout = {"cp": "shard(1)"}
    whole = {"params": {"weight": {}, "bias": {}}, "in_src": {"input": layout}, "in_dst": {"input": layout}}
    mix = {"match": "layers.0.mix", **whole, "out_src": {"output": layout}, "out_dst": {"output": layout}}
    attention = {"match": "*.self_attn", "when": "cp", "inner_target": "self", "inner_wrapper": "sdpa_hf_ring"}
    with pytest.raises(Refused, match=r"cp=2 is active, and layers\.0\.mix convolves along the sequence"):
        build_plan(Own(convolves=True), {"cp": 2}, overrides=[mix, attention])
