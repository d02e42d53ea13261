"""The inner wrappers: a module's own forward, with its attention done over cp.

`sdpa_hf` and its forms wrap modules that are called with hidden states; `sdpa_qkv` and its forms wrap modules that are called with
queries, keys and values, of this rank's tokens. Inside, the attention is reached where transformers looks it up by name, and else where
the module calls torch's scaled_dot_product_attention; one of the two must happen, or the forward is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode

from hyperpar_core import original_forward
from hyperpar_core.batch import current_share
from hyperpar_core.collectives.functional import AxisGroup, axis_group
from hyperpar_core.errors import ApplyError, PlanError, Refused

from . import huggingface
from .attention import attention
from .exchange import Parts, check_heads
from .kernels import KERNELS
from .masks import Mask, bidirectional, causal

__all__ = ["ContextParallel", "wrap"]

# Attention arguments that change what is computed, and that this attention doesn't compute.
_UNKNOWN = ("position_bias", "indices", "block_indices", "head_mask", "cu_seq_lens_q", "cu_seqlens")


class ContextParallel:
    """A module's forward with its attention over cp. Plain values: it pickles and deep-copies with the module.

    form, degree: how keys and values travel, and the Ulysses degree. interface: whether transformers looks the attention up by name.
    """

    def __init__(self, fqn: str, group: AxisGroup, form: str, degree: int, kernel: str, interface: bool) -> None:
        self.fqn, self.group, self.form, self.degree, self.kernel = fqn, group, form, degree, kernel
        self.interface = interface
        self.order = ""  # of the last batch; a layer that is computed again in a backward can't ask for it
        self.fired = 0

    def __call__(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        before = self.fired
        if self.interface:
            if module.config._attn_implementation != huggingface.NAME:
                raise ApplyError(
                    f"{self.fqn}: its config's attention function is {module.config._attn_implementation!r} by now, so it would attend to"
                    " this rank's tokens only.\n  Call set_attn_implementation() before apply_plan."
                )
            out = original_forward(module, *args, **kwargs)
        else:
            with _CallsToSdpa(self):
                out = original_forward(module, *args, **kwargs)
        if self.fired == before:
            where = "its config's attention function" if self.interface else "scaled_dot_product_attention"
            raise ApplyError(
                f"{self.fqn}: the forward never came to {where}, so it attended to this rank's tokens only.\n"
                "  It needs another inner wrapper, or, as inner_target, the child that does."
            )
        return out

    def install(self, module: nn.Module) -> Callable[[], None]:
        """Called once by apply_plan; returns what undo() calls."""
        return huggingface.install(module, self.attend) if self.interface else lambda: None

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Any,
        *,
        scaling: float | None = None,
        dropout: float = 0.0,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        sinks: Tensor | None = None,
        **others: Any,
    ) -> Tensor:
        """[B, H, local, D] in, [B, H, local, Dv] out; with the arguments of transformers' attention functions."""
        self.fired += 1
        if dropout:
            raise ApplyError(
                f"{self.fqn}: attention dropout {dropout} under context parallel: ranks would have to draw one mask together.\n"
                "  Set the config's attention dropout to 0 before the model is made."
            )
        unknown = [name for name in _UNKNOWN if others.get(name) is not None]
        if unknown:
            raise ApplyError(f"{self.fqn}: attention with {unknown[0]} isn't supported under context parallel.")
        if not isinstance(mask, Mask):
            found = "no mask" if mask is None else f"a {type(mask).__name__} {tuple(getattr(mask, 'shape', ()))}"
            raise ApplyError(
                f"{self.fqn}: got {found} as attention mask; under context parallel it is built from the batch that applied.shard_batch"
                " returned, by transformers' own mask functions."
            )
        parts = Parts(self.group, mask.order, mask.length, self.degree)
        return attention(
            query, key, value, mask, parts, scale=scaling, softcap=softcap, sinks=s_aux if sinks is None else sinks,
            gather=self.form == "all_gather", kernel=self.kernel,
        )  # fmt: skip

    def plain_mask(self, length: int, is_causal: bool) -> Mask:
        """The mask of a module that knows only whether it is causal. `length`: this rank's tokens."""
        share = current_share()
        if share is not None:
            self.order = share.order
            if share.several_documents or (share.documents is not None and not (is_causal and _ends_in_padding(share.documents))):
                raise ApplyError(
                    f"{self.fqn}: calls scaled_dot_product_attention without the batch's padding and documents, which only"
                    " transformers' mask functions pass on.\n  Give it whole rows of one document (a causal one may end in padding)."
                )
        if not self.order:
            raise ApplyError(f"{self.fqn}: ran outside its model's forward, so how the sequence is cut isn't known.")
        return Mask(causal if is_causal else bidirectional, self.order, length * self.group.ranks)


