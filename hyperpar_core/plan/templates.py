"""The contract that each kind of boundary starts from.

`hidden` below is how hidden states travel between boundaries: cut along dim 1 by cp where it is active, and by tp inside the
decoder stack under sequence parallelism. Model-level code only ever sees the whole sequence of its cp rank.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

from ..descriptors import Section
from ..errors import PlanError, Refused
from ..placement import Layout, Placement, SharedShard
from ..plugins import get_registry
from .boundaries import Structure
from .contract import Contract
from .experts import cut_over_ep, cut_over_tp, experts_per_token
from .heads import HEAD_COUNTS, KV_GROUPS, KV_HEAD_COUNTS, STATE_COUNTS, Heads, count_heads, require_split
from .roles import COLWISE, ROWWISE
from .stacks import find_stacks, member

__all__ = ["PlanContext", "contract_from", "cut_sections", "first_argument", "projections"]

VOCAB_EMBEDDING = "vocab_parallel_embedding"


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
    ep: int = 1

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
    divide: dict[str, int]


def _parameters(ctx: PlanContext, fqn: str, module: nn.Module, owned: Mapping[str, nn.Parameter]) -> _Held:
    """Placements from roles."""
    held = _Held({}, {}, {}, {}, {})
    for name, value in owned.items():
        full = f"{fqn}.{name}" if fqn else name
        role = ctx.roles.get(full)
        path, _, leaf = name.rpartition(".")
        owner = module.get_submodule(path)
        transposed = _is_transposed(owner, value)
        if transposed and ctx.tp > 1 and role in ("colwise", "packed"):
            held.divide[f"{path}.nf" if path else "nf"] = ctx.tp
        if ctx.tp == 1 or role in ("norm", "replicated", "moe_gate"):
            held.params[name] = {}
        elif role in ("colwise", "per_head"):
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


def _is_transposed(owner: nn.Module, value: nn.Parameter) -> bool:
    """Whether a weight is kept as [in, out], as Conv1D does; it says so by counting its outputs in nf."""
    return value.ndim == 2 and getattr(owner, "nf", None) == value.shape[1] and not isinstance(owner, nn.Linear)


def cut_sections(ctx: PlanContext, full: str, handler: str) -> tuple[Section, ...]:
    """The sections that a special handler cuts the parameter `full` into."""
    path, _, leaf = full.rpartition(".")
    owner = ctx.model.get_submodule(path)
    return _sections(ctx, full, handler, owner, leaf, owner.get_parameter(leaf))


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
    return sections


def _attention(ctx: PlanContext, fqn: str, module: nn.Module, owned: Mapping[str, nn.Parameter]) -> Contract:
    held = _parameters(ctx, fqn, module, owned)
    if ctx.tp > 1:
        shared = _split_heads(ctx, fqn, module, owned, held)
        counts = {a: ctx.tp for a in HEAD_COUNTS if isinstance(getattr(module, a, None), int)}
        if shared:
            counts.update({a: ctx.tp // shared for a in KV_HEAD_COUNTS if a in counts})
            counts.update({a: shared for a in KV_GROUPS if isinstance(getattr(module, a, None), int)})
        held.divide.update(counts)
    x = first_argument(module)
    residual, residual_grad = _residual(ctx, module)
    return Contract(
        fqn, "attention", **vars(held),
        in_src={x: ctx.hidden(), **residual}, in_dst={x: ctx.layout(), **residual}, in_grad=residual_grad,
        out_src={"output": _sums(ctx, fqn, owned), "attn_weights": {"tp": Shard(1)} if ctx.tp > 1 else {}},
        out_dst={"output": ctx.hidden(), "attn_weights": {}},
        out_names=("output", "attn_weights"), features={**_features(owned, x, module), **_head_dim(module)},
    )  # fmt: skip


def _sums(ctx: PlanContext, fqn: str, owned: Mapping[str, nn.Parameter]) -> dict[str, Placement]:
    """What a block yields: summands where it owns its row-wise projection, else what that projection's own boundary made of them."""
    rowwise = any(ctx.roles.get(f"{fqn}.{name}") == "rowwise" for name in owned)
    return ctx.layout(Partial()) if rowwise else ctx.hidden()


def _residual(ctx: PlanContext, module: nn.Module) -> tuple[dict[str, Layout], dict[str, Layout]]:
    """(layouts, gradients' layouts) of a residual that a block takes and adds to its whole sums: it passes as it is."""
    if "residual" not in inspect.signature(type(module).forward).parameters:
        return {}, {}
    return {"residual": ctx.hidden()}, {"residual": {"tp": Shard(1) if ctx.sequence_parallel else Replicate()}}


