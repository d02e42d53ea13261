"""The contract that each kind of boundary starts from.

`hidden` below is how hidden states travel between boundaries: cut along dim 1 by cp where it is active, and by tp inside the
decoder stack under sequence parallelism. Model-level code only ever sees the whole sequence of its cp rank.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

from ..errors import PlanError, Refused
from ..placement import Layout, Placement
from .boundaries import Structure
from .contract import Contract

__all__ = ["PlanContext", "contract_from", "first_argument"]

VOCAB_EMBEDDING = "vocab_parallel_embedding"

# Integer attributes that count heads, as models use them for reshapes; a region that sees local heads needs them divided.
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


def _held(ctx: PlanContext, fqn: str, parameter: str, value: nn.Parameter) -> tuple[Layout, Layout | None]:
    """(how a parameter is held, how the region sees it where that differs), from its role."""
    role = ctx.roles.get(f"{fqn}.{parameter}" if fqn else parameter)
    if ctx.tp == 1 or role in ("norm", "replicated", "moe_gate"):
        return {}, None
    if role == "colwise":
        return {"tp": Shard(0)}, None
    if role == "rowwise":
        return ({"tp": Shard(1)}, None) if value.ndim > 1 else ({}, {"tp": Partial()})
    raise PlanError(f"{fqn}.{parameter}: role {role!r} has no placement in this boundary.")


def _parameters(
    ctx: PlanContext, fqn: str, owned: Mapping[str, nn.Parameter]
) -> tuple[dict[str, Layout], dict[str, Layout]]:
    params: dict[str, Layout] = {}
    use: dict[str, Layout] = {}
    for name, value in owned.items():
        params[name], seen = _held(ctx, fqn, name, value)
        if seen is not None:
            use[name] = seen
    return params, use


def _require(ctx: PlanContext, fqn: str, count: int, what: str) -> None:
    if count % ctx.tp:
        degrees = [d for d in range(2, min(count, 64) + 1) if count % d == 0]
        raise Refused(
            f"{fqn}: {count} {what} can't be split over tp={ctx.tp}.\n"
            f"  Degrees of tp that work here: {', '.join(map(str, degrees)) or 'none'}; the other ranks can go to dp or cp."
        )


def _attention(ctx: PlanContext, fqn: str, module: nn.Module, owned: Mapping[str, nn.Parameter]) -> Contract:
    params, use = _parameters(ctx, fqn, owned)
    head_dim = getattr(module, "head_dim", None)
    divide = {}
    if ctx.tp > 1:
        for name, value in owned.items():
            role = ctx.roles.get(f"{fqn}.{name}")
            if role == "colwise" and value.ndim == 2:
                if not isinstance(head_dim, int):
                    raise Refused(
                        f"{fqn}: the module has no head_dim, so the heads in {name} can't be counted; a family adapter has to declare them."
                    )
                heads = value.shape[0] // head_dim
                kv = "key/value heads" if heads != _query_heads(module, heads) else "attention heads"
                _require(ctx, fqn, heads, kv)
            if role == "norm" and isinstance(head_dim, int) and value.shape[-1] != head_dim:
                raise Refused(
                    f"{fqn}.{name}: a norm of width {value.shape[-1]} inside attention with heads of {head_dim}: its statistic spans"
                    f" heads that tp={ctx.tp} splits.\n  Declare its module a boundary with template 'sharded_norm' if its input is"
                    " sharded on the last dim, or its role 'replicated' if every rank computes it whole."
                )
        divide = {a: ctx.tp for a in HEAD_COUNTS if isinstance(getattr(module, a, None), int)}
    x = first_argument(module)
    return Contract(
        fqn, "attention", params, use,
        in_src={x: ctx.hidden()}, in_dst={x: ctx.layout()},
        out_src={"output": ctx.layout(Partial()), "attn_weights": {"tp": Shard(1)} if ctx.tp > 1 else {}},
        out_dst={"output": ctx.hidden(), "attn_weights": {}},
        out_names=("output", "attn_weights"), divide=divide, features=_features(owned, x),
    )  # fmt: skip


def _query_heads(module: nn.Module, default: int) -> int:
    config = getattr(module, "config", None)
    count = getattr(config, "num_attention_heads", default)
    return count if isinstance(count, int) else default


def _features(owned: Mapping[str, nn.Parameter], x: str) -> dict[str, int]:
    """The width of what enters and leaves: the columns of the first matrix, which is also what a block adds to the residual."""
    widths = [p.shape[-1] for p in owned.values() if p.ndim == 2] or [p.shape[-1] for p in owned.values() if p.ndim]
    return {x: widths[0], "output": widths[0]} if widths else {}


def _mlp(ctx: PlanContext, fqn: str, module: nn.Module, owned: Mapping[str, nn.Parameter]) -> Contract:
    params, use = _parameters(ctx, fqn, owned)
    for name, value in owned.items():
        if ctx.roles.get(f"{fqn}.{name}") == "colwise" and value.ndim == 2:
            _require(ctx, fqn, value.shape[0], f"intermediate features ({name})")
    x = first_argument(module)
    return Contract(
        fqn, "mlp", params, use,
        in_src={x: ctx.hidden()}, in_dst={x: ctx.layout()},
        out_src={"output": ctx.layout(Partial())}, out_dst={"output": ctx.hidden()}, features=_features(owned, x),
    )  # fmt: skip


def _norm(ctx: PlanContext, fqn: str, module: nn.Module, owned: Mapping[str, nn.Parameter]) -> Contract:
    params, use = _parameters(ctx, fqn, owned)
    x = first_argument(module)
    inside = fqn == ctx.structure.final_norm or fqn.startswith(tuple(f"{layer}." for layer in ctx.structure.layers))
    hidden = ctx.hidden() if inside else ctx.layout()
    out = ctx.layout() if fqn == ctx.structure.final_norm else hidden
    return Contract(
        fqn, "norm", params, use, in_src={x: hidden}, in_dst={x: hidden},
        out_src={"output": hidden}, out_dst={"output": out}, features=_features(owned, x),
    )  # fmt: skip


def _sharded_norm(ctx: PlanContext, fqn: str, module: nn.Module, owned: Mapping[str, nn.Parameter]) -> Contract:
    """A norm whose input is cut along its normalised dim: gathered, normalised whole, cut again."""
    params, use = _parameters(ctx, fqn, owned)
    x = first_argument(module)
    cut, whole = ctx.layout(Shard(-1)), ctx.layout()
    return Contract(
        fqn, "sharded_norm", params, use, in_src={x: cut}, in_dst={x: whole},
        out_src={"output": whole}, out_dst={"output": cut}, features=_features(owned, x),
    )  # fmt: skip


def _replicated(ctx: PlanContext, fqn: str, module: nn.Module, owned: Mapping[str, nn.Parameter]) -> Contract:
    params, use = _parameters(ctx, fqn, owned)
    x = first_argument(module)
    whole = ctx.layout()
    return Contract(
        fqn, "replicated", params, use, in_src={x: whole}, in_dst={x: whole},
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
    return Contract(fqn, "stack", in_src={x: ctx.layout()}, in_dst={x: ctx.hidden()}, out_src={}, out_dst={})


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
