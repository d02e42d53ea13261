"""Dense families that tensor parallelism would get wrong, and why."""

from __future__ import annotations

from hyperpar_core.descriptors import Limit, ModelFamily

__all__ = ["REFUSED"]

_CAUSES = {
    "blt": "several stacks of layers with their own sequences (bytes and patches), joined by cross attention.",
    "ctrl": "its attention takes queries, keys and values as three inputs, and its MLP is a bare Sequential.",
    "diffllama": "each head's output is subtracted from that of a head half the heads away, which tp holds on another rank.",
    "doge": "its attention mask is computed from the values of all heads together, which tp splits.",
    "dory": "norms without a module between its projections span all heads and features, which tp splits.",
    "gpt_neox_japanese": "its attention returns a parameter (dense_bias) as an output, to be added outside of it.",
    "hrm_text": "two stacks of layers that run in turns, several times each.",
    "phi4_multimodal": "its vision and audio encoders are parts of the text model's embedding.",
    "recurrent_gemma": "its recurrent blocks have gates that are block-diagonal over their own number of heads.",
    "reformer": "its layers are reversible, and hash tokens into buckets with all heads.",
    "rwkv": "a recurrent model: its state spans the whole width.",
    "xlm": "it has no list of layers, and its loss takes labels of its own.",
    "xlstm": "a recurrent model: its cells' gates and norms span the whole width.",
}


def _refuse(name: str, cause: str) -> ModelFamily:
    return ModelFamily(
        name,
        matches=(name,),
        limits=(Limit(f"tensor parallel: {cause}", lambda config, sizes: sizes["tp"] > 1),),
        summary=f"refused under tp: {cause}",
    )


REFUSED = tuple(_refuse(name, cause) for name, cause in _CAUSES.items())
