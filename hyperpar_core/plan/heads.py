"""How many heads an attention module has, and which of its parameters' rows make one: where tp may cut."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..errors import Refused

__all__ = [
    "HEAD_COUNTS",
    "KV_GROUPS",
    "KV_HEAD_COUNTS",
    "STATE_COUNTS",
    "Heads",
    "attribute_of",
    "check_counts",
    "count_heads",
    "require_split",
]

# Integer attributes that count heads, as models use them for reshapes; a region that sees local heads needs them divided.
KV_HEAD_COUNTS = ("num_key_value_heads", "num_kv_heads")
KV_GROUPS = ("num_key_value_groups", "n_rep")
STATE_COUNTS = ("num_heads", "num_k_heads", "num_v_heads", "key_dim", "value_dim", "intermediate_size", "n_groups")
HEAD_COUNTS = ("num_heads", "num_attention_heads", "num_key_value_heads", "num_kv_heads", "n_heads", "n_head")


@dataclass(frozen=True)
class Heads:
    """What a module and its config say: query heads, key/value heads, the width of one, and of others; None where they don't say."""

    query: int | None
    key_value: int | None
    dim: int | None
    others: tuple[int, ...] = ()

    def whole(self, rows: int) -> int | None:
        """The heads that `rows` hold, where they are heads of a known width, as many as there are of one kind."""
        counts = (self.query, self.key_value) if self.query else (rows // self.dim if self.dim else None,)
        found = (rows // dim for dim in (self.dim, *self.others) if dim and rows % dim == 0)
        return next((count for count in found if count in counts), None)

    def blocks(self, rows: int) -> int | None:
        """The blocks where `rows` of another width may be cut: between groups of heads that share a key/value head."""
        return self.key_value if self.key_value and rows % self.key_value == 0 else None

    def fit(self, tp: int) -> bool:
        """Whether tp ranks can have whole query heads, and whole key/value heads or one that some of them share."""
        query, shared = self.query or 0, self.key_value or 0
        return query % tp == 0 and (shared % tp == 0 or (shared != query and tp % shared == 0))


def _integer(source: Any, *names: str) -> int | None:
    for name in names:
        try:
            value = getattr(source, name, None)
        except Exception:  # a config whose layers differ refuses to name one value for all of them
            continue
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None


def count_heads(module: nn.Module) -> Heads:
    """The heads of an attention module: its own numbers, else its config's."""
    config = getattr(module, "config", None)
    query = _integer(module, "num_heads", "num_attention_heads", "n_heads", "n_head") or _integer(
        config, "num_attention_heads"
    )
    groups = _integer(module, *KV_GROUPS)
    shared = query // groups if query and groups else None
    key_value = _integer(module, *KV_HEAD_COUNTS) or shared or _integer(config, *KV_HEAD_COUNTS) or query
    hidden = _integer(config, "hidden_size") or _integer(module, "hidden_size", "embed_dim")
    derived = hidden // query if hidden and query else None
    dim = _integer(module, "head_dim", "head_size") or _integer(config, "head_dim") or derived
    others = (_integer(source, name) for source in (module, config) for name in ("v_head_dim", "qk_head_dim"))
    return Heads(query, key_value, dim, tuple(dict.fromkeys(width for width in others if width and width != dim)))


def require_split(fqn: str, count: int, what: str, tp: int, heads: Heads | None = None) -> None:
    """Refused unless `tp` ranks can share `count` evenly. `heads`: what else must fit the degrees that are named instead."""
    if count % tp:
        degrees = [d for d in range(2, min(count, 64) + 1) if count % d == 0 and (heads is None or heads.fit(d))]
        raise Refused(
            f"{fqn}: {count} {what} can't be split over tp={tp}.\n"
            f"  Degrees of tp that work here: {', '.join(map(str, degrees)) or 'none'}; the other ranks can go to dp or cp."
        )


def attribute_of(module: nn.Module, path: str) -> tuple[nn.Module, list[str], Any]:
    """(the module that holds it, what is left of the path, its value or None) of a dotted path through children, and at its end
    through something that is no module, such as a config."""
    owner: nn.Module = module
    *parents, leaf = path.split(".")
    while parents and isinstance(child := getattr(owner, parents[0], None), nn.Module):
        owner = child
        parents.pop(0)
    value: Any = owner
    for part in [*parents, leaf]:
        value = getattr(value, part, None)
    return owner, [*parents, leaf], value


def check_counts(fqn: str, module: nn.Module, divide: Mapping[str, int], counts: Mapping[str, int]) -> None:
    """Refused unless every attribute that the region's view divides is a whole number of its divisor's multiples, and every one that
    it sets is a whole number."""
    for path, by in {**divide, **counts}.items():
        value = attribute_of(module, path)[2]
        if not isinstance(value, int) or isinstance(value, bool):
            raise Refused(f"{fqn}.{path}: to be {f'divided by {by}' if path in divide else f'set to {by}'}, and it is {value!r}.")
        if path in divide:
            require_split(fqn, value, path, by)
