"""What the first training forward shows of a model: whether its loss counts by the global number of targets, and what it draws."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..errors import ApplyError

__all__ = ["FirstForward", "watchable"]

_DRAWS = {
    torch.nn.functional.dropout, torch.nn.functional.alpha_dropout, torch.nn.functional.feature_alpha_dropout,
    torch.nn.functional.dropout1d, torch.nn.functional.dropout2d, torch.nn.functional.dropout3d,
    torch.dropout, torch.dropout_, torch.bernoulli, Tensor.bernoulli, Tensor.bernoulli_, torch.rand_like, torch.randn_like,
    Tensor.uniform_, Tensor.normal_, Tensor.exponential_,
}  # fmt: skip


def watchable(model: nn.Module) -> bool:
    """Whether no part of the model is compiled: a mode would be traced into it."""
    return not any(
        getattr(m, "_compiled_call_impl", None) is not None or hasattr(m, "_orig_mod") or "forward" in m.__dict__
        for m in model.modules()
    )


class FirstForward(TorchFunctionMode):
    """Watches one forward. count: the num_items_in_batch that it was given, if its loss has to be divided by it."""

    def __init__(self, count: Any) -> None:
        super().__init__()
        self.count = count if isinstance(count, Tensor) else None
        self.counted = False
        self.drew = ""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.count is not None and not self.counted:
            self.counted = any(value is self.count for value in (*args, *kwargs.values()))
        if not self.drew and _draws(func, args, kwargs):
            self.drew = getattr(func, "__name__", str(func))
        return func(*args, **kwargs)

    def check(self, module: nn.Module, loss: Any, shares: tuple[str, ...], streams: bool) -> None:
        """Raises ApplyError for a loss that is a mean of its own, and for random numbers that no stream was prepared for."""
        if isinstance(loss, Tensor) and self.count is not None and shares and not self.counted:
            raise ApplyError(
                f"{type(module).__name__}'s loss ignores num_items_in_batch: it would be the mean of this rank's own tokens, and the"
                f" gradients, summed over {' x '.join(shares)}, too large.\n"
                "  Divide the sum over shift_labels by num_items_in_batch in its forward, or take the logits and do so in your own loss."
            )
        if self.drew and not streams:
            raise ApplyError(
                f"{type(module).__name__} draws random numbers in training ({self.drew}), and no module of it has a dropout above 0: which"
                " ranks draw the same ones is decided as the plan is applied.\n"
                "  Keep the rate as a float attribute of a module (self.dropout = 0.1) before apply_plan, or say so in a family:"
                " facts={'draws': True}."
            )


def _draws(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if func is torch.nn.functional.scaled_dot_product_attention:
        rate = kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)
        return bool(rate)
    if func not in _DRAWS:
        return False
    if "dropout" not in getattr(func, "__name__", ""):
        return True
    rate = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
    train = kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 else True))
    return bool(rate) and bool(train)
