"""Plugins with one fault each, which the conformance suites have to find."""

from dataclasses import dataclass

import torch

from hyperpar_core import hookimpl, original_forward
from hyperpar_core.collectives.functional import all_gather, all_reduce, convert
from hyperpar_core.descriptors import (
    CollectiveLowerer,
    InnerWrapper,
    LocalComputeFactory,
    ModelFamily,
    PluginInfo,
    Section,
    SpecialHandler,
)
from hyperpar_core.placement import Shard

# ---- inner wrappers and local computes


def no_gradient(*, tp_mesh):
    """The sum is right, and its gradient gets lost: the plain collective isn't differentiable."""

    def forward(module, *args, **kwargs):
        return all_reduce(original_forward(module, *args, **kwargs), tp_mesh)

    return forward


def summed_twice(*, tp_mesh):
    """It sums by itself, and the contract says that it yields summands."""

    def forward(module, *args, **kwargs):
        return convert(original_forward(module, *args, **kwargs), tp_mesh, "all_reduce")

    return forward


def attribute_left(*, module, target_module):
    target_module.wrapped_by_acme = True

    def forward(module, *args, **kwargs):
        return original_forward(module, *args, **kwargs)

    return forward


def counts_calls(*, fqn):
    def forward(module, *args, **kwargs):
        module.calls = getattr(module, "calls", 0) + 1
        return original_forward(module, *args, **kwargs)

    return forward


def swallowed(*, fqn, scale=1.0):
    def forward(module, *args, **kwargs):
        return original_forward(module, *args, **kwargs)

    return forward


# ---- special handlers


def one_section(shape, *, module, param_name, config):
    """As if gate and up were one projection: tp gives one rank the gate and the other the up projection."""
    return [Section("both", 0, shape[0], Shard(0))]


def marks_the_module(shape, *, module, param_name, config):
    module.cut_by_acme = True
    return [Section(name, 0, shape[0] // 2, Shard(0)) for name in ("gate", "up")]


# ---- lowerers


@dataclass(frozen=True)
class NoBackward:
    """The input of a sharded compute, without the sum of its gradient."""

    def __call__(self, x, group, size=None):
        return x


class _Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, size):
        whole = all_gather(x, 1, group, size)
        ctx.at = (group.rank * x.shape[1], x.shape[1])
        return whole.flip(1)

    @staticmethod
    def backward(ctx, grad):
        return grad.narrow(1, *ctx.at).contiguous(), None, None


@dataclass(frozen=True)
class Backwards:
    """The shards joined in the wrong order."""

    def __call__(self, x, group, size=None):
        return _Reversed.apply(x, group, size)


@dataclass(frozen=True)
class Rounded:
    """A sum of rounded summands that calls itself exact."""

    def __call__(self, x, group, size=None):
        return convert(x + (x.bfloat16().to(x.dtype) - x).detach(), group, "all_reduce")


def lower_no_backward(transition):
    return NoBackward() if (transition.forward, transition.backward) == ("identity", "all_reduce") else None


def lower_backwards(transition):
    ways = (transition.forward, transition.backward)
    return Backwards() if ways == ("all_gather", "shard") and transition.src == Shard(1) else None


def lower_rounded(transition):
    return Rounded() if (transition.forward, transition.backward) == ("all_reduce", "identity") else None


def lower_with_a_setting(transition):
    torch.set_float32_matmul_precision("medium")
    return Rounded() if (transition.forward, transition.backward) == ("all_reduce", "identity") else None


# ---- families


def named(name):
    return lambda model: getattr(model.config, "name_or_path", "") == name


def touches_the_config(model):
    if not named("touching")(model):
        return False
    model.config.seen_by_acme = True
    return True


@hookimpl
def hyperpar_plugin_info():
    return PluginInfo()


@hookimpl
def hyperpar_inner_wrappers():
    return [
        InnerWrapper(f"wrapper_{name}", factory, needs_axis=axis, summary="wrong")
        for name, factory, axis in [
            ("no_gradient", no_gradient, "tp"),
            ("summed_twice", summed_twice, "tp"),
            ("attribute_left", attribute_left, None),
            ("swallowed", swallowed, None),
        ]
    ]


@hookimpl
def hyperpar_local_compute_factories():
    return [
        LocalComputeFactory(f"compute_{name}", factory, expects=("gate_proj",), needs_axis=axis, summary="wrong")
        for name, factory, axis in [
            ("no_gradient", no_gradient, "tp"),
            ("summed_twice", summed_twice, "tp"),
            ("counts_calls", counts_calls, None),
            ("swallowed", swallowed, None),
        ]
    ]


@hookimpl
def hyperpar_special_handlers():
    return [
        SpecialHandler("handler_one_section", one_section, "wrong"),
        SpecialHandler("handler_marks_the_module", marks_the_module, "wrong"),
    ]


@hookimpl
def hyperpar_collective_lowerers():
    return [
        CollectiveLowerer("lowerer_no_backward", lower_no_backward, axes=("tp",), summary="wrong"),
        CollectiveLowerer("lowerer_backwards", lower_backwards, axes=("tp",), summary="wrong"),
        CollectiveLowerer("lowerer_rounded", lower_rounded, axes=("tp",), summary="wrong"),
        CollectiveLowerer("lowerer_setting", lower_with_a_setting, axes=("tp",), summary="wrong"),
    ]


@hookimpl
def hyperpar_model_families():
    mlp = {"template": "mlp"}
    return [
        ModelFamily(
            "family_no_gradient", named("no-gradient"), summary="wrong",
            boundaries={"*.mlp": {**mlp, "in_grad": {"x": {"tp": "replicate"}}}},
        ),
        ModelFamily(
            "family_summand", named("summand"), summary="wrong", boundaries={"*.mlp": {**mlp, "out_src": {"output": {}}}}
        ),
        ModelFamily("family_touching", touches_the_config, summary="wrong"),
        ModelFamily("family_idle_rule", named("idle-rule"), roles={"*.qkv.weight": "colwise"}, summary="wrong"),
    ]  # fmt: skip
