"""Models on the meta device, and a plugin that offers one of everything."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.distributed.tensor import Shard
from transformers import AutoModelForCausalLM

from hyperpar_core.descriptors import (
    CollectiveLowerer,
    InnerWrapper,
    LocalComputeFactory,
    LossFactory,
    Section,
    SpecialHandler,
)
from hyperpar_core.plugins import Plugin, Provider, Registry, get_registry, loader
from hyperpar_core.testing import tiny_config

_models = {}


def _meta(family, **changes):
    key = (family, repr(sorted(changes.items())))
    if key not in _models:
        with torch.device("meta"):
            _models[key] = AutoModelForCausalLM.from_config(tiny_config(family, **changes))
    return _models[key]


@pytest.fixture
def meta():
    """meta(family, **config fields) -> the tiny model on the meta device, shared by the tests: no test may change it."""
    return _meta


def state_of(model):
    """Everything of a model that a plan could touch."""
    modules = [
        (
            name,
            type(module),
            id(module.__dict__),
            copy.copy({k: id(v) for k, v in module.__dict__.items() if not k.startswith("_") or k in ("_forward",)}),
            *(
                {k: id(v) for k, v in getattr(module, store).items()}
                for store in (
                    "_parameters",
                    "_buffers",
                    "_modules",
                    "_forward_hooks",
                    "_forward_pre_hooks",
                    "_backward_hooks",
                )
            ),
            module.training,
        )
        for name, module in model.named_modules()
    ]
    parameters = [(n, id(p), p._version, p.requires_grad, p.grad is None) for n, p in model.named_parameters()]
    config = repr(getattr(model, "config", None))
    return modules, parameters, config, torch.get_rng_state().tolist()


@pytest.fixture
def untouched():
    """untouched(model): a snapshot; call it again and compare."""
    return state_of


def over_cp(*, target_module, cp_mesh, causal=True):
    return print


def probe(*, target_module):
    return print


def experts(*, module, ep_mesh, capacity):
    return print


def plain(*, module):
    return print


def halves(shape, *, module, param_name, config):
    return [Section("a", 0, shape[0] // 2, Shard(0)), Section("b", 0, shape[0] - shape[0] // 2, Shard(0))]


DEMO = {
    InnerWrapper: (
        InnerWrapper("demo_cp", over_cp, summary="all keys and values on every rank; short sequences"),
        InnerWrapper("demo_probe", probe, needs_axis=None, region_dispatch=True),
    ),
    LocalComputeFactory: (
        LocalComputeFactory("demo_experts", experts, summary="one all-to-all out, one back"),
        LocalComputeFactory("demo_plain", plain, expects=("gate_proj",), needs_axis=None, region_dispatch=True),
    ),
    SpecialHandler: (SpecialHandler("demo_halves", halves),),
    CollectiveLowerer: (CollectiveLowerer("demo_lowerer", lambda transition: None, axes=("ep",)),),
    LossFactory: (LossFactory("demo_loss", lambda *, model, scale=1.0: print),),
}


@pytest.fixture
def demo(monkeypatch):
    """The registry with the installed plugins and `hyperpar-demo`."""
    plugin = Plugin(Provider("demo", "hyperpar-demo", "1.0"), "loaded", offers=DEMO)
    registry = Registry([*get_registry().plugins, plugin])
    monkeypatch.setattr(loader._process, "registry", registry)
    return registry
