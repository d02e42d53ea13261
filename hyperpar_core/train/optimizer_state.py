"""An optimizer's state under the parameters' own names, whatever its parameters are cut or packed into."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..errors import CheckpointError
from .canonical import Part, Place, WholeTensor, describe, laid, part_of, places
from .plain_values import decode, dtype_named, encode

__all__ = ["States", "apply", "as_list", "collect", "restore"]

States = list[tuple[Optimizer, dict[Tensor, dict[str, Any]]]]  # an optimizer's state to be: {parameter: {key: value}}
_NAMES = ("params", "param_names")  # of a group: what it holds, not how it is stepped
_SCHEDULERS = {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum"}  # what schedulers add to a group


def as_list(optimizer: Optimizer | Sequence[Optimizer] | None) -> list[Optimizer]:
    """The optimizers that a caller gave: none, one, or several."""
    if optimizer is None:
        return []
    return [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)


def _places(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[int, Place]:
    """{id of a parameter: its place}; CheckpointError for an optimizer of parameters that aren't the model's."""
    found = places(model)[0]
    for optimizer in optimizers:
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if id(parameter) not in found:
                    raise CheckpointError(
                        f"group {number} of the optimizer holds a parameter of {describe(parameter)} that the model doesn't have.\n"
                        "  fully_shard() and load_pretrained() make new parameters: make the optimizer after them."
                    )
    return found


def _groups(optimizers: Sequence[Optimizer], where: Mapping[int, Place]) -> list[tuple[dict[str, Any], list[str], str]]:
    """[(group, the original names of its parameters, the class of its optimizer)]."""
    return [
        (group, list(dict.fromkeys(n for p in group["params"] for n in where[id(p)].names)), type(optimizer).__qualname__)
        for optimizer in optimizers
        for group in optimizer.param_groups
    ]


def _part(label: str, state: Tensor, parameter: Tensor) -> Part | None:
    """This rank's part of a state tensor that lies as its parameter does; None for a number that every rank has."""
    if state.shape == parameter.shape and isinstance(state, DTensor) == isinstance(parameter, DTensor):
        return part_of(label, state)
    if state.numel() == 1 and not isinstance(state, DTensor):
        return None
    raise CheckpointError(
        f"optimizer state {label} is {describe(state)}, and its parameter {describe(parameter)}: it is neither as large nor a single"
        " number,\n  so it can't be cut anew for other degrees. Save without the optimizer, or take one with elementwise state."
    )


def collect(model: nn.Module, optimizers: Sequence[Optimizer]) -> tuple[dict[str, WholeTensor], dict[str, Any]]:
    """({"state/original name": whole tensor and this rank's parts}, facts: groups and states that are no tensors)."""
    where = _places(model, optimizers)
    parts: dict[str, list[Part]] = {}
    first: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    values: dict[str, Any] = {}
    for parameter, state in ((p, s) for optimizer in optimizers for p, s in optimizer.state.items()):
        place = where[id(parameter)]
        for key, value in state.items():
            label = f"{key}/{place.name}"
            part = _part(label, value, parameter) if isinstance(value, Tensor) else None
            if part is not None:
                for name, shape, here in laid(part, place):
                    label = f"{key}/{name}"
                    if first.setdefault(label, (shape, value.dtype)) != (shape, value.dtype):
                        raise CheckpointError(f"optimizer state {label} has sections of several dtypes.")
                    parts.setdefault(label, []).extend(here)
                continue
            said = encode(value.detach().cpu() if isinstance(value, Tensor) else value, f"optimizer state {label}")
            if any(values.setdefault(f"{key}/{name}", said) != said for name in place.names):
                raise CheckpointError(f"optimizer state {label} differs between the sections of {place.name}.")
    groups = [
        {
            "parameters": sorted(names),
            "optimizer": kind,
            "options": {k: encode(v, f"group {i}[{k!r}]") for k, v in group.items() if k not in _NAMES},
        }
        for i, (group, names, kind) in enumerate(_groups(optimizers, where))
    ]
    tensors = {
        label: WholeTensor(label, shape, dtype, tuple(parts[label])) for label, (shape, dtype) in first.items()
    }
    return tensors, {"groups": groups, "values": values}


