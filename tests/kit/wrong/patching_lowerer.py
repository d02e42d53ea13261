"""Replaces a function of torch.distributed for the whole process when it lowers."""

import torch.distributed as dist

from hyperpar_core import hookimpl
from hyperpar_core.collectives.functional import convert
from hyperpar_core.descriptors import CollectiveLowerer, PluginInfo

broadcast = dist.broadcast


def patched(*args, **kwargs):
    return broadcast(*args, **kwargs)


class Sum:
    def __call__(self, x, group, size=None):
        return convert(x, group, "all_reduce")


def lower(transition):
    dist.broadcast = patched
    return Sum() if (transition.forward, transition.backward) == ("all_reduce", "identity") else None


@hookimpl
def hyperpar_plugin_info():
    return PluginInfo()


@hookimpl
def hyperpar_collective_lowerers():
    return [CollectiveLowerer("lowerer_patching", lower, axes=("tp",), summary="wrong")]
