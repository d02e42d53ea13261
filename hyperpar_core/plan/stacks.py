"""Experts that are modules of a list, one each: a plan names them as the model does, a run holds each of their parameters once, stacked.

`experts.0.w1.weight`, `experts.1.w1.weight`, ... of a block are held as `experts.w1_weight` [experts, *shape], cut over ep.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from ..errors import Refused
from .alike import difference
from .contract import Contract
from .sharding_plan import ShardingPlan

__all__ = ["as_held", "check_stacks", "find_stacks", "member", "stack_name"]


def member(stacked: Mapping[str, int], name: str) -> tuple[str, int, str] | None:
    """(the list, the expert's number, the name in the expert) of a parameter of a stacked list; None for any other."""
    for path in stacked:
        number, _, rest = name.removeprefix(f"{path}.").partition(".")
        if name.startswith(f"{path}.") and number.isdecimal():
            return path, int(number), rest
    return None


def stack_name(path: str, rest: str) -> str:
    """The name that `rest` of all experts of the list `path` is held under."""
    return f"{path}.{rest.replace('.', '_')}"


def find_stacks(fqn: str, block: nn.Module, experts: Iterable[str], ep: int) -> dict[str, int]:
    """{list of expert modules in the block `fqn`: their number}. `experts`: the experts' parameters, by name in the block.

    Refused where ep doesn't divide the number, or where the parameters of a list's modules aren't alike.
    """
    found: dict[str, int] = {}
    for name in experts:
        parts = name.split(".")
        for i in range(1, len(parts)):
            path = ".".join(parts[:i])
            if path not in found and isinstance(block.get_submodule(path), nn.ModuleList):
                found[path] = len(block.get_submodule(path))  # type: ignore[arg-type]
                break
    for path, count in found.items():
        if count % ep:
            degrees = [d for d in range(2, count + 1) if count % d == 0]
            raise Refused(
                f"{fqn}.{path}: {count} experts can't be split over ep={ep}.\n"
                f"  Degrees of ep that divide them: {', '.join(map(str, degrees)) or 'none'}; ep must also divide dp x cp x tp."
            )
        _require_alike(f"{fqn}.{path}", list(block.get_submodule(path).children()))
    return found


def _require_alike(fqn: str, experts: list[nn.Module]) -> None:
    first = _facts(experts[0])
    for i, expert in enumerate(experts):
        if _facts(expert) != first:
            different = [f"{n} {_facts(expert).get(n)}, expert 0 has {v}" for n, v in first.items() if _facts(expert).get(n) != v]
            raise Refused(
                f"{fqn}.{i} isn't like {fqn}.0, so they can't be stacked: {', '.join(different[:2]) or 'it has more parameters'}."
            )
    if any(True for _ in experts[0].buffers()):
        raise Refused(f"{fqn}: its experts have buffers, which aren't stacked.")
    names = [stack_name("", name) for name in first]
    if len(set(names)) < len(names):
        raise Refused(f"{fqn}: two parameters of an expert have one name once its dots are underlines ({', '.join(names)}).")


def check_stacks(model: nn.Module, boundaries: Iterable[Contract], tied: Iterable[Sequence[str]]) -> None:
    """Refused where an expert of a stacked list computes otherwise than the first, or has a parameter that anything else has too."""
    stacked = {f"{c.fqn}.{path}" if c.fqn else path: count for c in boundaries for path, count in c.stacked.items()}
    if not stacked:
        return
    for group in tied:
        mine = next((name for name in group if member(stacked, name)), None)
        if mine is not None:
            other = next(name for name in group if name != mine)
            raise Refused(
                f"{mine} and {other} are one parameter, and each expert of a list over ep is held by other ranks, in a stack.\n"
                "  Give each its own parameter, or leave ep at 1."
            )
    for path in stacked:
        first, *others = model.get_submodule(path).children()
        for i, expert in enumerate(others, 1):
            what = difference(first, expert)
            if what is not None:
                raise Refused(f"{path}.{i} isn't like {path}.0, so they can't be stacked: {what}.")


def _facts(expert: nn.Module) -> dict[str, Any]:
    return {
        "class": type(expert).__qualname__,
        **{n: (tuple(p.shape), str(p.dtype).removeprefix("torch."), p.requires_grad) for n, p in expert.named_parameters()},
    }


def as_held(plan: ShardingPlan) -> ShardingPlan:
    """The plan in the names that a run has: stacked experts under the stack's."""
    if not any(contract.stacked for contract in plan.boundaries):
        return plan
    shapes = dict(plan.parameters)
    boundaries = []
    for contract in plan.boundaries:
        prefix = f"{contract.fqn}." if contract.fqn else ""
        for name in contract.params:
            found = member(contract.stacked, name)
            if found:
                shape = shapes.pop(prefix + name)
                shapes[prefix + stack_name(found[0], found[2])] = (contract.stacked[found[0]], *shape)
        boundaries.append(_held(contract))
    return replace(plan, boundaries=tuple(boundaries), parameters=shapes)


def _held(contract: Contract) -> Contract:
    if not contract.stacked:
        return contract

    def renamed(values: Mapping[str, Any]) -> dict[str, Any]:
        made = {}
        for name, value in values.items():
            found = member(contract.stacked, name)
            made[stack_name(found[0], found[2]) if found else name] = value
        return made

    fields = {field: renamed(getattr(contract, field)) for field in ("params", "param_use", "param_grad")}
    return replace(contract, **fields)  # type: ignore[arg-type]
