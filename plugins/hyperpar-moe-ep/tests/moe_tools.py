"""What the tests share: a tiny model with its family's suggestions, compared with one process, on the ranks of a pool."""

import torch

from hyperpar_core import suggest_overrides
from hyperpar_core.testing import Degrees, check_parity, pool, tiny_batch, tiny_model


def parity(family, degrees, config, implementation, dtype, seq, steps, options):
    """The report of one run, on every rank."""
    model = tiny_model(family, getattr(torch, dtype), **config)
    if implementation:
        model.set_experts_implementation(implementation)
    if "bias" in options:  # of the router: which experts are chosen
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("router.bias"):
                    parameter.copy_(torch.tensor(options["bias"]))
    degrees = {"dp": 1, "cp": 1, "tp": 1, "ep": 1, **degrees}
    sizes = {axis: degrees[axis] for axis in ("dp", "cp", "tp")}
    plan = {"overrides": suggest_overrides(model, sizes, ep_size=degrees["ep"])}
    plan |= {name: value for name, value in options.items() if name not in ("bias", "mode")}
    batch = tiny_batch(model, batch=2 * degrees["dp"], seq=seq)
    return check_parity(model, batch, Degrees(**degrees, options=plan), steps=steps, mode=options.get("mode", "production"))


def assert_equal(
    family, degrees, config=None, implementation=None, dtype="float32", seq=16, steps=0, **options
):
    ranks = degrees.get("dp", 1) * degrees.get("cp", 1) * degrees.get("tp", 1)
    report = pool(ranks).run(parity, family, degrees, config or {}, implementation, dtype, seq, steps, options)[0]
    assert report.ok, report.text()


AUX = {"output_router_logits": True, "router_aux_loss_coef": 0.1}
