"""What a planned model refuses, because it would do something else than it says, with the call to use instead."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ..errors import ApplyError

__all__ = ["refuse_ddp", "refuse_meta", "refuse_resize", "refuse_save", "refuse_trainer"]


def refuse_resize(*args: Any, **kwargs: Any) -> Any:
    """Stands in for `resize_token_embeddings` while a plan is on the model."""
    raise ApplyError(
        "resize_token_embeddings on a planned model: the plan knows the old vocab.\n"
        "  Call applied.undo(), resize, and plan anew; or resize before build_plan."
    )


def refuse_save(*args: Any, **kwargs: Any) -> Any:
    """Stands in for `save_pretrained` while a plan is on the model."""
    raise ApplyError(
        "save_pretrained on a planned model: this rank holds parts of the parameters.\n"
        "  Call applied.save_pretrained(folder) on every rank: whole tensors, a folder that plain transformers loads."
    )


def refuse_meta(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raises ApplyError where a batch meets parameters that are still on the meta device."""
    empty = [name for name, parameter in model.named_parameters() if parameter.device.type == "meta"]
    if empty and any(isinstance(v, Tensor) and v.device.type != "meta" for v in (*args, *kwargs.values())):
        raise ApplyError(
            f"a forward of a model whose weights aren't there yet: {len(empty)} parameters are on the meta device (first: {empty[0]}).\n"
            "  Call applied.load_pretrained(folder) on every rank first."
        )


def refuse_trainer() -> None:
    """Raises ApplyError where transformers' Trainer is among the callers."""
    frame: Any = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "transformers.trainer":
            raise ApplyError(
                "transformers' Trainer on a planned model: it hands every rank other samples, counts tokens by rank and sums gradients"
                " itself.\n  Train with a loop of your own: applied.shard_batch(batch), backward, applied.clip_grad_norm_, step"
                " (docs/examples/train.py)."
            )
        frame = frame.f_back


def refuse_ddp() -> None:
    """Raises ApplyError as DistributedDataParallel is put around a model whose parameters are DTensors."""
    refuse_trainer()
    raise ApplyError(
        "DistributedDataParallel around a planned model: its parameters are parts, and the core sums their gradients over dp already.\n"
        "  Leave DDP out, or call applied.fully_shard(). On a mesh of dp alone, apply_plan(..., data_parallel='external') leaves dp to DDP."
    )
