"""The contract that each kind of boundary starts from.

`hidden` below is how hidden states travel between boundaries: cut along dim 1 by cp where it is active, and by tp inside the
decoder stack under sequence parallelism. Model-level code only ever sees the whole sequence of its cp rank.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

from ..descriptors import Section
from ..errors import PlanError, Refused
from ..placement import Layout, Placement, SharedShard
from ..plugins import get_registry
from .boundaries import Structure
from .contract import Contract

__all__ = ["PlanContext", "contract_from", "first_argument"]

VOCAB_EMBEDDING = "vocab_parallel_embedding"

# Integer attributes that count heads, as models use them for reshapes; a region that sees local heads needs them divided.
KV_HEAD_COUNTS = ("num_key_value_heads", "num_kv_heads")
KV_GROUPS = ("num_key_value_groups", "n_rep")
HEAD_COUNTS = ("num_heads", "num_attention_heads", "num_key_value_heads", "num_kv_heads", "n_heads", "n_head")


@dataclass(frozen=True)
class PlanContext:
    """What templates need to know of the whole plan."""

    model: nn.Module
    sizes: Mapping[str, int]  # active plan axes only
    sequence_parallel: bool
    loss_parallel: bool
    vocab_embedding: bool  # whether the vocab-parallel embedding is there to be used
    roles: Mapping[str, str]
    handlers: Mapping[str, str]  # {parameter pattern: special handler}
    structure: Structure
    tied: bool  # input embedding and output head share their weight

    @property
    def tp(self) -> int:
        return self.sizes.get("tp", 1)

    def layout(self, tp: Placement | None = None, *, sequence: bool = True) -> dict[str, Placement]:
        """A layout: cp cuts the sequence (dim 1) of what has one, tp as given. Inactive axes and replication are left out."""
        layout: dict[str, Placement] = {}
        if sequence and "cp" in self.sizes:
            layout["cp"] = Shard(1)
        if tp is not None and self.tp > 1 and not isinstance(tp, Replicate):
            layout["tp"] = tp
        return layout

    def hidden(self) -> dict[str, Placement]:
        return self.layout(Shard(1) if self.sequence_parallel else None)


def first_argument(module: nn.Module) -> str:
    """The name of the first argument of a module's forward."""
    names = [
        p.name
        for p in inspect.signature(type(module).forward).parameters.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    if len(names) < 2:
        raise PlanError(f"{type(module).__name__}.forward has no named argument to declare a layout for.")
    return names[1]


@dataclass(frozen=True)
class _Held:
    """How a boundary's parameters are held and used: the fields of the same names in its contract."""

    params: dict[str, Layout]
    param_use: dict[str, Layout]
    special_handlers: dict[str, str]
    sections: dict[str, tuple[Section, ...]]


def _parameters(ctx: PlanContext, fqn: str, module: nn.Module, owned: Mapping[str, nn.Parameter]) -> _Held:
    """Placements from roles."""
    held = _Held({}, {}, {}, {})
    for name, value in owned.items():
        full = f"{fqn}.{name}" if fqn else name
        role = ctx.roles.get(full)
        path, _, leaf = name.rpartition(".")
        owner = module.get_submodule(path)
        # Conv1D keeps its weight as [in, out]; it says so by counting its outputs in nf.
        transposed = (
            value.ndim == 2 and getattr(owner, "nf", None) == value.shape[1] and not isinstance(owner, nn.Linear)
        )
        if ctx.tp == 1 or role in ("norm", "replicated", "moe_gate"):
            held.params[name] = {}
        elif role == "colwise":
            held.params[name] = {"tp": Shard(1 if transposed else 0)}
        elif role == "rowwise" and value.ndim > 1:
            held.params[name] = {"tp": Shard(0 if transposed else 1)}
        elif role == "rowwise":
            held.params[name] = {}
            held.param_use[name] = {"tp": Partial()}
        elif role == "packed":
            handler = next(
                (h for pattern, h in reversed(list(ctx.handlers.items())) if fnmatchcase(full, pattern)), None
            )
            if handler is None:
                raise PlanError(f"{full}: role 'packed', and no special handler is declared for it.")
            sections = _sections(ctx, full, handler, owner, leaf, value)
            held.special_handlers[name], held.sections[name] = handler, sections
            held.params[name] = {
                "tp": next((s.placement for s in sections if isinstance(s.placement, Shard)), Replicate())
            }
        else:
            raise PlanError(f"{full}: role {role!r} has no placement in this boundary.")
    return held


def _sections(
    ctx: PlanContext, full: str, handler: str, owner: nn.Module, leaf: str, value: nn.Parameter
) -> tuple[Section, ...]:
    describe = get_registry().special_handler(handler)[0].sections
    config = getattr(ctx.model, "config", None)
    sections = tuple(describe(tuple(value.shape), module=owner, param_name=leaf, config=config))
    dims = {s.dim for s in sections}
    if len(dims) != 1 or sum(s.size for s in sections) != value.shape[min(dims)]:
        raise PlanError(
            f"{full}: handler {handler!r} cuts {tuple(value.shape)} into {[(s.dim, s.size) for s in sections]}, which don't add up."
        )
    for section in sections:
        if isinstance(section.placement, Shard) and section.size % ctx.tp:
            raise Refused(f"{full}: section {section.name!r} of {section.size} can't be split over tp={ctx.tp}.")
    return sections


def _require(ctx: PlanContext, fqn: str, count: int, what: str) -> None:
    if count % ctx.tp:
        degrees = [d for d in range(2, min(count, 64) + 1) if count % d == 0]
        raise Refused(
            f"{fqn}: {count} {what} can't be split over tp={ctx.tp}.\n"
            f"  Degrees of tp that work here: {', '.join(map(str, degrees)) or 'none'}; the other ranks can go to dp or cp."
        )


def _attention(ctx: PlanContext, fqn: str, module: nn.Module, owned: Mapping[str, nn.Parameter]) -> Contract:
    held = _parameters(ctx, fqn, module, owned)
    divide: dict[str, int] = {}
    if ctx.tp > 1:
        shared = _split_heads(ctx, fqn, module, owned, held)
        divide = {a: ctx.tp for a in HEAD_COUNTS if isinstance(getattr(module, a, None), int)}
        if shared:
            divide.update({a: ctx.tp // shared for a in KV_HEAD_COUNTS if a in divide})
            divide.update({a: shared for a in KV_GROUPS if isinstance(getattr(module, a, None), int)})
    x = first_argument(module)
    return Contract(
        fqn, "attention", **vars(held),
        in_src={x: ctx.hidden()}, in_dst={x: ctx.layout()},
        out_src={"output": ctx.layout(Partial()), "attn_weights": {"tp": Shard(1)} if ctx.tp > 1 else {}},
        out_dst={"output": ctx.hidden(), "attn_weights": {}},
        out_names=("output", "attn_weights"), divide=divide, features=_features(owned, x),
    )  # fmt: skip


def _split_heads(
    ctx: PlanContext, fqn: str, module: nn.Module, owned: Mapping[str, nn.Parameter], held: _Held
) -> int | None:
    """Checks that heads can be split over tp. Key/value heads that are fewer than the ranks are held whole and shared: the number of
    ranks that share one is returned."""
    head_dim = _head_dim(module)
    shared: int | None = None
    for name, value in owned.items():
        role = ctx.roles.get(f"{fqn}.{name}")
        if role == "colwise":
            layout = held.params[name]["tp"]
            assert isinstance(layout, Shard)
            rows = value.shape[layout.dim]
            if head_dim is None or rows % head_dim:
                raise Refused(
                    f"{fqn}.{name}: {rows} rows aren't whole heads of {head_dim}; a family adapter has to declare how they split."
                )
            heads = rows // head_dim
            if heads < ctx.tp and ctx.tp % heads == 0 and heads != _query_heads(module, heads):
                shared = ctx.tp // heads
                held.params[name] = {}
                held.param_use[name] = {"tp": SharedShard(layout.dim, shared)}
                continue
            _require(ctx, fqn, heads, "attention heads" if heads == _query_heads(module, heads) else "key/value heads")
        if role == "packed" and head_dim is not None:
            for section in held.sections[name]:
                if isinstance(section.placement, Shard):
                    _require(ctx, fqn, section.size // head_dim, f"heads in section {section.name} of {name}")
        if role == "norm" and head_dim is not None and value.shape[-1] != head_dim:
            raise Refused(
                f"{fqn}.{name}: a norm of width {value.shape[-1]} inside attention with heads of {head_dim}: its statistic spans"
                f" heads that tp={ctx.tp} splits.\n  Declare its module a boundary with template 'sharded_norm' if its input is"
                " sharded on the last dim, or its role 'replicated' if every rank computes it whole."
            )
    return shared


def _head_dim(module: nn.Module) -> int | None:
    """The width of a head: the module's own number, else the config's."""
    config = getattr(module, "config", None)
    hidden, heads = getattr(config, "hidden_size", None), getattr(config, "num_attention_heads", None)
    derived = hidden // heads if isinstance(hidden, int) and isinstance(heads, int) else None
    for value in (
        getattr(module, "head_dim", None),
        getattr(module, "head_size", None),
        getattr(config, "head_dim", None),
        derived,
    ):
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None


def _query_heads(module: nn.Module, default: int) -> int:
    config = getattr(module, "config", None)
    count = getattr(config, "num_attention_heads", default)
    return count if isinstance(count, int) else default


def _features(owned: Mapping[str, nn.Parameter], x: str) -> dict[str, int]:
    """The width of what enters and leaves: the columns of the first matrix, which is also what a block adds to the residual."""
    widths = [p.shape[-1] for p in owned.values() if p.ndim == 2] or [p.shape[-1] for p in owned.values() if p.ndim]
    return {x: widths[0], "output": widths[0]} if widths else {}


def _mlp(ctx: PlanContext, fqn: str, module: nn.Module, owned: Mapping[str, nn.Parameter]) -> Contract:
    held = _parameters(ctx, fqn, module, owned)
    for name, value in owned.items():
        if ctx.roles.get(f"{fqn}.{name}") == "colwise" and value.ndim == 2:
            _require(ctx, fqn, value.shape[0], f"intermediate features ({name})")
    x = first_argument(module)
    return Contract(
        fqn, "mlp", **vars(held),
        in_src={x: ctx.hidden()}, in_dst={x: ctx.layout()},
        out_src={"output": ctx.layout(Partial())}, out_dst={"output": ctx.hidden()}, features=_features(owned, x),
    )  # fmt: skip


def _norm(ctx: PlanContext, fqn: str, module: nn.Module, owned: Mapping[str, nn.Parameter]) -> Contract:
    held = _parameters(ctx, fqn, module, owned)
    x = first_argument(module)
    inside = fqn == ctx.structure.final_norm or fqn.startswith(tuple(f"{layer}." for layer in ctx.structure.layers))
    hidden = ctx.hidden() if inside else ctx.layout()
    out = ctx.layout() if fqn == ctx.structure.final_norm else hidden
    return Contract(
        fqn, "norm", **vars(held), in_src={x: hidden}, in_dst={x: hidden},
        out_src={"output": hidden}, out_dst={"output": out}, features=_features(owned, x),
    )  # fmt: skip


def _sharded_norm(ctx: PlanContext, fqn: str, module: nn.Module, owned: Mapping[str, nn.Parameter]) -> Contract:
    """A norm whose input is cut along its normalised dim: gathered, normalised whole, cut again."""
    held = _parameters(ctx, fqn, module, owned)
    head_dim = _head_dim(ctx.model.get_submodule(fqn.rpartition(".")[0]))
    for value in owned.values():
        if head_dim is not None and value.shape[-1] % head_dim == 0 and (value.shape[-1] // head_dim) % ctx.tp:
            raise Refused(
                f"{fqn}: its statistic spans {value.shape[-1] // head_dim} heads, which tp={ctx.tp} ranks would have to share."
                f" Choose a tp that divides {value.shape[-1] // head_dim}."
            )
    x = first_argument(module)
    cut, whole = ctx.layout(Shard(-1)), ctx.layout()
    return Contract(
        fqn, "sharded_norm", **vars(held), in_src={x: cut}, in_dst={x: whole},
        out_src={"output": whole}, out_dst={"output": cut}, features=_features(owned, x),
    )  # fmt: skip


def _replicated(ctx: PlanContext, fqn: str, module: nn.Module, owned: Mapping[str, nn.Parameter]) -> Contract:
    held = _parameters(ctx, fqn, module, owned)
    x = first_argument(module)
    whole = ctx.layout()
    return Contract(
        fqn, "replicated", **vars(held), in_src={x: whole}, in_dst={x: whole},
        out_src={"output": whole}, out_dst={"output": whole}, features=_features(owned, x),
    )  # fmt: skip


def _embed(ctx: PlanContext, fqn: str, module: nn.Module, owned: Mapping[str, nn.Parameter]) -> Contract:
    x = first_argument(module)
    ids, out = ctx.layout(), ctx.layout()
    features = {"output": owned["weight"].shape[1]} if "weight" in owned else {}
    if ctx.tp == 1 or not ctx.vocab_embedding or set(owned) != {"weight"}:
        return Contract(
            fqn, "embed", {name: {} for name in owned}, in_src={x: ids}, in_dst={x: ids},
            out_src={"output": out}, out_dst={"output": out}, features=features,
        )  # fmt: skip
    return Contract(
        fqn, "embed", {"weight": {"tp": Shard(0)}}, in_src={x: ids}, in_dst={x: ids},
        out_src={"output": ctx.layout(Partial())}, out_dst={"output": out},
        local_compute_fn=VOCAB_EMBEDDING, region_dispatch=False, features=features,
    )  # fmt: skip


def _lm_head(ctx: PlanContext, fqn: str, module: nn.Module, owned: Mapping[str, nn.Parameter]) -> Contract:
    x = first_argument(module)
    whole = ctx.layout()
    shard = ctx.tp > 1 and (ctx.vocab_embedding or not ctx.tied)
    held: Layout = {"tp": Shard(0)} if shard else {}
    logits = ctx.layout(Shard(-1)) if shard else whole
    features = {x: owned["weight"].shape[1], "output": owned["weight"].shape[0]} if "weight" in owned else {}
    return Contract(
        fqn, "lm_head", {name: held for name in owned}, in_src={x: whole}, in_dst={x: whole},
        out_src={"output": logits}, out_dst={"output": logits if ctx.loss_parallel else whole}, features=features,
    )  # fmt: skip


def _stack(ctx: PlanContext, fqn: str, module: nn.Module, owned: Mapping[str, nn.Parameter]) -> Contract:
    x = first_argument(module)
    norm = ctx.model.get_submodule(ctx.structure.final_norm) if ctx.structure.final_norm else None
    widths = [p.shape[-1] for p in norm.parameters()] if norm is not None else []
    return Contract(
        fqn, "stack", in_src={x: ctx.layout()}, in_dst={x: ctx.hidden()}, out_src={}, out_dst={},
        features={x: widths[0]} if widths else {},
    )  # fmt: skip


_TEMPLATES = {
    "attention": _attention, "mlp": _mlp, "norm": _norm, "sharded_norm": _sharded_norm, "replicated": _replicated,
    "embed": _embed, "lm_head": _lm_head, "stack": _stack,
}  # fmt: skip


def contract_from(
    template: str, ctx: PlanContext, fqn: str, module: nn.Module, owned: Mapping[str, nn.Parameter]
) -> Contract:
    """The contract that `template` gives `module`. `owned`: its parameters, by name relative to it."""
    if template not in _TEMPLATES:
        raise PlanError(f"{fqn}: no template {template!r} (templates: {', '.join(sorted(_TEMPLATES))}).")
    return _TEMPLATES[template](ctx, fqn, module, owned)
