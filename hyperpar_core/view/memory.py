"""What one rank holds in a step, in bytes: parameters, gradients, optimizer state, and what the forward keeps for the backward.

The first three are counted from the plan's shapes. Activations are estimated, boundary by boundary, with e bytes per element and t the
tokens that the region sees on a rank (all of its cp share; under sequence parallel a norm sees 1/tp of them):

    norm        t (4 + e) h             the input in float32 and the normalised values; a LayerNorm keeps its input alone, t e h
    attention   t e (h + q + k + v + o) + t (4 + e) (q + k) of its own norms     h in, what each projection yields, what the last one takes
    mlp         t e (h + 4 f)           gate, its activation, up, their product; without a gate 2 f
    experts     t e h + 4 t n + t K e (2 h + 4 f), and 4 f' of a shared expert   n logits, K experts per token, routed evenly;
                with ep also t e (K + r) h: the results, as experts and as the r ranks of a token return them
    embedding   9 t                     ids, and which are this rank's
    head        t e h + t e V + 4 t V   logits, and their softmax in float32; logits sharded over tp in the loss: t e V / tp
    checkpoint  t e h per layer, and the most that one layer keeps, while the backward computes it again

The widths q, k, v, o, f are a rank's own. A packed parameter that tp cuts by sections is joined for the region, and that copy is kept:
e for each of its elements on this rank. Attention is taken to keep no scores (SDPA), an activation function its input alone. Not in
it: what an operator needs while it runs, communication buffers, rotary tables and masks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

from ..errors import PlanError
from ..placement import Layout
from ..plan.contract import Contract
from ..plan.roles import ROWWISE
from ..plan.sharding_plan import ShardingPlan
from ..plan.stacks import as_held
from .traffic import held_parts, local_shape, seen_shapes

__all__ = ["OPTIMIZERS", "Activation", "Memory", "memory"]

# Bytes of optimizer state per element, for parameters of `width` bytes.
OPTIMIZERS: dict[str, Callable[[int], int]] = {
    "adamw": lambda width: 2 * width,
    "adamw_float32": lambda width: 12,  # a master copy and both moments in float32
    "sgd_momentum": lambda width: width,
    "sgd": lambda width: 0,
}
OUTPUT_NAMES = ROWWISE | {"out_proj", "c_proj", "dense", "dense_4h_to_h", "fc2", "fc_out", "w2", "wo"}


@dataclass(frozen=True)
class Activation:
    """What one boundary keeps for the backward. `formula`: how `bytes` came about; `rough`: the boundary's kind isn't known well."""

    fqn: str
    bytes: int
    formula: str
    rough: bool = False


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank (the first). Of the activations: `layers` those of the decoder stack, `again` those of them that exist only
    while a checkpointed layer is computed again. `gathered`: whole parameters under FSDP."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    layers: int
    boundaries: tuple[Activation, ...]
    again: int = 0
    gathered: int = 0

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.activations + self.gathered


def memory(
    plan: ShardingPlan,
    batch: int,
    sequence: int,
    *,
    dp: int = 1,
    bytes_per_element: int = 2,
    optimizer: str = "adamw",
    checkpointing: bool = False,
    fully_sharded: bool = False,
    copies: Callable[[Contract], int] = lambda contract: 1,
) -> Memory:
    """The memory of one training step of `batch` x `sequence` tokens per dp rank; see the module for the formulas.

    optimizer: a name in OPTIMIZERS. checkpointing: of whole decoder layers. fully_sharded: FSDP over dp x cp, experts over the other
    ranks of the expert mesh. copies: how many boundaries one of the plan's stands for. PlanError for another optimizer.
    """
    if optimizer not in OPTIMIZERS:
        raise PlanError(f"no optimizer {optimizer!r}; known: {', '.join(OPTIMIZERS)}.")
    plan = as_held(plan)
    kept = tuple(_activation(plan, c, batch, sequence, bytes_per_element) for c in plan.boundaries)
    prefix = _stack(plan)
    by_layer: dict[str, int] = {}
    times: dict[str, int] = {}
    outside = 0
    for contract, one in zip(plan.boundaries, kept, strict=True):
        layer = _layer(one.fqn, prefix)
        if layer is None:
            outside += one.bytes
        else:
            by_layer[layer] = by_layer.get(layer, 0) + one.bytes
            times[layer] = max(times.get(layer, 1), copies(contract))
    layers, again = sum(bytes_ * times[layer] for layer, bytes_ in by_layer.items()), 0
    if checkpointing and by_layer:
        again = max(by_layer.values())
        layers = again + _entering(plan, batch, sequence, bytes_per_element, sum(times.values()))
    held, whole = _parameters(plan, dp if fully_sharded else 0, prefix, copies)
    return Memory(
        parameters=held * bytes_per_element,
        gradients=held * bytes_per_element,
        optimizer=held * OPTIMIZERS[optimizer](bytes_per_element),
        activations=layers + outside,
        layers=layers,
        boundaries=kept,
        again=again,
        gathered=whole * bytes_per_element,
    )


# ---- parameters


def _parameters(
    plan: ShardingPlan, dp: int, prefix: str | None, copies: Callable[[Contract], int]
) -> tuple[int, int]:
    """(elements held, elements that FSDP has gathered at once): outside the layers, and of one layer. dp 0: no FSDP."""
    later = {name for group in plan.tied for name in group[1:]}
    ranks = dp * plan.sizes.get("cp", 1)
    experts = dp * prod(plan.sizes.values()) // plan.ep_size
    held = 0
    units: dict[str | None, int] = {}
    for contract in plan.boundaries:
        for name in contract.params:
            if _full(contract, name) in later:
                continue
            mine = sum(elements for elements, _ in held_parts(plan, contract, name))
            share = 1 if not dp else max(experts, 1) if "ep" in contract.params[name] else ranks
            held += -(-mine // share) * copies(contract)
            unit = _layer(contract.fqn, prefix)
            units[unit] = units.get(unit, 0) + mine
    if ranks < 2:
        return held, 0
    return held, units.pop(None, 0) + max(units.values(), default=0)


def _full(contract: Contract, name: str) -> str:
    return f"{contract.fqn}.{name}" if contract.fqn else name


# ---- layers


def _stack(plan: ShardingPlan) -> str | None:
    """The name of the list of decoder layers; None where the plan has none."""
    return next((c.fqn.rpartition(".")[0] for c in plan.boundaries if c.template == "stack"), None)


def _layer(fqn: str, prefix: str | None) -> str | None:
    """The layer that a boundary stands in."""
    if prefix is None or not fqn.startswith(f"{prefix}."):
        return None
    return fqn[len(prefix) + 1 :].partition(".")[0]


def _entering(plan: ShardingPlan, batch: int, sequence: int, width: int, layers: int) -> int:
    """Bytes of the inputs of all layers: the first one's may be the whole sequence, which it cuts itself."""
    stack = next(c for c in plan.boundaries if c.template == "stack")
    name = next(iter(stack.in_src), "")
    hidden = stack.features.get(name, 0)
    first, others = (
        _tokens(plan, side.get(name, {}), batch, sequence) for side in (stack.in_src, stack.in_dst)
    )
    return (first + (layers - 1) * others) * hidden * width


