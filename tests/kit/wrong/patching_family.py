"""Adds a method to a class of transformers when it looks at a model."""

import transformers

from hyperpar_core import hookimpl
from hyperpar_core.descriptors import ModelFamily, PluginInfo


def greet(self):
    return "hello"


def matches(model):
    transformers.PreTrainedModel.greet = greet
    return getattr(model.config, "name_or_path", "") == "patching"


@hookimpl
def hyperpar_plugin_info():
    return PluginInfo()


@hookimpl
def hyperpar_model_families():
    return [ModelFamily("family_patching", matches, summary="wrong")]
