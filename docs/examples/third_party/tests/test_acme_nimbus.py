"""Everything that acme-nimbus offers passes hyperpar's suites, alone and all of it at once."""

import torch
from acme_nimbus.modeling import NimbusConfig, NimbusForCausalLM

from hyperpar_core.testing import Degrees, jitter
from hyperpar_core.testing.conformance import (
    FamilyConformance,
    InnerWrapperConformance,
    LocalComputeConformance,
    LowererConformance,
    Refusal,
    SpecialHandlerConformance,
)


def nimbus(**sizes):
    torch.manual_seed(0)
    model = NimbusForCausalLM(NimbusConfig(**sizes))
    jitter(model)
    return model.train()


def three_heads():
    return nimbus(hidden_size=48, num_heads=6, num_kv_heads=3)


class Nimbus:
    def model(self):
        return nimbus()


class TestNimbus(Nimbus, FamilyConformance):
    """Also tensor, context and expert parallel at once: four ranks, of which every two share the experts."""

    name = "nimbus"
    degrees = (
        Degrees(tp=2),
        Degrees(tp=4, options={"sequence_parallel": False}),
        Degrees(dp=2, ep=2),
        Degrees(cp=2, tp=2, ep=2, options={"overrides": [{"match": "*.mix", "when": "tp", "lowerer": "nimbus_ordered_sum"}]}),
        Degrees(cp=2, tp=2, ep=4),
    )
    refusals = (
        Refusal("its router draws noise", Degrees(tp=2), model=lambda: nimbus(router_noise=0.1)),
        Refusal("3 key/value heads can't be split over tp=2", Degrees(tp=2), model=three_heads),
    )


class TestPacked(Nimbus, SpecialHandlerConformance):
    name = "nimbus_kvq"
    packed = "kvq.weight"
    degrees = (Degrees(tp=2), Degrees(tp=4))

    def entries(self, model, degrees, options):
        return []  # the family's own rules name it


class TestContext(Nimbus, InnerWrapperConformance):
    name = "nimbus_whole_keys"
    match = "*.mix"
    target = "core"
    degrees = (Degrees(cp=2), Degrees(cp=4))
    entry = {"inner_out_src": "first_input"}  # noqa: RUF012


class TestExperts(Nimbus, LocalComputeConformance):
    name = "nimbus_experts"
    match = "*.moe"
    without = "blocks.0.mix"


class TestSums(Nimbus, LowererConformance):
    name = "nimbus_ordered_sum"
    lowers = ("reduce_scatter", "all_gather")
    degrees = (Degrees(tp=2), Degrees(tp=4))
