"""The auxiliary loss of routers: exact within a dp slice, the mean over slices across dp.

Load balancing multiplies two statistics over all tokens, so it is no sum over ranks of anything local. transformers records the logits
that each router returns, and computes the loss from them behind the base model; that code must see the logits of the whole slice, in
the order of its tokens:

    tp, tokens cut          all-gather forward   shard backward            every tp rank computes the same loss
    tp, tokens whole, experts cut   identity     keep-first backward       the routers' own gradients are summed over tp
    cp                      all-gather forward   reduce-scatter backward   each cp rank's loss is its share

Gradients are summed over cp and dp, and so are the ranks' losses; each rank therefore counts its auxiliary loss with 1 / (cp * dp) of
the coefficient. The number that the model returns as aux_loss is the whole one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from ..collectives.functional import AxisGroup, convert
from ..errors import ApplyError
from ..placement import Layout
from .generated import original_forward
from .share import current_share, joined

__all__ = ["AuxLoss", "RouterLogits"]

COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef")  # where models keep what they multiply their auxiliary loss by


class RouterLogits:
    """Runs around the forward of the base model, and makes the router logits that it returns whole.

    inner    what ran there before, or None for the module's own forward
    tokens   how the tokens that routers see lie on the axes; None where routers differ
    partial  whether the routers' gradients are partial over tp although their tokens are whole
    """

    def __init__(
        self, inner: Callable[..., Any] | None, groups: Mapping[str, AxisGroup], tokens: Layout | None, partial: bool
    ) -> None:
        self.inner, self.groups, self.tokens, self.partial = inner, dict(groups), tokens, partial

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = original_forward(module, *args, **kwargs) if self.inner is None else self.inner(module, args, kwargs)
        logits = out.get("router_logits") if isinstance(out, dict) else None
        if isinstance(logits, tuple) and logits:
            out["router_logits"] = self._whole(logits, out.get("last_hidden_state"))
        return out

    def _whole(self, logits: tuple[Tensor, ...], hidden: Any) -> tuple[Tensor, ...]:
        """[tokens of this rank, experts] of each layer -> [tokens of the slice, experts]; one collective an axis for all layers."""
        share = current_share()
        if self.tokens is None or not isinstance(hidden, Tensor) or (share is not None and share.several_documents):
            raise ApplyError(
                "router logits can't be made whole: "
                + ("routers of this plan see differently cut tokens." if self.tokens is None else
                   "the base model returns no last_hidden_state." if not isinstance(hidden, Tensor) else
                   "a row holds several documents under cp, and the auxiliary loss would weigh tokens by their document.")
                + "\n  Run with output_router_logits=False, or change that."
            )  # fmt: skip
        rows, tokens = hidden.shape[:2]
        widths = [x.shape[-1] for x in logits]
        x = torch.cat([one.reshape(rows, -1, width) for one, width in zip(logits, widths, strict=True)], -1)
        tp, cp = self.groups.get("tp"), self.groups.get("cp")
        if tp is not None and isinstance(self.tokens.get("tp"), Shard):
            x = convert(x, tp, "all_gather", "shard", src_dim=1, size=tokens)
        elif tp is not None and self.partial:
            x = convert(x, tp, "identity", "keep_first")
        if cp is not None:
            x = convert(x, cp, "all_gather", "reduce_scatter", src_dim=1)
            x = joined(x.chunk(cp.ranks, 1), 1, share.order if share is not None else "contiguous")
        return tuple(one.reshape(-1, one.shape[-1]) for one in x.split(widths, -1))


class AuxLoss:
    """Scales the coefficient of a model's auxiliary loss while its forward runs. `shares`: cp * dp."""

    def __init__(self, shares: int) -> None:
        self.shares = shares

    @contextmanager
    def shared(self, module: nn.Module, summed: bool) -> Iterator[None]:
        """`summed`: whether the loss of this forward is a share, which is to be summed over cp and dp."""
        name = next((name for name in COEFFICIENTS if name in module.__dict__), None)
        if self.shares == 1 or not summed or name is None:
            yield
            return
        whole = module.__dict__[name]
        module.__dict__[name] = whole / self.shares
        try:
            yield
        finally:
            module.__dict__[name] = whole

    def check(self, module: nn.Module, out: Any, summed: bool) -> None:
        """ApplyError where the model added an auxiliary loss whose coefficient isn't known."""
        added = summed and self.shares > 1 and isinstance(out, dict) and isinstance(out.get("aux_loss"), Tensor)
        if added and not any(name in module.__dict__ for name in COEFFICIENTS):
            raise ApplyError(
                f"{type(module).__name__} adds an auxiliary loss, and none of {', '.join(COEFFICIENTS)} is an attribute of it: summed over"
                f" {self.shares} ranks it would count too often.\n  Run with output_router_logits=False."
            )
