"""What a plan says its experts send is what the process groups see."""

from unittest import mock

import pytest
import torch
import toy_moe
from hyperpar_moe_ep.dispatch import AllToAll
from torch.distributed.tensor import Shard
from torch.utils._python_dispatch import TorchDispatchMode

from hyperpar_core import apply_plan, build_plan, make_mesh, suggest_overrides
from hyperpar_core.collectives.functional import axis_group
from hyperpar_core.plan.contract import Contract
from hyperpar_core.testing import pool, tiny_batch, tiny_model
from hyperpar_core.view.traffic import predict

NAMES = {
    "all_reduce": "all_reduce", "all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}  # fmt: skip


class Counted(TorchDispatchMode):
    """{collective: (count, bytes at its input)}."""

    def __init__(self):
        super().__init__()
        self.total = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        space, _, name = func._schema.name.partition("::")
        if space in ("_c10d_functional", "c10d") and name != "wait_tensor":
            count, size = self.total.get(NAMES.get(name, name), (0, 0))
            self.total[NAMES.get(name, name)] = (count + 1, size + args[0].numel() * args[0].element_size())
        return func(*args, **(kwargs or {}))


def step(family, degrees, ep, config):
    """(predicted, counted) of one step on this rank."""
    model = tiny_model(family, **config)
    mesh = make_mesh(**degrees)
    plan = build_plan(model, mesh, ep_size=ep, overrides=suggest_overrides(model, mesh, ep_size=ep))
    applied = apply_plan(model, plan, mesh, checks=None)
    batch = applied.shard_batch(tiny_batch(model, batch=2, seq=16))
    with Counted() as counter:
        model(**batch, use_cache=False).loss.backward()
    return predict(plan, 2, 16, bytes_per_element=4, dp=degrees.get("dp", 1)), counter.total


# every token goes to all four experts, so the rows that travel don't depend on the routing
@pytest.mark.parametrize(
    ("family", "degrees", "ep"),
    [("mixtral", {"dp": 2}, 2), ("mixtral", {"tp": 2}, 2), ("qwen2_moe", {"dp": 2}, 2), ("olmoe", {"dp": 2, "tp": 2}, 2),
     ("deepseek_v3", {"dp": 2, "tp": 2}, 4), ("llama4_text", {"dp": 2}, 2), ("llama4_text", {"tp": 2}, 2), ("jetmoe", {"dp": 2}, 2)],
    ids=str,
)  # fmt: skip
def test_a_step_makes_the_predicted_collectives_with_the_predicted_bytes_on_every_rank(family, degrees, ep):
    ranks = 2 * len(degrees)
    for predicted, seen in pool(ranks).run(step, family, degrees, ep, {"num_experts_per_tok": 4}):
        assert seen == predicted and seen["all_to_all"]


def step_of_a_list(folder):
    """The same of a block that calls experts one by one, and says of how many a token goes to."""
    with toy_moe.installed(folder), mock.patch.object(toy_moe, "CHOSEN", toy_moe.EXPERTS):
        model = toy_moe.ToyMoE()
        for layer in model.layers:
            layer.moe.top_k = toy_moe.CHOSEN
        mesh = make_mesh(dp=2)
        plan = build_plan(model, mesh, ep_size=2, overrides=suggest_overrides(model, mesh, ep_size=2))
        applied = apply_plan(model, plan, mesh, checks=None)
        batch = applied.shard_batch(tiny_batch(model, batch=2, seq=16))
        with Counted() as counter:
            model(**batch).loss.backward()
        return predict(plan, 2, 16, bytes_per_element=4, dp=2), counter.total


def test_experts_called_one_by_one_send_what_is_predicted(tmp_path):
    for predicted, seen in pool(2).run(step_of_a_list, toy_moe.write_distribution(tmp_path)):
        assert seen == predicted and seen["all_to_all"][0] == 10


HIDDEN, CHOSEN, TOKENS = 256, 4, 3000


def sent():
    """(pairs of a token and a rank, bytes counted) of a dispatch to 16 equally likely experts, forward and backward."""
    group = axis_group(make_mesh(dp=4)["dp"])
    generator = torch.Generator().manual_seed(group.rank)
    x = torch.randn(TOKENS, HIDDEN, generator=generator).requires_grad_()
    indices = torch.rand(TOKENS, 16, generator=generator).topk(CHOSEN).indices
    weights = torch.rand(TOKENS, CHOSEN, generator=generator).requires_grad_()
    with Counted() as counter:
        out = AllToAll(group, 4)(lambda rows, expert, weight: rows * weight, x, indices, weights)
        out.sum().backward()
    pairs = sum(len(set(row)) for row in (indices // 4).tolist())
    return pairs, counter.total["all_to_all"]


def test_a_dispatch_sends_less_than_two_percent_more_than_its_rows_and_what_the_formula_says():
    features = {"x": HIDDEN, "output": HIDDEN, "experts_per_token": CHOSEN}
    contract = Contract("mlp", params={"experts.weight": {"ep": Shard(0)}}, features=features)
    said = AllToAll.traffic(contract=contract, shapes={"experts.weight": (16, 8, 8)}, tokens=TOKENS, ranks=4, width=4)
    for pairs, (count, size) in pool(4).run(sent):
        assert count == len(said) == 5
        assert 1 < size / (4 * pairs * HIDDEN * 4) < 1.02
        assert size == pytest.approx(sum(bytes_ for *_, bytes_ in said), rel=0.02)
