"""Which ranks draw the same random numbers: dropout masks follow the layout of what they fall on.

Where tp ranks hold the same values (replicated, or summands of one sum) they draw the same numbers; where they hold parts they draw
different ones; ranks of dp and cp always draw different ones. The stream is switched where the layout changes: as a region is entered
and left, and at the projections inside it,

    embedding      layer (SP)      q_proj     attention weights     o_proj        residual (SP)
    equal      ->  own         ->  equal  ->  own               ->  equal     ->  own

A switch seeds torch's default generators from the seed that they had: the low bits of a seed say whose stream it is, the others are
the same on all tp ranks and change at every switch. So a stream is a function of the generator's state alone, and activation
checkpointing, which restores that state, draws the same masks again.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from ..collectives.functional import AxisGroup, all_reduce
from ..errors import ApplyError
from ..placement import Layout, SharedShard
from ..plan.contract import Contract
from ..plan.sharding_plan import ShardingPlan
from .generated import original_forward

__all__ = ["APART", "Projection", "Streams", "Switch", "at_boundary", "declares_randomness", "mark", "projections", "refuse_layerdrop",
           "refuse_new_rates"]  # fmt: skip

APART = (
    "the ranks of a tp group draw different random numbers, so dropout would differ where they hold the same values.\n"
    "  Seed them alike: hyperpar_core.set_seed(seed, mesh)."
)
_NAMES = re.compile(r"drop(out|_p|_rate|_prob)?(_|$)|_drop|pdrop|jitter")
_OWNER_BITS = 16  # of a seed: 0 for the stream that tp ranks share, else one more than the tp rank
_SEED_BITS = 47


def declares_randomness(model: nn.Module) -> bool:
    """Whether a module, or the config, has a dropout (or jitter) above 0, by the usual names."""

    def positive(values: Mapping[str, Any]) -> bool:
        return any(isinstance(v, float) and v > 0 and _NAMES.search(name) is not None for name, v in values.items())

    if positive(getattr(getattr(model, "config", None), "__dict__", {})):
        return True
    return any(
        positive(m.__dict__) or (isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0) for m in model.modules()
    )


def refuse_new_rates(model: nn.Module) -> None:
    """Raises ApplyError where a model that had no dropout as the plan was applied has one now, and drew."""
    if declares_randomness(model):
        raise ApplyError(
            f"{type(model).__name__} draws random numbers in training, and no dropout was above 0 as the plan was applied: a rate was"
            " raised since, and which ranks draw the same numbers is decided then.\n"
            "  Set the rate before apply_plan: applied.undo(), and apply the plan anew."
        )


def refuse_layerdrop(model: nn.Module, plan: ShardingPlan) -> None:
    """Raises ApplyError where ranks that work on a layer together would skip different ones."""
    rates = [getattr(model, "config", None), *model.modules()]
    drops = any(isinstance(v, float) and v > 0 for m in rates for n, v in getattr(m, "__dict__", {}).items() if "layerdrop" in n)
    if drops and (plan.sequence_parallel or plan.ep_size > 1 or "cp" in plan.sizes):
        raise ApplyError(
            "layerdrop under sequence, context or expert parallel: each rank would skip other layers, and wait for those that don't.\n"
            "  Set the config's layerdrop to 0 before the model is made."
        )


def _mixed(seed: int, place: int) -> int:
    """A seed of _SEED_BITS bits from another and a place (splitmix64's finaliser)."""
    z = (seed * 0x9E3779B97F4A7C15 + place + 1) & (2**64 - 1)
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return (z ^ (z >> 31)) >> (64 - _SEED_BITS)


def _generators(cuda: bool) -> list[torch.Generator]:
    own = [torch.default_generator]
    return [*own, torch.cuda.default_generators[torch.cuda.current_device()]] if cuda else own


def mark(cuda: bool) -> bytes:
    """Where torch's default generators stand: another one once something was drawn."""
    if not cuda:
        return torch.default_generator.get_state().numpy().tobytes()
    gpu = torch.cuda.default_generators[torch.cuda.current_device()]
    return mark(False) + f"{gpu.initial_seed()} {gpu.get_offset()}".encode()


@dataclass(frozen=True)
class Switch:
    """From here on this rank draws from another stream. owner: 0 for the one that tp ranks share, else tp rank + 1."""

    place: int
    owner: int
    cuda: bool

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self) -> None:
        for generator in _generators(self.cuda):
            base = _mixed(generator.initial_seed() >> _OWNER_BITS, self.place)
            generator.manual_seed(base << _OWNER_BITS | self.owner)


