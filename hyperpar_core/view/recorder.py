"""What a step of a planned model does, seen from outside: hooks on the boundaries' modules, and a dispatch mode around everything.

An operator of the forward belongs to the innermost boundary that is running. The nodes that the forward leaves in the graph are marked
with it, so an operator of the backward belongs to the boundary whose node is running, in whatever order autograd runs them. What the
end of a backward sends is a gradient sum. All of it is gone when the recorder stops.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ..plan.contract import Contract

__all__ = ["MODEL", "SUMS", "Recorder", "Sent", "Span", "Statistic"]

MODEL, SUMS = "(model)", "(gradient sums)"  # what belongs to no boundary, and what the end of a backward sends
_MARK = "hyperpar_boundary"
# {operator: (collective, position of what is handed in)}
_FUNCTIONAL = {
    "all_reduce": ("all_reduce", 0), "all_reduce_": ("all_reduce", 0), "all_gather_into_tensor": ("all_gather", 0),
    "reduce_scatter_tensor": ("reduce_scatter", 0), "all_to_all_single": ("all_to_all", 0), "broadcast": ("broadcast", 0),
}  # fmt: skip
_PLAIN = {
    "allreduce_": ("all_reduce", 0), "_allgather_base_": ("all_gather", 1), "allgather_": ("all_gather", 1),
    "allgather_into_tensor_coalesced_": ("all_gather", 1), "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_": ("reduce_scatter", 1), "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "alltoall_base_": ("all_to_all", 1), "alltoall_": ("all_to_all", 1), "broadcast_": ("broadcast", 0),
}  # fmt: skip


@dataclass
class Sent:
    """One collective. `bytes`: what this rank handed to it; `seconds`: until its result was there; `start`: since the trace began."""

    boundary: str
    phase: str
    axis: str
    collective: str
    bytes: int
    start: float
    seconds: float


@dataclass
class Span:
    """A run of operators of one boundary in one phase (forward, backward, recompute)."""

    boundary: str
    phase: str
    start: float
    seconds: float


@dataclass(frozen=True)
class Statistic:
    """One tensor at a boundary, this rank's part: mean, standard deviation and largest absolute value of what is finite in it."""

    boundary: str
    side: str
    name: str
    call: int
    mean: float
    std: float
    absmax: float
    nan: int
    infinite: int


