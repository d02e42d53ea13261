"""Archetypes: for one kind of MoE block each, its interface and its expert-parallel compute.

All of them run the block's own forward: its router, its shared expert, how it merges the branches. What they take over is the call
`experts(hidden_states, indices, weights)` inside it: there tokens travel (see `dispatch`), and the experts module's own forward, in
whatever implementation the config names, computes with this rank's experts. What tells archetypes apart is the block that they accept:
each states the children and attributes that it knows, and refuses a block that has others, whose meaning it would have to guess.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.distributed.device_mesh import DeviceMesh

from hyperpar_core import original_forward
from hyperpar_core.collectives.functional import AxisGroup, axis_group
from hyperpar_core.errors import ApplyError, OverrideError, Refused

from .dispatch import DISPATCHERS, Build, Dispatcher, nothing
from .other_calls import ScaledInputs, SortedRows
from .two_passes import called_one_by_one

__all__ = [
    "BlockForward", "CalledOneByOne", "deepseekv3_sigmoid_group_shared", "expert_modules", "experts_dispatch", "jetmoe_sorted_rows",
    "llama4_scaled_inputs", "mixtral_topk_router", "qwen2moe_shared_expert_gate", "routed_only_softmax_topk", "topk_router",
]  # fmt: skip


@dataclass(frozen=True)
class BlockForward:
    """The block's own forward, with the forwards of some children replaced: what the archetypes return.

    children  {child: fn(module, *args, **kwargs)}; the applier installs them, and `original_forward` leads back to the child's own
    """

    children: Mapping[str, Callable[..., Any]]

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        out = original_forward(module, *args, **kwargs)
        x = args[0] if args else next(iter(kwargs.values()))
        if isinstance(out, tuple) and out[0].ndim < x.ndim:  # some hand back rows, of which a boundary can't tell sequences
            return (out[0].view(x.shape), *out[1:])
        return out


@dataclass(frozen=True)
class CalledOneByOne(BlockForward):
    """The same for a block that calls its experts one after the other."""

    fqn: str

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return called_one_by_one(self.fqn, module, super().__call__, args, kwargs)


@dataclass(frozen=True)
class DispatchedExperts:
    """The experts' forward: tokens go to the ranks of their experts, and come back weighted and summed."""

    fqn: str
    names: tuple[str, ...]  # of the experts' arguments: hidden states, indices, weights
    dispatch: Dispatcher

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        given = {**dict(zip(self.names, args, strict=False)), **kwargs}
        if len(args) > 3 or set(given) != set(self.names):
            raise ApplyError(
                f"{self.fqn}: the block calls its experts with {', '.join(given)}, and expert parallelism knows how to send"
                f" {', '.join(self.names)} only."
            )
        hidden: Tensor
        indices: Tensor
        weights: Tensor
        hidden, indices, weights = (given[name] for name in self.names)
        x = hidden.reshape(-1, hidden.shape[-1])
        if indices.ndim != 2 or indices.shape != weights.shape or len(indices) != len(x) or indices.is_floating_point():
            kind = f" of {str(indices.dtype).removeprefix('torch.')}" if indices.is_floating_point() else ""
            raise ApplyError(
                f"{self.fqn}: the experts get indices {list(indices.shape)}{kind} and weights {list(weights.shape)} for {len(x)} tokens;"
                " needed: [tokens, k] both, indices whole numbers."
            )
        if isinstance(x, FakeTensor):  # the offline check: shapes alone can't say how many rows travel
            x = x * weights.sum(1, keepdim=True).to(x.dtype) + nothing(module).to(x.dtype)
            return x.reshape(hidden.shape)
        return self.dispatch(partial(_local_experts, module), x, indices, weights).reshape(hidden.shape)


def _local_experts(module: nn.Module, x_NH: Tensor, expert_N1: Tensor, weight_N1: Tensor) -> Tensor:
    """The experts' own forward on this rank's experts. Without a token their gradients are zero, not missing."""
    if len(x_NH):
        return original_forward(module, x_NH, expert_N1, weight_N1).reshape(x_NH.shape)  # type: ignore[no-any-return]
    return x_NH * weight_N1.to(x_NH.dtype) + nothing(module).to(x_NH.dtype)


@dataclass(frozen=True)
class Interface:
    """The block that an archetype accepts.

    children    those that hold parameters, all of them; None: any
    attributes  what the block must have
    router      attributes that its router must have
    linear      whether the router must be a plain linear layer, whose logits the block itself makes into weights
    """

    children: tuple[str, ...] | None = None
    attributes: tuple[str, ...] = ()
    router: tuple[str, ...] = ()
    linear: bool | None = None
    jitter: bool = True


def _refuse(name: str, fqn: str, module: nn.Module, why: str) -> Refused:
    held = [f"{child} ({type(m).__name__})" for child, m in module.named_children() if any(True for _ in m.parameters())]
    return Refused(
        f"{fqn}: {name} doesn't fit {type(module).__name__}: {why}.\n"
        f"  Its children with parameters: {', '.join(held) or 'none'}.\n"
        "  experts_dispatch takes any block that calls experts(hidden_states, indices, weights)."
    )


