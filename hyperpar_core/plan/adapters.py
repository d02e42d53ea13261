"""Low-rank adapters around a projection: which of their matrices are cut as the projection is.

An adapter adds B(A(x)) to what its projection W yields. Where W is cut by what it yields, so is B, and A is whole; where W is cut by
what it takes, so is A, and B is whole: it maps summands to summands. The matrices that are whole work on parts, so their gradients
are partial.

    W column-wise   A [rank, in] whole        B [out, rank] cut by rows
    W row-wise      A [rank, in] cut by columns   B [out, rank] whole
"""

from __future__ import annotations

from torch import nn

from ..errors import Refused

__all__ = ["BASE", "adapted", "adapter_role", "refuse_copies"]

BASE, FIRST, SECOND = "base_layer", "lora_A", "lora_B"  # as PEFT names them


def adapted(model: nn.Module) -> dict[str, tuple[str, str]]:
    """{parameter in a wrapped projection: (its name as if there were no wrapper, which part of the wrapper it is in)}.

    Parameters of the adapter itself stand for the projection's weight.
    """
    found = {}
    for name, module in model.named_modules():
        if BASE not in module._modules:
            continue
        for parameter, _ in module.named_parameters():
            part, _, rest = parameter.partition(".")
            found[f"{name}.{parameter}"] = (f"{name}.{rest if part == BASE else 'weight'}", part)
    return found


def adapter_role(role: str | None, part: str, dims: int) -> str | None:
    """The role of an adapter's parameter of so many dims, from that of the projection's weight; None where there is no rule."""
    if role == "replicated" and part in (FIRST, SECOND):
        return "replicated"
    if role == "colwise":
        return {FIRST: "replicated", SECOND: "colwise"}.get(part)
    if role == "rowwise":
        return {FIRST: "rowwise", SECOND: "replicated" if dims > 1 else "rowwise"}.get(part)
    return None


def refuse_copies(model: nn.Module) -> None:
    """Raises Refused where a trained copy stands in the place of a module (PEFT's modules_to_save), beside the original."""
    for name, module in model.named_modules():
        if {"original_module", "modules_to_save"} <= module._modules.keys():
            raise Refused(
                f"{name}: an adapter's trained copy of a whole module stands beside it (modules_to_save), which has no rule.\n"
                f"  Leave it out of modules_to_save and train the module itself: requires_grad_(True) on {name} after get_peft_model."
            )
