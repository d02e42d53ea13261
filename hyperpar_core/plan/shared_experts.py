"""Shared experts: tensor-parallel boundaries inside a block of experts whose tokens tp ranks share."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from torch.distributed.tensor import Shard

from ..errors import OverrideError, Refused
from .consistency import layout_text
from .contract import Contract
from .templates import PlanContext, contract_from, projections

__all__ = ["block_of", "check_shared_experts", "with_shared_experts"]

_BY_PARAMETER = ("params", "param_use", "special_handlers", "sections")


def with_shared_experts(
    ctx: PlanContext, block: Contract, module: nn.Module, owned: Mapping[str, nn.Parameter]
) -> dict[str, Contract]:
    """{module: contract} of a block of experts and of the shared experts in it, in the model's order.

    Where tp cuts the block's tokens, a shared expert is an MLP of its own: it gathers them, computes with its part of the intermediate
    features and scatters the summands. One that can't be cut, that holds more than projections or takes more than tokens (which would
    have to be gathered with them), stays whole in the block.
    """
    if not any(isinstance(layout.get("tp"), Shard) for layout in block.in_dst.values()):
        return {block.fqn: block}
    roles = projections(ctx, block.fqn, module, owned)
    nested: dict[str, Contract] = {}
    moved: set[str] = set()
    for path in dict.fromkeys(name.rpartition(".")[0].rpartition(".")[0] for name in roles):
        inner = [name for name in owned if name.startswith(f"{path}.")]
        if not path or {roles.get(name) for name in inner} != {"colwise", "rowwise"}:
            continue
        if len(inspect.signature(type(module.get_submodule(path)).forward).parameters) != 2:
            continue
        fqn = f"{block.fqn}.{path}"
        context = replace(ctx, roles={f"{block.fqn}.{name}": roles[name] for name in inner})
        parameters = {name[len(path) + 1 :]: owned[name] for name in inner}
        try:
            nested[fqn] = contract_from("shared_expert", context, fqn, module.get_submodule(path), parameters)
        except Refused:  # tp doesn't divide its features
            continue
        moved |= set(inner)
    left: dict[str, Any] = {
        field: {name: value for name, value in getattr(block, field).items() if name not in moved} for field in _BY_PARAMETER
    }
    return {block.fqn: replace(block, **left), **nested}


def block_of(contract: Contract, boundaries: Sequence[Contract]) -> Contract | None:
    """The innermost boundary around another one."""
    around = [c for c in boundaries if c is not contract and contract.fqn.startswith(f"{c.fqn}.")]
    return max(around, key=lambda c: len(c.fqn), default=None)


def check_shared_experts(boundaries: Sequence[Contract]) -> None:
    """A shared expert takes and yields tokens as its block has them inside."""
    for contract in (c for c in boundaries if c.template == "shared_expert"):
        block = block_of(contract, boundaries)
        if block is None:
            raise OverrideError(f"{contract.fqn}: a shared_expert stands in a block of experts, and no boundary is around it; use mlp.")
        for field, mine, name, inside in (
            ("in_src", contract.in_src, "in_dst", block.in_dst),
            ("out_dst", contract.out_dst, "out_src", block.out_src),
        ):
            have, need = (layout_text(next(iter(layouts.values()), {})) for layouts in (mine, inside))
            if have != need:
                raise OverrideError(
                    f"{contract.fqn}: {field} is {have}, and in {block.fqn}, around it, tokens are {need} ({name}).\n"
                    "  Declare both alike."
                )
