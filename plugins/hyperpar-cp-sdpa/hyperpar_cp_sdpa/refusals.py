"""What context-parallel attention can't do at a module, said when the plan is made."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

from hyperpar_core.errors import PlanError, Refused

from .exchange import check_heads
from .huggingface import NAME, takes_registered_attention

__all__ = ["local_heads", "refuse", "ulysses_degree"]

_HEADS = ("num_attention_heads", "num_heads", "n_heads")
_SOFT_CAPS = ("attn_logit_softcapping", "attn_logit_softcap")
_UNCAPPED = ("flash", "efficient", "cudnn")  # kernels that know no soft cap
_GROUPS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")


def refuse(
    form: str, style: str, kernel: str, kernels: Collection[str], degree: int | None, *, target_module: nn.Module, model: nn.Module,
    fqn: str, contract: Any, sizes: Mapping[str, int],
) -> None:  # fmt: skip
    """Raises Refused or PlanError where a wrapper of `form` and `style` can't work at `target_module`. Reads attributes only."""
    if kernel not in kernels:
        raise PlanError(f"{fqn}: kernel {kernel!r}; known: {', '.join(kernels)}.")
    if contract.template == "linear_attention" or any(isinstance(m, nn.Conv1d) for m in target_module.modules()):
        raise Refused(
            f"{fqn}: {type(target_module).__name__} is linear attention, or convolves: it carries a state along the sequence, which cp"
            " cuts; this wrapper exchanges keys and values.\n  Plan without cp."
        )
    _refuse_dropout(fqn, target_module)
    cap = next((c for name in _SOFT_CAPS if (c := getattr(target_module, name, None))), None)
    if cap is not None and kernel in _UNCAPPED:
        raise Refused(
            f"{fqn}: kernel {kernel!r} can't compute a soft cap, and scores are capped at {cap} here.\n  Declare kernel: auto or math."
        )
    seats = ulysses_degree(form, sizes["cp"], degree, fqn)
    heads = local_heads(target_module, sizes.get("tp", 1))
    if seats > 1 and heads is not None:
        check_heads(*heads, seats, f"{fqn}: ")
    if style == "hf" and takes_registered_attention(target_module, model):
        config: Any = copy.deepcopy(target_module.config)
        config._attn_implementation = NAME
        if config._attn_implementation != NAME:
            raise Refused(f"{fqn}: {type(config).__name__} doesn't take another attention function, so its attention can't be wrapped.")


def ulysses_degree(form: str, ranks: int, asked: int | None, fqn: str) -> int:
    """How many ranks exchange heads. asked: the hybrid's option; Refused where it doesn't divide the ranks of cp."""
    if form == "ulysses":
        return ranks
    if form != "hybrid":
        return 1
    degree = 2 if asked is None else asked
    if not isinstance(degree, int) or isinstance(degree, bool) or degree < 1 or ranks % degree:
        divisors = [d for d in range(1, ranks + 1) if ranks % d == 0]
        raise Refused(f"{fqn}: ulysses_degree {degree!r} doesn't divide cp={ranks}. Degrees that work: {', '.join(map(str, divisors))}.")
    return degree


def local_heads(module: nn.Module, tp: int) -> tuple[int, int] | None:
    """(query heads, key/value heads) of one tp rank, where the module or its config says."""
    heads = _number(module, _HEADS)
    groups = _number(module, _GROUPS) or heads
    if heads is None or groups is None or heads % tp:
        return None
    return heads // tp, max(groups // tp, 1)


def _number(module: nn.Module, names: tuple[str, ...]) -> int | None:
    """The first of `names` that the module's config, or the module, has as a number."""
    for holder in (getattr(module, "config", None), module):
        for name in names:
            value = getattr(holder, name, None)
            if isinstance(value, int) and value > 0:
                return value
    return None


def _refuse_dropout(fqn: str, module: nn.Module) -> None:
    for name in ("attention_dropout", "attn_dropout", "attn_pdrop"):
        value = getattr(module, name, None)
        value = value.p if isinstance(value, nn.Dropout) else value
        if isinstance(value, float) and value > 0:
            raise Refused(
                f"{fqn}: attention dropout is {value}; under context parallel it isn't supported.\n"
                "  Set it to 0 in the config before the model is made."
            )
