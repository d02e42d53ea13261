"""Rows: what a block that flattens its tokens hands to a boundary inside it.

Boundaries cut and gather a sequence along dim 1. A block may call a shared expert with [batch * sequence, features]; between the two,
rows become [batch, sequence, features] again, so that uneven sequences are cut where the rest of the model cuts them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..errors import ApplyError
from .generated import original_forward
from .regions import ModelState, Region

__all__ = ["Block", "Rows"]


@dataclass(frozen=True)
class Block:
    """The compute of a block with boundaries inside: it notes the tokens that the block has on this rank.

    name, position: of the input that holds them. compute: None for the block's own forward.
    """

    state: ModelState
    name: str
    position: int
    compute: Callable[..., Any] | None

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        x = kwargs[self.name] if self.name in kwargs else args[self.position]
        self.state.tokens = tuple(x.shape[:-1]) if x.ndim > 2 else (1, len(x))
        return (original_forward if self.compute is None else self.compute)(module, *args, **kwargs)


@dataclass(frozen=True)
class Rows:
    """Runs around a boundary inside such a block. Its input's rows are the block's tokens, all of them, in any order."""

    state: ModelState
    name: str
    position: int
    region: Region

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        named = self.name in kwargs
        x = kwargs[self.name] if named else args[self.position]
        if x.ndim != 2:
            return self.region(module, args, kwargs)
        tokens = self.state.tokens
        if len(x) != prod(tokens):
            raise ApplyError(
                f"{self.region.fqn}: got {len(x)} rows, and the block around it has {' x '.join(map(str, tokens))} tokens on this rank."
            )
        shaped = x.unflatten(0, tokens)
        if named:
            kwargs = {**kwargs, self.name: shaped}
        else:
            args = (*args[: self.position], shaped, *args[self.position + 1 :])
        return pytree.tree_map_only(Tensor, lambda y: y.flatten(0, len(tokens) - 1), self.region(module, args, kwargs))
