"""Whole tensors under their own names, and folders that plain transformers loads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..apply.generated import plain_name
from ..apply.parameters import whole
from ..errors import CheckpointError
from .bare import bare_model
from .canonical import WholeTensor, model_tensors, refuse_meta, sections, stacks
from .line import line_of
from .pretrained_folder import Reversal, ShardWriter, parse_size

__all__ = ["full_gradients", "full_parameters", "full_state_dict", "load_full_state_dict", "save_pretrained"]


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


def load_full_state_dict(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copies whole tensors under their names before the plan into the model: each rank takes its parts. Every rank calls it.

    Raises CheckpointError, with nothing changed, for names that are missing, unexpected, or of another shape. Doesn't communicate.
    """
    wholes = model_tensors(model)
    names = {name: whole for whole in wholes.values() for name in (whole.name, *whole.aliases)}
    wrong = [f"no {name}" for name, whole in wholes.items() if name not in state and not any(n in state for n in whole.aliases)]
    wrong += [f"unexpected {name}" for name in state if name not in names]
    wrong += [
        f"{n} is {tuple(value.shape)}, needed {names[n].shape}"
        for n, value in state.items()
        if n in names and tuple(value.shape) != names[n].shape
    ]
    if wrong:
        raise CheckpointError(f"load_full_state_dict: {len(wrong)} don't fit: {'; '.join(wrong[:4])}.")
    with torch.no_grad():
        for whole in wholes.values():
            value = next(state[name] for name in (whole.name, *whole.aliases) if name in state)
            for part in whole.parts:
                box = tuple(slice(at, at + length) for at, length in zip(part.offsets, part.local.shape, strict=True))
                part.local.copy_(value[box])


def _original_names(model: nn.Module, names: Iterable[str]) -> list[str]:
    packed, stacked = sections(model), stacks(model)
    found: dict[str, None] = {}
    for name in names:
        found.update(dict.fromkeys(stacked.get(name, (packed[name].name if name in packed else name,))))
    return _in_order(found, stacked)


def _whole(model: nn.Module, tensors: Mapping[str, Any], *, cpu: bool = False) -> dict[str, Tensor]:
    """Whole tensors under their original names, sections joined, stacks taken apart, one storage for tied names."""
    packed, stacked = sections(model), stacks(model)
    done: dict[int, Tensor] = {}

    def gather(value: Any) -> Tensor:
        if id(value) not in done:
            full = whole(value)
            done[id(value)] = full.cpu() if cpu else full
        return done[id(value)]

    result: dict[str, Tensor] = {}
    for name, value in tensors.items():
        if name in stacked:
            result.update(zip(stacked[name], (part.clone() for part in gather(value)), strict=True))
            continue
        section = packed.get(name)
        original = section.name if section else name
        if original in result:
            continue
        if section:
            result[original] = torch.cat([whole(tensors[part]) for part in section.names], section.dim)
            if cpu:
                result[original] = result[original].cpu()
        else:
            result[original] = gather(value)
    return {name: result[name] for name in _in_order(result, stacked)}


def _in_order(names: Iterable[str], stacked: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Names in the model's order: the parameters of an expert stand together, those of all stacks of a list where the first stands."""
    names = list(names)
    if not stacked:
        return names
    lists: dict[str, list[tuple[str, ...]]] = {}
    for stack, members in stacked.items():
        lists.setdefault(stack.rpartition(".")[0], []).append(members)
    in_list = {name: path for path, of_list in lists.items() for members in of_list for name in members}
    present, ordered = set(names), dict[str, None]()
    for name in names:
        together = [one for of_one in zip(*lists[in_list[name]], strict=True) for one in of_one] if name in in_list else [name]
        ordered.update({one: None for one in together if one in present})
    return list(ordered)


def save_pretrained(
    model: nn.Module,
    folder: str | Path,
    mesh: DeviceMesh,
    *,
    max_shard_size: int | str = "5GB",
    save_original_format: bool = True,
) -> None:
    """Writes a folder that plain transformers loads: whole tensors under their checkpoint's names. Every rank calls it; the first writes.

    max_shard_size: bytes of a file at most ("5GB"); the first rank holds one file's tensors at a time, the others one tensor.
    save_original_format: undo transformers' key conversions (experts under their own names, say), as its own save_pretrained does.
    Raises CheckpointError on every rank when the writing fails.
    """
    what, line = f"save_pretrained({str(folder)!r})", line_of(mesh)
    problem: Exception | None = None
    try:
        limit, bare = parse_size(max_shard_size), bare_model(model)
        wholes = model_tensors(model)
        refuse_meta(wholes)
        names = [_saved_name(bare, whole) for whole in wholes.values()]
        reversal = Reversal(bare, [name for name in names if not _ignored(bare, name)], save_original_format)
        groups = list(reversal.groups())
    except Exception as error:
        problem = error
    line.agree(what, problem)
    writer = ShardWriter(Path(folder), limit) if line.rank == 0 else None
    registered = {plain_name(n): v for n, v in model.state_dict(keep_vars=True).items() if isinstance(v, Tensor)}
    joined: dict[str, list[str]] = {}
    for name, section in sections(model).items():
        joined.setdefault(section.name, []).append(name)
    for name, members in stacks(model).items():
        joined.update({member: [name] for member in members})
    for group, how in groups:
        values = {}
        for name in group:  # every rank takes part, also where writing failed
            full = _whole(model, {part: registered[part] for part in joined.get(name, [name])})[name]
            if writer is not None:
                values[name] = full.cpu()
            del full
        if writer is None or problem is not None:
            continue
        try:
            writer.add(reversal.convert(how, values))
        except Exception as error:
            problem = error
    if writer is not None and problem is None:
        try:
            writer.finish(bare)
        except Exception as error:
            problem = error
    line.agree(what, problem)


def _saved_name(bare: Any, whole: WholeTensor) -> str:
    """The name of tied tensors that transformers saves: the one that the others are tied to."""
    tied = bare.all_tied_weights_keys
    return next((name for name in (whole.name, *whole.aliases) if name not in tied), whole.name)


def _ignored(bare: Any, name: str) -> bool:
    return name in (getattr(bare, "_keys_to_ignore_on_save", None) or ())
