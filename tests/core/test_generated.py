"""Generated classes: parameters are DTensors outside a region and local tensors inside it, and nothing else changes."""

import copy
import inspect

import pytest
import torch
import torch.distributed as dist
from core_tools import planned, share, step
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer, LlamaRMSNorm

from hyperpar_core import Override, make_mesh, original_forward
from hyperpar_core.apply import generated
from hyperpar_core.testing import pool


def looks(degrees):
    """How a planned model looks from outside, and what its modules saw inside."""
    applied, _, batch = planned("llama", **degrees)
    model, seen = applied.model, []
    layer = model.model.layers[0]
    modules = (layer.self_attn.q_proj, layer.mlp.down_proj, layer.input_layernorm, model.lm_head, model.model.embed_tokens)
    for module in modules:
        module.register_forward_hook(lambda m, args, out: seen.append(type(m.weight).__name__))
    step(model, share(applied, batch))
    classes = {
        "model": (type(model), LlamaForCausalLM), "attention": (type(layer.self_attn), LlamaAttention),
        "norm": (type(layer.input_layernorm), LlamaRMSNorm), "linear": (type(layer.mlp.up_proj), nn.Linear),
        "layer": (type(layer), LlamaDecoderLayer),
    }  # fmt: skip
    named = {
        key: (ours.__module__, ours.__qualname__, ours.__name__, ours.__doc__)
        == (base.__module__, base.__qualname__, base.__name__, base.__doc__) and issubclass(ours, base)
        for key, (ours, base) in classes.items()
    }  # fmt: skip
    signature = inspect.signature(model.forward) == inspect.signature(LlamaForCausalLM.forward.__get__(model))
    outside = [
        all(isinstance(p, DTensor) and isinstance(p, nn.Parameter) for p in model.parameters()),
        all(isinstance(v, DTensor) for v in model.state_dict().values()),
        all(getattr(m, n) is p for m in model.modules() for n, p in m._parameters.items() if p is not None),
        all(isinstance(p, DTensor) for group in torch.optim.SGD(model.parameters()).param_groups for p in group["params"]),
        isinstance(layer.self_attn.q_proj.weight, DTensor),
        all(isinstance(p.grad, DTensor) for p in model.parameters()),
    ]
    instance = [n for n, m in model.named_modules() if "forward" in m.__dict__]
    return named, signature, outside, instance, seen


@pytest.mark.parametrize("degrees", [{"tp": 2}, {"dp": 2}], ids=str)
def test_outside_a_region_everyone_sees_dtensors_and_the_classes_look_like_their_bases(degrees):
    for named, signature, outside, instance, _ in pool(2).run(looks, degrees):
        assert all(named.values()), named
        assert signature and outside == [True] * 6 and instance == []


def inside_and_after():
    """The type of a weight inside its region, after it, and after a forward that failed in it."""
    applied, _, batch = planned("llama", tp=2)
    attention, seen = applied.model.model.layers[0].self_attn, []
    handle = attention.q_proj.register_forward_pre_hook(lambda m, args: seen.append(type(m.weight).__name__))
    mine = share(applied, batch)
    step(applied.model, mine)
    seen.append(type(attention.q_proj.weight).__name__)
    handle.remove()
    handle = attention.q_proj.register_forward_pre_hook(lambda m, args: 1 / 0)
    try:
        step(applied.model, mine)
    except ZeroDivisionError:
        seen.append("failed")
    handle.remove()
    seen.append(type(attention.q_proj.weight).__name__)
    return seen


def test_inside_its_region_a_weight_is_local_and_after_a_failure_it_is_a_dtensor_again():
    assert pool(2).run(inside_and_after) == [["Tensor", "DTensor", "failed", "DTensor"]] * 2


def failing_getter():
    applied, _, batch = planned("llama", tp=2)
    before = generated.local_part
    generated.local_part = lambda parameter, placements: parameter.no_such_attribute
    try:
        step(applied.model, share(applied, batch))
    except RuntimeError as error:
        return type(error).__name__, str(error)
    finally:
        generated.local_part = before
    return None


def test_a_getter_that_fails_is_a_runtime_error_and_never_hands_out_the_dtensor_in_silence():
    for kind, text in pool(2).run(failing_getter):
        assert kind == "RuntimeError" and ".weight failed" in text and "no_such_attribute" in text


class Own(nn.Linear):
    pass


def test_modules_of_one_class_share_a_generated_class_and_others_get_their_own():
    one = generated.generated_class(Own, ("weight", "bias"), True)
    assert one is generated.generated_class(Own, ("weight", "bias"), True)
    assert one is not generated.generated_class(Own, ("weight", "bias"), False)
    assert one is not generated.generated_class(nn.Linear, ("weight", "bias"), True)
    assert "forward" not in vars(generated.generated_class(Own, ("weight",), False))
    assert "forward" in vars(one) and "forward" not in vars(Own)


def test_the_original_forward_is_that_of_the_base_class_with_a_plan_and_without():
    plain = nn.Linear(2, 2)
    made = copy.deepcopy(plain)
    made.__class__ = generated.generated_class(nn.Linear, (), True)
    x = torch.ones(2)
    assert torch.equal(original_forward(made, x), plain(x)) and torch.equal(original_forward(plain, x), plain(x))


def doubled(module, x):
    return 2 * original_forward(module, x)


def make_doubled(*, module):
    return doubled


def replaced():
    """A local compute that calls the module's own forward, on top of the boundary's transitions."""
    override = Override(match="*.mlp", local_compute_fn=make_doubled, region_dispatch=True)
    applied, single, batch = planned("llama", tp=2, overrides=[override])
    ours = applied.model(**share(applied, batch)).logits
    plain = type(single.model.layers[0].mlp).forward
    for layer in single.model.layers:
        layer.mlp.forward = lambda x, m=layer.mlp: 2 * plain(m, x)
    return float((ours - single(**batch).logits).abs().max() / ours.abs().max())


def test_a_local_compute_calls_the_modules_own_forward_inside_the_region():
    assert max(pool(2).run(replaced)) < 1e-5


def twice_the_same_mesh():
    """Whether the gradient that a parameter is given lies on the parameter's own mesh, for two meshes that are equal."""
    own: list[bool] = []
    for _ in range(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        # nn.Parameter detaches, which torch labels from a cache of its own
        parameter = DTensor.from_local(torch.ones(3), mesh, [Replicate()]).requires_grad_()
        parameter.register_hook(lambda grad, mesh=mesh: own.append(grad.device_mesh is mesh))
        generated.local_part(parameter, (Partial(),)).sum().backward()
    return own


def test_a_gradient_lies_on_its_parameters_own_mesh_not_on_an_equal_one_of_an_earlier_job():
    assert pool(2).run(twice_the_same_mesh) == [[True, True]] * 2


def test_the_meshes_of_a_job_that_ended_are_forgotten_by_torch_too():
    for _ in range(2):
        mesh = make_mesh()
        parameter = nn.Parameter(DTensor.from_local(torch.ones(3), mesh, [Replicate()]))
        assert parameter.device_mesh is mesh
        dist.destroy_process_group()
