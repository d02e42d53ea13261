"""Modules whose weight is computed from other parameters."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from ..errors import Refused

__all__ = ["refuse_parametrised"]


def refuse_parametrised(model: nn.Module, sizes: Mapping[str, int]) -> None:
    """Raises Refused where a weight is computed from other parameters: parts of those don't make a part of the weight."""
    if sizes.get("tp", 1) == 1:
        return
    for name, module in model.named_modules():
        if not isinstance(module, (nn.Linear, nn.Embedding)) and not hasattr(module, "nf"):  # GPT-2's Conv1D
            continue
        hooks = module._forward_pre_hooks.values()
        if parametrize.is_parametrized(module) or any(isinstance(hook, (SpectralNorm, WeightNorm)) for hook in hooks):
            raise Refused(
                f"{name}: its weight is computed from other parameters (a parametrization such as weight_norm or spectral_norm), of the"
                " whole weight: tp can't cut it.\n"
                "  Remove it before build_plan (torch.nn.utils.parametrize.remove_parametrizations(module, 'weight'))."
            )
