"""Tables that families share: roles by the names of projections, what a block does after them, and what it can't do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hyperpar_core.descriptors import Limit, ModelFamily

__all__ = ["EXPERTS", "GATED", "LATENT", "LATENT_ATTENTION", "LLAMA", "QKVO", "after_sum", "family", "no_cp", "no_sp", "roles", "unless"]


def roles(**names: str) -> dict[str, str]:
    """{pattern: role} from `role="module module ..."`: everything that those modules own. A name that starts with a dot is a
    parameter itself."""
    return {
        f"*{name}" if name.startswith(".") else f"*.{name}.*": role
        for role, listed in names.items()
        for name in listed.split()
    }


QKVO = roles(colwise="q_proj k_proj v_proj", rowwise="o_proj")
GATED = roles(colwise="gate_proj up_proj", rowwise="down_proj")  # also without a gate
LLAMA = {**QKVO, **GATED}
# Latent attention: the projections to the latents, their norms and the rotary part that all heads share are whole on every rank.
LATENT = {
    **LLAMA,
    **roles(
        replicated="q_a_proj q_a_layernorm kv_a_proj_with_mqa kv_a_layernorm", colwise="q_b_proj kv_b_proj", rowwise="o_proj"
    ),
}
# It fills its keys in place, which DTensor can't follow: a black box to validate mode.
LATENT_ATTENTION = {"*.self_attn": {"region_dispatch": False}}
# A router, stacked experts, and experts that every token passes: tp ranks share the tokens of such a block.
EXPERTS = {"*.mlp.gate.*": "moe_gate", "*.mlp.experts.*": "moe_expert", "*.mlp.shared_expert*": "shared_expert"}


def after_sum(*names: str) -> dict[str, str]:
    """Row-wise projections that are boundaries of their own, because their block goes on after them: with dropout, or by adding
    the residual. That has to see whole sums."""
    return {f"*.{name}": "rowwise" for name in names}


def unless(cause: str, applies: Callable[[Any], Any]) -> Limit:
    """Refuses tp and sequence parallel for configs of which `applies` is true."""
    return Limit(cause, lambda config, sizes: sizes["tp"] > 1 and bool(applies(config)))


def no_sp(cause: str, applies: Callable[[Any], Any] = lambda config: True) -> Limit:
    """Refuses sequence parallel, and says how to go on."""
    return Limit(
        f"{cause}\n  Pass sequence_parallel=False.", lambda config, sizes: sizes["sp"] == 1 and bool(applies(config))
    )


no_cp = Limit(
    "its attention doesn't go through transformers' attention interface, which context parallel wrappers take over.",
    lambda config, sizes: sizes["cp"] > 1,
)


def family(
    name: str,
    summary: str,
    rules: Mapping[str, str],
    boundaries: Mapping[str, Any] | None = None,
    *,
    handlers: Mapping[str, str] | None = None,
    attention: str | None = "self_attn",
    archetype: str | None = None,
    block: str = "mlp",
    limits: tuple[Limit, ...] = (),
    **facts: Any,
) -> ModelFamily:
    """One family, known by its model_type `name`. attention: the name of its attention modules, for what it suggests; None
    where context parallel can't wrap them. archetype: what it suggests for its blocks of experts, which are called `block`."""
    suggestions: dict[str, Any] = {}
    if attention:
        wrapper = {"match": f"*.{attention}", "when": "cp", "inner_target": "self", "inner_wrapper": "sdpa_hf_ring"}
        suggestions["cp"] = (wrapper,)
    if archetype:
        suggestions["ep"] = ({"match": f"*.{block}", "when": "ep", "local_compute_fn": archetype},)
    return ModelFamily(
        name,
        matches=(name,),
        roles=rules,
        boundaries=boundaries or {},
        handlers=handlers or {},
        facts={"causal": True, "isolates_documents": True, **facts},
        suggestions=suggestions,
        limits=limits if attention else (*limits, no_cp),
        summary=summary,
    )
