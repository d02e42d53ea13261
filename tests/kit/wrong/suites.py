"""A conformance suite for each wrong plugin. Run by test_wrong_plugins.py, which knows what must fail."""

import torch
from torch import nn
from torch.nn.functional import silu

from hyperpar_core.testing import Degrees, conformance, tiny_model

ONE_RUN = (Degrees(tp=2),)  # each fault shows on two ranks


class InnerWrapperConformance(conformance.InnerWrapperConformance):
    degrees = ONE_RUN


class LocalComputeConformance(conformance.LocalComputeConformance):
    degrees = ONE_RUN


class LowererConformance(conformance.LowererConformance):
    degrees = ONE_RUN


SUMMED = {"out_src": {"output": {}}}  # what the injected code yields is the whole sum


class TestWrapperGradient(InnerWrapperConformance):
    name, match, entry = "wrapper_no_gradient", "*.mlp", SUMMED


class TestWrapperPlacement(InnerWrapperConformance):
    name, match = "wrapper_summed_twice", "*.mlp"


class TestWrapperState(InnerWrapperConformance):
    name, match = "wrapper_attribute_left", "*.mlp"


class TestWrapperOption(InnerWrapperConformance):
    name, match, other_options = "wrapper_swallowed", "*.mlp", {"scale": 2.0}


class TestWrapperPatch(InnerWrapperConformance):
    name, match = "wrapper_patching", "*.mlp"


class TestComputeGradient(LocalComputeConformance):
    name, match, entry = "compute_no_gradient", "*.mlp", SUMMED


class TestComputePlacement(LocalComputeConformance):
    name, match = "compute_summed_twice", "*.mlp"


class TestComputeState(LocalComputeConformance):
    name, match = "compute_counts_calls", "*.mlp"


class TestComputeOption(LocalComputeConformance):
    name, match, other_options = "compute_swallowed", "*.mlp", {"scale": 2.0}


class TestComputePatch(LocalComputeConformance):
    name, match = "compute_patching", "*.mlp"


class PackedMLP(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.gate_up = nn.Linear(hidden, 4 * hidden, bias=False)
        self.down = nn.Linear(2 * hidden, hidden, bias=False)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(silu(gate) * up)


class Handler(conformance.SpecialHandlerConformance):
    degrees = (Degrees(tp=2, options={"sequence_parallel": False}),)
    packed, rowwise = "gate_up.weight", ("down.weight",)

    def block(self, hidden):
        torch.manual_seed(0)
        return PackedMLP(hidden)


class TestHandlerPlacement(Handler):
    name = "handler_one_section"


class TestHandlerState(Handler):
    name = "handler_marks_the_module"


class TestHandlerPatch(Handler):
    name = "handler_patching"


class TestLowererGradient(LowererConformance):
    name, lowers = "lowerer_no_backward", ("all_reduce",)


class TestLowererPlacement(LowererConformance):
    name, lowers = "lowerer_backwards", ("all_gather",)


class TestLowererRounded(LowererConformance):
    name, lowers = "lowerer_rounded", ("all_reduce",)


class TestLowererState(LowererConformance):
    name, lowers = "lowerer_setting", ("all_reduce",)


class TestLowererPatch(LowererConformance):
    name, lowers = "lowerer_patching", ("all_reduce",)


class Family(conformance.FamilyConformance):
    degrees = ONE_RUN
    known: str

    def model(self):
        model = tiny_model("llama")
        model.config.name_or_path = self.known
        return model


class TestFamilyGradient(Family):
    name, known = "family_no_gradient", "no-gradient"


class TestFamilyPlacement(Family):
    name, known = "family_summand", "summand"


class TestFamilyState(Family):
    name, known = "family_touching", "touching"


class TestFamilyRule(Family):
    name, known = "family_idle_rule", "idle-rule"


class TestFamilyPatch(Family):
    name, known = "family_patching", "patching"
