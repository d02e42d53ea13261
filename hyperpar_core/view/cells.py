"""The words for one boundary: what it holds, how its tensors lie before and after, what runs inside."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.distributed.tensor import Partial, Shard

from ..placement import Layout, Placement, format_placement, short
from ..plan.contract import Contract, callable_name
from ..plan.sharding_plan import ShardingPlan

__all__ = [
    "held_text", "injection_name", "inside_text", "layout_text", "parameters_text", "placement_text", "sides_text",
]  # fmt: skip


def parameters_text(plan: ShardingPlan, contract: Contract) -> str:
    """`q_proj k_proj S(0), o_proj S(1), q_norm R grad P`: parameters that are held alike together."""
    alike: dict[str, list[str]] = {}
    for name, layout in contract.params.items():
        names = alike.setdefault(held_text(plan, contract, name, layout), [])
        owner, _, leaf = name.rpartition(".")
        if leaf == "bias" and owner and names and names[-1] == owner:
            names[-1] = f"{owner}+bias"
        else:
            names.append(name.removesuffix(".weight"))
    return ", ".join(f"{' '.join(names)} {text}" for text, names in alike.items())


def held_text(plan: ShardingPlan, contract: Contract, name: str, layout: Layout) -> str:
    if name in contract.sections:
        text = "+".join(f"{s.name} {short(s.placement)}" for s in contract.sections[name])
    else:
        text = f"{short(layout['ep'])} ep" if "ep" in layout else layout_text(layout, plan.sizes, "R", short)
    partial = [axis for axis in plan.sizes if isinstance(contract.param_grad.get(name, {}).get(axis), Partial)]
    if partial:
        text += " grad P" if len(plan.sizes) == 1 else f" grad P({','.join(partial)})"
    return text


def layout_text(layout: Layout, axes: Mapping[str, int], whole: str, text: Any) -> str:
    """`S(1)` on one axis, `S(1) cp S(2) tp` on more; `whole` where nothing is cut."""
    cut = [(axis, layout[axis]) for axis in axes if axis in layout and text(layout[axis]) not in ("R", "replicate")]
    if not cut:
        return whole
    return " ".join(text(p) if len(axes) == 1 else f"{text(p)} {axis}" for axis, p in cut)


def placement_text(placement: Placement) -> str:
    return short(placement) if isinstance(placement, Shard) else format_placement(placement)


def sides_text(plan: ShardingPlan, contract: Contract, src: Mapping[str, Layout], dst: Mapping[str, Layout]) -> str:
    """The layouts of what travels in every step; the others stand below the table."""
    names = [name for name in src if name in contract.features] or list(src)[:1]
    texts = []
    for name in names:
        before, after = (layout_text(side.get(name, {}), plan.sizes, "replicate", placement_text) for side in (src, dst))
        texts.append((f"{name}: " if len(names) > 1 else "") + (before if before == after else f"{before} -> {after}"))
    return "; ".join(texts)


def inside_text(contract: Contract) -> str:
    named = contract.inner_wrapper if contract.inner_wrapper is not None else contract.local_compute_fn
    target = f" on {contract.inner_target}" if contract.inner_target not in (None, "self") else ""
    parts = [f"{injection_name(named)}{target}"] if named is not None else []
    if contract.region_dispatch is False and named is None:
        parts.append("own forward, a black box")
    return ", ".join([*parts, *([f"lowerer {contract.lowerer}"] if contract.lowerer else [])])


def injection_name(value: Any) -> str:
    return value if isinstance(value, str) else callable_name(value)