def _check(name: str, fqn: str, module: nn.Module, interface: Interface) -> None:
    held = {child for child, m in module.named_children() if any(True for _ in m.parameters())}
    held |= {p for p, value in module._parameters.items() if value is not None}
    if interface.children is not None and held != set(interface.children):
        raise _refuse(name, fqn, module, f"it needs exactly {', '.join(interface.children)}")
    for attribute in interface.attributes:
        if not hasattr(module, attribute):
            raise _refuse(name, fqn, module, f"it has no {attribute}")
    gate = getattr(module, "gate", None)
    for attribute in interface.router:
        if not hasattr(gate, attribute):
            raise _refuse(name, fqn, module, f"its router ({type(gate).__name__}) has no {attribute}")
    if interface.linear is not None and isinstance(gate, nn.Linear) != interface.linear:
        kind = "a plain linear layer" if interface.linear else "one that returns logits, scores and indices"
        raise _refuse(name, fqn, module, f"its router is {type(gate).__name__}, needed: {kind}")
    if not interface.jitter and getattr(module, "jitter_noise", False):
        raise _refuse(name, fqn, module, f"it jitters its input (jitter_noise={module.jitter_noise}); mixtral_topk_router knows that")


def _group(name: str, fqn: str, ep_mesh: DeviceMesh | None) -> AxisGroup:
    """The ranks that share the experts."""
    if ep_mesh is None:
        raise Refused(f"{fqn}: {name} needs ep_mesh, and ep is 1 here. Plan with ep_size > 1, or leave the archetype out.")
    return axis_group(ep_mesh)


