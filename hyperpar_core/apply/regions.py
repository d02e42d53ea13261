"""The runtime of a boundary: inputs in, compute on local tensors, outputs out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import _disable_current_modes

from ..collectives.functional import AxisGroup, all_reduce
from ..collectives.transition import Transition
from ..errors import ApplyError
from ..placement import Layout, shard_size
from .generated import in_backward, original_forward
from .streams import Switch
from .validate import Validation

__all__ = ["BoundStep", "ModelState", "Region"]

Observer = Callable[[str, str, str, Tensor, Layout], None]


class ModelState:
    """What the boundaries of one model share while it runs.

    length    tokens (dim 1) of the sequence that entered the decoder stack last; None before the first
    uneven    whether a length was ever no multiple of the axis it is cut by
    tokens    [batch, sequence] that the block of experts which runs has on this rank, where boundaries are inside it
    labels    whether the running forward was given labels
    counted   whether the last batch that was shared out came with the number of all its targets
    where     the region that validate mode entered last
    report    where validate mode notes a mismatch; None raises it
    """

    def __init__(self, report: Callable[[str, str], None] | None = None) -> None:
        self.report = report
        self.length: int | None = None
        self.uneven = False
        self.tokens: tuple[int, ...] = ()
        self.labels = False
        self.counted = False
        self.where = ""
        self.observer: Observer | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "observer": None}


class BoundStep:
    """One transition, bound to its ranks and its lowering.

    size: the whole length of the source's cut dim where the plan knows it. sequence: dim 1 is that of the tokens, whose number the
    stack knows while it runs; otherwise it is cut evenly (heads).
    """

    def __init__(
        self,
        transition: Transition,
        group: AxisGroup,
        call: Callable[..., Tensor],
        size: int | None,
        sequence: bool = True,
    ) -> None:
        self.group, self.call, self.size = group, call, size
        self.gathers = transition.forward in ("all_gather", "all_to_all")
        self.cuts_sequence = (
            isinstance(transition.dst, Shard) and transition.dst.dim == 1 and transition.forward == "shard"
        )
        self.src_dim = transition.src.dim if isinstance(transition.src, Shard) else 0
        self.sequence = sequence and self.gathers and self.src_dim == 1 and size is None

    def __call__(self, x: Tensor, model: ModelState) -> Tensor:
        if self.cuts_sequence:
            model.length = x.shape[1]
            if x.shape[1] % self.group.ranks:
                model.uneven = True
        if not self.gathers:
            return self.call(x, self.group)
        return self.call(x, self.group, self._whole(x, model))

    def _whole(self, x: Tensor, model: ModelState) -> int | None:
        """The length of the dim to be joined; None: every rank's part is as long as this one's."""
        if not self.sequence:
            return self.size
        if not model.uneven or model.length is None:
            return None
        if in_backward():  # another forward may have set the length since: ask the ranks
            with _disable_current_modes():  # selective checkpointing knows only what the forward ran
                return int(all_reduce(torch.tensor(x.shape[1], device=x.device), self.group).item())
        if shard_size(model.length, self.group.ranks, self.group.rank)[0] != x.shape[1]:
            raise ApplyError(
                f"a boundary got {x.shape[1]} tokens on rank {self.group.rank} of {self.group.ranks}, where a sequence of"
                f" {model.length} entered the stack; hand every layer the hidden states that the layer before it returned."
            )
        return model.length


class Region:
    """A boundary at run time. It holds no module, so that a deepcopy of the model computes with its own weights."""

    def __init__(
        self,
        fqn: str,
        model: ModelState,
        inputs: Mapping[str, tuple[int, tuple[BoundStep, ...]]],
        outputs: Mapping[str, tuple[BoundStep, ...]],
        out_names: tuple[str, ...],
        layouts: tuple[Mapping[str, Layout], Mapping[str, Layout]],
        compute: Callable[..., Any] | None = None,
        keep_sharded: tuple[Any, int] | None = None,
        validation: Validation | None = None,
        switches: tuple[Switch | None, Switch | None] = (None, None),
    ) -> None:
        self.fqn, self.model = fqn, model
        self.inputs = tuple((name, position, steps) for name, (position, steps) in inputs.items())
        self.outputs, self.out_names = dict(outputs), out_names
        self.in_layouts, self.out_layouts = layouts
        self.compute = compute
        self.keep_sharded = (
            keep_sharded  # (1-D mesh, width): with labels, the output leaves as a DTensor cut on its last dim
        )
        self.validation = validation
        self.at_entry, self.at_exit = switches
        self.active = 0

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.inputs:
            args, kwargs = self._enter(args, kwargs)
        if self.at_entry is not None and module.training:
            self.at_entry()
        compute = original_forward if self.compute is None else self.compute
        if self.validation is not None:
            self.model.where = self.fqn
            args, kwargs = self.validation.others((args, kwargs))
        self.active += 1
        try:
            if self.validation is None:
                out = compute(module, *args, **kwargs)
            else:
                with self.validation.computing():
                    out = compute(module, *args, **kwargs)
        finally:
            self.active -= 1
        if self.at_exit is not None and module.training:
            self.at_exit()
        return self._leave(out) if self.outputs else out

    def _enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        positional = list(args)
        named = dict(kwargs)
        for name, position, steps in self.inputs:
            if name in named:
                named[name] = self._input(name, named[name], steps)
            elif position < len(positional):
                positional[position] = self._input(name, positional[position], steps)
            else:
                raise ApplyError(f"{self.fqn}: input {name!r} has a declared layout and wasn't passed under that name.")
        return tuple(positional), named

    def _input(self, name: str, x: Any, steps: tuple[BoundStep, ...]) -> Any:
        if x is None:
            return None
        if self.validation is not None and isinstance(x, DTensor):
            x = self.validation.arrive(name, x)
        if not isinstance(x, Tensor) or isinstance(x, DTensor):
            raise ApplyError(f"{self.fqn}: input {name!r} must be a plain tensor, got {type(x).__name__}.")
        observer = self.model.observer
        if observer is not None and x.requires_grad:
            x = x.view_as(x)
            x.register_hook(lambda grad: observer(self.fqn, "grad_input", name, grad, self.in_layouts[name]))
        for step in steps:
            x = step(x, self.model)
        return x if self.validation is None else self.validation.enter(name, x)

    def _leave(self, out: Any) -> Any:
        if isinstance(out, Tensor):
            return self._output("output" if self.out_names[0] not in self.outputs else self.out_names[0], out)
        if isinstance(out, (tuple, list)):
            values = [self._element(i, value) for i, value in enumerate(out)]
            return type(out)(*values) if hasattr(out, "_fields") else values if isinstance(out, list) else tuple(values)
        if isinstance(out, dict):
            for name, value in list(out.items()):
                if isinstance(value, Tensor):
                    out[name] = self._output(name, value)
            return out
        if out is None:
            return None
        raise ApplyError(
            f"{self.fqn}: returns a {type(out).__name__}; a boundary returns tensors, a tuple, a list or a mapping of them."
        )

    def _element(self, i: int, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return self._output(self.out_names[i] if i < len(self.out_names) else f"output {i}", value)

    def _output(self, name: str, x: Tensor) -> Any:
        if name not in self.outputs:
            raise ApplyError(
                f"{self.fqn}: returns a tensor as {name!r}, which the contract doesn't declare (declared: {', '.join(self.outputs)}).\n"
                "  Name it in out_names, and give it out_src and out_dst."
            )
        if self.validation is not None:
            x = self.validation.leave(name, x)
        if self.keep_sharded is not None and self.model.labels:
            mesh, width = self.keep_sharded
            shape = (*x.shape[:-1], width)
            return DTensor.from_local(
                x, mesh, [Shard(x.ndim - 1)], run_check=False, shape=torch.Size(shape), stride=_contiguous(shape)
            )
        for step in self.outputs[name]:
            x = step(x, self.model)
        if self.model.observer is not None:
            self.model.observer(self.fqn, "output", name, x.detach(), self.out_layouts[name])
        return x if self.validation is None else self.validation.depart(name, x)


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides))
