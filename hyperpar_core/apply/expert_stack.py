"""A list of expert modules while a plan over ep is on: each of their parameters once, stacked, and the list's face for the block's code."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..errors import ApplyError
from ..plan.stacks import stack_name

__all__ = ["ExpertStack"]

Answer = Callable[[int, Tensor], Tensor]


@dataclass(frozen=True)
class _Expert:
    """What the block's code gets for `experts[number]`."""

    number: int
    answer: Answer | None

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        if self.answer is None:
            raise ApplyError("experts over ep are called one by one, and no local compute answers; declare expert_modules.")
        if len(args) != 1 or kwargs or not isinstance(args[0], Tensor):
            raise ApplyError("experts of a list over ep take one tensor of rows.")
        return self.answer(self.number, args[0])


class ExpertStack(nn.Module):
    """Stands in the place of a ModuleList of `count` experts that are alike.

    Its parameters are [experts, *shape], by `names`: {name here: name in an expert}. Its forward is that of stacked experts:
    (hidden_states [N, H], indices [N, 1], weights [N, 1]) -> [N, H]. Indexed or iterated over it hands out experts that can be called,
    inside `answering`.
    """

    def __init__(self, experts: nn.ModuleList) -> None:
        super().__init__()
        self.count = len(experts)
        first = experts[0]
        self.names = {stack_name("", name)[1:]: name for name, _ in first.named_parameters()}
        # the experts' code, with nothing for its parameters
        self.expert = copy.deepcopy(first, {id(p): None for p in first.parameters()})
        for name, path in self.names.items():
            values = [expert.get_parameter(path) for expert in experts]
            stacked = torch.stack([value.detach() for value in values])
            self.register_parameter(name, nn.Parameter(stacked, requires_grad=values[0].requires_grad))
        self.answer: Answer | None = None

    def forward(self, hidden_states: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        stacked = {path: getattr(self, name).unbind() for name, path in self.names.items()}
        number = indices.flatten()
        out = hidden_states.new_zeros(hidden_states.shape)
        for expert in number.unique().tolist():
            at = (number == expert).nonzero().squeeze(1)
            values = {path: parts[expert] for path, parts in stacked.items()}
            y = functional_call(self.expert, values, (hidden_states.index_select(0, at),))
            out = out.index_copy(0, at, y.to(out.dtype) * weights.index_select(0, at).to(out.dtype))
        return out

    @contextmanager
    def answering(self, answer: Answer) -> Iterator[None]:
        """Inside, a call of expert `number` with rows [n, H] is `answer(number, rows)`."""
        before, self.answer = self.answer, answer
        try:
            yield
        finally:
            self.answer = before

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return [_Expert(i, self.answer) for i in range(*number.indices(self.count))]
        i = operator.index(number)
        if not -self.count <= i < self.count:
            raise IndexError(f"expert {i} of {self.count}")
        return _Expert(i % self.count, self.answer)

    def __iter__(self) -> Iterator[Any]:
        return (_Expert(i, self.answer) for i in range(self.count))
