"""What each parameter is: the family's rules first, then generic ones that know conventions, not families."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

from torch import nn

from .adapters import BASE, adapted, adapter_role

__all__ = ["assign_roles", "is_norm", "names_of_embeddings"]

# Names of projections whose rows (colwise) or columns (rowwise) are heads or intermediate features, as the field uses them.
COLWISE = frozenset({"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"})
ROWWISE = frozenset({"o_proj", "down_proj"})


def is_norm(module: nn.Module) -> bool:
    """Whether a module normalises its last dim: by type, or by its class's name."""
    return isinstance(module, (nn.LayerNorm, nn.RMSNorm)) or type(module).__name__.endswith(("Norm", "LayerNorm"))


def names_of_embeddings(model: nn.Module) -> tuple[str | None, str | None]:
    """(name of the input embedding module, name of the output head), as the model itself says; None where it has none."""
    found: list[str | None] = []
    for getter in ("get_input_embeddings", "get_output_embeddings"):
        try:
            module = getattr(model, getter)()
        except (AttributeError, NotImplementedError):
            module = None
        names = [name for name, m in model.named_modules() if m is module] if module is not None else []
        found.append(names[0] if names else None)
    return found[0], found[1]


def _generic(fqn: str, owner: nn.Module, embed: str | None, head: str | None) -> str | None:
    leaf = fqn.rpartition(".")[2]
    if fqn == embed:
        return "embed"
    if fqn == head:
        return "lm_head"
    if isinstance(owner, nn.Linear):
        return "colwise" if leaf in COLWISE else "rowwise" if leaf in ROWWISE else None
    if is_norm(owner):
        return "norm"
    return None


def assign_roles(model: nn.Module, family_rules: Mapping[str, str]) -> dict[str, str]:
    """{parameter name: role}, tied parameters under each of their names. A parameter without a role is left out.

    Patterns are case-sensitive fnmatch over the parameter's name (`*` crosses dots); the last one that matches wins.
    """
    embed, head = names_of_embeddings(model)
    wrapped = adapted(model)
    roles = {}

    def role_of(fqn: str, owner_name: str, owner: nn.Module) -> str | None:
        matching = [role for pattern, role in family_rules.items() if fnmatchcase(fqn, pattern)]
        return matching[-1] if matching else _generic(owner_name, owner, embed, head)

    for owner_name, owner in model.named_modules():
        for name in owner._parameters:
            if owner._parameters[name] is None:
                continue
            fqn = f"{owner_name}.{name}" if owner_name else name
            plain, part = wrapped.get(fqn, (fqn, BASE))
            above = plain.rpartition(".")[0]
            projection = owner if part == BASE else model.get_submodule(f"{above}.{BASE}")
            role = role_of(plain, above, projection)
            if part != BASE:
                role = adapter_role(role, part, owner._parameters[name].ndim)
            if role is not None:
                roles[fqn] = role
    return roles
