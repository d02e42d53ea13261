"""apply_plan, and the handle it returns. Every method delegates to the floor that does the work."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from .apply.agreement import agree
from .apply.applier import Installed, install
from .apply.checks import Checks, compare_replicas
from .apply.gradient_sums import GradientSums
from .apply.meshes import axis_groups
from .apply.preflight import preflight, record
from .apply.weights import broadcast_weights, weight_hashes
from .errors import ApplyError
from .placement import Placement, layout_on
from .plan.boundaries import find_structure
from .plan.sharding_plan import ShardingPlan
from .train import batch as batches
from .train import checkpoint, loading, saving
from .train import data_parallel as fsdp
from .train.clip import clip_grad_norm
from .train.finite import refuse_nonfinite
from .train.materialise import materialise
from .train.optimizers import remember, retire
from .view.trace import Trace
from .view.trace import trace as record_steps

__all__ = ["Applied", "apply_plan"]

_CHECKS = Checks()


class Applied:
    """A planned model. Made by apply_plan, on every rank of the mesh; methods that gather are called by every rank."""

    def __init__(
        self,
        model: nn.Module,
        plan: ShardingPlan,
        mesh: DeviceMesh,
        mode: str,
        data_parallel: str,
        installed: Installed,
        checks: Checks | None,
    ) -> None:
        self.model, self.plan, self.mesh, self.mode, self.checks = model, plan, mesh, mode, checks
        self.data_parallel = data_parallel
        self.expert_mesh = installed.expert_mesh
        self._sharded = False
        self._installed: Installed | None = installed
        self._groups = axis_groups(mesh)
        sums = {axis: group for axis, group in self._groups.items() if axis != "dp" or data_parallel == "core"}
        if installed.expert_sums is not None:
            sums["edp"] = installed.expert_sums
        self._sums = GradientSums(installed.parameters, sums)
        self._tokens: dict[int, int] = {}  # {tokens of this rank: tokens of the whole sequence}, of the last shard_batch

    @property
    def source_layouts(self) -> dict[str, tuple[tuple[Placement, ...], DeviceMesh]]:
        """{parameter: (placements, mesh)}: what each parameter looks like before data parallelism, on the plan's axes."""
        axes = tuple(self.plan.sizes)
        mesh = self.mesh[axes] if axes else None
        layouts: dict[str, tuple[tuple[Placement, ...], DeviceMesh]] = {}
        for name in self.plan.parameters:
            contract, local = self.plan.owner(name)
            held = contract.params[local]
            if "ep" in held and self.expert_mesh is not None:
                layouts[name] = (layout_on(held, ("ep",)), self.expert_mesh["ep"])
            elif mesh is not None:
                layouts[name] = (layout_on(held, axes), mesh)
        return layouts

    @property
    def data_parallel_rank(self) -> int:
        """This rank's place along dp: which samples it reads."""
        return self._groups["dp"].rank if "dp" in self._groups else 0

    @property
    def data_parallel_size(self) -> int:
        """Number of dp ranks."""
        return self._groups["dp"].ranks if "dp" in self._groups else 1

    def shard_batch(self, batch: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> Any:
        """This rank's share of its dp rank's whole sequences: see train.batch.shard_batch. Every rank calls it."""
        check = self.checks is not None and self.checks.inputs != 0
        shares = batches.shard_batch(self.model, batch, self._groups, self.plan.cp_order, check)
        self._tokens = batches.lengths(batch, shares)
        if self._installed is not None:
            first = shares if isinstance(shares, Mapping) else shares[0]
            self._installed.state.counted = "num_items_in_batch" in first
        return shares

    def unshard(self, tensor: Tensor, dim: int = 1) -> Tensor:
        """The whole of a tensor whose `dim` holds this rank's tokens: in sequence order, without the padding of the last shard_batch.

        Every rank of cp calls it; detached. Without cp it is the tensor itself.
        """
        tokens = self._tokens.get(tensor.shape[dim])
        return batches.unshard(tensor, dim, self._groups.get("cp"), self.plan.cp_order, tokens)

    def reduce_loss(self, loss: Tensor) -> Tensor:
        """The mean over all tokens of all ranks, from this rank's share; for logging."""
        return batches.reduce_loss(loss, self._groups)

    def full_parameters(self) -> dict[str, Tensor]:
        """{original name: whole tensor}."""
        return saving.full_parameters(self.model)

    def full_gradients(self) -> dict[str, Tensor | None]:
        """{original name: whole gradient, or None}."""
        return saving.full_gradients(self.model)

    def full_state_dict(self) -> dict[str, Tensor]:
        """The state_dict with whole tensors."""
        return saving.full_state_dict(self.model)

    def load_full_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copies whole tensors, under their original names, into the model."""
        saving.load_full_state_dict(self.model, state)

    def save_pretrained(self, folder: str | Path, **options: Any) -> None:
        """Writes a folder that plain transformers loads: see train.saving.save_pretrained. Every rank calls it."""
        saving.save_pretrained(self.model, folder, self.mesh, **options)

    def load_pretrained(self, folder: str | Path) -> None:
        """Each rank reads its own share of a Hugging Face folder: see train.loading.load_pretrained. Every rank calls it."""
        loading.load_pretrained(self.model, self.mesh, folder, self._materialise)

    def save_checkpoint(
        self, folder: str | Path, optimizer: checkpoint.Optimizers = None, *, step: int, **options: Any
    ) -> checkpoint.SaveHandle | None:
        """Writes a checkpoint of model and optimizer: see train.checkpoint.save_checkpoint. Every rank calls it.

        options: extra, rank_extra, keep=2, asynchronous=False.
        """
        return checkpoint.save_checkpoint(self.model, self.mesh, folder, optimizer, step=step, **options)

    def load_checkpoint(
        self, folder: str | Path, optimizer: checkpoint.Optimizers = None, *, step: int | None = None
    ) -> dict[str, Any] | None:
        """Reads the newest complete checkpoint, at any degrees: see train.checkpoint.load_checkpoint. Every rank calls it."""
        before = self._materialise
        return checkpoint.load_checkpoint(self.model, self.mesh, folder, optimizer, step=step, materialise=before)

    def fully_shard(self, **options: Any) -> nn.Module:
        """FSDP2 over dp (x cp), experts over edp; from then on FSDP sums gradients over them. Options are torch's fully_shard's.

        Every rank calls it once, before an optimizer is made. Modules of another dtype than their layer are sharded by themselves and
        compute in it. ApplyError, with nothing changed, for options that follow from the plan and for a module of two dtypes.
        """
        installed = self._live()
        if self.data_parallel != "core":
            raise ApplyError(
                "fully_shard: data_parallel='external' leaves dp to the caller; call torch's fully_shard yourself."
            )
        if self._sharded:
            raise ApplyError("fully_shard was called on this model already.")
        groups = fsdp.Groups.of(self.model, self.mesh, find_structure(self.model).layers, options)
        before = remember(self.model)
        self._sums.remove()
        fsdp.shard_model(self.model, self.mesh, tuple(self.plan.sizes), groups, self.expert_mesh)
        installed.parameters.clear()  # FSDP holds its own
        self._sharded = True
        retire(before, self.model, "fully_shard")
        return self.model

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """Clips all gradients to a joint norm, right across meshes; returns the norm before. See train.clip.clip_grad_norm.

        error_if_nonfinite: a norm that isn't finite raises before anything is scaled, as check_gradients does.
        """
        check = self.check_gradients if error_if_nonfinite else None
        return clip_grad_norm(self.model.parameters(), max_norm, norm_type, check)

    def check_gradients(self, norm: Tensor | None = None) -> None:
        """Raises ApplyError, on every rank, where a gradient (or `norm`, theirs) isn't finite; names the boundary. Every rank calls it."""
        refuse_nonfinite(self.model, self._groups, [c.fqn for c in self.plan.boundaries], norm)

    def check_replicas(self) -> None:
        """Raises RankMismatch, on every rank, where replicas aren't bitwise equal or a parameter was replaced. Every rank calls it."""
        compare_replicas(self.model, self._groups, self._live().held.replaced(self.model))

    def no_sync(self) -> AbstractContextManager[None]:
        """Backwards inside leave gradients unsummed; the first one outside sums them too."""
        return fsdp.no_sync(self.model) if self._sharded else self._sums.no_sync()

    @contextmanager
    def observe(self, callback: Callable[[str, str, str, Tensor, Any], None]) -> Iterator[None]:
        """Calls `callback(fqn, kind, name, local tensor, layout)` for every output ("output") and input gradient ("grad_input")."""
        state = self._live().state
        state.observer = callback
        try:
            yield
        finally:
            state.observer = None

    def trace(self, *, statistics: bool = False, show: bool = True) -> AbstractContextManager[Trace]:
        """Records each boundary's collectives, bytes and time of what runs inside: see view.trace. Every rank enters it."""
        return record_steps(self.model, self.plan, self.mesh, self.expert_mesh, statistics=statistics, show=show)

    def undo(self) -> nn.Module:
        """Takes the plan off: the model with whole parameters, as trained so far, and no gradients. Every rank calls it."""
        installed = self._live()
        if any(isinstance(module, FSDPModule) for module in self.model.modules()):
            raise ApplyError("undo() after fully_shard: FSDP can't be taken off a model; save it, and load it anew.")
        values = self.full_parameters() if installed.parameters else {}
        before = remember(self.model)
        self._sums.remove()
        installed.journal.undo(values)
        self._installed = None
        retire(before, self.model, "undo")
        return self.model

    def _materialise(self) -> None:
        """Gives a model on the meta device its memory; the gradient sums watch the parameters that it then has."""
        before = remember(self.model)
        made = materialise(self.model, torch.device(self.mesh.device_type))
        installed = self._live()
        if made and installed.parameters:
            self._sums.remove()
            now = {n: (made.get(id(p), p), grad) for n, (p, grad) in installed.parameters.items()}
            installed.parameters.update(now)
            self._sums = GradientSums(now, self._sums.groups)
        retire(before, self.model, "load_pretrained")

    def _live(self) -> Installed:
        if self._installed is None:
            raise ApplyError("this plan was taken off its model by undo().")
        return self._installed


def apply_plan(
    model: nn.Module,
    plan: ShardingPlan,
    mesh: DeviceMesh,
    *,
    mode: str = "production",
    data_parallel: str = "core",
    weights: str = "check",
    checks: Checks | None = _CHECKS,
) -> Applied:
    """Makes `model` parallel in place. Every rank of `mesh` calls it with the same plan and a whole copy of the model.

    data_parallel: "core" sums gradients over dp too; "external" leaves dp to FSDP, DDP or the caller.
    weights: "check" refuses ranks whose copies differ, "broadcast" takes the first rank's, "trust" doesn't look.
    checks: what is looked at beside training, and how often; None turns all of it off.
    Raises ApplyError, PlanError, PluginError or RankMismatch with the model as it was, on every rank.
    """
    problem: Exception | None = None
    facts: dict[str, Any] = {}
    try:
        preflight(model, plan, mesh, mode, data_parallel, weights)
        hashes = weight_hashes(model) if weights == "check" and mesh.size() > 1 else {}
        options = {"mode": mode, "data_parallel": data_parallel, "weights": weights, "checks": str(checks)}
        facts = record(plan, mesh, options, hashes)
    except Exception as error:
        problem = error
    agree(mesh, facts, problem)
    if weights == "broadcast":
        broadcast_weights(model, mesh)
    installed: Installed | None = None
    applied: Applied | None = None
    before = remember(model)
    try:
        installed = install(model, plan, mesh, mode, data_parallel, checks=checks)
        applied = Applied(model, plan, mesh, mode, data_parallel, installed, checks)
    except Exception as error:
        problem = error
    try:
        agree(mesh, {}, problem)
    except BaseException:
        if installed is not None:
            installed.journal.roll_back()
        raise
    assert installed is not None and applied is not None
    installed.journal.commit()
    retire(before, model, "apply_plan")
    return applied