# ---- activations


def _tokens(plan: ShardingPlan, layout: Layout, batch: int, sequence: int) -> int:
    return prod(local_shape((batch, sequence, 1), layout, plan.sizes)[:2])


def _activation(plan: ShardingPlan, contract: Contract, batch: int, sequence: int, e: int) -> Activation:
    name = next(iter(contract.in_dst), None)
    if contract.template == "stack" or name is None or not contract.params:
        return Activation(contract.fqn, 0, "nothing of its own")
    t = _tokens(plan, contract.in_dst[name], batch, sequence)
    h = contract.features.get(name, 0)
    terms, rough = _terms(plan, contract, h, e)
    per_token = sum(width * each for each, width, _ in terms)
    sums = []  # one for each size of elements
    for each in dict.fromkeys(each for each, _, _ in terms):
        sums.append(f"{each} B x ({' + '.join(f'{width:.6g} {what}' for size, width, what in terms if size == each)})")
    formula = f"{t} tokens x " + (sums[0] if len(sums) == 1 else f"[{' + '.join(sums)}]")
    joined = sum(elements for name in contract.sections for elements, _ in held_parts(plan, contract, name))
    if joined:
        formula += f" + {e} B x {joined} joined sections"
    return Activation(contract.fqn, round(t * per_token) + e * joined, formula, rough)


Term = tuple[int, float, str]  # bytes of an element, elements per token, what they are


