"""What the suites run on rank processes. Every function finds the suite's class by name, and returns what can be pickled."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import io
import logging
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ... import Override, Overrides, apply_plan, build_plan, make_mesh
from ...errors import HyperparError
from ..ranks import locate
from ..report import ParityReport
from ..verify import Degrees, check_parity
from .leftovers import changes, model_state, patches, process_state, reset_settings, sources

__all__ = ["Address", "copied", "effects", "parity", "refusal", "undone", "whole_parameters"]


@dataclass(frozen=True)
class Address:
    """Where a rank finds a suite's class."""

    module: str
    file: str | None
    name: str

    def suite(self) -> Any:
        return locate(self.module, self.file, self.name)()


def _batch(suite: Any, model: nn.Module, degrees: Degrees) -> dict[str, Tensor]:
    return {k: v.to(next(model.parameters()).device) for k, v in suite.batch(model, 2 * degrees.dp).items()}


def planned(suite: Any, model: nn.Module, degrees: Degrees, options: Mapping[str, Any] | None = None) -> Degrees:
    """`degrees` with the suite's own override entries among its options."""
    entries = [Override(**entry) for entry in suite.entries(model, degrees, suite.options if options is None else options)]
    given = Overrides.of(degrees.options.get("overrides")).entries
    return replace(degrees, options={**degrees.options, "overrides": Overrides((*given, *entries))})


def _applied(suite: Any, model: nn.Module, degrees: Degrees, options: Mapping[str, Any] | None = None) -> Any:
    degrees = planned(suite, model, degrees, options)
    device = next(model.parameters()).device.type
    mesh = make_mesh(dp=degrees.dp, cp=degrees.cp, tp=degrees.tp, device_type=device)
    return apply_plan(model, build_plan(model, mesh, ep_size=degrees.ep, **degrees.options), mesh)


def _run(model: nn.Module, batch: Mapping[str, Any]) -> Any:
    out = model(**batch, use_cache=False) if getattr(model, "config", None) is not None else model(**batch)
    out.loss.backward()
    return out


# ---- parity


def parity(address: Address, degrees: Degrees, mode: str, device: str) -> ParityReport | None:
    """The report of every rank, from the first one."""
    suite = address.suite()
    if device == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    model = suite.model().to(device)
    batch = _batch(suite, model, degrees)
    report = check_parity(
        model, batch, planned(suite, model, degrees), steps=suite.steps, mode=mode, title=suite.name, bounds=suite.bounds
    )
    return report if dist.get_rank() == 0 else None


# ---- undo and patches


def undone(address: Address, degrees: Degrees, module: str) -> dict[str, list[str]]:
    """What planning, applying, one step and undo() leave: {"planning", "patches", "model", "process", "numbers": lines}."""
    suite, source = address.suite(), sources(module)
    model = suite.model()
    whole = _batch(suite, model, degrees)
    expected = model(**whole).logits.detach()  # before the state is looked at: a model may keep tables of its own
    reset_settings()
    process, state = process_state(), model_state(model)
    applied = _applied(suite, model, degrees)
    found = {"planning": _planning(suite, degrees)}
    share = applied.data_parallel_rank, applied.data_parallel_size
    part = applied.shard_batch({name: value.chunk(share[1])[share[0]] for name, value in whole.items()})
    _run(model, part)
    first = dist.get_rank() == 0  # every rank runs the same code, and looking at all of torch takes a while
    found["patches"] = patches(source) if first else []
    applied.undo()
    model.zero_grad()
    found["model"] = changes(state, model_state(model))
    found["process"] = changes(process, process_state())
    if first:
        found["patches"] += [where for where in patches(source) if where not in found["patches"]]
    equal = torch.equal(model(**whole).logits.detach(), expected)
    found["numbers"] = [] if equal else ["the model computes something else than before"]
    return found


def _planning(suite: Any, degrees: Degrees) -> list[str]:
    """What build_plan alone changes of a model."""
    model = suite.model()
    before = model_state(model)
    degrees = planned(suite, model, degrees)
    sizes = {axis: getattr(degrees, axis) for axis in ("dp", "cp", "tp") if getattr(degrees, axis) > 1}
    build_plan(model, sizes, ep_size=degrees.ep, **degrees.options)
    return changes(before, model_state(model))


