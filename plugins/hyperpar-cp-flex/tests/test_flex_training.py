"""Training on ranks with a dense attention in the place of torch's kernel, which has no backward on a CPU: what is around it is proven."""

from contextlib import contextmanager
from itertools import product
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from cp_dense import cp_group, differences, held, inputs, mask_of, reference, whole
from hyperpar_cp_flex import attention as module
from hyperpar_cp_flex.block_masks import BLOCK
from hyperpar_cp_sdpa.extend import Parts
from test_flex_attention import FORMS, documents_of, rule_of

from hyperpar_core import apply_plan, build_plan, make_mesh
from hyperpar_core.batch import ORDERS
from hyperpar_core.testing import Degrees, check_parity, pool, tiny_batch, tiny_model
from hyperpar_core.view.traffic import predict

RANKS = 4
RULES = ("causal", "bidirectional", "window", "chunk")
WRAPPERS = ("flex_hf", "flex_hf_ulysses")


def dense(q, k, v, *, score_mod, block_mask, scale, enable_gqa, return_aux):
    """flex_attention's interface, by the formula."""
    if enable_gqa:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    sizes = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    batch, head, query, key = (torch.arange(n).view([-1 if i == dim else 1 for i in range(4)]) for dim, n in enumerate(sizes))
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if score_mod is not None:
        scores = score_mod(scores, batch, head, query, key)
    seen = block_mask.mask_mod(batch, head, query, key).expand(sizes)
    lse = scores.masked_fill(~seen, -torch.inf).logsumexp(-1)
    weights = torch.exp(scores - torch.where(lse.isfinite(), lse, 0.0).unsqueeze(-1)).masked_fill(~seen, 0.0)
    out = weights @ v
    return out if return_aux is None else (out, SimpleNamespace(lse=lse))


@contextmanager
def dense_kernel():
    kernel, refuse = module.flex_attention, module._refuse_backward
    module.flex_attention, module._refuse_backward = dense, lambda tensors, where: None
    try:
        yield
    finally:
        module.flex_attention, module._refuse_backward = kernel, refuse


# ---- on the ranks


def gradients(cp, form):
    """The largest relative difference of the output and every gradient, over orders, masks and documents."""
    group, worst = cp_group(cp), []
    for order in ORDERS:
        for number, (rule, documents) in enumerate(product(RULES, documents_of(24))):
            softcap, with_sinks = (None, 2.0)[number % 2], number % 3 == 0
            mask = mask_of(rule_of(rule, 6), order, 24, documents)
            tensors = inputs((2, 4, 2, 24, 8, 6), torch.float64, seed=number)
            q, k, v, grad = (held(x, 2, order, group) for x in tensors[:4])
            leaves = [x.clone().requires_grad_() for x in (q, k, v, tensors[4])]
            parts = Parts(group, order, 24, FORMS[form](cp))
            with dense_kernel():
                out = module.attention(*leaves[:3], mask, parts, scale=0.4, softcap=softcap, sinks=leaves[3] if with_sinks else None)
            out.backward(grad)
            ours = [whole(x, 2, order, group) for x in (out.detach(), *(x.grad for x in leaves[:3]))]
            if with_sinks:
                total = leaves[3].grad.clone()
                dist.all_reduce(total, group=dist.distributed_c10d._resolve_process_group(group.name))
                ours.append(total)
            error = max(differences(ours, reference(tensors, mask, 0.4, softcap, with_sinks)))
            worst.append((error, order, rule, number))
    return max(worst)


def strips(cp, form):
    """The same where queries are more than one strip."""
    group, length = cp_group(cp), cp * (BLOCK + 20)
    tensors = inputs((1, 4, 4, length, 8, 8), torch.float64)
    mask = mask_of(rule_of("causal", 0), "head_tail", length)
    q, k, v, grad = (held(x, 2, "head_tail", group) for x in tensors[:4])
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    with dense_kernel():
        out = module.attention(*leaves, mask, Parts(group, "head_tail", length, FORMS[form](cp)), scale=0.4)
    out.backward(grad)
    ours = [whole(x, 2, "head_tail", group) for x in (out.detach(), *(x.grad for x in leaves))]
    return max(differences(ours, reference(tensors, mask, 0.4)))


def entry(wrapper):
    return {"match": "*.self_attn", "when": "cp", "inner_target": "self", "inner_wrapper": wrapper}


def trained(family, wrapper, degrees):
    model = tiny_model(family)
    batch = tiny_batch(model, batch=2, seq=21)
    with dense_kernel():
        return check_parity(model, batch, Degrees(**degrees, options={"overrides": [entry(wrapper)]}), steps=2)


def counted(wrapper, degrees):
    """(predicted, counted) collectives and bytes of a step."""
    model, mesh = tiny_model("llama"), make_mesh(**degrees)
    applied = apply_plan(model, build_plan(model, mesh, overrides=[entry(wrapper)]), mesh, checks=None)
    batch = applied.shard_batch(tiny_batch(model, batch=2, seq=16))
    with dense_kernel(), applied.trace(show=False) as trace:
        model(**batch).loss.backward()
    return predict(applied.plan, 2, 16, bytes_per_element=4), trace.totals()


# ---- tests


@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("form", FORMS)
def test_gradients_are_those_of_dense_attention_for_every_mask_and_order(form, cp):
    for worst in pool(RANKS).run(gradients, cp, form):
        assert worst[0] <= 1e-10, worst


@pytest.mark.parametrize("form", FORMS)
def test_so_are_those_of_more_queries_than_one_strip(form):
    for error in pool(RANKS).run(strips, 4, form):
        assert error <= 1e-10


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize(
    ("family", "degrees"),
    [("llama", {"cp": 2, "tp": 2}), ("gemma2", {"cp": 4}), ("gpt_oss", {"cp": 2}), ("gemma3_text", {"dp": 2, "cp": 2})],
    ids=str,
)
def test_training_computes_what_one_process_does(family, degrees, wrapper):
    ranks = degrees.get("dp", 1) * degrees["cp"] * degrees.get("tp", 1)
    for report in pool(ranks).run(trained, family, wrapper, degrees):
        assert report.ok, report.text()


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("degrees", [{"cp": 4}, {"cp": 2, "tp": 2}], ids=str)
def test_a_step_sends_what_the_plan_says(wrapper, degrees):
    for predicted, seen in pool(degrees["cp"] * degrees.get("tp", 1)).run(counted, wrapper, degrees):
        assert seen == predicted and seen
