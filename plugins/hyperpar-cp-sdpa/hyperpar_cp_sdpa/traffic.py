"""What context-parallel attention sends in a step: for plans, from shapes alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

__all__ = ["sent"]

PACKED = ("qkv_proj.weight", "query_key_value.weight", "c_attn.weight", "Wqkv.weight")
Sent = tuple[str, str, int]  # direction, collective, bytes that this rank hands to it


def sent(
    form: str, *, contract: Any, shapes: Mapping[str, Sequence[int]], tokens: int, ranks: int, width: int
) -> list[Sent] | None:
    """The collectives of one attention module, forward and backward, whose keys and values are as wide as the plan's parameters of
    these names say; None where it has none of them (they come from elsewhere, or are expanded first).

    Keys and values travel in the tensors' own dtype, the sums of their gradients in float32 or wider.
    """
    if "head_dim" not in contract.features:
        return None
    widths = _widths(contract, shapes)
    if widths is None:
        return None
    (q, k, v), head = widths, contract.features["head_dim"]
    ulysses = {"ulysses": ranks, "hybrid": contract.options.get("ulysses_degree", 2)}.get(form, 1)
    ring, groups = ranks // ulysses, max(k // head, 1)
    # Heads that are fewer than the seats are sent to several.
    travelling = tokens * (k + v) * (1 if groups % ulysses == 0 else ulysses / groups)
    kv, sums = int(travelling * width), int(travelling * max(width, 4))
    if form == "all_gather":
        return [("forward", "all_gather", kv), ("backward", "all_gather", kv), ("backward", "reduce_scatter", sums * ranks)]
    exchanged = [tokens * q * width, kv, tokens * q * width] if ulysses > 1 else []  # queries, keys and values, results
    return [
        *(("forward", "all_to_all", size) for size in [*exchanged, *[kv] * (ring - 1)]),
        *(("backward", "all_to_all", size) for size in [*exchanged, *[kv, sums] * (ring - 1)]),
    ]


def _widths(contract: Any, shapes: Mapping[str, Sequence[int]]) -> tuple[int, int, int] | None:
    """How wide a rank's queries, keys and values are: by projections of their own, by the sections of a packed one, or, of a packed
    one that isn't cut, by what the output projection takes of it."""
    hidden = next(iter(contract.features.values()))
    widths = {name: prod(shape) // hidden for name, shape in shapes.items() if len(shape) == 2}
    for end in ("{}_proj.weight", "weight.{}"):
        found = [next((width for name, width in widths.items() if name.endswith(end.format(of))), 0) for of in "qkv"]
        if all(found):
            return found[0], found[1], found[2]
    packed = [name for name in widths if name in PACKED]
    others = [width for name, width in widths.items() if name not in PACKED]
    if len(packed) == len(others) == 1:
        rest = (widths[packed[0]] - others[0]) // 2
        return others[0], rest, rest
    return None
