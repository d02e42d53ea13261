"""Attention biases that depend on the head's number (ALiBi): a rank that computes some heads takes those heads' biases.

B: rows, H: heads, q and k: lengths. The model makes the bias for all heads: [H, 1, k], [B*H, 1, k], or as part of a mask
[B, H, q, k].
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from hyperpar_core import original_forward
from hyperpar_core.descriptors import LocalComputeFactory
from hyperpar_core.errors import Refused

__all__ = ["LOCAL_COMPUTES", "own_head_biases"]

_COUNTS = ("num_heads", "n_heads")


@dataclass(frozen=True)
class _OwnHeads:
    """The module's own forward, with this rank's heads of the biases among its arguments."""

    places: tuple[tuple[str, int], ...]  # (argument, its position)
    heads: int
    ranks: int
    rank: int

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        positional = list(args)
        for name, position in self.places:
            if name in kwargs:
                kwargs[name] = self._own(kwargs[name])
            elif position < len(positional):
                positional[position] = self._own(positional[position])
        return original_forward(module, *positional, **kwargs)

    def _own(self, bias: Any) -> Any:
        """Rows of [.., H, ..] that belong to this rank's heads; what has no head dim passes."""
        if not isinstance(bias, Tensor) or (bias.ndim == 4 and bias.shape[1] != self.heads):
            return bias
        by_head = bias if bias.ndim == 4 else bias.unflatten(0, (-1, self.heads))
        count = self.heads // self.ranks
        own = by_head.narrow(1, self.rank * count, count)
        return own if bias.ndim == 4 else own.flatten(0, 1)


def own_head_biases(*, module: nn.Module, tp_mesh: DeviceMesh, fqn: str = "", arguments: list[str]) -> Callable[..., Any]:
    """The forward of an attention module whose `arguments` hold a bias for every head: [H, 1, k], [B*H, 1, k] or
    [B, H, q, k]. A mask [B, 1, q, k] passes as it is. Called on every rank of tp; it doesn't communicate.

    Raises Refused where the module doesn't count its heads or has no such argument.
    """
    heads = next((getattr(module, name) for name in _COUNTS if isinstance(getattr(module, name, None), int)), None)
    names = list(inspect.signature(type(module).forward).parameters)[1:]
    missing = [name for name in arguments if name not in names]
    if heads is None or missing:
        what = f"no argument {missing[0]!r}" if missing else f"none of the attributes {', '.join(_COUNTS)}"
        raise Refused(f"{fqn}: own_head_biases found {what} on {type(module).__name__}.")
    places = tuple((name, names.index(name)) for name in arguments)
    return _OwnHeads(places, heads, tp_mesh.size(), tp_mesh.get_local_rank())


LOCAL_COMPUTES = (
    LocalComputeFactory(
        "own_head_biases", own_head_biases, expects=(), needs_axis="tp", summary="attention biases of this rank's heads"
    ),
)
