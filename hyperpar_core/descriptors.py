"""What plugins hand to the core: frozen descriptions that can be listed without running any of what they describe.

A `factory` is called once, at apply time, with what it asks for by parameter name: `module`, `target_module`, `fqn`, `mesh`,
`tp_mesh`, `cp_mesh`, `ep_mesh` (None for an inactive axis), `contract`, `mode`, and its own options from the plan. These
names are reserved; options are checked against the signature; `**kwargs` is refused. It returns a function that runs on
local tensors and closes over no module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from .changes import API_VERSION, versioned
from .placement import Placement

__all__ = [
    "API_VERSION",
    "CHECK_NAMES",
    "CONTEXT_NAMES",
    "ROLES",
    "TEMPLATES",
    "CollectiveLowerer",
    "InnerWrapper",
    "Limit",
    "LocalComputeFactory",
    "LossFactory",
    "ModelFamily",
    "PluginInfo",
    "Section",
    "SpecialHandler",
]

CONTEXT_NAMES = frozenset(
    {"module", "target_module", "fqn", "mesh", "tp_mesh", "cp_mesh", "ep_mesh", "contract", "mode", "model"}
)
CHECK_NAMES = frozenset({"module", "target_module", "fqn", "contract", "model", "sizes"})
ROLES = (
    "colwise", "rowwise", "per_head", "norm", "embed", "lm_head", "moe_gate", "moe_expert", "shared_expert", "packed",
    "bias", "replicated", "special", "skip",
)  # fmt: skip
TEMPLATES = (
    "attention", "linear_attention", "mlp", "norm", "sharded_norm", "embed", "lm_head", "moe_gate", "moe_mlp",
    "shared_expert", "stack", "replicated", "colwise", "rowwise",
)  # fmt: skip

Traffic = Callable[..., Sequence[tuple[str, str, int]] | None]


@versioned
@dataclass(frozen=True)
class PluginInfo:
    """What a plugin needs: the core's descriptor API and PEP 508 ranges, such as `("torch>=2.9", "transformers>=5,<6")`."""

    api: str = API_VERSION
    requires: tuple[str, ...] = ()


@versioned
@dataclass(frozen=True)
class InnerWrapper:
    """Replaces or weaves into the forward of a region's inner module.

    `factory(*, target_module, ...) -> fn(module, *args, **kwargs)`, the new forward. `forward_style`: "hf" for modules called
    with hidden states, "qkv" for modules called with queries, keys and values. `needs_axis`: the axis that must be active.
    `check(*, target_module, sizes, ...) -> None` raises Refused for a module that can't be wrapped rightly, when a plan is made: it gets
    what it asks for by name of CHECK_NAMES and of the options. The model may be on the meta device; `sizes` is {active axis: degree}.
    `traffic`: what the wrapper itself sends over `needs_axis`, see LocalComputeFactory.
    """

    name: str
    factory: Callable[..., Callable[..., Any]]
    forward_style: Literal["hf", "qkv"] = "hf"
    needs_axis: str | None = "cp"
    region_dispatch: bool = False
    summary: str = ""
    check: Callable[..., None] | None = None
    traffic: Traffic | None = None


@versioned
@dataclass(frozen=True)
class LocalComputeFactory:
    """Replaces a region's compute outright. `factory(*, module, ...) -> fn(module, *args, **kwargs)`.

    `expects`: attributes that the module must have. `traffic`: what the compute itself sends over `needs_axis` in a step, for
    `explain` and predictions: `traffic(*, contract, shapes, tokens, ranks, width) -> [(direction, collective, bytes), ...]` with the
    shapes of the boundary's parameters as a tp rank's region sees them (and of a packed one's sections, as `parameter.section`), one
    rank's tokens, the ranks of the axis and the bytes of an element. No `traffic`, or None from it: not known.
    """

    name: str
    factory: Callable[..., Callable[..., Any]]
    expects: tuple[str, ...] = ("gate", "experts")
    needs_axis: str | None = "ep"
    region_dispatch: bool = False
    summary: str = ""
    traffic: Traffic | None = None


@dataclass(frozen=True)
class Section:
    """One cut of a packed parameter: `size` rows along `dim`, held as a parameter of its own with `placement` on tp."""

    name: str
    dim: int
    size: int
    placement: Placement


@versioned
@dataclass(frozen=True)
class SpecialHandler:
    """Shards a parameter that plain placements can't cut.

    `sections(shape, *, module, param_name, config) -> [Section, ...]`, in order along one dim; the inverse follows from it.
    """

    name: str
    sections: Callable[..., Sequence[Section]]
    summary: str = ""


@versioned
@dataclass(frozen=True)
class CollectiveLowerer:
    """Turns a transition into collectives: `lower(transition) -> callable | None`; None leaves it to the default lowerer.

    `axes` and `backends`: where it may be used (empty: anywhere). `exact`: it computes what the default computes. `error`: where it
    isn't exact, the bound of one transition's error, as a part of the largest value (of summands: of their largest absolute sum).
    """

    name: str
    lower: Callable[..., Callable[..., Any] | None]
    axes: tuple[str, ...] = ()
    backends: tuple[str, ...] = ()
    exact: bool = True
    summary: str = ""
    error: float | None = None


@versioned
@dataclass(frozen=True)
class LossFactory:
    """A loss on sharded logits: `factory(*, model, ...) -> loss_function` as transformers calls it.

    `traffic`: what it sends over `needs_axis`, see LocalComputeFactory; the contract is the output head's, with
    the loss's options.
    """

    name: str
    factory: Callable[..., Callable[..., Any]]
    needs_axis: str | None = "tp"
    summary: str = ""
    traffic: Traffic | None = None


@dataclass(frozen=True)
class Limit:
    """Something that a family can't do: `applies(config, sizes) -> bool`, with sizes {axis: degree, "sp": 0 | 1}."""

    cause: str
    applies: Callable[[Any, Mapping[str, int]], bool]


@versioned
@dataclass(frozen=True)
class ModelFamily:
    """An adapter that knows one model family.

    matches      model_type names of configs, or `matches(model) -> bool`
    roles        {parameter pattern: role}, one of ROLES; the last pattern that matches wins
    boundaries   {module pattern: template name, a mapping with the keys of an override and `template`, or None for no boundary};
                 "" is the model itself
    handlers     {parameter pattern: name of a special handler}
    facts        what the planner needs to know about the model: {"causal": True, "isolates_documents": True, ...};
                 "draws": True where a model draws random numbers in training without a rate above 0 in its config or modules
    suggestions  {axis: [override entry, ...]}: what to declare for cp and ep; never applied by itself
    limits       what is refused, with its cause
    """

    name: str
    matches: tuple[str, ...] | Callable[[Any], bool]
    roles: Mapping[str, str] = field(default_factory=dict)
    boundaries: Mapping[str, Any] = field(default_factory=dict)
    handlers: Mapping[str, str] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    suggestions: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    limits: tuple[Limit, ...] = ()
    summary: str = ""
