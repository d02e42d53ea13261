"""The runtime of the whole model: what has to hold before its boundaries run."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from math import prod
from typing import Any

import torch
from torch import nn

from ..collectives.functional import AxisGroup
from ..errors import ApplyError
from .checks import Checks, compare_inputs, compare_replicas, due
from .cut_input import CutInput
from .first_forward import FirstForward, watchable
from .generated import original_forward, plain_name
from .held import Held
from .misuse import refuse_meta, refuse_trainer
from .regions import ModelState
from .router_logits import AuxLoss
from .share import activate
from .streams import Streams, mark, refuse_new_rates

__all__ = ["Root", "Stack"]


class Root:
    """Runs in front of the model's own forward. `region` is its boundary, where the model itself is one.

    shares: the axes over which each rank's loss is only its share of the whole (gradients are summed over them).
    aux: counts this rank's share of an auxiliary loss.
    cut: reads what this rank holds of sequences that are cut over cp.
    streams: what the model draws its random numbers from, where it draws any.
    checks: what is checked beside the forward, over groups {axis: its ranks}.
    held: notices parameters of the plan that were replaced.
    synced: whether dp slices wait for each other in every forward, so that generate() has to keep them in step.
    """

    def __init__(
        self,
        model: nn.Module,
        state: ModelState,
        sequence_parallel: bool,
        shares: tuple[str, ...],
        region: Callable[..., Any] | None,
        aux: AuxLoss,
        cut: CutInput | None = None,
        streams: Streams | None = None,
        checks: Checks | None = None,
        groups: Mapping[str, AxisGroup] | None = None,
        held: Held | None = None,
        synced: bool = False,
    ) -> None:
        self.state, self.sequence_parallel, self.shares, self.region = state, sequence_parallel, shares, region
        self.cut, self.aux = cut, aux
        self.streams, self.checks, self.groups = streams, checks, dict(groups or {})
        self.held, self.synced = held, synced
        self.forwards, self.trained = 0, 0  # how many forwards, and how many of them in training
        self.known = frozenset(name for name, _ in model.named_parameters(remove_duplicate=False))
        names = list(inspect.signature(type(model).forward).parameters)
        self.labels_position = names.index("labels") - 1 if "labels" in names else None
        self.checked = self.watched = self.draws = self.warned = False
        self.drawn = 0

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.checked:
            refuse_meta(module, args, kwargs)
            self._check(module)
        if self.held is not None and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self.held.check(module)
        self.drawn = self.streams.draw() if self.streams is not None and self._trains(module) else 0
        if self.checks is not None and not torch.compiler.is_compiling():
            self._run_checks(module, args, kwargs)
        position = self.labels_position
        labels = kwargs.get("labels")
        if labels is None and position is not None and position < len(args):
            labels = args[position]
        if self.sequence_parallel:
            _refuse_hidden_states(module, kwargs)
        if labels is not None and self.shares and kwargs.get("num_items_in_batch") is None:
            raise ApplyError(
                f"labels without num_items_in_batch, and the batch is split over {' x '.join(self.shares)}: the loss would be this rank's"
                " mean, and the gradients' sum too large.\n  Pass the batch through applied.shard_batch(batch)."
            )
        self.state.labels = labels is not None
        if labels is None and self.shares and not (self.warned or self.state.counted) and self._trains(module):
            self._warn_of_own_loss()
        if self.cut is None:
            return self._train(module, args, kwargs)
        kwargs, share = self.cut.share(module, args, kwargs)
        with activate(share):
            return self._train(module, args, kwargs)

    def _run_checks(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert self.checks is not None
        device = next(module.parameters()).device
        if "tp" in self.groups and due(self.checks.inputs, self.forwards, device.type == "cuda"):
            compare_inputs(args, kwargs, self.groups["tp"], device, self.drawn)
        if module.training and self.trained and due(self.checks.replicas, self.trained, False):
            compare_replicas(module, self.groups)
        self.forwards += 1

    def _warn_of_own_loss(self) -> None:
        """Says once what a loss outside the model has to be, where nothing has given its caller the number of all targets."""
        if not torch.is_grad_enabled():
            return
        self.warned = True
        if any(group.rank for group in self.groups.values()):
            return
        ranks = prod(self.groups[axis].ranks for axis in self.shares)
        warnings.warn(
            f"a training forward without labels, and gradients are summed over {' x '.join(self.shares)}: a loss that is the mean over this"
            f" rank's tokens makes them {ranks} times too large.\n"
            "  Pass the labels through applied.shard_batch, and divide the sum over its shift_labels by its num_items_in_batch; without"
            f" labels, divide the mean by {ranks}.",
            stacklevel=3,
        )

    def _trains(self, module: nn.Module) -> bool:
        return module.training and not torch.compiler.is_compiling()

    def _train(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The forward, in training with random streams of its own, and the first time watched."""
        if not self._trains(module):
            return self._run(module, args, kwargs)
        self.trained += 1
        if self.streams is not None or not self.groups:
            with self.streams.forward(self.drawn) if self.streams is not None else nullcontext():
                return self._watch(module, args, kwargs)
        cuda = next(module.parameters()).is_cuda
        before, watched = mark(cuda), self.watched
        out = self._watch(module, args, kwargs)
        if mark(cuda) != before:
            refuse_new_rates(module)
            self.draws = self.draws or not watched  # by something that was watched, and is no dropout
            self.watched = self.watched and self.draws
        return out

    def _watch(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.watched = self.watched or not self.groups or not watchable(module)
        if self.watched:
            return self._run(module, args, kwargs)
        with FirstForward(kwargs.get("num_items_in_batch")) as watch:
            out = self._run(module, args, kwargs)
        loss = out.get("loss") if isinstance(out, dict) else out[0] if isinstance(out, tuple) and self.state.labels else None
        watch.check(module, loss, self.shares, self.streams is not None)
        self.watched = not self.state.labels or loss is not None
        return out

    def _run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        summed = self.state.labels and kwargs.get("num_items_in_batch") is not None
        with self.aux.shared(module, summed):
            run = self.region
            out = original_forward(module, *args, **kwargs) if run is None else run(module, args, kwargs)
        self.aux.check(module, out, summed)
        return out

    def _check(self, module: nn.Module) -> None:
        unknown = [n for n, _ in module.named_parameters(remove_duplicate=False) if plain_name(n) not in self.known]
        if unknown:
            raise ApplyError(
                f"{len(unknown)} parameters aren't in the plan: {', '.join(unknown[:3])}{', ...' if len(unknown) > 3 else ''}.\n"
                "  Adapters and other new parameters go on before build_plan, so that they are planned too (applied.undo() first)."
            )
        refuse_trainer()
        self.checked = True


def refuse_save(*args: Any, **kwargs: Any) -> Any:
    """Stands in for `save_pretrained` while a plan is on the model."""
    raise ApplyError(
        "save_pretrained on a planned model: this rank holds parts of the parameters.\n"
        "  Call applied.save_pretrained(folder) on every rank: whole tensors, a folder that plain transformers loads."
    )


class Stack:
    """Runs around the base model, the one that holds the decoder layers, which may be called on its own under sequence parallel."""

    def __init__(self, inner: Callable[..., Any] | None) -> None:
        self.inner = inner

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        _refuse_hidden_states(module, kwargs)
        return original_forward(module, *args, **kwargs) if self.inner is None else self.inner(module, args, kwargs)


def _refuse_hidden_states(module: nn.Module, kwargs: dict[str, Any]) -> None:
    if _asked(module, kwargs, "output_hidden_states"):
        raise ApplyError(
            "output_hidden_states under sequence parallel: each rank would get its own part of the sequence.\n"
            "  Plan with sequence_parallel=False, or take the last hidden states, which are whole."
        )


def _asked(module: nn.Module, kwargs: dict[str, Any], flag: str) -> bool:
    value = kwargs.get(flag)
    return bool(getattr(getattr(module, "config", None), flag, False) if value is None else value)
