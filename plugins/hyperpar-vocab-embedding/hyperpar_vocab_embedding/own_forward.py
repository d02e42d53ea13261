"""Embedding classes with a forward of their own, such as `super().forward(ids) * scale`.

Their forward runs as it is, with its one lookup replaced. What it yields is summed over tp, so whatever it does to the
rows must commute with a sum: it may scale them, nothing else. That is checked once, on two traced tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hyperpar_core.errors import Refused

__all__ = ["InterceptLookup", "check_only_scales"]

_EMBEDDING = inspect.signature(F.embedding)
_KEEPS = ("mul", "mul_", "div", "div_", "_to_copy", "alias", "clone", "detach", "view", "_unsafe_view")


class InterceptLookup(TorchFunctionMode):
    """While active in this thread, F.embedding is `replace(ids, weight, padding_idx)`; `count` says how often."""

    def __init__(self, replace: Callable[[Tensor, Tensor, int | None], Tensor]) -> None:
        self.replace, self.count = replace, 0

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not F.embedding:
            return func(*args, **(kwargs or {}))
        self.count += 1
        call = _EMBEDDING.bind(*args, **(kwargs or {})).arguments
        return self.replace(call["input"], call["weight"], call.get("padding_idx"))


class _OnlyScales(TorchDispatchMode):
    """Follows the looked-up rows through every operator, and raises at the first that could do more than scale them."""

    def __init__(self, rows: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.followed = [rows]

    def follows(self, value: object) -> bool:
        return any(value is tensor for tensor in self.followed)

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        hits = [i for i, value in enumerate(tree_leaves((args, kwargs or {}))) if self.follows(value)]
        name = func._schema.name.removeprefix("aten::")
        keeps = (hits == [0] and name in _KEEPS) or (hits == [1] and name == "mul")
        if hits and not keeps:
            raise _NotLinear(name)
        out = func(*args, **(kwargs or {}))
        if hits:
            self.followed.append(out)
        return out


class _NotLinear(Exception):
    pass


def check_only_scales(module: nn.Embedding, fqn: str) -> None:
    """Raises Refused unless `module`'s forward is one lookup in its weight whose rows are scaled at most.

    Runs the forward in training and evaluation mode on two tokens, with zeros in place of the rows: nothing is computed
    with the weight, which may be a DTensor or on the meta device.
    """
    kind = type(module).__name__
    rest = [name for name, _ in module.named_parameters() if name != "weight"]
    if rest:
        raise _refused(fqn, f"{kind} has parameters besides its table ({', '.join(rest[:3])})")
    modes = {child: child.training for child in module.modules()}
    try:
        for training in (True, False):
            module.train(training)
            _trace(module, fqn, kind)
    finally:
        for child, mode in modes.items():
            child.training = mode


def _trace(module: nn.Embedding, fqn: str, kind: str) -> None:
    weight = module.weight
    ids = torch.zeros(1, 2, dtype=torch.long, device=weight.device)
    rows = torch.zeros(1, 2, weight.shape[-1], dtype=weight.dtype, device=weight.device)
    tables: list[object] = []
    tracer = _OnlyScales(rows)

    def replace(ids: Tensor, table: Tensor, padding_idx: int | None) -> Tensor:
        tables.append(table)
        return rows

    try:
        with torch.no_grad(), tracer, InterceptLookup(replace):
            out = type(module).forward(module, ids)  # the class's own: no plan stands in front of it yet
    except _NotLinear as error:
        raise _refused(fqn, f"{kind} applies '{error}' to the looked-up rows") from None
    except Exception as error:
        raise _refused(fqn, f"the forward of {kind} can't be traced ({type(error).__name__}: {error})") from error
    if len(tables) != 1 or tables[0] is not weight:
        raise _refused(fqn, f"{kind} doesn't look up its weight by exactly one F.embedding")
    if not tracer.follows(out):
        raise _refused(fqn, f"{kind} returns something else than its looked-up rows")


def _refused(fqn: str, cause: str) -> Refused:
    return Refused(
        f"{fqn}: {cause}.\n"
        "  Its output is summed over tp; only one lookup, whose rows are scaled at most, commutes with a sum.\n"
        "  Keep this embedding's weight replicated over tp (local_compute_fn: none)."
    )
