"""Models by name, for the command line and for verify: a transformers family, a config, a checkpoint, or module:function."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from ..errors import HyperparError
from .zoo import causal_config, families, jitter, tiny_model

__all__ = ["meta_model", "model_from"]


def model_from(spec: str, dtype: torch.dtype = torch.float32) -> Any:
    """The model that `spec` names, in train mode, the same in every process.

    spec is a config file or folder (random weights), a checkpoint folder, a transformers family (its tiny version) where there is no
    file or folder of that name, or module:function (called without arguments). Weights that aren't a checkpoint's are
    jittered. Raises HyperparError when it is none of these.
    """
    torch.manual_seed(0)
    path = Path(spec)
    if not path.exists() and spec in families(include_excluded=True):
        return tiny_model(spec, dtype)
    if path.is_dir() and (any(path.glob("*.safetensors")) or any(path.glob("pytorch_model*.bin"))):
        return AutoModelForCausalLM.from_pretrained(str(path), dtype=dtype).train()
    model = (
        AutoModelForCausalLM.from_config(_config(spec), dtype=dtype) if path.exists() else _function(spec)().to(dtype)
    )
    jitter(model)
    return model.train()


def meta_model(spec: str) -> Any:
    """The model that `spec` names, as large as it is, on the meta device: shapes without weights. Raises as `model_from`."""
    with torch.device("meta"):
        if not Path(spec).exists() and spec not in CONFIG_MAPPING:
            return _function(spec)()
        try:
            config = _config(spec) if Path(spec).exists() else CONFIG_MAPPING[spec]()
            return AutoModelForCausalLM.from_config(causal_config(config))
        except HyperparError:
            raise
        except Exception as error:  # what a config's own code or an odd default raises
            raise HyperparError(f"{spec}: no causal language model: {_line(error)}") from error


def _config(spec: str) -> Any:
    try:
        return AutoConfig.from_pretrained(spec)
    except (OSError, ValueError, KeyError) as error:
        raise HyperparError(f"{spec}: not a config that transformers reads: {_line(error)}") from error


def _function(spec: str) -> Any:
    module, _, name = spec.partition(":")
    if not module or not name:
        raise HyperparError(
            f"{spec!r} is no model: give a transformers family, a config file or folder, a checkpoint folder, or"
            " module:function."
        )
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise HyperparError(f"{spec}: {error}.") from error


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