def copied(address: Address, degrees: Degrees) -> str:
    """How a deepcopy of a planned model differs once the original's weights are gone; "" if it doesn't."""
    suite = address.suite()
    model = suite.model()
    whole = _batch(suite, model, degrees)
    applied = _applied(suite, model, degrees)
    share = applied.data_parallel_rank, applied.data_parallel_size
    part = applied.shard_batch({name: value.chunk(share[1])[share[0]] for name, value in whole.items()})
    with torch.no_grad():
        expected = model(**part).logits
        twin = copy.deepcopy(model)
        for parameter in model.parameters():
            parameter.zero_()
        found = twin(**part).logits
    return "" if torch.equal(expected, found) else f"differs by {float((expected - found).abs().max()):.2g}"


def whole_parameters(address: Address, degrees: Degrees) -> list[str]:
    """Parameters that full_parameters() and the full state_dict return otherwise than the original had them."""
    suite = address.suite()
    model = suite.model()
    parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    state = {name: value.clone() for name, value in model.state_dict().items()}
    applied = _applied(suite, model, degrees)
    found = []
    for what, ours, theirs in (
        ("full_parameters()", parameters, applied.full_parameters()),
        ("full_state_dict()", state, applied.full_state_dict()),
    ):
        if list(ours) != list(theirs):
            odd = next((pair for pair in zip(ours, theirs, strict=False) if pair[0] != pair[1]), "their number")
            found.append(f"{what}: names or their order differ: {odd}")
        found += [f"{what}: {n}" for n, v in ours.items() if n in theirs and not torch.equal(v, theirs[n].detach())]
    return found


# ---- refusals and options


def refusal(address: Address, degrees: Degrees, options: Mapping[str, Any], index: int | None) -> tuple[str, str, bool]:
    """(type, text, whether the model is as it was) of the HyperparError that planning, applying or a first forward raises."""
    suite = address.suite()
    make = suite.model if index is None or suite.refusals[index].model is None else suite.refusals[index].model
    model = make()
    before = model_state(model)
    try:
        applied = _applied(suite, model, degrees, options)
    except HyperparError as error:
        return type(error).__name__, str(error), not changes(before, model_state(model))
    applied.undo()
    return "", "", True


@dataclass
class _Seen:
    """What can be seen of one step."""

    lines: list[str] = field(default_factory=list)

    def digest(self) -> str:
        return hashlib.sha1("\n".join(self.lines).encode(), usedforsecurity=False).hexdigest()


class _Operators(TorchDispatchMode):
    """Notes every operator with the shapes that it is given."""

    def __init__(self, seen: _Seen) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = seen

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        shapes = [tuple(x.shape) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        self.seen.lines.append(f"{func} {shapes}")
        return func(*args, **(kwargs or {}))


class _Records(logging.Handler):
    """Notes what code of a plugin logs."""

    def __init__(self, seen: _Seen, source: Any) -> None:
        super().__init__(logging.DEBUG)
        self.seen, self.source = seen, source

    def emit(self, record: logging.LogRecord) -> None:
        if str(record.pathname).startswith(str(self.source)):
            self.seen.lines.append(f"log {record.getMessage()}")


@contextlib.contextmanager
def _listening(handler: logging.Handler) -> Iterator[None]:
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        root.removeHandler(handler)
        root.setLevel(level)


def effects(address: Address, degrees: Degrees, options: Mapping[str, Any], module: str) -> str:
    """A digest of all that can be seen of one step with `options`: its error, operators, log lines, prints, warnings and numbers."""
    suite = address.suite()
    seen, printed = _Seen(), io.StringIO()
    model = suite.model()
    whole = _batch(suite, model, degrees)
    with (
        _listening(_Records(seen, sources(module))),
        contextlib.redirect_stdout(printed),
        warnings.catch_warnings(record=True) as warned,
    ):
        warnings.simplefilter("always")
        try:
            applied = _applied(suite, model, degrees, options)
            share = applied.data_parallel_rank, applied.data_parallel_size
            part = applied.shard_batch({name: value.chunk(share[1])[share[0]] for name, value in whole.items()})
            with _Operators(seen):
                out = _run(model, part)
            numbers = [out.logits.detach(), *(g for g in applied.full_gradients().values() if g is not None)]
            seen.lines += [repr(x.flatten().tolist()) for x in numbers]
        except HyperparError as error:
            seen.lines.append(f"{type(error).__name__}: {error}")
        except Exception as error:  # an option may have a value with which the code fails: it did something
            seen.lines.append(f"{type(error).__name__}: {error}")
    seen.lines += [printed.getvalue(), *(str(one.message) for one in warned)]
    return seen.digest()