def _split_heads(
    ctx: PlanContext, fqn: str, module: nn.Module, owned: Mapping[str, nn.Parameter], held: _Held
) -> int | None:
    """Checks that heads can be split over tp. Key/value heads that are fewer than the ranks are held whole and shared: the number of
    ranks that share one is returned."""
    heads = count_heads(module)
    shared: set[int] = set()
    rows: set[int] = set()
    for name, value in owned.items():
        role = ctx.roles.get(f"{fqn}.{name}")
        if role in ("colwise", "per_head"):
            layout = held.params[name]["tp"]
            assert isinstance(layout, Shard)
            unit = replace(heads, dim=1) if role == "per_head" else heads
            rows |= {value.shape[layout.dim]} if role == "colwise" else set()
            cut = _cut(ctx, f"{fqn}.{name}", value.shape[layout.dim], layout.dim, unit)
            if isinstance(cut, SharedShard):
                held.params[name], held.param_use[name] = {}, {"tp": cut}
                shared.add(cut.copies)
        if role == "packed":
            rows |= {section.size for section in held.sections[name]}
            held.sections[name] = tuple(
                replace(s, placement=_cut(ctx, f"{fqn}.{name} ({s.name})", s.size, s.dim, heads))
                if isinstance(s.placement, Shard)
                else s
                for s in held.sections[name]
            )
            shared |= {s.placement.copies for s in held.sections[name] if isinstance(s.placement, SharedShard)}
        if role == "norm" and heads.dim is not None and value.shape[-1] != heads.dim:
            raise Refused(
                f"{fqn}.{name}: a norm of width {value.shape[-1]} inside attention with heads of {heads.dim}: its statistic spans"
                f" heads that tp={ctx.tp} splits.\n  Declare its module a boundary with template 'sharded_norm' if its input is"
                " sharded on the last dim, or its role 'replicated' if every rank computes it whole."
            )
    if not shared and heads.query and heads.key_value and rows == {heads.query * (heads.dim or 0)}:
        # Only queries: the keys and values are another layer's, which may share them.
        return ctx.tp // heads.key_value if heads.key_value < min(ctx.tp, heads.query) else None
    return max(shared, default=None)


