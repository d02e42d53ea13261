"""A block that calls its experts one after the other, while all of their rows travel at once.

Its own forward runs twice. The first pass learns the rows of every expert; they travel together; the second pass gets what the experts
made of them. Both compute the same, and both are differentiated: what the rows depend on by way of the first, how they are merged by way
of the second.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sized
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

    state, before = _noise(), _accounts(module, args, kwargs)
    with experts.answering(learn):
        forward(module, *args, **kwargs)
    after = _accounts(module, args, kwargs)
    changed = [what for what in {**before, **after} if before.get(what) != after.get(what)]
    if changed:
        raise ApplyError(f"{fqn}: its forward changes {changed[0]}, and expert_modules runs it twice.")
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


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _accounts(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """{what a forward may change: a mark that is another one once it did}: its inputs, and all that the block's modules have."""
    found = {f"its input {name}": _mark(x) for name, x in [*enumerate(args), *kwargs.items()] if isinstance(x, Tensor)}
    for path, child in module.named_modules():
        if path.partition(".")[0] == "experts":  # stacked, and called once
            continue
        dot = f"{path}." if path else ""
        found |= {f"the buffer {dot}{name}": _mark(x) for name, x in child._buffers.items()}
        plain = {name: x for name, x in vars(child).items() if name not in ("_buffers", "_parameters", "_modules")}
        found |= {f"the attribute {dot}{name}": _mark(x) for name, x in plain.items()}
    return found


def _mark(value: Any) -> Any:
    """What tells a value from another one, and from itself once it was changed in place: the version of a tensor, the members of a list."""
    if isinstance(value, Tensor):
        # without a version its values have to do
        return id(value), float(value.double().nan_to_num().sum()) if value.is_inference() else value._version
    if isinstance(value, (list, tuple)):
        return id(value), [_mark(x) if isinstance(x, Tensor) else id(x) for x in value]
    if isinstance(value, Mapping):
        return id(value), [(key, _mark(x) if isinstance(x, Tensor) else id(x)) for key, x in value.items()]
    if isinstance(value, (bool, int, float, str, type(None))):
        return value
    return id(value), len(value) if isinstance(value, Sized) else 0


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
