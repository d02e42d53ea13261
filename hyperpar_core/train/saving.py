"""Whole tensors under their own names, and folders that plain transformers loads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..apply.generated import STATE, plain_name, state_of
from ..apply.parameters import whole
from ..errors import ApplyError

__all__ = ["full_gradients", "full_parameters", "full_state_dict", "save_pretrained"]


def full_parameters(model: nn.Module) -> dict[str, Tensor]:
    """{name: whole tensor}, tied names each, as they were before the plan. Every rank calls it, and gets all of them."""
    return _whole(model, {plain_name(name): p for name, p in model.named_parameters(remove_duplicate=False)})


def full_gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """{name: whole gradient, sums done; None where there is none}. Every rank calls it; the gradients stay as they are."""
    grads = {plain_name(name): p.grad for name, p in model.named_parameters(remove_duplicate=False)}
    present = _whole(model, {name: grad for name, grad in grads.items() if grad is not None})
    return {name: present.get(name) for name in _original_names(model, grads)}


def full_state_dict(model: nn.Module, *, cpu: bool = False) -> dict[str, Tensor]:
    """The model's state_dict with whole tensors. Every rank calls it. cpu: each tensor goes to the host as it is gathered."""
    tensors = {k: v for k, v in model.state_dict(keep_vars=True).items() if isinstance(v, Tensor)}
    return _whole(model, tensors, cpu=cpu)


def _packed(model: nn.Module) -> dict[str, tuple[str, int, tuple[str, ...]]]:
    """{name of a section: (name of its parameter, dim, names of all its sections)}."""
    found = {}
    for prefix, module in model.named_modules():
        state = state_of(module)
        for name, (dim, sections) in (state.packed if state else {}).items():
            dot = f"{plain_name(prefix)}." if prefix else ""
            names = tuple(f"{dot}{section}" for section in sections)
            found.update({section: (f"{dot}{name}", dim, names) for section in names})
    return found


def _original_names(model: nn.Module, names: Iterable[str]) -> list[str]:
    packed = _packed(model)
    return list(dict.fromkeys(packed[name][0] if name in packed else name for name in names))


def _whole(model: nn.Module, tensors: Mapping[str, Any], *, cpu: bool = False) -> dict[str, Tensor]:
    """Whole tensors under their original names, sections joined, one storage for tied names."""
    packed = _packed(model)
    done: dict[int, Tensor] = {}

    def gather(value: Any) -> Tensor:
        if id(value) not in done:
            full = whole(value)
            done[id(value)] = full.cpu() if cpu else full
        return done[id(value)]

    result: dict[str, Tensor] = {}
    for name, value in tensors.items():
        original, dim, sections = packed.get(name, (name, 0, ()))
        if original in result:
            continue
        if sections:
            result[original] = torch.cat([whole(tensors[section]) for section in sections], dim)
            if cpu:
                result[original] = result[original].cpu()
        else:
            result[original] = gather(value)
    return result


def save_pretrained(model: nn.Module, folder: str | Path, mesh: DeviceMesh, **options: Any) -> None:
    """Writes a folder that plain transformers loads: whole tensors under their own names. Every rank calls it; the first one writes.

    options go to transformers' own save_pretrained (max_shard_size and the like).
    """
    if not hasattr(type(model), "save_pretrained"):
        raise ApplyError(f"{type(model).__name__} has no save_pretrained; take full_state_dict() and save it your way.")
    state = full_state_dict(model, cpu=True)
    first = not dist.is_initialized() or dist.get_rank() == int(mesh.mesh.flatten()[0])
    problem = ""
    if first:
        try:
            with torch.no_grad():
                writer: Any = _bare(model)
                writer.save_pretrained(folder, state_dict=state, **options)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
    if dist.is_initialized() and dist.get_world_size() > 1:
        posted = [problem]
        for axis in range(mesh.ndim):
            group = mesh.get_group(axis)
            dist.broadcast_object_list(posted, dist.get_global_rank(group, 0), group=group)
        problem = posted[0]
    if problem:
        raise ApplyError(f"save_pretrained({str(folder)!r}) failed on the writing rank: {problem}")


def _bare(model: nn.Module) -> nn.Module:
    """A meta copy of the model without the plan: what transformers reads names, config and tied keys from."""
    base = getattr(type(model), "_hyperpar_base", type(model))
    config = getattr(model, "config", None)
    with torch.device("meta"):
        bare: nn.Module = base(config).to(getattr(model, "dtype", None))  # transformers writes it into the config
    bare.__dict__.update(
        {k: v for k, v in model.__dict__.items() if k not in bare.__dict__ and k != STATE and not k.startswith("_")}
    )
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        bare.generation_config = generation
    assert state_of(bare) is None
    return bare
