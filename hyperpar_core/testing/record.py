"""What one training step computed, recorded from one process or from the ranks of a planned model.

A record holds whole tensors under their original names, so that the two can be compared one by one. Boundaries are
recorded in execution order: what left each forward, and the gradient that each sent back to its inputs.
"""

from __future__ import annotations

import hashlib
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.overrides import TorchFunctionMode

from ..placement import Layout

__all__ = ["Boundary", "Record", "no_float32_casts", "record_parallel", "record_reference", "replica_differences"]

SGD_RATE = 0.05
ADAMW_RATE = 1e-3

# (boundary's module name, input or output name, how often that boundary had run before)
Boundary = tuple[str, str, int]


@dataclass(frozen=True)
class Record:
    """One step's results: whole tensors, in the original order of rows and tokens.

    outputs, input_gradients   per boundary, in execution order
    gradients                  {parameter: gradient, or None where there is none}
    weights                    {parameter: value} after `steps` SGD steps
    replicas                   what differs between ranks that hold the same shard: "NAME" or "gradient of NAME", then
                               the same after the SGD steps and after as many AdamW steps
    """

    loss: Tensor
    logits: Tensor
    gradients: Mapping[str, Tensor | None]
    outputs: Mapping[Boundary, Tensor] = field(default_factory=dict)
    input_gradients: Mapping[Boundary, Tensor] = field(default_factory=dict)
    weights: Mapping[str, Tensor] = field(default_factory=dict)
    replicas: tuple[str, ...] = ()
    steps: int = 0
    rank: int = 0


