"""Replaces a function of torch for the whole process when its factory is called."""

import torch.nn.functional as F

from hyperpar_core import hookimpl, original_forward
from hyperpar_core.descriptors import InnerWrapper, PluginInfo

silu = F.silu


def patched(*args, **kwargs):
    return silu(*args, **kwargs)


def factory(*, fqn):
    F.silu = patched

    def forward(module, *args, **kwargs):
        return original_forward(module, *args, **kwargs)

    return forward


@hookimpl
def hyperpar_plugin_info():
    return PluginInfo()


@hookimpl
def hyperpar_inner_wrappers():
    return [InnerWrapper("wrapper_patching", factory, needs_axis=None, summary="wrong")]
