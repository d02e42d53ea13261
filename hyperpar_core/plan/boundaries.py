"""Which modules own a contract, and from which template each starts."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from ..errors import PlanError
from .adapters import BASE, adapted
from .roles import is_norm, names_of_embeddings

__all__ = ["Structure", "find_boundaries", "find_structure", "owners"]


@dataclass(frozen=True)
class Structure:
    """The parts of a decoder that boundaries hang on. Names; None where the model has no such part."""

    embed: str | None
    head: str | None
    layers: tuple[str, ...]  # the decoder stack, in order
    final_norm: str | None


def find_structure(model: nn.Module) -> Structure:
    """The embedding, the head, the longest list of layers and the norm behind it."""
    embed, head = names_of_embeddings(model)
    lists = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) and any(True for _ in module.parameters())
    ]
    outer = [(n, m) for n, m in lists if not any(n.startswith(other + ".") for other, _ in lists if other != n)]
    if not outer:
        return Structure(embed, head, (), None)
    name, stack = max(outer, key=lambda item: sum(p.numel() for p in item[1].parameters()))
    parent_name = name.rpartition(".")[0]
    parent = model.get_submodule(parent_name)
    children = list(parent.named_children())
    position = [child for child, _ in children].index(name.rpartition(".")[2])
    norms = [child for child, module in children[position + 1 :] if is_norm(module)]
    prefix = f"{parent_name}." if parent_name else ""
    return Structure(
        embed, head, tuple(f"{name}.{i}" for i in range(len(stack))), f"{prefix}{norms[-1]}" if norms else None
    )


def _looks_like_attention(fqn: str, module: nn.Module) -> bool:
    leaf = fqn.rpartition(".")[2].lower()
    return (
        "attn" in leaf
        or "attention" in leaf
        or "attention" in type(module).__name__.lower()
        or hasattr(module, "head_dim")
    )


def _kind_of_block(fqn: str, module: nn.Module) -> str:
    """The template of a module with column-wise and row-wise projections."""
    if any(isinstance(child, nn.Conv1d) for child in module.children()):
        return "linear_attention"
    return "attention" if _looks_like_attention(fqn, module) else "mlp"


def _above(name: str) -> list[str]:
    """The names of all modules above a parameter or module."""
    parts = name.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts))]


def _blocks_of_experts(roles: Mapping[str, str]) -> set[str]:
    """The modules that hold a router and its experts, and no smaller module that does."""
    routed, experts = ({above for p, r in roles.items() if r == role for above in _above(p)} for role in ("moe_gate", "moe_expert"))
    both = routed & experts
    return both - {above for name in both for above in _above(name)}


def find_boundaries(
    model: nn.Module, roles: Mapping[str, str], structure: Structure, family_rules: Mapping[str, Any]
) -> dict[str, tuple[str, Mapping[str, Any]]]:
    """{module name: (template, fields that the family declares)}, in the model's order.

    A family's pattern (case-sensitive fnmatch over module names, the last match wins) decides; None takes a boundary away.
    """
    found: dict[str, tuple[str, Mapping[str, Any]]] = {}
    children: dict[str, set[str]] = {}
    wrapped = adapted(model)
    for parameter, role in roles.items():
        plain, part = wrapped.get(parameter, (parameter, BASE))
        if part != BASE:
            continue  # an adapter goes with its projection
        owner = plain.rpartition(".")[0]
        children.setdefault(owner.rpartition(".")[0], set()).add(role)
    blocks = _blocks_of_experts(roles)
    inner: list[str] = []
    moe: list[str] = []  # blocks of experts
    for fqn, module in model.named_modules():
        template: str | None = None
        if fqn == structure.embed:
            template = "embed"
        elif fqn == structure.head:
            template = "lm_head"
        elif fqn.startswith(tuple(moe)):
            pass  # shared experts, norms: the block's own
        elif fqn in blocks:
            template = "moe_mlp"
            moe.append(fqn + ".")
        elif (
            fqn not in structure.layers  # projections that sit in a layer itself are boundaries of their own, below
            and "rowwise" in (own := children.get(fqn, set()))
            and own & {"colwise", "packed"}
        ):
            template = _kind_of_block(fqn, module)
        elif any(p is not None for p in module._parameters.values()) and not fqn.startswith(tuple(inner)):
            held = {roles.get(f"{fqn}.{name}" if fqn else name) for name in module._parameters}
            template = "norm" if "norm" in held else "replicated" if held & {"replicated", "bias"} else None
            if fqn.rpartition(".")[0] in structure.layers and held & {"colwise", "rowwise"}:
                template = "colwise" if "colwise" in held else "rowwise"
        if fqn == structure.final_norm:
            template = "norm"  # also without parameters: the stack's sequence shards end here
        declared: Mapping[str, Any] = {}
        matching = [rule for pattern, rule in family_rules.items() if fnmatchcase(fqn, pattern)]
        if matching:
            rule = matching[-1]
            declared = {"template": rule} if isinstance(rule, str) or rule is None else dict(rule)
            template = declared.get("template", template)
        if template in ("attention", "linear_attention", "mlp"):
            inner.append(fqn + ".")
        if template is not None:
            found[fqn] = (template, {k: v for k, v in declared.items() if k != "template"})
        elif declared.get("template", "") is None:
            continue
        elif declared:
            raise PlanError(f"the family declares a boundary at '{fqn}' without a template, and none is derived there.")
    if structure.layers and structure.layers[0] not in found:
        found[structure.layers[0]] = ("stack", {})
    order = {fqn: i for i, (fqn, _) in enumerate(model.named_modules())}
    return dict(sorted(found.items(), key=lambda item: order[item[0]]))


def owners(model: nn.Module, boundaries: Collection[str]) -> dict[str, str | None]:
    """{parameter name: the nearest boundary above it, or None}, tied parameters under each of their names."""
    result: dict[str, str | None] = {}
    for owner_name, owner in model.named_modules():
        for name, parameter in owner._parameters.items():
            if parameter is None:
                continue
            fqn = f"{owner_name}.{name}" if owner_name else name
            scope: str | None = owner_name
            while scope is not None and scope not in boundaries:
                scope = scope.rpartition(".")[0] if "." in scope else ("" if scope else None)
            result[fqn] = scope
    return result