class Recorder(TorchDispatchMode):
    """Records between `start` and `stop`. groups: {name of a process group: its axes}."""

    def __init__(
        self, model: nn.Module, contracts: Sequence[Contract], groups: Mapping[str, Sequence[str]], device: str, statistics: bool
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.model, self.contracts, self.groups, self.wants_statistics = model, contracts, groups, statistics
        self.waits = device != "cpu"
        self._experts = {c.fqn for c in contracts if any("ep" in layout for layout in c.params.values())}
        self.sent: list[Sent] = []
        self.spans: list[Span] = []
        self.statistics: list[Statistic] = []
        self._running: list[str] = []
        self._entered: list[list[Any]] = []
        self._pending: dict[int, Sent] = {}
        self._owner: tuple[str, str] | None = None
        self._paused = False
        self._calls: dict[tuple[str, str, str], int] = {}
        self._handles: list[Any] = []
        self._begun = 0.0
        self.epoch = 0.0

    def start(self) -> None:
        for contract in self.contracts:
            module = self.model.get_submodule(contract.fqn)
            names = list(inspect.signature(type(module).forward).parameters)[1:]
            self._handles += [
                module.register_forward_pre_hook(self._enter(contract, names), with_kwargs=True, prepend=True),
                module.register_forward_hook(self._leave(contract), with_kwargs=True, always_call=True),
            ]
        self.epoch, self._begun = time.time(), time.perf_counter()
        self.__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._switch(None)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._running.clear()
        self._entered.clear()
        self._pending.clear()

    # boundaries

    def _enter(self, contract: Contract, names: Sequence[str]) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._running.append(contract.fqn or MODEL)
            leaves = pytree.tree_leaves((args, kwargs))
            self._entered.append([x.grad_fn for x in leaves if isinstance(x, Tensor) and x.grad_fn is not None])
            if self.wants_statistics:
                given = {**dict(zip(names, args, strict=False)), **kwargs}
                self._measure(contract, "in", {name: given[name] for name in contract.in_src if name in given})

        return hook

    def _leave(self, contract: Contract) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
            self._running.pop()
            entered = self._entered.pop()
            outputs = [x for x in pytree.tree_leaves(out) if isinstance(x, Tensor)]
            _mark([x.grad_fn for x in outputs], entered, contract.fqn or MODEL)
            if self.wants_statistics and outputs:
                single = {contract.out_names[0]: out} if isinstance(out, Tensor) else None
                named = out if isinstance(out, Mapping) else dict(zip(contract.out_names, pytree.tree_leaves(out), strict=False))
                self._measure(contract, "out", single or named)

        return hook

    def _measure(self, contract: Contract, side: str, tensors: Mapping[str, Any]) -> None:
        self._paused = True
        with torch.no_grad():
            for name, x in tensors.items():
                if not isinstance(x, Tensor) or not x.is_floating_point() or not x.numel():
                    continue
                x = x.to_local() if isinstance(x, DTensor) else x
                key = (contract.fqn, side, name)
                self._calls[key] = self._calls.get(key, 0) + 1
                wide = x.detach().float()
                finite = wide[wide.isfinite()]
                some = finite if finite.numel() else wide.new_zeros(1)
                mean, std, absmax = torch.stack([some.mean(), some.std(correction=0), some.abs().max()]).tolist()
                odd = (int(wide.isnan().sum()), int(wide.isinf().sum()))
                self.statistics.append(Statistic(contract.fqn or MODEL, side, name, self._calls[key], mean, std, absmax, *odd))
        self._paused = False

    # operators

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # DTensor takes it apart; its operators on local tensors come back here
        if self._paused:
            return func(*args, **kwargs)
        owner = self._whose()
        if owner != self._owner:
            self._switch(owner)
        space, _, name = func._schema.name.partition("::")
        if space not in ("_c10d_functional", "c10d"):
            return func(*args, **kwargs)
        if name == "wait_tensor":
            out = func(*args, **kwargs)
            self._arrived(args[0])
            return out
        known = (_FUNCTIONAL if space == "_c10d_functional" else _PLAIN).get(name)
        if known is None:
            return func(*args, **kwargs)
        collective, position = known
        handed = [x for x in pytree.tree_leaves(args[position]) if isinstance(x, Tensor)]
        one = Sent(*owner, self._axis(args, owner[0], collective), collective, sum(x.nbytes for x in handed), self._now(), 0.0)
        self.sent.append(one)
        out = func(*args, **kwargs)
        if isinstance(out, Tensor):
            self._pending[out.data_ptr()] = one
        one.seconds = self._now() - one.start
        return out

    def _arrived(self, x: Tensor) -> None:
        one = self._pending.pop(x.data_ptr(), None)
        if one is not None:
            one.seconds = self._now() - one.start

    def _whose(self) -> tuple[str, str]:
        in_backward = torch._C._current_graph_task_id() != -1
        if self._running:
            return self._running[-1], "recompute" if in_backward else "forward"
        if not in_backward:
            return MODEL, "forward"
        node: Any = torch._C._current_autograd_node()
        return (SUMS, "backward") if node is None else (node.metadata.get(_MARK, MODEL), "backward")

    def _switch(self, owner: tuple[str, str] | None) -> None:
        now = self._now()
        if self._owner is not None:
            self.spans[-1].seconds = now - self.spans[-1].start
        if owner is not None:
            self.spans.append(Span(*owner, now, 0.0))
        self._owner = owner

    def _axis(self, args: Sequence[Any], boundary: str, collective: str) -> str:
        names = [value for value in args if isinstance(value, str)]
        for value in args:
            if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
                names.append(dist.ProcessGroup.unbox(value).group_name)
        axes = next((self.groups[name] for name in names if name in self.groups), ["other ranks"])
        if "ep" in axes and collective == "all_to_all" and boundary in self._experts:
            return "ep"
        return axes[0]  # several where axes have the same ranks

    def _now(self) -> float:
        if self.waits:
            torch.accelerator.synchronize()
        return time.perf_counter() - self._begun


def _mark(made: Sequence[Any], entered: Sequence[Any], boundary: str) -> None:
    """Marks the nodes between a boundary's outputs and its inputs that no boundary inside it has marked."""
    seen = {id(node) for node in entered}
    todo = [node for node in made if node is not None]
    visited = []  # keeps the nodes' wrappers, and with them their ids
    while todo:
        node = todo.pop()
        if id(node) in seen or "AccumulateGrad" in node.name():
            continue
        seen.add(id(node))
        visited.append(node)
        owner = node.metadata.setdefault(_MARK, boundary)
        if owner != boundary and boundary != MODEL and not owner.startswith(f"{boundary}."):
            continue  # what came before this boundary, by another way than its arguments
        todo += [after for after, _ in node.next_functions if after is not None]
