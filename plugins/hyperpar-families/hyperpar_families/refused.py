"""Families that tensor and context parallelism aren't worked out for, and what stands in the way. Most run under data parallelism."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

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
    "rwkv": "no template for its recurrent blocks.",
    "xlstm": "no template for its recurrent blocks.",
}
_NOT_AT_ALL = {
    "reformer": "its layers are reversible: they compute again in the backward, outside of the model's forward.",
    "xlm": "its loss is a mean of its own, which takes no count of all ranks' tokens.",
}
# One boundary, the model itself: every rank computes all of it.
_WHOLE = {"*": None, "": {"template": "replicated", "in_src": {}, "in_dst": {}, "out_src": {}, "out_dst": {}}}


def _refuse(name: str, cause: str, applies: Callable[[Any, Mapping[str, int]], bool], summary: str) -> ModelFamily:
    limit = Limit(cause, applies)
    return ModelFamily(
        name, matches=(name,), roles={"*": "replicated"}, boundaries=_WHOLE, limits=(limit,), summary=f"{summary}: {cause}"
    )


REFUSED = (
    *(
        _refuse(name, cause, lambda config, sizes: sizes["tp"] > 1 or sizes["cp"] > 1, "data parallel only")
        for name, cause in _CAUSES.items()
    ),
    *(_refuse(name, cause, lambda config, sizes: True, "refused") for name, cause in _NOT_AT_ALL.items()),
)
