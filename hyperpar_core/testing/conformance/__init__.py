"""Conformance: subclass one class per kind of descriptor, and get the whole suite that a plugin of that kind has to pass.

    from hyperpar_core.testing.conformance import InnerWrapperConformance

    class TestMaxNorm(InnerWrapperConformance):
        name = "max_norm"                       # as the installed plugin offers it
        match = "*.mlp"                         # the boundaries of `model()` that it is put on
        options = {"limit": 1000.0}
        other_options = {"limit": 0.001}        # another value for each option: it must be seen to do something

The model is a tiny one of the test kit unless `model` makes another; the class must stand at the top of its file, since rank
processes look it up there. conftest.py: `from hyperpar_core.testing.pytest_plugin import *`.
"""

from .family import FamilyConformance
from .handler import SpecialHandlerConformance
from .injected import InnerWrapperConformance, LocalComputeConformance
from .lowerer import LowererConformance
from .suite import Refusal

__all__ = [
    "FamilyConformance",
    "InnerWrapperConformance",
    "LocalComputeConformance",
    "LowererConformance",
    "Refusal",
    "SpecialHandlerConformance",
]