def _cut(ctx: PlanContext, name: str, rows: int, dim: int, heads: Heads) -> Placement:
    """How the rows of a projection are cut: at heads, or shared where there are fewer key/value heads than ranks."""
    count = heads.whole(rows)
    if count is not None and count < ctx.tp and ctx.tp % count == 0 and count != heads.query:
        return SharedShard(dim, ctx.tp // count)
    count = count or heads.blocks(rows)
    if count is None:
        raise Refused(
            f"{name}: {rows} rows aren't whole heads of {heads.dim}; a family adapter has to declare how they split."
        )
    require_split(name, count, "attention heads" if count == heads.query else "key/value heads", ctx.tp, heads)
    return Shard(dim)


def _head_dim(module: nn.Module) -> dict[str, int]:
    """{"head_dim": the width of a key}; {} where the module doesn't say it."""
    dim = count_heads(module).dim
    return {"head_dim": dim} if dim else {}


def _features(owned: Mapping[str, nn.Parameter], x: str, module: nn.Module | None = None) -> dict[str, int]:
    """The width of what enters and leaves: the columns of the first matrix, which is also what a block adds to the residual."""
    for name, value in owned.items():
        if value.ndim == 2:
            owner = module.get_submodule(name.rpartition(".")[0]) if module is not None else None
            width = value.shape[0 if owner is not None and _is_transposed(owner, value) else 1]
            return {x: width, "output": width}
    widths = [p.shape[-1] for p in owned.values() if p.ndim]
    return {x: widths[0], "output": widths[0]} if widths else {}


def _split_features(
    ctx: PlanContext, fqn: str, held: _Held, owned: Mapping[str, nn.Parameter], what: str = "intermediate features"
) -> None:
    """Refused unless tp divides what column-wise projections yield, each section of a packed one."""
    for name, value in owned.items():
        layout = held.params[name].get("tp")
        if name in held.sections:
            for section in (s for s in held.sections[name] if isinstance(s.placement, Shard)):
                require_split(fqn, section.size, f"{what} ({name}, {section.name})", ctx.tp)
        elif ctx.roles.get(f"{fqn}.{name}") == "colwise" and isinstance(layout, Shard):
            require_split(fqn, value.shape[layout.dim], f"{what} ({name})", ctx.tp)


def _mlp(
    ctx: PlanContext,
    fqn: str,
    module: nn.Module,
    owned: Mapping[str, nn.Parameter],
    what: str = "intermediate features",
) -> Contract:
    held = _parameters(ctx, fqn, module, owned)
    _split_features(ctx, fqn, held, owned, what)
    x = first_argument(module)
    residual, residual_grad = _residual(ctx, module)
    return Contract(
        fqn, "mlp", **vars(held),
        in_src={x: ctx.hidden(), **residual}, in_dst={x: ctx.layout(), **residual}, in_grad=residual_grad,
        out_src={"output": _sums(ctx, fqn, owned)}, out_dst={"output": ctx.hidden()},
        features=_features(owned, x, module),
    )  # fmt: skip


def _linear_attention(ctx: PlanContext, fqn: str, module: nn.Module, owned: Mapping[str, nn.Parameter]) -> Contract:
    """A recurrence over heads: each rank has some heads with their part of the convolution, of the decay and of the step. A section
    that all heads read is whole on each."""
    contract = _mlp(ctx, fqn, module, owned, "heads or features of heads")
    divide: dict[str, int] = {}
    counts: dict[str, int] = {}
    if ctx.tp > 1:
        parts = [section for sections in contract.sections.values() for section in sections]
        shared = any(not isinstance(section.placement, Shard) for section in parts)
        names = [n for n in STATE_COUNTS if isinstance(getattr(module, n, None), int) and not (shared and n == "n_groups")]
        divide = dict.fromkeys(names, ctx.tp)
        if isinstance(getattr(module, "conv_dim", None), int):
            conv = next((s for name, s in contract.sections.items() if module.conv_dim == owned[name].shape[0]), None)
            if conv is None:
                raise PlanError(
                    f"{fqn}: its conv_dim counts {module.conv_dim} rows, and no parameter with as many has sections that tp could cut.\n"
                    "  Give its convolution's weight the role packed, with sections, in a family adapter (hook hyperpar_model_families)."
                )
            counts["conv_dim"] = sum(s.size // ctx.tp if isinstance(s.placement, Shard) else s.size for s in conv)
    # a recurrence steps through the sequence in place, which DTensor can't follow
    return replace(contract, template="linear_attention", divide=divide, counts=counts, region_dispatch=False)


def _colwise(ctx: PlanContext, fqn: str, module: nn.Module, owned: Mapping[str, nn.Parameter]) -> Contract:
    """A column-wise projection that is a boundary of its own: what follows it works on a part of the features."""
    held = _parameters(ctx, fqn, module, owned)
    _split_features(ctx, fqn, held, owned)
    x = first_argument(module)
    cut = ctx.layout(Shard(-1))
    return Contract(
        fqn, "colwise", **vars(held), in_src={x: ctx.hidden()}, in_dst={x: ctx.layout()},
        out_src={"output": cut}, out_dst={"output": cut}, features=_features(owned, x, module),
    )  # fmt: skip


def _rowwise(ctx: PlanContext, fqn: str, module: nn.Module, owned: Mapping[str, nn.Parameter]) -> Contract:
    """A row-wise projection that is a boundary of its own: what its block does after it (dropout, a residual) sees whole sums."""
    held = _parameters(ctx, fqn, module, owned)
    for name, value in owned.items():
        layout = held.params[name].get("tp")
        if isinstance(layout, Shard):
            require_split(fqn, value.shape[layout.dim], f"input features ({name})", ctx.tp)
    x = first_argument(module)
    cut = ctx.layout(Shard(-1))
    return Contract(
        fqn, "rowwise", **vars(held), in_src={x: cut}, in_dst={x: cut},
        out_src={"output": ctx.layout(Partial())}, out_dst={"output": ctx.hidden()}, features=_features(owned, x, module),
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
    head_dim = count_heads(ctx.model.get_submodule(fqn.rpartition(".")[0])).dim
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
    if ctx.sequence_parallel and fqn in ctx.structure.layers:
        raise Refused(
            f"{fqn}: a layer of the stack that owns {', '.join(owned)} itself; under sequence parallel they would see a part of the"
            " sequence.\n  Pass sequence_parallel=False."
        )
    held = _parameters(ctx, fqn, module, owned)
    x = first_argument(module)
    whole = ctx.layout()
    return Contract(
        fqn, "replicated", **vars(held), in_src={x: whole}, in_dst={x: whole},
        out_src={"output": whole}, out_dst={"output": whole}, features=_features(owned, x),
    )  # fmt: skip


def _moe_mlp(ctx: PlanContext, fqn: str, module: nn.Module, owned: Mapping[str, nn.Parameter]) -> Contract:
    """A router and its experts. Over ep, experts are cut and the local compute lets tokens travel; over tp alone, their intermediate
    features are. Where neither is, every rank holds the block whole, and tp ranks share its tokens as they do over ep."""
    experts = {name: value for name, value in owned.items() if ctx.roles.get(f"{fqn}.{name}") == "moe_expert"}
    held = _Held({name: {} for name in owned}, {}, {}, {}, {})
    stacked = find_stacks(fqn, module, experts, ctx.ep) if ctx.ep > 1 else {}
    if ctx.ep > 1:
        for name, value in experts.items():
            if member(stacked, name):
                held.params[name] = {"ep": Shard(0)}
                continue
            held.params[name], counts = cut_over_ep(fqn, module, name, value, ctx.ep)
            held.divide.update(counts)
    sums = ctx.ep == 1 and ctx.tp > 1 and _cut_block(ctx, fqn, module, owned, experts, held)
    x = first_argument(module)
    inside, yields = (ctx.layout(), ctx.layout(Partial())) if sums else (ctx.layout(Shard(1)), ctx.layout(Shard(1)))
    return Contract(
        fqn, "moe_mlp", **vars(held), stacked=stacked, in_src={x: ctx.hidden()}, in_dst={x: inside},
        out_src={"output": yields, "router_scores": {}}, out_dst={"output": ctx.hidden(), "router_scores": {}},
        out_names=("output", "router_scores"), features={**_features(owned, x, module), **experts_per_token(ctx.model, module)},
        region_dispatch=False,  # which rows meet which expert is data: DTensor has no placements for that
    )  # fmt: skip


def projections(ctx: PlanContext, fqn: str, module: nn.Module, owned: Mapping[str, nn.Parameter]) -> dict[str, str]:
    """{parameter: "colwise" or "rowwise"} of the linear layers of shared experts in a block, by the names that the field uses."""
    found = {}
    for name in owned:
        path = name.rpartition(".")[0]
        owner, leaf = module.get_submodule(path), path.rpartition(".")[2]
        expert = ctx.roles.get(f"{fqn}.{name}") == "moe_expert"
        if leaf in COLWISE | ROWWISE and isinstance(owner, nn.Linear) and not expert:
            found[name] = "colwise" if leaf in COLWISE else "rowwise"
    return found


def _shared_expert(ctx: PlanContext, fqn: str, module: nn.Module, owned: Mapping[str, nn.Parameter]) -> Contract:
    """An MLP inside a block whose tokens tp ranks share, whether the model's hidden states are cut outside it or not."""
    contract = _mlp(ctx, fqn, module, owned)
    tokens = ctx.layout(Shard(1))
    in_src = {**contract.in_src, first_argument(module): tokens}
    return replace(contract, template="shared_expert", in_src=in_src, out_dst={"output": tokens})


def _cut_block(
    ctx: PlanContext,
    fqn: str,
    module: nn.Module,
    owned: Mapping[str, nn.Parameter],
    experts: Mapping[str, nn.Parameter],
    held: _Held,
) -> bool:
    """Cuts the intermediate features of experts and shared experts over tp, so that the block yields summands; False where something
    in it can't be cut, or works on whole sums."""
    cuts = {
        name: cut_over_tp(f"{fqn}.{name}", value, module.get_submodule(name.rpartition(".")[0]), ctx.tp)
        for name, value in experts.items()
    }
    if not cuts or not all(cuts.values()):
        return False
    shared = projections(ctx, fqn, module, owned)
    for name in owned.keys() - shared.keys() - experts.keys():
        owner = module.get_submodule(name.rpartition(".")[0])
        scales = isinstance(owner, nn.Linear) and owner.out_features == 1  # the gate of a shared expert
        if not scales and ctx.roles.get(f"{fqn}.{name}") != "moe_gate":
            return False
    for name, cut in cuts.items():
        assert cut is not None
        held.params[name], use, sections = cut
        held.param_use.update({name: use} if use else {})
        held.sections.update({name: sections} if sections else {})
    inner = replace(ctx, roles={f"{fqn}.{name}": role for name, role in shared.items()})
    parameters = {name: owned[name] for name in shared}
    cut_shared = _parameters(inner, fqn, module, parameters)
    _split_features(inner, fqn, cut_shared, parameters)
    for mine, theirs in zip(vars(held).values(), vars(cut_shared).values(), strict=True):
        mine.update(theirs)
    return True


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
    "attention": _attention, "linear_attention": _linear_attention, "mlp": _mlp, "colwise": _colwise, "rowwise": _rowwise,
    "norm": _norm, "sharded_norm": _sharded_norm, "replicated": _replicated, "embed": _embed, "lm_head": _lm_head, "stack": _stack,
    "moe_mlp": _moe_mlp, "shared_expert": _shared_expert,
}  # fmt: skip


def contract_from(
    template: str, ctx: PlanContext, fqn: str, module: nn.Module, owned: Mapping[str, nn.Parameter]
) -> Contract:
    """The contract that `template` gives `module`. `owned`: its parameters, by name relative to it."""
    if template not in _TEMPLATES:
        raise PlanError(f"{fqn}: no template {template!r} (templates: {', '.join(sorted(_TEMPLATES))}).")
    return _TEMPLATES[template](ctx, fqn, module, owned)
