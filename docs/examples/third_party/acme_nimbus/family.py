"""What each parameter of Nimbus is, what to declare for cp and ep, and what can't be done."""

from __future__ import annotations

from hyperpar_core.descriptors import Limit, ModelFamily

__all__ = ["NIMBUS"]

NIMBUS = ModelFamily(
    "nimbus",
    matches=("nimbus",),
    roles={
        "*.mix.kvq.weight": "packed",
        "*.mix.proj.weight": "rowwise",
        "*.moe.router.weight": "moe_gate",
        "*.moe.experts.*": "moe_expert",
    },
    handlers={"*.mix.kvq.weight": "nimbus_kvq"},
    facts={"causal": True},
    suggestions={
        "cp": [
            {
                "match": "*.mix", "when": "cp", "inner_target": "core", "inner_wrapper": "nimbus_whole_keys",
                "inner_out_src": "first_input",
            }
        ],
        "ep": [{"match": "*.moe", "when": "ep", "local_compute_fn": "nimbus_experts"}],
    },
    limits=(
        Limit(
            "its router draws noise, which ranks would draw each for itself.\n  Set router_noise to 0.",
            lambda config, sizes: config.router_noise > 0 and max(sizes[axis] for axis in ("cp", "tp", "ep")) > 1,
        ),
    ),
    summary="packed keys, values and queries; experts in every layer",
)  # fmt: skip
