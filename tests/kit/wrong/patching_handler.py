"""Replaces a function of torch for the whole process while a plan is made."""

import functools

import torch

from hyperpar_core import hookimpl
from hyperpar_core.descriptors import PluginInfo, Section, SpecialHandler
from hyperpar_core.placement import Shard

chunk = torch.chunk


def patched(*args, **kwargs):
    return chunk(*args, **kwargs)


def sections(shape, *, module, param_name, config):
    torch.chunk = functools.partial(patched)
    return [Section(name, 0, shape[0] // 2, Shard(0)) for name in ("gate", "up")]


@hookimpl
def hyperpar_plugin_info():
    return PluginInfo()


@hookimpl
def hyperpar_special_handlers():
    return [SpecialHandler("handler_patching", sections, "wrong")]
