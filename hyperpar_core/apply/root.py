"""The runtime of the whole model: what has to hold before its boundaries run."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from ..errors import ApplyError
from .cut_input import CutInput
from .generated import original_forward, plain_name
from .regions import ModelState
from .router_logits import AuxLoss
from .share import activate

__all__ = ["Root", "refuse_resize"]


class Root:
    """Runs in front of the model's own forward. `region` is its boundary, where the model itself is one.

    shares: the axes over which each rank's loss is only its share of the whole (gradients are summed over them).
    aux: counts this rank's share of an auxiliary loss.
    cut: reads what this rank holds of sequences that are cut over cp.
    """

    def __init__(
        self,
        model: nn.Module,
        state: ModelState,
        sequence_parallel: bool,
        shares: tuple[str, ...],
        region: Callable[..., Any] | None,
        aux: AuxLoss,
        cut: CutInput | None = None,
    ) -> None:
        self.state, self.sequence_parallel, self.shares, self.region = state, sequence_parallel, shares, region
        self.cut, self.aux = cut, aux
        self.known = frozenset(name for name, _ in model.named_parameters(remove_duplicate=False))
        names = list(inspect.signature(type(model).forward).parameters)
        self.labels_position = names.index("labels") - 1 if "labels" in names else None
        self.checked = False

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.checked:
            self._check(module)
        position = self.labels_position
        labels = kwargs.get("labels")
        if labels is None and position is not None and position < len(args):
            labels = args[position]
        if self.sequence_parallel and _asked(module, kwargs, "output_hidden_states"):
            raise ApplyError(
                "output_hidden_states under sequence parallel: each rank would get its own part of the sequence.\n"
                "  Plan with sequence_parallel=False, or take the last hidden states, which are whole."
            )
        if labels is not None and self.shares and kwargs.get("num_items_in_batch") is None:
            raise ApplyError(
                f"labels without num_items_in_batch, and the batch is split over {' x '.join(self.shares)}: the loss would be this rank's"
                " mean, and the gradients' sum too large.\n  Pass the batch through applied.shard_batch(batch)."
            )
        self.state.labels = labels is not None
        if self.cut is None:
            return self._run(module, args, kwargs)
        kwargs, share = self.cut.share(module, args, kwargs)
        with activate(share):
            return self._run(module, args, kwargs)

    def _run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        summed = self.state.labels and kwargs.get("num_items_in_batch") is not None
        with self.aux.shared(module, summed):
            run = self.region
            out = original_forward(module, *args, **kwargs) if run is None else run(module, args, kwargs)
        self.aux.check(module, out, summed)
        return out

    def _check(self, module: nn.Module) -> None:
        unknown = [n for n, _ in module.named_parameters(remove_duplicate=False) if plain_name(n) not in self.known]
        if unknown:
            raise ApplyError(
                f"{len(unknown)} parameters aren't in the plan: {', '.join(unknown[:3])}{', ...' if len(unknown) > 3 else ''}.\n"
                "  Adapters and other new parameters go on before build_plan, so that they are planned too (applied.undo() first)."
            )
        self.checked = True


def refuse_resize(*args: Any, **kwargs: Any) -> Any:
    """Stands in for `resize_token_embeddings` while a plan is on the model."""
    raise ApplyError(
        "resize_token_embeddings on a planned model: the plan knows the old vocab.\n"
        "  Call applied.undo(), resize, and plan anew; or resize before build_plan."
    )


def _asked(module: nn.Module, kwargs: dict[str, Any], flag: str) -> bool:
    value = kwargs.get(flag)
    return bool(getattr(getattr(module, "config", None), flag, False) if value is None else value)