def _ends_in_padding(documents: Tensor) -> bool:
    return bool((documents[:, 1:] <= documents[:, :-1]).all())


class _CallsToSdpa(TorchFunctionMode):
    """Sends calls to torch's scaled_dot_product_attention, of this thread and inside the `with`, to `wrapper`."""

    def __init__(self, wrapper: ContextParallel) -> None:
        super().__init__()
        self.wrapper = wrapper

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        return self._attend(*args, **kwargs)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        mask = attn_mask
        if mask is None:
            mask = self.wrapper.plain_mask(query.shape[-2], is_causal)
        lead = query.shape[:-3]
        q, k, v = (x if x.ndim == 4 else x.reshape(-1, *x.shape[-3:]) for x in (query, key, value))
        out = self.wrapper.attend(q, k, v, mask, scaling=scale, dropout=dropout_p)
        return out if query.ndim == 4 else out.reshape(*lead, *out.shape[1:])


def _local_heads(module: nn.Module, tp: int) -> tuple[int, int] | None:
    """(query heads, key/value heads) of one tp rank, where the module's config says."""
    config = getattr(module, "config", None)
    heads = getattr(config, "num_attention_heads", None)
    groups = getattr(config, "num_key_value_heads", None) or heads
    if not isinstance(heads, int) or not isinstance(groups, int) or heads % tp:
        return None
    return heads // tp, max(groups // tp, 1)


def _check_dropout(fqn: str, module: nn.Module) -> None:
    for name in ("attention_dropout", "attn_dropout", "attn_pdrop"):
        value = getattr(module, name, None)
        value = value.p if isinstance(value, nn.Dropout) else value
        if isinstance(value, float) and value > 0:
            raise Refused(
                f"{fqn}: attention dropout is {value}; under context parallel it isn't supported.\n"
                "  Set it to 0 in the config before the model is made."
            )


def _degree(form: str, ranks: int, asked: int | None, fqn: str) -> int:
    if form == "ulysses":
        return ranks
    if form != "hybrid":
        return 1
    degree = 2 if asked is None else asked
    if not isinstance(degree, int) or isinstance(degree, bool) or degree < 1 or ranks % degree:
        divisors = [d for d in range(1, ranks + 1) if ranks % d == 0]
        raise Refused(f"{fqn}: ulysses_degree {degree!r} doesn't divide cp={ranks}. Degrees that work: {', '.join(map(str, divisors))}.")
    return degree


def wrap(
    form: str, style: str, kernel: str, ulysses_degree: int | None, *, target_module: nn.Module, model: nn.Module, fqn: str,
    cp_mesh: DeviceMesh | None, tp_mesh: DeviceMesh | None,
) -> ContextParallel:  # fmt: skip
    """What the factory of one form ("all_gather", "ring", "ulysses", "hybrid") and style ("hf", "qkv") returns for a module."""
    if cp_mesh is None:
        raise PlanError(f"{fqn}: context-parallel attention needs an active cp axis; write `when: cp` in its entry.")
    if kernel not in KERNELS:
        raise PlanError(f"{fqn}: kernel {kernel!r}; known: {', '.join(KERNELS)}.")
    _check_dropout(fqn, target_module)
    group = axis_group(cp_mesh)
    degree = _degree(form, group.ranks, ulysses_degree, fqn)
    heads = _local_heads(target_module, 1 if tp_mesh is None else tp_mesh.size())
    if degree > 1 and heads is not None:
        check_heads(*heads, degree, f"{fqn}: ")
    interface = style == "hf" and huggingface.takes_registered_attention(target_module, model)
    return ContextParallel(fqn, group, form, degree, kernel, interface)
