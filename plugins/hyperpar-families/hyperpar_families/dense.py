"""Dense decoders in the shape of Llama: q, k, v and o projections, a gated MLP, norms, an embedding and a head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hyperpar_core.descriptors import ModelFamily

__all__ = ["FAMILIES"]

ROLES = {
    "*.embed_tokens.weight": "embed",
    "lm_head.*": "lm_head",
    "*norm.weight": "norm",
    "*.self_attn.[qkv]_proj.*": "colwise",
    "*.self_attn.o_proj.*": "rowwise",
    "*.mlp.gate_proj.*": "colwise",
    "*.mlp.up_proj.*": "colwise",
    "*.mlp.down_proj.*": "rowwise",
}
CP = ({"match": "*.self_attn", "when": "cp", "inner_target": "self", "inner_wrapper": "sdpa_hf_ring"},)
# q_norm and k_norm span all heads: their statistic needs the whole width.
WHOLE_WIDTH_NORMS = {"*.self_attn.q_norm": "sharded_norm", "*.self_attn.k_norm": "sharded_norm"}


def _llama_like(name: str, summary: str, boundaries: Mapping[str, Any] | None = None, **facts: Any) -> ModelFamily:
    return ModelFamily(
        name,
        matches=(name,),
        roles=ROLES,
        boundaries=boundaries or {},
        facts={"causal": True, "isolates_documents": True, **facts},
        suggestions={"cp": CP},
        summary=summary,
    )


FAMILIES = (
    _llama_like("llama", "Llama 1 to 3, and what is converted to it"),
    _llama_like("mistral", "sliding window", window=True),
    _llama_like("qwen2", "biases on q, k and v", window=True),
    _llama_like("qwen3", "norms on each head's queries and keys", window=True),
    _llama_like("smollm3", "layers without rotary positions", window=True),
    _llama_like("granite", "multipliers on embedding, residual, attention and logits"),
    _llama_like("olmo2", "norms behind the blocks, and across all heads' queries and keys", WHOLE_WIDTH_NORMS),
    _llama_like("gemma2", "four norms a layer, soft caps on attention and logits", window=True, softcap=True),
)
