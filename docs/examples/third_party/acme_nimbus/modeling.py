"""Nimbus: a decoder with one packed projection for keys, values and queries, an attention of its own, and experts in every layer.

It knows nothing of parallelism. B: rows, S: tokens, H: hidden, N: query heads, K: key/value heads, D: head dim, T: tokens of all rows,
E: experts, F: features of an expert.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast


class NimbusConfig(PreTrainedConfig):
    model_type = "nimbus"
    vocab_size: int = 64
    hidden_size: int = 32
    num_hidden_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    num_experts: int = 4
    experts_per_token: int = 2
    expert_features: int = 16
    router_noise: float = 0.0


class NimbusNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


class NimbusCore(nn.Module):
    """Attention where each query sees the keys at its own position and before."""

    def forward(self, q_BNSD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, q_at_BS: Tensor, k_at_BT: Tensor) -> Tensor:
        shared = q_BNSD.shape[1] // k_BKTD.shape[1]
        k, v = (x.repeat_interleave(shared, 1) for x in (k_BKTD, v_BKTD))
        scores = q_BNSD @ k.transpose(-1, -2) / q_BNSD.shape[-1] ** 0.5
        hidden = k_at_BT[:, None, None, :] > q_at_BS[:, None, :, None]
        return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v


class NimbusAttention(nn.Module):
    def __init__(self, config: NimbusConfig) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim = config.hidden_size // config.num_heads
        rows = (config.num_heads + 2 * config.num_kv_heads) * self.head_dim
        self.kvq = nn.Linear(config.hidden_size, rows, bias=False)
        self.core = NimbusCore()
        self.proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        counts = (self.num_kv_heads, self.num_kv_heads, self.num_heads)
        parts = self.kvq(x).split([count * self.head_dim for count in counts], -1)
        k, v, q = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in parts)
        out = self.core(rotated(q, positions), rotated(k, positions), v, positions, positions)
        return self.proj(out.transpose(1, 2).flatten(2))


def rotated(x_BNSD: Tensor, positions_BS: Tensor) -> Tensor:
    """Rotary position embedding."""
    half = x_BNSD.shape[-1] // 2
    speeds = 10_000.0 ** (-torch.arange(half, device=x_BNSD.device) / half)
    angles = positions_BS[:, None, :, None] * speeds
    a, b = x_BNSD.split(half, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1).to(x_BNSD.dtype)


class NimbusExperts(nn.Module):
    def __init__(self, config: NimbusConfig) -> None:
        super().__init__()
        self.num_experts = config.num_experts
        sizes = config.num_experts, config.hidden_size, config.expert_features
        self.w_in = nn.Parameter(torch.randn(sizes) * 0.1)
        self.w_out = nn.Parameter(torch.randn(sizes) * 0.1)

    def forward(self, x_TH: Tensor, experts_Tk: Tensor, weights_Tk: Tensor) -> Tensor:
        out = torch.zeros_like(x_TH)
        for expert in range(self.num_experts):
            rows, slots = torch.where(experts_Tk == expert)
            y = F.silu(x_TH[rows] @ self.w_in[expert]) @ self.w_out[expert].T
            out = out.index_add(0, rows, y * weights_Tk[rows, slots, None])
        return out


class NimbusBlockOfExperts(nn.Module):
    def __init__(self, config: NimbusConfig) -> None:
        super().__init__()
        self.experts_per_token, self.noise = config.experts_per_token, config.router_noise
        self.router = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = NimbusExperts(config)

    def route(self, x_TH: Tensor) -> tuple[Tensor, Tensor]:
        """(numbers, weights) of each token's experts: [T, experts per token] both."""
        logits = self.router(x_TH)
        if self.training and self.noise:
            logits = logits + self.noise * torch.randn_like(logits)
        weights, experts = logits.sigmoid().topk(self.experts_per_token)
        return experts, weights / weights.sum(-1, keepdim=True)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        return self.experts(flat, *self.route(flat)).view_as(x)


class NimbusLayer(nn.Module):
    def __init__(self, config: NimbusConfig) -> None:
        super().__init__()
        self.before, self.between = NimbusNorm(config.hidden_size), NimbusNorm(config.hidden_size)
        self.mix, self.moe = NimbusAttention(config), NimbusBlockOfExperts(config)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        x = x + self.mix(self.before(x), positions)
        return x + self.moe(self.between(x))


class NimbusForCausalLM(PreTrainedModel):
    config_class = NimbusConfig

    def __init__(self, config: NimbusConfig) -> None:
        super().__init__(config)
        self.tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(NimbusLayer(config) for _ in range(config.num_hidden_layers))
        self.last = NimbusNorm(config.hidden_size)
        self.out = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.out

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool = False,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device).expand(input_ids.shape)
        x = self.tokens(input_ids)
        for block in self.blocks:
            x = block(x, position_ids)
        logits = self.out(self.last(x))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits)
