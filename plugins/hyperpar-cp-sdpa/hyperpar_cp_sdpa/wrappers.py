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
from hyperpar_core.errors import ApplyError

from . import huggingface
from .attention import attention
from .exchange import Parts, check_heads
from .masks import Mask, bidirectional, causal
from .refusals import ulysses_degree

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
        check_heads(query.shape[1], key.shape[1], self.degree, f"{self.fqn}: ")
        parts = Parts(self.group, mask.order, mask.length, self.degree)
        return self.compute(query, key, value, mask, parts, scaling, softcap or None, s_aux if sinks is None else sinks)

    def compute(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, parts: Parts, scale: float | None, softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """The attention itself, of arguments that have been checked."""
        return attention(
            q, k, v, mask, parts, scale=scale, softcap=softcap, sinks=sinks, gather=self.form == "all_gather", kernel=self.kernel
        )

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


def wrap(
    form: str, style: str, kernel: str, degree: int | None, *, target_module: nn.Module, model: nn.Module, fqn: str,
    cp_mesh: DeviceMesh | None, kind: type[ContextParallel] = ContextParallel,
) -> ContextParallel:  # fmt: skip
    """What the factory of one form ("all_gather", "ring", "ulysses", "hybrid") and style ("hf", "qkv") returns for a module.

    degree: the hybrid's option. What can't be wrapped was refused when the plan was made, by `refusals.refuse`.
    """
    assert cp_mesh is not None, "needs_axis is cp"
    group = axis_group(cp_mesh)
    interface = style == "hf" and huggingface.takes_registered_attention(target_module, model)
    return kind(fqn, group, form, ulysses_degree(form, group.ranks, degree, fqn), kernel, interface)
