"""What has to hold for the input of a model whose sequences are cut over cp."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn

from ..collectives.functional import AxisGroup
from ..errors import ApplyError
from .share import Share, multiple

__all__ = ["CutInput"]

_CACHES = ("cache", "past_key_values", "past_key_value", "layer_past")


class CutInput:
    """Reads the share that a forward was given, and refuses what would go wrong in silence. Raises ApplyError."""

    def __init__(self, model: nn.Module, group: AxisGroup, order: str) -> None:
        parameters = list(inspect.signature(type(model).forward).parameters.values())[1:]
        self.names = tuple(p.name for p in parameters)
        self.keywords = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self.group, self.order = group, order
        if "position_ids" not in self.names:
            raise ApplyError(
                f"{type(model).__name__}.forward takes no position_ids, so under cp={group.ranks} each rank would count its tokens from 0."
            )

    def share(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[dict[str, Any], Share]:
        """(the keyword arguments to go on with, what this rank holds)."""
        given = {**dict(zip(self.names, args, strict=False)), **kwargs}
        first = given.get("input_ids") if given.get("input_ids") is not None else given.get("inputs_embeds")
        if not isinstance(first, Tensor) or first.ndim < 2:
            raise ApplyError(self._unsharded("it has no input_ids or inputs_embeds [batch, local]"))
        self._refuse_caches(module, given)
        local = first.shape[1]
        length = local * self.group.ranks
        if length % multiple(self.order, self.group.ranks):
            raise ApplyError(self._unsharded(f"{local} tokens on each of {self.group.ranks} ranks can't be in order {self.order}"))
        positions, marks = given.get("position_ids"), given.get("attention_mask")
        if not isinstance(positions, Tensor) or positions.shape[-1] != local:
            found = "no position_ids" if positions is None else f"position_ids {tuple(positions.shape)}"
            raise ApplyError(self._unsharded(f"it has {found} for {local} tokens; each rank would count from 0"))
        if "attention_mask" in self.names and (not isinstance(marks, Tensor) or tuple(marks.shape) != (first.shape[0], length)):
            found = "no attention_mask" if marks is None else f"an attention_mask {tuple(getattr(marks, 'shape', ()))}"
            raise ApplyError(
                self._unsharded(f"it has {found}, where {local} tokens on each of {self.group.ranks} ranks need [batch, {length}]")
            )
        known = "use_cache" in self.names or (self.keywords and hasattr(getattr(module, "config", None), "use_cache"))
        if known and "use_cache" not in self.names[: len(args)]:  # the config's default is True
            kwargs = {**kwargs, "use_cache": False}
        return kwargs, Share(self.group, self.order, length, marks if isinstance(marks, Tensor) else None)

    def _refuse_caches(self, module: nn.Module, given: dict[str, Any]) -> None:
        cache = next((name for name in _CACHES if given.get(name) is not None), None)
        if given.get("use_cache") or cache:
            raise ApplyError(
                f"{'use_cache=True' if cache is None else cache} under context parallel: a cache holds whole sequences, and cp cuts them.\n"
                "  generate() runs on a model without cp: applied.undo(), or a saved folder."
            )
        asked = given.get("output_attentions")
        if asked or (asked is None and getattr(getattr(module, "config", None), "output_attentions", False)):
            raise ApplyError("output_attentions under context parallel: no rank ever holds the weights of a whole row.")
        keep = given.get("logits_to_keep")
        if isinstance(keep, Tensor) or keep:
            raise ApplyError(
                "logits_to_keep under context parallel: the last tokens of the sequence are on other ranks than the last of a part.\n"
                "  Leave it out, and take what you need of applied.unshard(logits)."
            )

    def _unsharded(self, what: str) -> str:
        return (
            f"this batch wasn't cut for cp={self.group.ranks} ({self.order}): {what}.\n"
            "  Pass it through applied.shard_batch(batch)."
        )