class no_float32_casts(TorchFunctionMode):
    """While active, what would cast a float64 tensor to float32 leaves it in float64.

    Models cast inside (norms, router softmax, the loss), which would hide a fault below 1e-6. Casts with `.float()`,
    `.to(torch.float32)`, `.type(...)` and any `dtype=torch.float32` are covered.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if func is Tensor.float:
                return args[0]
            args = tuple(torch.float64 if a is torch.float32 else a for a in args)
            kwargs = {k: torch.float64 if v is torch.float32 else v for k, v in kwargs.items()}
        return func(*args, **kwargs)


def record_reference(
    model: nn.Module,
    batch: Mapping[str, Tensor],
    *,
    boundaries: Mapping[str, Sequence[str]] | None = None,
    steps: int = 0,
    slices: int = 1,
) -> Record:
    """One process: forward, backward and `steps` SGD steps of the plain `model` on the global batch.

    boundaries: {module name: names of its outputs}, to be observed.
    slices: data-parallel slices over which an auxiliary loss is averaged, since it isn't linear in tokens (without one,
    the whole batch is one slice).
    """
    watch = _Watch()
    if not getattr(getattr(model, "config", None), "output_router_logits", False):
        slices = 1

    def step() -> tuple[Tensor, Tensor]:
        return _reference_step(model, batch, slices, watch)

    with _precise(model):
        with watch.modules(model, boundaries or {}):
            loss, logits = step()
        gradients = {n: _copy(p.grad) for n, p in model.named_parameters()}
        _optimise(torch.optim.SGD(model.parameters(), lr=SGD_RATE), step, steps, ready=True)
    weights = {n: p.detach().clone() for n, p in model.named_parameters()} if steps else {}
    return Record(loss, logits, gradients, watch.outputs, watch.input_gradients, weights, steps=steps)


def record_parallel(applied: Any, batch: Mapping[str, Tensor], *, steps: int = 0) -> Record:
    """The same of a planned model. Called on every rank with the global batch; each gets the whole record.

    Every data-parallel rank takes its rows of the batch, whose number must be a multiple of their count.
    """
    model, length = applied.model, batch["input_ids"].shape[1]
    rows = batch["input_ids"].shape[0]
    if rows % applied.data_parallel_size:
        raise ValueError(f"{rows} rows can't be split over {applied.data_parallel_size} data-parallel ranks.")
    part = {n: t.chunk(applied.data_parallel_size)[applied.data_parallel_rank] for n, t in batch.items()}
    share, watch = applied.shard_batch(part), _Watch()

    def step() -> Any:
        out = model(**share, **_no_cache(model))
        out.loss.backward()
        return out

    with _precise(model):
        with applied.observe(watch.observe):
            out = step()
        loss = applied.reduce_loss(out.loss.detach()).detach()
        logits = out.logits.detach()
        if isinstance(logits, DTensor):
            logits = logits.full_tensor()
        logits = _whole(applied, logits, {"cp": Shard(1)})[:, :length]
        gradients = {name: _copy(gradient) for name, gradient in applied.full_gradients().items()}
        replicas = replica_differences(model)
        weights: dict[str, Tensor] = {}
        if steps:
            _optimise(torch.optim.SGD(model.parameters(), lr=SGD_RATE), step, steps, ready=True)
            weights = {name: value.detach().clone() for name, value in applied.full_parameters().items()}
            replicas += [f"{name} after {steps} SGD steps" for name in replica_differences(model)]
            _optimise(torch.optim.AdamW(model.parameters(), lr=ADAMW_RATE), step, steps)
            replicas += [f"{name} after {steps} AdamW steps" for name in replica_differences(model)]
    outputs = _gathered(applied, watch, "output")
    input_gradients = _gathered(applied, watch, "grad_input")
    rank = dist.get_rank() if dist.is_initialized() else 0
    return Record(loss, logits, gradients, outputs, input_gradients, weights, tuple(replicas), steps, rank)


def replica_differences(model: nn.Module) -> list[str]:
    """What isn't bitwise equal on the ranks that hold the same shard of it.

    Called on every rank; all get the same list. A gradient that is still labelled Partial has no replicas.
    """
    held: dict[str, tuple[tuple[tuple[str, int], ...], str]] = {}
    for name, parameter in model.named_parameters():
        held[name] = _place(parameter), _digest(parameter)
        gradient = parameter.grad
        if not _is_partial(gradient):
            place = _place(parameter if gradient is None else gradient)
            held[f"gradient of {name}"] = place, "none" if gradient is None else _digest(gradient)
    everywhere: list[Any] = [held]
    if dist.is_initialized():
        everywhere = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, held)
    seen: dict[tuple[str, Any], str] = {}
    differing = []
    for entries in everywhere:
        for name, (shard, digest) in entries.items():
            if seen.setdefault((name, shard), digest) != digest and name not in differing:
                differing.append(name)
    return differing


# ---- one step


@contextmanager
def _precise(model: nn.Module) -> Iterator[None]:
    double = any(p.dtype == torch.float64 for p in model.parameters())
    with no_float32_casts() if double else nullcontext():
        yield


def _no_cache(model: nn.Module) -> dict[str, Any]:
    """`use_cache=False`, where the forward knows it: a cache switches the isolation of packed documents off."""
    parameters = inspect.signature(type(model).forward).parameters
    known = "use_cache" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return {"use_cache": False} if known else {}


def _reference_step(model: Any, batch: Mapping[str, Tensor], slices: int, watch: _Watch) -> tuple[Tensor, Tensor]:
    """(loss, logits) of the global batch; its gradients are added to the parameters.

    Over several slices: the cross entropy is the mean over all tokens, the auxiliary loss the mean over slices.
    """
    if slices == 1:
        out = model(**batch, **_no_cache(model))
        out.loss.backward()
        return out.loss.detach(), out.logits.detach()
    labels = batch["labels"]
    tokens = int((labels[:, 1:] != -100).sum())
    total, logits = torch.zeros((), dtype=torch.float64), []
    for part in zip(*(batch[name].chunk(slices) for name in batch), strict=True):
        watch.start_slice()
        rows = dict(zip(batch, part, strict=True))
        out = model(**rows, **_no_cache(model), num_items_in_batch=tokens)
        vocab = out.logits.shape[-1]
        cross_entropy = model.loss_function(out.logits, rows["labels"], vocab_size=vocab, num_items_in_batch=tokens)
        share = cross_entropy + (out.loss - cross_entropy) / slices
        share.backward()
        total += share.detach()
        logits.append(out.logits.detach())
    return total.to(logits[0].dtype), torch.cat(logits)


def _optimise(
    optimizer: torch.optim.Optimizer, step: Callable[[], Any], steps: int, ready: bool = False
) -> None:
    """`steps` updates; `ready`: the gradients of the first are already there."""
    for number in range(steps):
        if number or not ready:
            optimizer.zero_grad()
            step()
        optimizer.step()


# ---- boundaries


class _Watch:
    """Collects what boundaries send, from hooks of a plain model or from `applied.observe`."""

    def __init__(self) -> None:
        self.outputs: dict[Boundary, Tensor] = {}
        self.input_gradients: dict[Boundary, Tensor] = {}
        self.layouts: dict[tuple[str, Boundary], Layout] = {}
        self._runs: Counter[tuple[str, str, str]] = Counter()

    def observe(self, fqn: str, kind: str, name: str, tensor: Tensor, layout: Layout) -> None:
        boundary = (fqn, name, self._runs[fqn, kind, name])
        self._runs[fqn, kind, name] += 1
        self.layouts[kind, boundary] = layout
        seen = self.outputs if kind == "output" else self.input_gradients
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        rows = local.detach().clone()
        seen[boundary] = torch.cat([seen[boundary], rows]) if boundary in seen and rows.ndim else rows

    def start_slice(self) -> None:
        """What follows is the same boundaries' work on further rows."""
        self._runs.clear()

    @contextmanager
    def modules(self, model: nn.Module, boundaries: Mapping[str, Sequence[str]]) -> Iterator[None]:
        with ExitStack() as stack:
            for fqn, names in boundaries.items():
                for handle in self._hook(model.get_submodule(fqn), fqn, names):
                    stack.callback(handle.remove)
            yield

    def _hook(self, module: nn.Module, fqn: str, names: Sequence[str]) -> list[Any]:
        arguments = list(inspect.signature(type(module).forward).parameters)[1:]

        def entered(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            seen = [self._input(fqn, name, x) for name, x in zip(arguments, args, strict=False)]
            return (*seen, *args[len(seen) :]), {name: self._input(fqn, name, x) for name, x in kwargs.items()}

        def left(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
            for name, x in _named_outputs(out, names):
                self.observe(fqn, "output", name, x, {})

        return [module.register_forward_pre_hook(entered, with_kwargs=True), module.register_forward_hook(left)]

    def _input(self, fqn: str, name: str, x: Any) -> Any:
        if not (isinstance(x, Tensor) and x.requires_grad):
            return x
        x = x.view_as(x)  # the gradient of this use alone, not of the residual beside it
        x.register_hook(lambda grad: self.observe(fqn, "grad_input", name, grad, {}))
        return x


def _named_outputs(out: Any, names: Sequence[str]) -> list[tuple[str, Tensor]]:
    if isinstance(out, Tensor):
        return [(names[0] if names else "output", out)]
    if isinstance(out, Mapping):
        return [(str(name), x) for name, x in out.items() if isinstance(x, Tensor)]
    if isinstance(out, (tuple, list)):
        named = [(names[i] if i < len(names) else f"output {i}", x) for i, x in enumerate(out)]
        return [(name, x) for name, x in named if isinstance(x, Tensor)]
    return []


# ---- whole tensors


def _gathered(applied: Any, watch: _Watch, kind: str) -> dict[Boundary, Tensor]:
    """Whole tensors of what every rank has seen, in this rank's execution order."""
    seen = watch.outputs if kind == "output" else watch.input_gradients
    names: list[Any] = [list(seen)]
    if dist.is_initialized():
        names = [None] * dist.get_world_size()
        dist.all_gather_object(names, list(seen))
    common = [boundary for boundary in names[0] if all(boundary in other for other in names)]
    whole = {boundary: _whole(applied, seen[boundary], watch.layouts[kind, boundary]) for boundary in common}
    return {boundary: whole[boundary] for boundary in seen if boundary in whole}


def _whole(applied: Any, x: Tensor, layout: Layout) -> Tensor:
    """The whole of a local tensor: parts joined over cp and tp, rows over dp. Called on every rank."""
    for axis in reversed(applied.mesh.mesh_dim_names or ()):
        placement = Shard(0) if axis == "dp" else layout.get(axis, Replicate())
        group = applied.mesh.get_group(axis)
        if isinstance(placement, Partial):
            x = x.clone()
            dist.all_reduce(x, group=group)
        elif isinstance(placement, Shard) and axis == "cp":
            x = applied.unshard(x, dim=placement.dim)
        elif isinstance(placement, Shard) and x.ndim:
            parts: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(parts, x.cpu(), group=group)
            x = torch.cat(parts, placement.dim).to(x.device)
    return x


def _copy(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.detach().clone()


def _is_partial(x: Tensor | None) -> bool:
    return isinstance(x, DTensor) and any(isinstance(p, Partial) for p in x.placements)


def _place(x: Tensor) -> tuple[tuple[str, int], ...]:
    """Which shard of a tensor this rank holds: {axis: coordinate} of the axes that cut it."""
    if not isinstance(x, DTensor):
        return ()
    coordinate, axes = x.device_mesh.get_coordinate() or (), x.device_mesh.mesh_dim_names or ()
    cuts = zip(axes, x.placements, coordinate, strict=True)
    return tuple((axis, at) for axis, placement, at in cuts if not isinstance(placement, Replicate))


def _digest(x: Tensor) -> str:
    local = (x.to_local() if isinstance(x, DTensor) else x).detach()
    data = local.contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes()
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()
