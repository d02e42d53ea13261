"""Replaces a method of torch for the whole process when it is imported."""

import functools

import torch

from hyperpar_core import hookimpl, original_forward
from hyperpar_core.descriptors import LocalComputeFactory, PluginInfo

linear = torch.nn.Linear.forward


@functools.wraps(linear)
def patched(self, x):
    return linear(self, x)


torch.nn.Linear.forward = patched


def factory(*, fqn):
    def compute(module, *args, **kwargs):
        return original_forward(module, *args, **kwargs)

    return compute


@hookimpl
def hyperpar_plugin_info():
    return PluginInfo()


@hookimpl
def hyperpar_local_compute_factories():
    return [LocalComputeFactory("compute_patching", factory, expects=(), needs_axis=None, summary="wrong")]
