"""Tiny random-weight versions of every causal-LM family of the installed transformers; nothing is downloaded.

    for name in families():
        model = tiny_model(name)              # about 100k parameters, train mode, dropout 0
        loss = model(**tiny_batch(model)).loss

Common geometry: vocab 256, hidden 64, 2 layers (more where a family mixes more than 2 kinds), 4 attention heads, 2
key/value heads where they are grouped, head dim 16, 4 experts top-2, sliding window 16. A tiny config is built by
constructing the family's config class with small sizes, so that whatever it derives is derived from them; zoo.yaml
holds the sizes and what is peculiar to a family.
"""

from __future__ import annotations

import dataclasses
import re
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

__all__ = ["families", "jitter", "tiny_batch", "tiny_config", "tiny_model"]

INIT_STD = 0.1  # wide enough that attention is far from uniform and a router far from ties
_DROPOUT = re.compile(r"drop(out|_p|_rate)?(_|$)|pdrop|layerdrop|jitter")


@cache
def _tables() -> dict[str, dict[str, Any]]:
    tables: dict[str, dict[str, Any]] = yaml.safe_load((Path(__file__).parent / "zoo.yaml").read_text())
    return tables


def families(include_excluded: bool = False) -> list[str]:
    """The text causal-LM families of the installed transformers, by name."""
    excluded = {name for names in _tables()["excluded"].values() for name in names}
    return [name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if include_excluded or name not in excluded]


def tiny_config(name: str, **overrides: Any) -> Any:
    """The tiny config of family `name`, as `AutoModelForCausalLM.from_config` takes it.

    `overrides` are config fields that win over everything here: `tiny_config("...", num_hidden_layers=4)`. Where the
    causal-LM class of a multimodal config takes its text config, the result is that text config. Raises KeyError for an
    unknown family.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return causal_config(_shrink(CONFIG_MAPPING[name], {**_tables()["overrides"].get(name, {}), **overrides}, {}))


def causal_config(config: Any) -> Any:
    """The config that the causal-LM class takes: the text config of a multimodal one where it does, else the config itself."""
    text, models = getattr(config, "text_config", None), AutoModelForCausalLM._model_mapping
    if text is not None and type(text) in models and models[type(config)].config_class is type(text):
        return text
    return config


def tiny_model(name: str, dtype: torch.dtype = torch.float32, seed: int = 0, **overrides: Any) -> Any:
    """The tiny model of family `name` in train mode, jittered, with the same weights in every dtype.

    Same arguments, same weights, in every process.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(tiny_config(name, **overrides), dtype=torch.float32)
        for key, table in model.named_buffers():
            if key.endswith("tid2eid"):  # a routing table that checkpoints fill
                table.copy_(torch.rand(*table.shape[:-1], 4).argsort(-1)[..., : table.shape[-1]])
        jitter(model, seed=seed)
        if dtype != torch.float32:
            weights = model.state_dict()
            model = AutoModelForCausalLM.from_config(tiny_config(name, **overrides), dtype=dtype)
            model.load_state_dict(weights)
        if dtype == torch.float64 and model._can_set_experts_implementation():
            model.set_experts_implementation("eager")  # the grouped matmul has no float64 on CPU
    return model.train()


def jitter(model: nn.Module, scale: float = 0.05, seed: int = 0) -> None:
    """Adds `scale * randn` to every parameter, once per storage, and to every constant float buffer that is saved.

    Initialisation leaves norms at 1 and biases, sinks and router corrections at 0, where an error in them doesn't show:
    a bias that is counted twice changes nothing while it is 0. Deterministic in the names, the shapes and `seed`.
    """
    generator = torch.Generator().manual_seed(seed)
    saved = model.state_dict(keep_vars=True)
    buffers = [b for name, b in model.named_buffers() if name in saved and b.is_floating_point() and b.numel()]
    with torch.no_grad():
        for value in [*model.parameters(), *(b for b in buffers if b.min() == b.max())]:
            noise = torch.randn(value.shape, generator=generator, dtype=torch.float32)
            value.add_(noise.to(value), alpha=scale)


def tiny_batch(model: Any, batch: int = 2, seq: int = 32, seed: int = 1) -> dict[str, torch.Tensor]:
    """`input_ids` and `labels` [batch, seq] of random tokens, no special ids among them; seq 32 is twice the window."""
    vocab = model.config.get_text_config().vocab_size
    low, high = (3, vocab - 6) if vocab >= 16 else (0, vocab)
    ids = torch.randint(low, high, (batch, seq), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids.clone()}


def _shrink(cls: Any, overrides: dict[str, Any], base: dict[str, Any]) -> Any:
    """An instance of config class `cls`: `base`, its size-like fields made small, then `overrides`."""
    sizes, fields, kwargs = _tables()["sizes"], _defaults(cls), dict(base)
    for name, value in fields.items():
        if _DROPOUT.search(name) and isinstance(value, int | float):
            kwargs[name] = 0.0
        elif name in ("initializer_range", "init_std"):
            kwargs[name] = INIT_STD
        elif name in sizes and isinstance(value, int) and not isinstance(value, bool):
            kwargs[name] = sizes[name]
    if "kv_lora_rank" in fields:  # latent attention has no grouped heads; its head_dim, where it is a field, is derived
        kwargs["num_key_value_heads"] = kwargs["num_attention_heads"]
    else:  # an unset field would give a key/value head per head, and not every config derives head_dim
        kwargs |= {n: sizes[n] for n in ("num_key_value_heads", "head_dim") if fields.get(n, 0) is None}
    kinds = {f: _layer_kinds(cls, f) for f in ("layer_types", "mlp_layer_types") if f in fields}
    kinds = {f: k for f, k in kinds.items() if len(k) > 1}
    if kinds:  # one layer of each kind, and at least the table's number of layers
        depth = max(kwargs["num_hidden_layers"], *map(len, kinds.values()))
        kwargs |= {f: (k * depth)[:depth] for f, k in kinds.items()} | {"num_hidden_layers": depth}
    for sub, spec in (cls.sub_configs_defaults or {}).items():
        inner = {key[len(sub) + 1 :]: value for key, value in overrides.items() if key.startswith(sub + ".")}
        inner = {**_tables()["overrides"].get(spec.model_type, {}), **inner}
        known = spec.model_type in CONFIG_MAPPING
        sub_cls = CONFIG_MAPPING[spec.model_type] if known else spec.config_class
        kwargs[sub] = _shrink(sub_cls, inner, {k: v for k, v in spec.init_kwargs.items() if k not in sizes})
    return cls(**kwargs | {key: value for key, value in overrides.items() if "." not in key})


def _defaults(cls: Any) -> dict[str, Any]:
    """Field name -> default value of a config class."""
    missing = dataclasses.MISSING
    return {
        field.name: field.default if field.default_factory is missing else field.default_factory()
        for field in dataclasses.fields(cls)
        if field.default is not missing or field.default_factory is not missing
    }


def _layer_kinds(cls: Any, field: str) -> list[str]:
    """The kinds of layers that the default config of `cls` mixes, in order of first use."""
    try:
        value = getattr(cls(), field, None)
    except Exception:  # a config without a valid default: zoo.yaml says what its layers are
        return []
    return list(dict.fromkeys(value)) if isinstance(value, list | tuple) else []
