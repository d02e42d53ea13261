"""Which distribution is known to ship which name: what an error suggests to install. It names them and imports none."""

from __future__ import annotations

import difflib
from fnmatch import fnmatchcase

from ..descriptors import CollectiveLowerer, InnerWrapper, LocalComputeFactory, LossFactory, SpecialHandler

__all__ = ["known_distribution"]

# {kind: {pattern of names: distribution}}
_KNOWN: dict[type, dict[str, str]] = {
    InnerWrapper: {
        "sdpa_hf*": "hyperpar-cp-sdpa",
        "sdpa_qkv*": "hyperpar-cp-sdpa",
        "flex_*": "hyperpar-cp-flex",
        "gated_group_norm": "hyperpar-linear-attention",
        "summed_projection": "hyperpar-linear-attention",
    },
    LocalComputeFactory: {
        "experts_dispatch": "hyperpar-moe-ep",
        "routed_only_softmax_topk": "hyperpar-moe-ep",
        "topk_router": "hyperpar-moe-ep",
        "*_topk_router": "hyperpar-moe-ep",
        "*_shared_expert_gate": "hyperpar-moe-ep",
        "*_sigmoid_group_shared": "hyperpar-moe-ep",
        "expert_modules": "hyperpar-moe-ep",
        "*_scaled_inputs": "hyperpar-moe-ep",
        "*_sorted_rows": "hyperpar-moe-ep",
        "vocab_parallel*": "hyperpar-vocab-embedding",
    },
    SpecialHandler: {
        "delta_channels": "hyperpar-linear-attention",
        "state_space_*": "hyperpar-linear-attention",
    },
    LossFactory: {"vocab_parallel*": "hyperpar-vocab-embedding"},
    CollectiveLowerer: {"bf16_wire": "hyperpar-compressed-gather"},
}


def known_distribution(kind: type, name: str) -> str | None:
    """The distribution that ships `name`, a descriptor of type `kind`, or a name that is nearly the same."""
    table = _KNOWN.get(kind, {})
    for pattern, distribution in table.items():
        if fnmatchcase(name, pattern):
            return distribution
    near = difflib.get_close_matches(name, table, n=1, cutoff=0.8)
    return table[near[0]] if near else None