@dataclass(frozen=True)
class Projection:
    """The forward of a projection inside a region: where what it yields lies differently from what it takes."""

    enter: Switch
    leave: Switch

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not module.training:
            return original_forward(module, *args, **kwargs)
        self.enter()
        out = original_forward(module, *args, **kwargs)
        self.leave()
        return out


class Streams:
    """The streams of one model, for models that draw random numbers in training.

    tp: the ranks that share a stream or have their own each. rest: this rank's coordinates on the other axes.
    """

    def __init__(self, tp: AxisGroup | None, rest: tuple[int, ...], cuda: bool) -> None:
        self.tp, self.rest, self.cuda = tp, rest, cuda
        self.compared = tp is None

    def switch(self, name: str, own: bool) -> Switch | None:
        """The switch at a place; None without tp, where all streams are one."""
        if self.tp is None:
            return None
        return Switch(zlib.crc32(name.encode()), self.tp.rank + 1 if own else 0, self.cuda)

    def draw(self) -> int:
        """The number that seeds one forward."""
        return int(torch.randint(1 << _SEED_BITS, ()))

    @contextmanager
    def forward(self, drawn: int) -> Iterator[None]:
        """One forward of the model in training: seeded by one number drawn outside, which goes on as if that were all.

        Raises ApplyError, on every tp rank, where the first ones aren't the same number.
        """
        if not self.compared:
            self._compare(drawn)
        seed = drawn
        for coordinate in self.rest:
            seed = _mixed(seed, coordinate)
        generators = _generators(self.cuda)
        outside = [generator.get_state() for generator in generators]
        for generator in generators:
            generator.manual_seed(seed << _OWNER_BITS)
        try:
            yield
        finally:
            for generator, state in zip(generators, outside, strict=True):
                generator.set_state(state)

    def _compare(self, drawn: int) -> None:
        assert self.tp is not None
        device = torch.device("cuda", torch.cuda.current_device()) if self.cuda else torch.device("cpu")
        high, low = all_reduce(torch.tensor([drawn, -drawn], device=device), self.tp, "max").tolist()
        if high != -low:
            raise ApplyError(APART)
        self.compared = True


def _is_cut(layouts: Mapping[str, Layout]) -> bool | None:
    """Whether the first of these tensors is cut over tp; None where there is none."""
    return next((isinstance(layout.get("tp"), Shard) for layout in layouts.values()), None)


def at_boundary(streams: Streams, contract: Contract) -> tuple[Switch | None, Switch | None]:
    """The switches (at the entry, at the exit) of a boundary's region."""
    enter, leave = _is_cut(contract.in_dst), _is_cut(contract.out_dst)
    if contract.template in ("norm", "sharded_norm") and _is_cut(contract.in_src) == enter == leave:
        return None, None  # nothing is drawn inside, and nothing changes
    return (
        None if enter is None else streams.switch(f"{contract.fqn} in", enter),
        None if leave is None else streams.switch(f"{contract.fqn} out", leave),
    )


def projections(streams: Streams, contract: Contract, module: nn.Module) -> Iterator[tuple[nn.Module, Projection]]:
    """The projections inside a region that tp cuts, and what runs in their place: column-wise ones turn what is whole into parts,
    row-wise ones turn parts into summands. A projection is the largest module below the boundary that is all of one kind."""
    if streams.tp is None:
        return
    kinds: dict[str, set[str]] = {}  # {module below the boundary: kinds of the weights in it}
    for name in contract.params:
        kind = _kind(contract, name, module)
        parts = name.split(".")[:-1]
        for depth in range(1, len(parts) + 1):
            if kind is not None:
                kinds.setdefault(".".join(parts[:depth]), set()).add(kind)
    for path, found in kinds.items():
        above = path.rpartition(".")[0]
        if len(found) == 1 and not (above in kinds and len(kinds[above]) == 1):
            place, (kind,) = f"{contract.fqn}.{path}", found
            enter, leave = streams.switch(f"{place} in", kind == "row"), streams.switch(f"{place} out", kind == "col")
            assert enter is not None and leave is not None
            yield module.get_submodule(path), Projection(enter, leave)


def _kind(contract: Contract, name: str, module: nn.Module) -> str | None:
    """"col" where tp cuts what a weight yields, "row" where it cuts what it takes; None for anything else."""
    owner, _, leaf = name.rpartition(".")
    held = contract.params[name].get("tp", contract.param_use.get(name, {}).get("tp"))
    if contract.sections.get(name):
        return "col"
    holder = module.get_submodule(owner)
    weight: Tensor | None = holder._parameters[leaf]
    if weight is None or weight.ndim != 2 or not isinstance(held, (Shard, SharedShard)):
        return None
    transposed = getattr(holder, "nf", None) == weight.shape[1] and not isinstance(holder, nn.Linear)
    return "col" if held.dim % 2 == (1 if transposed else 0) else "row"


