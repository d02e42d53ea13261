"""Expert parallelism in a plan: which degrees fit, and that every block of experts says how its tokens travel."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from math import prod

from torch import nn
from torch.distributed.tensor import Partial, Shard

from ..descriptors import LocalComputeFactory, ModelFamily, Section
from ..errors import OverrideError, PlanError, Refused
from ..placement import Layout
from ..plugins import get_registry
from .contract import Contract
from .heads import require_split
from .overrides import Override, paste

__all__ = ["check_expert_degree", "cut_over_ep", "cut_over_tp", "experts_per_token", "patterns_for", "require_archetypes",
           "suggested_archetypes"]  # fmt: skip

# Integer attributes that count experts; a module that holds local ones needs them divided.
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
# What a router, its block or the config calls the number of experts that a token goes to.
CHOSEN_COUNTS = ("top_k", "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts")
# What transformers calls the stacked weights of experts: features of the intermediate size come out of these, or go into those.
EXPERT_COLWISE = ("gate_up_proj", "gate_proj", "up_proj")
EXPERT_ROWWISE = ("down_proj",)


def check_expert_degree(ep_size: int, sizes: Mapping[str, int]) -> None:
    """Refused unless ep divides dp x cp x tp; `sizes`: the mesh's active axes."""
    if not isinstance(ep_size, int) or isinstance(ep_size, bool) or ep_size < 1:
        raise PlanError(f"ep_size: a degree is a positive whole number, got {ep_size!r}.")
    ranks = prod(sizes.values())
    if ranks % ep_size:
        degrees = ", ".join(str(d) for d in range(1, ranks + 1) if ranks % d == 0)
        raise Refused(
            f"ep_size={ep_size}: experts spread over the ranks of dp x cp x tp, which are {ranks}; ep must divide them.\n"
            f"  Degrees of ep that do: {degrees}."
        )


def cut_over_ep(fqn: str, block: nn.Module, local: str, value: nn.Parameter, ep: int) -> tuple[Layout, dict[str, int]]:
    """(how stacked experts lie on ep, {attribute of the block's modules that counts them: ep}); Refused unless ep divides their number.

    `local`: the parameter's name in the block `fqn`. The weights of all experts may lie one below the other in two dims; then the
    module that holds them, or one above it, says how many they are.
    """
    path = local.rpartition(".")[0].split(".") if "." in local else []
    owners = {".".join(path[:i]): block.get_submodule(".".join(path[:i])) for i in range(len(path), 0, -1)} or {"": block}
    said = [n for owner in owners.values() for a in EXPERT_COUNTS if isinstance(n := getattr(owner, a, None), int)]
    count = next((n for n in said if n and value.shape[0] % n == 0), value.shape[0])
    if count % ep:
        degrees = [d for d in range(2, count + 1) if count % d == 0]
        raise Refused(
            f"{fqn}.{local}: {count} experts can't be split over ep={ep}.\n"
            f"  Degrees of ep that divide them: {', '.join(map(str, degrees)) or 'none'}; ep must also divide dp x cp x tp."
        )
    counts = [
        f"{name}.{a}" if name else a for name, owner in owners.items() for a in EXPERT_COUNTS if getattr(owner, a, None) == count
    ]
    return {"ep": Shard(0)}, dict.fromkeys(counts, ep)


def cut_over_tp(
    name: str, value: nn.Parameter, owner: nn.Module, tp: int
) -> tuple[Layout, Layout, tuple[Section, ...]] | None:
    """(held, seen, sections) of stacked experts whose intermediate features tp cuts; None where the names don't say which those are.

    `owner` says, as transformers' experts do, whether weights are [experts, in, out] (is_transposed) and whether gate and up
    projection stand one behind the other (is_concatenated) or interleaved.
    """
    leaf = name.rpartition(".")[2]
    weight, bias = leaf.removesuffix("_bias"), leaf.endswith("_bias")
    if not hasattr(owner, "is_transposed") or value.ndim != (2 if bias else 3):
        return None
    if weight in EXPERT_COLWISE:
        dim = 1 if bias or not owner.is_transposed else 2
        parts = ("gate", "up") if weight == "gate_up_proj" and getattr(owner, "is_concatenated", True) else ()
        size = value.shape[dim] // (2 if weight == "gate_up_proj" else 1)
        require_split(name, size, "intermediate features", tp)
        return {"tp": Shard(dim)}, {}, tuple(Section(part, dim, size, Shard(dim)) for part in parts)
    if weight in EXPERT_ROWWISE and bias:
        return {}, {"tp": Partial()}, ()
    if weight in EXPERT_ROWWISE:
        dim = 1 if owner.is_transposed else 2
        require_split(name, value.shape[dim], "intermediate features", tp)
        return {"tp": Shard(dim)}, {}, ()
    return None


def experts_per_token(model: nn.Module, block: nn.Module) -> dict[str, int]:
    """{"experts_per_token": how many experts a token goes to}; {} where neither the block, nor its router, nor the config says it."""
    for owner in (block, *block.children(), getattr(model, "config", None)):
        for attribute in CHOSEN_COUNTS:
            count = getattr(owner, attribute, None)
            if isinstance(count, int) and not isinstance(count, bool) and count > 0:
                return {"experts_per_token": count}
    return {}


