"""Families that tensor and context parallelism aren't worked out for, and what stands in the way. Data parallelism runs."""

from __future__ import annotations

from hyperpar_core.descriptors import Limit, ModelFamily

__all__ = ["REFUSED"]

_CAUSES = {
    "blt": "several stacks of layers with their own sequences (bytes and patches), joined by cross attention.",
    "diffllama": "each head's output is subtracted from that of a head half the heads away, which tp holds on another rank.",
    "doge": "its attention mask is computed from the values of all heads together, which tp splits.",
    "gpt_neox_japanese": "its attention returns a parameter (dense_bias) as an output, to be added outside of it.",
    "hrm_text": "two stacks of layers that run in turns, several times each.",
    "phi4_multimodal": "its vision and audio encoders are parts of the text model's embedding.",
    "recurrent_gemma": "no template for its recurrent blocks.",
    "reformer": "its layers are reversible, and its attention sorts tokens into buckets.",
    "rwkv": "no template for its recurrent blocks.",
    "xlm": "its attentions, MLPs and norms stand in lists of their own, and there are no layers.",
    "xlstm": "no template for its recurrent blocks.",
}
# One boundary, the model itself: every rank computes all of it.
_WHOLE = {
    "*": None,
    "": {"template": "replicated", "in_src": {}, "in_dst": {}, "out_src": {}, "out_dst": {}},
}


def _refuse(name: str, cause: str) -> ModelFamily:
    return ModelFamily(
        name,
        matches=(name,),
        roles={"*": "replicated"},
        boundaries=_WHOLE,
        limits=(Limit(cause, lambda config, sizes: sizes["tp"] > 1 or sizes["cp"] > 1),),
        summary=f"data parallel only: {cause}",
    )


REFUSED = tuple(_refuse(name, cause) for name, cause in _CAUSES.items())
