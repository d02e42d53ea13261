"""The handlers and the wrappers by themselves."""

from importlib.metadata import entry_points
from types import SimpleNamespace

import pytest
import torch
from hyperpar_linear_attention import norm, plugin, projection
from hyperpar_linear_attention.sections import delta_channels, state_space_channels, state_space_projection
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from transformers.models.bamba.modeling_bamba import BambaRMSNormGated
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

from hyperpar_core import make_mesh
from hyperpar_core.errors import ApplyError, Refused
from hyperpar_core.testing import pool


def cut(handler, rows, **config):
    sections = handler((rows, 1), module=nn.Identity(), param_name="weight", config=SimpleNamespace(**config))
    return [(s.name, s.size, s.placement) for s in sections]


def test_queries_keys_and_values_of_gated_delta_heads_are_cut_each():
    found = cut(delta_channels, 128, linear_num_key_heads=2, linear_key_head_dim=16)
    assert found == [("q", 32, Shard(0)), ("k", 32, Shard(0)), ("v", 64, Shard(0))]


@pytest.mark.parametrize(("groups", "placement"), [(1, Replicate()), (2, Shard(0))])
def test_one_group_of_b_and_c_is_whole_on_every_rank_and_several_go_with_their_heads(groups, placement):
    config = {"mamba_n_groups": groups, "mamba_d_state": 16, "mamba_n_heads": 8}
    shared = [("B", 16 * groups, placement), ("C", 16 * groups, placement)]
    inner = ("x", 128, Shard(0))
    assert cut(state_space_channels, 128 + 32 * groups, **config) == [inner, *shared]
    found = cut(state_space_projection, 256 + 32 * groups + 8, **config)
    assert found == [("gate", 128, Shard(0)), inner, *shared, ("dt", 8, Shard(0))]


def test_a_config_that_does_not_say_where_parts_begin_is_refused():
    with pytest.raises(Refused, match="mamba_n_groups"):
        cut(state_space_channels, 128, mamba_d_state=16)


def normed(width):
    mesh = make_mesh(tp=2)
    module = BambaRMSNormGated(width, group_size=width)
    nn.init.normal_(module.weight)
    generator = torch.Generator().manual_seed(0)
    x, gate, grad = (torch.randn(2, 3, width, generator=generator) for _ in range(3))
    module.weight = nn.Parameter(torch.randn(width, generator=generator))
    inputs = [x.requires_grad_(), gate.requires_grad_()]
    module(*inputs).backward(grad)
    expected = [module(*inputs).detach(), x.grad, gate.grad, module.weight.grad]
    rank, half = mesh.get_local_rank(), width // 2
    mine = slice(rank * half, (rank + 1) * half)
    forward = norm.gated_group_norm(target_module=module, fqn="norm", tp_mesh=mesh)
    module.weight = nn.Parameter(module.weight.detach()[mine].clone())
    parts = [t.detach()[..., mine].clone().requires_grad_() for t in (x, gate)]
    out = forward(module, *parts)
    out.backward(grad[..., mine])
    ours = [out.detach(), *(p.grad for p in parts), module.weight.grad]
    return [(o, e[..., mine]) for o, e in zip(ours, expected, strict=True)]


def test_a_norm_over_a_group_that_spans_the_ranks_has_the_values_and_gradients_of_one_process():
    for pairs in pool(2).run(normed, 32):
        for ours, expected in pairs:
            torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)


def test_another_norm_is_refused_when_planned_and_one_that_computes_something_else_when_applied():
    with pytest.raises(Refused, match="group_size"):
        norm.check(target_module=Qwen3NextRMSNormGated(8), fqn="norm", sizes={"tp": 2})

    class GatesAfterwards(BambaRMSNormGated):
        def forward(self, hidden_states, gate=None):
            return super().forward(hidden_states) * nn.functional.silu(gate)

    with pytest.raises(ApplyError, match="GatesAfterwards"):
        norm.gated_group_norm(target_module=GatesAfterwards(8, 8), fqn="norm", tp_mesh=None)


def test_a_summed_projection_with_a_bias_is_refused():
    with pytest.raises(Refused, match="bias"):
        projection.check(target_module=nn.Linear(4, 2), fqn="x_proj")


def test_the_entry_point_leads_to_the_plugin():
    (entry,) = entry_points(group="hyperpar", name="linear_attention")
    assert entry.load() is plugin