def _terms(plan: ShardingPlan, contract: Contract, h: int, e: int) -> tuple[list[Term], bool]:
    """What a boundary keeps per token."""
    match contract.template:
        case "norm" | "sharded_norm":
            return _norm_terms(contract, h, e), False
        case "embed":
            return [(9, 1, "id")], False
        case "lm_head":
            return _head_terms(plan, contract, h, e), False
        case "moe_mlp":
            return _expert_terms(plan, contract, h, e), False
        case "attention" | "mlp" | "shared_expert" as kind:
            return _block_terms(plan, contract, h, e, attention=kind == "attention"), False
    widths = [(e, _rows(plan, contract, n, h), n.removesuffix(".weight")) for n in contract.params if _is_matrix(plan, contract, n)]
    return [(e, h, "in"), *widths], True


def _norm_terms(contract: Contract, h: int, e: int) -> list[Term]:
    if any(name.endswith("bias") for name in contract.params):
        return [(e, h, "in")]
    return [(4, h, "in"), (e, h, "normalised")]


def _block_terms(plan: ShardingPlan, contract: Contract, h: int, e: int, *, attention: bool) -> list[Term]:
    """Attention: every projection's result, and what the last one takes. MLP: the same with the activation and the product."""
    matrices = [name for name in contract.params if _is_matrix(plan, contract, name)]
    last = next((n for n in matrices if n.split(".")[-2 if "." in n else 0] in OUTPUT_NAMES), matrices[-1] if matrices else "")
    rows = {_short(n): _rows(plan, contract, n, h) for n in matrices if n != last}
    inner = _rows(plan, contract, last, h) if last else 0.0
    terms: list[Term] = [(e, h, "in"), *((e, width, name) for name, width in rows.items())]
    if attention:
        terms.append((e, inner, "out"))
        for name in contract.params:  # of queries and keys: a norm's input in float32 and its result
            of = next((n for n in rows if name.partition("_norm")[0] in (n, n[:1]) and "norm" in name), None)
            if of is not None:
                terms += [(4, rows[of], f"{of} to norm"), (e, rows[of], f"{of} normalised")]
        return terms
    gated = sum(rows.values()) >= 2 * inner
    return [*terms, *([(e, inner, "activation")] if gated else []), (e, inner, "out")]


def _expert_terms(plan: ShardingPlan, contract: Contract, h: int, e: int) -> list[Term]:
    """Router, routed experts (evenly loaded), shared experts."""
    chosen = contract.features.get("experts_per_token", 1)
    terms: list[Term] = [(e, h, "in")]
    up = down = shared = 0.0
    seen = seen_shapes(plan, contract)
    for name in contract.params:
        shape = plan.parameters[_full(contract, name)]
        if len(shape) == 3 and h:
            width = prod(seen[name]) / shape[0] / h  # over ep, rows from other ranks come in place of those that leave
            if name.rpartition(".")[2] in ROWWISE:
                down = width
            else:
                up += width
        elif len(shape) == 2 and "shared" in name and _is_matrix(plan, contract, name):
            shared += _rows(plan, contract, name, h) * (2 if _short(name) in ROWWISE else 1)
        elif len(shape) == 2 and "gate" in name:
            terms.append((4, shape[0], "router logits"))
    terms += [(e, chosen * 2 * h, "to and from experts"), (e, chosen * (up + 2 * down), "inside experts")]
    return [*terms, *([(e, shared, "shared experts")] if shared else [])]


def _head_terms(plan: ShardingPlan, contract: Contract, h: int, e: int) -> list[Term]:
    weight = next(iter(contract.params))
    whole = plan.parameters[_full(contract, weight)][0]
    if plan.loss is not None:
        return [(e, h, "in"), (e, _rows(plan, contract, weight, h), "logits")]
    return [(e, h, "in"), (e, whole, "logits"), (4, whole, "softmax")]


# ---- widths


def _short(name: str) -> str:
    return name.removesuffix(".weight").rpartition(".")[2].removesuffix("_proj")


def _is_matrix(plan: ShardingPlan, contract: Contract, name: str) -> bool:
    return len(plan.parameters[_full(contract, name)]) == 2


def _rows(plan: ShardingPlan, contract: Contract, name: str, h: int) -> float:
    """The width of a rank's part of a matrix, on the side that isn't the hidden states'."""
    whole, seen = plan.parameters[_full(contract, name)], seen_shapes(plan, contract)[name]
    return prod(seen) / h if h and h in whole else seen[0]
