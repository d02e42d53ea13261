"""A model that isn't transformers', whose experts are modules of a list, and the adapter for it: what its author would write."""

import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from hyperpar_core import hookimpl, plugins
from hyperpar_core.descriptors import ModelFamily

HIDDEN, EXPERTS, CHOSEN, VOCAB = 32, 4, 2, 64


class Expert(nn.Module):
    def __init__(self, bias=True):
        super().__init__()
        self.w1 = nn.Linear(HIDDEN, 48, bias=bias)
        self.w2 = nn.Linear(48, HIDDEN, bias=False)
        self.scale = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x):
        return self.w2(F.silu(self.w1(x))) * self.scale


class Block(nn.Module):
    """Experts without a token are skipped, as older checkpoints' code does; the logits are handed back."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

    def forward(self, x):
        rows = x.reshape(-1, HIDDEN)
        logits = self.gate(rows)
        weights, chosen = logits.softmax(-1).topk(CHOSEN)
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            row, slot = torch.where(chosen == number)
            if len(row):
                out.index_add_(0, row, expert(rows[row]) * weights[row, slot, None])
        return out.view_as(x), logits


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.up_proj, self.down_proj = nn.Linear(HIDDEN, 64), nn.Linear(64, HIDDEN)
        self.moe = Block()

    def forward(self, x):
        x = x + self.down_proj(F.silu(self.up_proj(self.norm1(x))))
        return x + self.moe(self.norm2(x))[0]


class ToyMoE(nn.Module):
    def __init__(self, layers=2, seed=0):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.embed = nn.Embedding(VOCAB, HIDDEN)
            self.layers = nn.ModuleList(Layer() for _ in range(layers))
            self.norm = nn.RMSNorm(HIDDEN)
            self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
            for parameter in self.parameters():
                parameter.data.add_(0.1 * torch.randn_like(parameter))
        self.config = SimpleNamespace(vocab_size=VOCAB, get_text_config=lambda: SimpleNamespace(vocab_size=VOCAB))

    def get_input_embeddings(self):
        return self.embed

    def get_output_embeddings(self):
        return self.head

    def forward(self, input_ids, labels=None, shift_labels=None, num_items_in_batch=None, position_ids=None, attention_mask=None, **_):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        loss = None
        if labels is not None:
            targets = shift_labels if shift_labels is not None else F.pad(labels, (0, 1), value=-100)[:, 1:]
            total = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=-100, reduction="sum")
            loss = total / (num_items_in_batch if num_items_in_batch is not None else (targets != -100).sum())
        return SimpleNamespace(loss=loss, logits=logits)


@hookimpl
def hyperpar_model_families():
    roles = {"*.moe.gate.*": "moe_gate", "*.moe.experts.*": "moe_expert"}
    suggestions = {"ep": ({"match": "*.moe", "when": "ep", "local_compute_fn": "expert_modules"},)}
    return [ModelFamily("toy_moe", matches=is_toy, roles=roles, suggestions=suggestions)]


def is_toy(model):
    return any(isinstance(module, Block) for module in model.modules())


def write_distribution(folder):
    """Makes this module a plugin of a distribution in `folder`."""
    info = Path(folder) / "toy_moe-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-moe\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[hyperpar]\ntoy_moe = toy_moe\n")
    return str(folder)


@contextmanager
def installed(folder):
    """While inside, the distribution in `folder` is installed."""
    sys.path.insert(0, str(folder))
    plugins.reset()
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        plugins.reset()
