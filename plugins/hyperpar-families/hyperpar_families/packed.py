"""Parameters that hold several projections: where each begins, so that tp cuts inside each of them.

The rows are a Linear's dim 0; a Conv1D keeps them last. A projection that interleaves its parts head by head needs no
handler where whole heads can be cut: it is column-wise.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.tensor import Shard

from hyperpar_core.descriptors import Section, SpecialHandler

__all__ = ["HANDLERS"]


def _is_conv1d(module: nn.Module) -> bool:
    return isinstance(getattr(module, "nf", None), int)


def _rows(shape: tuple[int, ...], module: nn.Module) -> int:
    return shape[-1] if _is_conv1d(module) else shape[0]


def _sections(shape: tuple[int, ...], module: nn.Module, sizes: dict[str, int]) -> list[Section]:
    dim = len(shape) - 1 if _is_conv1d(module) else 0
    return [Section(name, dim, size, Shard(dim)) for name, size in sizes.items()]


def _key_value_heads(config: Any) -> int:
    if getattr(config, "multi_query", False):
        return 1
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def query_key_value(shape: tuple[int, ...], *, module: nn.Module, param_name: str, config: Any) -> list[Section]:
    """All queries, then all keys, then all values; keys and values may be of fewer heads."""
    heads, groups = int(config.num_attention_heads), _key_value_heads(config)
    width = _rows(shape, module) // (heads + 2 * groups)
    return _sections(shape, module, {"q": heads * width, "k": groups * width, "v": groups * width})


def query_key_value_or_heads(
    shape: tuple[int, ...], *, module: nn.Module, param_name: str, config: Any
) -> list[Section]:
    """Multi-query models: all queries, then the one key and the one value. Otherwise query, key and value head by head (or
    group by group), which is one section."""
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        return query_key_value(shape, module=module, param_name=param_name, config=config)
    return _sections(shape, module, {"heads": _rows(shape, module)})


def halves(shape: tuple[int, ...], *, module: nn.Module, param_name: str, config: Any) -> list[Section]:
    """A gate and what it gates, one after the other."""
    rows = _rows(shape, module)
    return _sections(shape, module, {"first": rows // 2, "second": rows - rows // 2})


HANDLERS = (
    SpecialHandler("query_key_value", query_key_value, "a fused QKV: all queries, all keys, all values"),
    SpecialHandler("query_key_value_or_heads", query_key_value_or_heads, "the same with one key/value head, else by heads"),
    SpecialHandler("halves", halves, "a fused gate and up projection"),
)