def _block_forward(
    name: str, interface: Interface, fqn: str, module: nn.Module, ep_mesh: DeviceMesh, dispatcher: Any, experts: str = "experts"
) -> BlockForward:
    group = _group(name, fqn, ep_mesh)
    _check(name, fqn, module, interface)
    child = getattr(module, experts, None)
    if not isinstance(child, nn.Module):
        raise _refuse(name, fqn, module, f"it has no child {experts!r}")
    weights = [p for p in child.parameters()]
    arguments = tuple(inspect.signature(type(child).forward).parameters)[1:]
    count = _count(child)
    if len(arguments) < 3 or count is None:
        raise _refuse(
            name, fqn, module,
            f"{experts} must hold parameters whose first dim counts the experts, and take (hidden_states, indices, weights); it is a"
            f" {type(child).__name__} with first dims {sorted({w.shape[0] for w in weights if w.ndim})} that takes"
            f" ({', '.join(arguments)})",
        )  # fmt: skip
    dispatch = _build(name, fqn, dispatcher)(group, count // group.ranks)
    return BlockForward({experts: DispatchedExperts(f"{fqn}.{experts}", arguments[:3], dispatch)})


def _count(experts: nn.Module) -> int | None:
    """How many experts the first dims of a module's parameters hold; None where they don't agree."""
    sizes = {p.shape[0] if p.ndim else 0 for p in experts.parameters()}
    said = getattr(experts, "num_experts", None)  # weights of all experts may lie one below the other in two dims
    if isinstance(said, int) and sizes and all(size and size % said == 0 for size in sizes):
        return said
    return sizes.pop() if len(sizes) == 1 and not isinstance(experts, (nn.ModuleList, nn.ModuleDict)) else None


def _build(name: str, fqn: str, dispatcher: Any) -> Build:
    build = DISPATCHERS.get(dispatcher) if isinstance(dispatcher, str) else dispatcher
    if build is None:
        raise OverrideError(f"{fqn}: {name}: no dispatcher {dispatcher!r} (dispatchers: {', '.join(DISPATCHERS)}).")
    return build


def experts_dispatch(
    *, module: nn.Module, ep_mesh: DeviceMesh, fqn: str = "block", experts: str = "experts", dispatcher: Any = "all_to_all"
) -> BlockForward:
    """Any block whose forward calls experts(hidden_states, indices, weights) once, whatever else it does.

    experts: the child's name. dispatcher: a name in `dispatch.DISPATCHERS`, or a builder. Raises Refused with the block's children
    where it doesn't fit. Called on every rank of the expert group, as are all archetypes.
    """
    return _block_forward("experts_dispatch", Interface(), fqn, module, ep_mesh, dispatcher, experts)


def topk_router(
    *, module: nn.Module, ep_mesh: DeviceMesh, fqn: str = "block", dispatcher: Any = "all_to_all"
) -> BlockForward:
    """gate -> (logits, scores, indices), experts(hidden_states, indices, scores), and nothing else: Qwen3-MoE, OLMoE."""
    interface = Interface(("gate", "experts"), linear=False, jitter=False)
    return _block_forward("topk_router", interface, fqn, module, ep_mesh, dispatcher)


def mixtral_topk_router(
    *, module: nn.Module, ep_mesh: DeviceMesh, fqn: str = "block", dispatcher: Any = "all_to_all"
) -> BlockForward:
    """The same with jitter on the input, before router and experts: Mixtral."""
    interface = Interface(("gate", "experts"), attributes=("jitter_noise",), linear=False)
    return _block_forward("mixtral_topk_router", interface, fqn, module, ep_mesh, dispatcher)


def routed_only_softmax_topk(
    *, module: nn.Module, ep_mesh: DeviceMesh, fqn: str = "block", dispatcher: Any = "all_to_all"
) -> BlockForward:
    """A linear gate whose logits the block itself makes into weights and indices, and experts; no shared expert."""
    interface = Interface(("gate", "experts"), linear=True, jitter=False)
    return _block_forward("routed_only_softmax_topk", interface, fqn, module, ep_mesh, dispatcher)


def qwen2moe_shared_expert_gate(
    *, module: nn.Module, ep_mesh: DeviceMesh, fqn: str = "block", dispatcher: Any = "all_to_all"
) -> BlockForward:
    """A router, experts, and one shared expert that a sigmoid gate scales: Qwen2-MoE."""
    interface = Interface(("gate", "experts", "shared_expert", "shared_expert_gate"), linear=False, jitter=False)
    return _block_forward("qwen2moe_shared_expert_gate", interface, fqn, module, ep_mesh, dispatcher)


def deepseekv3_sigmoid_group_shared(
    *, module: nn.Module, ep_mesh: DeviceMesh, fqn: str = "block", dispatcher: Any = "all_to_all"
) -> BlockForward:
    """A sigmoid router limited to groups, with a correction bias, and shared experts beside the routed ones: DeepSeek-V3, GLM-4-MoE."""
    interface = Interface(
        ("gate", "experts", "shared_experts"), router=("e_score_correction_bias",), linear=False, jitter=False
    )
    return _block_forward("deepseekv3_sigmoid_group_shared", interface, fqn, module, ep_mesh, dispatcher)


def llama4_scaled_inputs(
    *, module: nn.Module, ep_mesh: DeviceMesh, fqn: str = "block", dispatcher: Any = "all_to_all"
) -> BlockForward:
    """A router whose weights scale the experts' inputs, experts that see every token, and a shared expert: Llama 4."""
    name = "llama4_scaled_inputs"
    group = _group(name, fqn, ep_mesh)
    _check(name, fqn, module, Interface(("router", "experts", "shared_expert")))
    experts: Any = module.experts
    if len(inspect.signature(type(experts).forward).parameters) != 2 or _count(experts) is None:
        raise _refuse(name, fqn, module, "experts must take all tokens once for each expert, and nothing else")
    if any(parameter.ndim < 3 for parameter in experts.parameters()):
        raise _refuse(name, fqn, module, "its experts have biases, so a token that they weren't chosen for isn't nothing to them")
    count = experts.num_experts
    local = count // group.ranks
    dispatch = _build(name, fqn, dispatcher)(group, local)
    return BlockForward({"experts": ScaledInputs(f"{fqn}.experts", count, local, dispatch)})


def jetmoe_sorted_rows(*, module: nn.Module, ep_mesh: DeviceMesh, fqn: str = "block") -> BlockForward:
    """A router that sorts, and experts in two layers that take (rows, rows of each expert), with an activation between: JetMoE."""
    name = "jetmoe_sorted_rows"
    group = _group(name, fqn, ep_mesh)
    _check(name, fqn, module, Interface(("router", "input_linear", "output_linear", "bias"), attributes=("activation",)))
    layers = ("input_linear", "output_linear")
    for layer in layers:
        arguments = list(inspect.signature(type(getattr(module, layer)).forward).parameters)[1:]
        if len(arguments) != 2 or _count(getattr(module, layer)) is None:
            raise _refuse(name, fqn, module, f"{layer} must take (rows, rows of each expert); it takes ({', '.join(arguments)})")
    return BlockForward(
        {layer: SortedRows(f"{fqn}.{layer}", group, sends=layer == layers[0], returns=layer == layers[1]) for layer in layers}
    )


def expert_modules(*, module: nn.Module, ep_mesh: DeviceMesh, fqn: str = "block", dispatcher: Any = "all_to_all") -> CalledOneByOne:
    """A block that calls experts[i](rows [n, hidden]) -> [n, hidden] for each expert of a ModuleList, at most once a forward.

    How it routes, in which order it calls, whether it skips experts without rows and how it merges is its own code, which runs twice: to
    learn the rows, and with what the experts made of them. So it may not keep accounts as it runs (buffers, hooks on its router).
    """
    name = "expert_modules"
    group = _group(name, fqn, ep_mesh)
    experts = getattr(module, "experts", None)
    if not isinstance(experts, nn.ModuleList) or not len(experts):
        raise _refuse(name, fqn, module, f"experts must be a ModuleList of modules; it is {type(experts).__name__}")
    dispatch = _build(name, fqn, dispatcher)(group, len(experts) // group.ranks)
    names = ("hidden_states", "indices", "weights")
    return CalledOneByOne({"experts": DispatchedExperts(f"{fqn}.experts", names, dispatch)}, fqn)