def restore(
    model: nn.Module, optimizers: Sequence[Optimizer], saved: Mapping[str, Any], facts: Mapping[str, Any]
) -> tuple[dict[str, WholeTensor], States, list[dict[str, Any]]]:
    """What a checkpoint's optimizer state is read into: (tensors by label, [(optimizer, its new state)], [new options by group]).

    saved: {"state/original name": {"dtype", "shape"}} of the checkpoint. Nothing of the optimizers is changed here; `apply` does that.
    """
    where = _places(model, optimizers)
    options = _matched(_groups(optimizers, where), facts["groups"])
    keys: dict[str, list[str]] = {}
    for label in (*saved, *facts["values"]):
        key, _, name = label.partition("/")
        keys.setdefault(name, []).append(key)
    parts: dict[str, list[Part]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    states: States = []
    for optimizer in optimizers:
        made: dict[Tensor, dict[str, Any]] = {}
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            place = where[id(parameter)]
            for key in dict.fromkeys(key for name in place.names for key in keys.get(name, ())):
                label, now = f"{key}/{place.names[0]}", optimizer.state.get(parameter, {}).get(key)
                _require_alike(key, place, saved, facts["values"])
                if label in facts["values"]:
                    made.setdefault(parameter, {})[key] = _like(now, decode(facts["values"][label]), parameter, key, optimizer)
                    continue
                dtype = dtype_named(saved[label]["dtype"])
                if not (isinstance(now, Tensor) and now.shape == parameter.shape and now.dtype == dtype):
                    now = torch.zeros_like(parameter.detach(), dtype=dtype)
                made.setdefault(parameter, {})[key] = now
                for name, shape, here in laid(part_of(label, now), place):
                    parts.setdefault(f"{key}/{name}", []).extend(here)
                    shapes[f"{key}/{name}"] = shape
        states.append((optimizer, made))
    tensors = {
        label: WholeTensor(label, shapes[label], dtype_named(saved[label]["dtype"]), tuple(found))
        for label, found in parts.items()
    }
    return tensors, states, options


def _require_alike(key: str, place: Place, saved: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """CheckpointError where the experts of a stack have no common state: a stack is stepped as one parameter."""
    labels = [f"{key}/{name}" for name in place.members]
    missing = [label for label in labels if label not in saved and label not in values]
    if missing:
        raise CheckpointError(
            f"the checkpoint has no optimizer state {missing[0]}, though other experts of its list have one: no token had chosen it.\n"
            "  Experts over ep are stepped together. Load without the optimizer, or with ep=1."
        )
    apart = next((label for label in labels if values.get(label) != values.get(labels[0])), None)
    if apart is not None:
        raise CheckpointError(
            f"optimizer state {labels[0]} is {values.get(labels[0])}, and {apart} {values.get(apart)}: they were stepped by themselves.\n"
            "  Experts over ep are stepped together. Load without the optimizer, or with ep=1."
        )


def apply(
    states: States, options: Sequence[Mapping[str, Any]]
) -> None:
    """Gives the optimizers what `restore` made, once the tensors are read."""
    groups = [group for optimizer, _ in states for group in optimizer.param_groups]
    for optimizer, made in states:
        optimizer.state.clear()
        optimizer.state.update(made)
    for group, said in zip(groups, options, strict=True):
        for key, value in said.items():
            if isinstance(group.get(key), Tensor):
                group[key].copy_(torch.as_tensor(value))
            else:
                group[key] = value


def _like(now: Any, value: Any, parameter: Tensor, key: str, optimizer: Optimizer) -> Any:
    """A number of the state where its optimizer wants it: the step of capturable and fused optimizers is on the device."""
    if not isinstance(value, Tensor):
        return value
    group = next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
    there = now.device if isinstance(now, Tensor) else "cpu"
    if key != "step" or group.get("capturable") or group.get("fused"):
        there = parameter.device
    return value.to(there)


def _matched(
    now: Sequence[tuple[dict[str, Any], list[str], str]], saved: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The saved options of each group of now, matched by the parameters' names."""
    of_name = {name: i for i, group in enumerate(saved) for name in group["parameters"]}
    have = {name for _, names, _ in now for name in names}
    lost = sorted(set(of_name) - have)
    if lost:
        raise CheckpointError(
            f"the checkpoint's optimizer has {len(lost)} parameters that this one lacks: {', '.join(lost[:3])}."
        )
    result = []
    for number, (group, names, kind) in enumerate(now):
        new = sorted(name for name in names if name not in of_name)
        if new:
            raise CheckpointError(
                f"the checkpoint's optimizer lacks {len(new)} parameters of group {number}: {', '.join(new[:3])}."
            )
        groups = sorted({of_name[name] for name in names})
        if len(groups) > 1:
            a, b = (next(n for n in names if of_name[n] == g) for g in groups[:2])
            raise CheckpointError(
                f"group {number} of the optimizer holds {a} and {b}, which were in groups {groups[0]} and {groups[1]} when it was saved;\n"
                "  make the groups as they were."
            )
        if groups:
            _require_kind(number, group, kind, saved[groups[0]])
        options = saved[groups[0]]["options"] if groups else {}
        result.append({key: decode(value) for key, value in options.items()})
    return result


def _require_kind(number: int, group: Mapping[str, Any], kind: str, saved: Mapping[str, Any]) -> None:
    """CheckpointError where another class of optimizer saved a group; without a class, where its options have other names."""
    if "optimizer" in saved:
        if saved["optimizer"] != kind:
            raise CheckpointError(
                f"group {number} is of {kind}, and was saved by {saved['optimizer']}, whose state means something else.\n"
                f"  Load with {saved['optimizer']}, or without an optimizer."
            )
        return
    other = sorted(((set(group) - {*_NAMES}) ^ set(saved["options"])) - _SCHEDULERS)
    if other:
        raise CheckpointError(
            f"group {number} is of {kind}, and was saved by another class of optimizer: only one of them has {', '.join(other[:4])}.\n"
            "  Load with the class that saved it, or without an optimizer."
        )
