"""A block that calls its experts one after the other, while all of their rows travel at once.

Its own forward runs twice. The first pass learns the rows of every expert; they travel together; the second pass gets what the experts
made of them. Both compute the same, and both are differentiated: what the rows depend on by way of the first, how they are merged by way
of the second.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from hyperpar_core.errors import ApplyError

from .dispatch import nothing

__all__ = ["called_one_by_one"]


def called_one_by_one(
    fqn: str, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """`forward(module, *args, **kwargs)` with every expert's rows dispatched by one call of `module.experts`. All ranks of ep call it."""
    experts: Any = module.experts
    x = args[0] if args else next(iter(kwargs.values()))
    if isinstance(x, FakeTensor):  # the offline check: which rows go where is data
        return x + nothing(module).to(x.dtype)
    _refuse_accounts(fqn, module)
    rows: dict[int, Tensor] = {}

    def learn(number: int, given: Tensor) -> Tensor:
        if number in rows or given.ndim != 2:
            raise ApplyError(f"{fqn}: expert {number} is called {'twice' if number in rows else f'with {list(given.shape)}'};"
                             " expert_modules takes blocks that call each expert at most once, with [rows, hidden].")  # fmt: skip
        rows[number] = given
        return torch.zeros_like(given)

    state = _noise()
    buffers = {name: buffer._version for name, buffer in module.named_buffers()}
    with experts.answering(learn):
        forward(module, *args, **kwargs)
    changed = [name for name, buffer in module.named_buffers() if buffer._version != buffers.get(name)]
    if changed:
        raise ApplyError(f"{fqn}: its forward changes the buffer {changed[0]}, and expert_modules runs it twice.")
    hidden = x.reshape(-1, x.shape[-1])
    numbers = sorted(rows)
    sizes = [len(rows[number]) for number in numbers]
    together = torch.cat([hidden[:0], *(rows[number] for number in numbers)])
    index = torch.tensor(numbers, device=x.device).repeat_interleave(torch.tensor(sizes, device=x.device, dtype=torch.long))
    made = experts(together, index.unsqueeze(1), together.new_ones(len(together), 1))
    results = dict(zip(numbers, made.split(sizes), strict=True))
    _noise(state)
    with experts.answering(lambda number, given: results[number]):
        return forward(module, *args, **kwargs)


def _refuse_accounts(fqn: str, module: nn.Module) -> None:
    for name, child in module.named_modules():
        if name and child._forward_hooks and not name.startswith("experts"):
            raise ApplyError(f"{fqn}.{name} has a forward hook, which would see two passes; expert_modules can't tell it which counts.")


def _noise(state: Any = None) -> Any:
    """The state of the random generators, or, given one, back to it: both passes draw the same."""
    if state is None:
        return torch.get_rng_state(), torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1])
    return None
