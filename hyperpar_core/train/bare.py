"""The model without its plan and without its weights, as transformers makes it: names, shapes, tied keys, key conversions, buffers."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..apply.generated import STATE, state_of
from ..errors import CheckpointError

__all__ = ["bare_model", "initial_buffers", "meta_model"]

_PLANNED = (STATE, "resize_token_embeddings", "save_pretrained")  # what a plan puts on a model itself


def _base(model: nn.Module) -> Any:
    """The class that transformers gave the model; None where it isn't transformers'."""
    from transformers import PreTrainedModel

    base = getattr(type(model), "_hyperpar_base", type(model))
    return base if issubclass(base, PreTrainedModel) else None


def bare_model(model: nn.Module) -> Any:
    """A meta copy of a transformers model without the plan; CheckpointError for a model that isn't transformers'."""
    base = _base(model)
    if base is None:
        raise CheckpointError(f"{type(model).__name__} isn't a transformers model, so its folders of weights have no known form.")
    with torch.device("meta"), _dtype(getattr(model, "dtype", None)):
        bare: Any = base(copy.deepcopy(model.config))
    bare.__dict__.update(
        {k: v for k, v in model.__dict__.items() if k not in bare.__dict__ and k not in _PLANNED and not k.startswith("_")}
    )
    for name in ("generation_config", "_weight_conversions"):  # how its checkpoint's keys were converted
        if getattr(model, name, None) is not None:
            setattr(bare, name, getattr(model, name))
    assert state_of(bare) is None
    return bare


@contextlib.contextmanager
def _dtype(dtype: torch.dtype | None) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@torch.no_grad()
def initial_buffers(model: nn.Module) -> dict[str, Tensor]:
    """{name: value} of the buffers of a transformers model as its own initialisation makes them; {} for other models."""
    if _base(model) is None:
        return {}
    bare: Any = bare_model(model)
    for parameter in bare.parameters():
        parameter._is_hf_initialized = True  # its initialisation passes them by
    for module in bare.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty_like(buffer, device="cpu")
    bare.initialize_weights()
    return {name: buffer for name, buffer in bare.named_buffers() if not buffer.is_meta}


def meta_model(folder: str | Path, *, dtype: str | torch.dtype = "auto", **config: Any) -> Any:
    """The causal language model of a checkpoint folder on the meta device, as transformers' from_pretrained would make it, without weights.

    dtype: "auto" is the folder's own. config: fields that win over those in the folder. It is in train mode. Runs in any process.
    Raises CheckpointError when the folder has no config that transformers reads as one.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    text = str(folder)
    hub_id = isinstance(folder, str) and text.count("/") == 1 and not text.startswith((".", "/", "~"))
    if not Path(folder).exists() and not hub_id:
        raise CheckpointError(f"{folder}: no such folder here.")
    try:
        found = AutoConfig.from_pretrained(text, **config)
        chosen = (getattr(found, "dtype", None) or torch.float32) if dtype == "auto" else dtype
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(found, dtype=chosen)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{folder}: no causal language model that transformers knows: {' '.join(str(error).split())[:300]}"
        ) from error
    for name, kept in kept_dtypes(model).items():
        owner, _, own = name.rpartition(".")
        module = model.get_submodule(owner)
        held = module._parameters if own in module._parameters else module._buffers
        value = torch.empty_like(held[own], dtype=kept)
        held[own] = nn.Parameter(value) if own in module._parameters else value
    if (Path(folder) / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(str(folder))
    return model.train()


def kept_dtypes(model: Any) -> dict[str, torch.dtype]:
    """{name: dtype} of what transformers keeps in another dtype than the model's, whatever the checkpoint holds."""
    from transformers.core_model_loading import build_glob_alternation

    plan = model._get_dtype_plan(model.dtype)
    if not plan:
        return {}
    pattern, by_group, _ = build_glob_alternation(list(plan))
    found = {}
    for name, value in model.state_dict(keep_vars=True).items():
        match = pattern.search(name)
        if match is not None and match.lastgroup is not None and value.dtype != plan[by_group[match.lastgroup]]:
            found[name] = plan[by_group[match.lastgroup]]
    return found