def holds_experts(contract: Contract) -> bool:
    """Whether the boundary holds a parameter that is cut over ep."""
    return any("ep" in layout for layout in contract.params.values())


def _dispatches(contract: Contract) -> bool:
    """Whether a local compute is declared that lets tokens travel. A callable owns its semantics; a registered name says its axis."""
    name = contract.local_compute_fn
    return name is not None and (not isinstance(name, str) or get_registry().local_compute(name)[0].needs_axis == "ep")


def require_archetypes(boundaries: Sequence[Contract], ep_size: int, family: ModelFamily | None) -> None:
    """PlanError unless every boundary that holds experts over ep, and no other, declares a local compute for them."""
    registry = get_registry()
    for contract in boundaries:
        name = contract.local_compute_fn
        if isinstance(name, str) and registry.local_compute(name)[0].needs_axis == "ep" and not holds_experts(contract):
            why = "ep is 1; write `when: ep`" if ep_size == 1 else f"it is a boundary of kind {contract.template}"
            raise OverrideError(f"{contract.fqn}: {name} dispatches tokens to experts over ep, and none are here: {why}.")
    if ep_size == 1:
        return
    blocks = [c.fqn for c in boundaries if holds_experts(c)]
    if not blocks:
        raise Refused(f"ep_size={ep_size}: no boundary of this model holds experts over ep. Leave ep_size out.")
    missing = [c.fqn for c in boundaries if holds_experts(c) and not _dispatches(c)]
    if not missing:
        return
    offered = [(d, provider) for d, provider in registry.offered(LocalComputeFactory) if d.needs_axis == "ep"]
    installed = [d.name for d, _ in offered]
    suggested = next((e["local_compute_fn"] for e in _entries(family) if "local_compute_fn" in e), None)
    name = suggested or (installed[0] if installed else "experts_dispatch")
    hint = f"{family.name} suggests {suggested}; " if family and suggested else ""
    others = [c.fqn for c in boundaries if c.fqn not in missing]
    entries = [f'{{match: "{pattern}", when: ep, local_compute_fn: {name}}}' for pattern in patterns_for(missing, others)]
    raise PlanError(
        f"ep={ep_size} is active, and {len(missing)} blocks of experts (first: {missing[0]}) declare no local compute.\n"
        f"  {hint}installed: {', '.join(installed) or 'none (pip install hyperpar-moe-ep)'}\n{paste(entries)}"
    )


def _entries(family: ModelFamily | None) -> Iterable[Mapping[str, object]]:
    return family.suggestions.get("ep", ()) if family else ()


def suggested_archetypes(
    family: ModelFamily | None, blocks: Sequence[str], others: Sequence[str]
) -> tuple[Override, ...]:
    """The family's entries for ep, with matches that hit blocks of experts and nothing else. `others`: the other boundaries."""
    entries = []
    for data in _entries(family):
        entry = Override.from_data(data, "suggestion")
        hit = [fqn for fqn in blocks if fnmatchcase(fqn, entry.match)]
        entries += [replace(entry, match=pattern) for pattern in patterns_for(hit, others)]
    return tuple(entries)


def patterns_for(names: Sequence[str], others: Sequence[str]) -> list[str]:
    """Globs that hit every one of `names` and none of `others`: as few as numbers in character classes allow."""
    by_shape: dict[tuple[str, str], list[int]] = {}
    plain = []
    for name in names:
        parts = name.split(".")
        at = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
        if at is None:
            plain.append(name)
        else:
            by_shape.setdefault((".".join(parts[:at]), ".".join(parts[at + 1 :])), []).append(int(parts[at]))
    found = list(plain)
    for (before, after), numbers in by_shape.items():
        wide = f"*.{after}"
        if not any(fnmatchcase(other, wide) for other in others):
            found.append(wide)
            continue
        found += [f"{before}.{digits}.{after}" for digits in _classes([str(n) for n in sorted(numbers)])]
    return list(dict.fromkeys(found))


def _classes(numbers: Sequence[str]) -> list[str]:
    """`["3", ..., "12"]` as `["[3-9]", "1[0-2]"]`: globs of digit classes that hit exactly these numbers."""
    result = []
    for length in sorted({len(n) for n in numbers}):
        # Numbers that differ in their last digit only, then heads that share the same last digits.
        tails: dict[str, list[str]] = {}
        for number in (n for n in numbers if len(n) == length):
            tails.setdefault(number[:-1], []).append(number[-1])
        heads: dict[str, list[str]] = {}
        for head, digits in tails.items():
            for run in _runs(digits):
                heads.setdefault(run, []).append(head)
        for run, of_run in heads.items():
            result += [head + run for head in (_classes(of_run) if of_run != [""] else [""])]
    return result


def _runs(digits: Sequence[str]) -> list[str]:
    """Consecutive digits as one class."""
    runs: list[list[str]] = []
    for digit in digits:
        if runs and int(digit) == int(runs[-1][-1]) + 1:
            runs[-1].append(digit)
        else:
            runs.append([digit])
    return [run[0] if len(run) == 1 else f"[{run[0]}-{run[-1]}]" for run in runs]
