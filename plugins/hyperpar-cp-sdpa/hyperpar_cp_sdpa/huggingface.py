"""The way into transformers' models: one name in its AttentionInterface and its AttentionMaskInterface.

The mask function returns a `Mask`, which travels through the model as its attention_mask argument; the attention function gets it
back together with q, k and v. Configs are shared between models: for a module without a plan, and outside a planned model's forward,
both do what the config's previous name did.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function

from hyperpar_core.batch import current_share
from hyperpar_core.errors import ApplyError, Refused

from .masks import Mask, Rule, causal

__all__ = ["KEY", "NAME", "install", "takes_registered_attention"]

NAME = "hyperpar_context_parallel"
KEY = "_hyperpar_context_parallel"  # under it a planned module holds its attention in __dict__, so that copies carry it

_previous: dict[int, tuple[Any, str, int]] = {}  # {id of a config: (weak reference, its own attention name, installs)}


class TravellingMask(Mask):
    """A `Mask` as models hand it on. What a model does to it on the way would be lost, so anything but handing on is an error."""

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise ApplyError(
            "the model changes its attention mask between building and using it; under context parallel the mask is a rule over global"
            " positions, not a tensor.\n  This model's attention can't be wrapped this way."
        )

    __getitem__ = __add__ = __radd__ = __mul__ = __rmul__ = __and__ = __or__ = __invert__ = __len__ = __iter__ = _refuse
    # what models look at or call on a mask tensor
    shape = dtype = ndim = device = property(_refuse)
    size = dim = to = expand = unsqueeze = masked_fill = bool = _refuse


def takes_registered_attention(module: nn.Module, model: nn.Module) -> bool:
    """Whether `module` looks its attention function up by its config's attention name."""
    if not hasattr(getattr(module, "config", None), "_attn_implementation"):
        return False
    return not isinstance(model, PreTrainedModel) or model._can_set_attn_implementation()


def install(module: nn.Module, attend: Callable[..., Tensor]) -> Callable[[], None]:
    """Makes `attend(q, k, v, mask, ...)` the attention of `module` and of what is inside it; returns the inverse."""
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)
    config: Any = module.config
    reference, own, count = _previous.get(id(config), (None, "", 0))
    if reference is None or reference() is not config:
        own, count = config._attn_implementation or "sdpa", 0
    if own == NAME:  # a copy of a planned model's config
        own = "sdpa"
    _previous[id(config)] = (weakref.ref(config), own, count + 1)
    config._attn_implementation = NAME
    inside = list(module.modules())
    for each in inside:
        each.__dict__[KEY] = attend

    def inverse() -> None:
        for each in inside:
            each.__dict__.pop(KEY, None)
        installs = _previous[id(config)][2] - 1
        _previous[id(config)] = (weakref.ref(config), own, installs)
        if not installs:
            del _previous[id(config)]
            config._attn_implementation = own

    if config._attn_implementation != NAME:
        inverse()
        raise Refused(f"{type(module).__name__}: its config doesn't take another attention function.")
    return inverse


def _own(config: Any) -> str:
    reference, own, _ = _previous.get(id(config), (None, "sdpa", 0))
    return own if reference is not None and reference() is config else "sdpa"


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """As transformers calls it: [B, H, L, D] in, [B, L, H, Dv] out."""
    attend = module.__dict__.get(KEY)
    if attend is None:
        own = _own(module.config)
        default = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        out: tuple[Tensor, Tensor | None] = AttentionInterface().get_interface(own, default)(
            module, query, key, value, attention_mask, **kwargs
        )
        return out
    return attend(query, key, value, attention_mask, **kwargs).transpose(1, 2).contiguous(), None


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Rule = causal_mask_function,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    config: Any = None,
    **kwargs: Any,
) -> Any:
    """As transformers calls it, with this rank's number of queries and the whole sequence's number of keys."""
    share = current_share()
    if share is None:
        interface = AttentionMaskInterface()
        own = _own(config)
        if own not in interface:
            return attention_mask
        return interface[own](
            batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
            mask_function=mask_function, attention_mask=attention_mask, use_vmap=use_vmap, config=config, **kwargs,
        )  # fmt: skip
    if (q_length, kv_length, q_offset, kv_offset) != (share.local_length, share.length, 0, 0):
        raise ApplyError(
            f"the model builds a mask of {q_length} x {kv_length} tokens, where this rank has {share.local_length} of"
            f" {share.length}: it doesn't hand its attention_mask on, so the mask can't be known under context parallel."
        )
    if use_vmap or any(x.ndim > 1 for x in _tensors(mask_function, set())):
        raise ApplyError(
            "the model adds a rule of its own to the mask, built from tensors of this rank's tokens; under context parallel only rules"
            " over positions work (causal, sliding window, chunks, padding, documents)."
        )
    rule = causal if mask_function is causal_mask_function else mask_function
    return TravellingMask(rule, share.order, share.length, share.documents, share.several_documents)


def _cells(function: Any, seen: set[int]) -> list[Any]:
    """What a rule closes over, those of the rules inside it included."""
    if id(function) in seen or not callable(function):
        return []
    seen.add(id(function))
    found = []
    for cell in getattr(function, "__closure__", None) or ():
        items = cell.cell_contents if isinstance(cell.cell_contents, (tuple, list)) else [cell.cell_contents]
        for item in items:
            found += [item, *_cells(item, seen)]
    return found


def _tensors(function: Any, seen: set[int]) -> list[Tensor]:
    return [item for item in _cells(function, seen) if isinstance(item, torch.Tensor)]
