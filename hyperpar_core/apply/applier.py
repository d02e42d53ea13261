"""Puts a plan on a model: parameters, head counts, boundaries (deepest first), the loss. All or nothing."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from ..collectives.transition import Transition, transitions
from ..errors import PlanError
from ..placement import Layout, SharedShard
from ..plan.contract import Contract
from ..plan.sharding_plan import ShardingPlan
from ..plugins import call_factory, get_registry
from .generated import ModuleState, state_of
from .journal import Journal
from .meshes import axis_groups, submesh
from .parameters import BoundView, SharedSlice, distribute, gradient_placements, held_placements, pieces
from .regions import BoundStep, ModelState, Region
from .root import Root

__all__ = ["Installed", "install"]

logger = logging.getLogger("hyperpar")


@dataclass
class Installed:
    """What stands on the model after an apply."""

    journal: Journal
    state: ModelState
    parameters: dict[
        str, tuple[nn.Parameter, tuple[Any, ...]]
    ]  # {first name: (DTensor parameter, placements of its gradient)}
    mesh: DeviceMesh | None  # the parameters' mesh; None when no axis is active


class _Inner:
    """The forward of a child that an inner wrapper took over."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward = forward

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.forward(module, *args, **kwargs)


class _Installer:
    def __init__(self, model: nn.Module, plan: ShardingPlan, mesh: DeviceMesh, mode: str, core_dp: bool) -> None:
        self.model, self.plan, self.mesh, self.mode = model, plan, mesh, mode
        self.groups = axis_groups(mesh)
        self.axes = tuple(plan.sizes)
        self.parameter_mesh = submesh(mesh, dp=core_dp)
        self.core_dp = core_dp
        self.journal = Journal()
        self.state = ModelState()
        self.parameters: dict[str, tuple[nn.Parameter, tuple[Any, ...]]] = {}
        self.gradients: dict[int, tuple[Any, ...]] = {}  # {id of a DTensor parameter: placements of its gradient}
        self.original_names = {
            id(m): tuple(n for n, p in m._parameters.items() if p is not None) for m in model.modules()
        }

    def install(self) -> Installed:
        try:
            computes = {c.fqn: self._compute(c) for c in self.plan.boundaries}
            self._distribute()
            self._divide_attributes()
            for contract in sorted(self.plan.boundaries, key=lambda c: -c.fqn.count(".")):
                self._wrap(contract, computes[contract.fqn])
            self._wrap_root()
            self._install_loss()
        except BaseException:
            self.journal.roll_back()
            raise
        return Installed(self.journal, self.state, self.parameters, self.parameter_mesh)

    # parameters

    def _distribute(self) -> None:
        mesh = self.parameter_mesh
        if mesh is None:
            return
        made: dict[int, dict[str, nn.Parameter]] = {}
        for owner_name, owner in self.model.named_modules():
            for name, parameter in list(owner._parameters.items()):
                if parameter is None:
                    continue
                fqn = f"{owner_name}.{name}" if owner_name else name
                if id(parameter) not in made:
                    made[id(parameter)] = self._distributed(fqn, name, parameter, mesh)
                self.journal.replace_parameter(owner, name, fqn, made[id(parameter)])

    def _distributed(self, fqn: str, name: str, parameter: nn.Parameter, mesh: DeviceMesh) -> dict[str, nn.Parameter]:
        """{name: the DTensor parameter}, or one for each section of a packed parameter."""
        contract, local = self.plan.owner(fqn)
        result = {}
        for piece, value, held, grad in pieces(contract, local, name, parameter):
            result[piece] = distribute(value, mesh, held_placements(held, mesh, parameter.ndim))
            prefix = fqn[: len(fqn) - len(name)]
            self.gradients[id(result[piece])] = gradient_placements(grad, mesh, parameter.ndim)
            self.parameters[f"{prefix}{piece}"] = (result[piece], self.gradients[id(result[piece])])
        return result

    # boundaries

    def _divide_attributes(self) -> None:
        for contract in self.plan.boundaries:
            module = self.model.get_submodule(contract.fqn)
            for attribute, divisor in contract.divide.items():
                self.journal.set_attribute(module, attribute, getattr(module, attribute) // divisor)

    def _wrap(self, contract: Contract, compute: Callable[..., Any] | None) -> None:
        module = self.model.get_submodule(contract.fqn)
        names = [p for p in inspect.signature(type(module).forward).parameters][1:]
        for name in contract.in_src:
            if name not in names:
                raise PlanError(f"{contract.fqn}: declares input {name!r}, and the forward takes {', '.join(names)}.")
        inputs = {
            name: (
                names.index(name),
                self._steps(
                    contract, contract.in_src[name], dst, contract.in_grad.get(name, {}), contract.features.get(name)
                ),
            )
            for name, dst in contract.in_dst.items()
        }
        outputs = {
            name: self._steps(contract, src, contract.out_dst[name], {}, contract.features.get(name))
            for name, src in contract.out_src.items()
        }
        keep = None
        if self.plan.loss is not None and contract.template == "lm_head":
            outputs = {
                n: self._steps(contract, src, {**contract.out_dst[n], "tp": Replicate()}, {}, contract.features.get(n))
                for n, src in contract.out_src.items()
            }
            keep = (self.mesh["tp"], contract.features["output"])
        child = contract.inner_target not in (None, "self")
        region = Region(
            contract.fqn, self.state, inputs, outputs, contract.out_names, (contract.in_src, contract.out_dst),
            None if child else compute, keep,
        )  # fmt: skip
        self._state(module, runs=True).run = region
        if child:
            target = module.get_submodule(str(contract.inner_target))
            self._state(target, runs=True).run = _Inner(compute)  # type: ignore[arg-type]
        self._adopt(contract, module, region)

    def _adopt(self, contract: Contract, module: nn.Module, region: Region) -> None:
        """Gives every module that holds parameters of this boundary local access to them while `region` runs."""
        mesh = self.parameter_mesh
        if mesh is None:
            return
        for parameter in contract.params:
            path, _, name = parameter.rpartition(".")
            owner = module.get_submodule(path)
            state = self._state(owner, runs=False)
            state.region = region
            sections = contract.sections.get(parameter, ())
            names = [f"{name}_{section.name}" for section in sections] or [name]
            if sections:
                state.packed[name] = (sections[0].dim, tuple(names))
            for piece in names:
                state.local[piece] = (self.gradients[id(owner._parameters[piece])], self._view(contract, parameter))

    def _view(self, contract: Contract, parameter: str) -> Callable[[Tensor], Tensor] | None:
        """What makes the region's view of a parameter out of the local part, where that is another."""
        seen = contract.param_use.get(parameter, {}).get("tp")
        if seen is None:
            return None
        if isinstance(seen, SharedShard):
            return SharedSlice(seen.dim, self.groups["tp"].ranks // seen.copies, self.groups["tp"].rank // seen.copies)
        (step,) = transitions(contract.params[parameter], {"tp": seen}, {}, ("tp",))
        return BoundView(self._lower(contract, step), self.groups["tp"])

    def _state(self, module: nn.Module, runs: bool) -> ModuleState:
        """The module's state; its class is generated on first need."""
        state = state_of(module)
        if state is None:
            names = (
                () if self.parameter_mesh is None else tuple(n for n, p in module._parameters.items() if p is not None)
            )
            state = self.journal.set_class(module, names, runs)
        return state

    def _steps(
        self, contract: Contract, src: Layout, dst: Layout, grad: Layout, width: int | None
    ) -> tuple[BoundStep, ...]:
        steps = []
        for t in transitions(src, dst, grad, self.axes):
            last = isinstance(t.src, Shard) and t.src.dim == -1
            steps.append(BoundStep(t, self.groups[t.axis], self._lower(contract, t), width if last else None))
        return tuple(steps)

    def _lower(self, contract: Contract, transition: Transition) -> Callable[..., Any]:
        registry = get_registry()
        if contract.lowerer is not None:
            call = registry.lowerer(contract.lowerer)[0].lower(transition)
            if call is not None:
                return call
        call = registry.lowerer("default")[0].lower(transition)
        assert call is not None
        return call

    # injections

    def _context(self, contract: Contract, module: nn.Module) -> dict[str, Any]:
        return {
            "module": module, "target_module": module, "fqn": contract.fqn, "mesh": self.mesh, "contract": contract,
            "tp_mesh": self._axis("tp"), "cp_mesh": self._axis("cp"), "ep_mesh": None, "mode": self.mode, "model": self.model,
        }  # fmt: skip

    def _axis(self, axis: str) -> DeviceMesh | None:
        return self.mesh[axis] if axis in self.groups else None

    def _compute(self, contract: Contract) -> Callable[..., Any] | None:
        registry = get_registry()
        for kind, named in (("inner_wrapper", contract.inner_wrapper), ("local_compute", contract.local_compute_fn)):
            if named is None:
                continue
            module = self.model.get_submodule(contract.fqn)
            context = self._context(contract, module)
            if kind == "inner_wrapper" and contract.inner_target != "self":
                context["target_module"] = module.get_submodule(str(contract.inner_target))
            factory, provider = named, "python"
            if isinstance(named, str):
                descriptor, source = getattr(registry, kind)(named)
                factory, provider = descriptor.factory, str(source)
            compute = call_factory(factory, context, dict(contract.options), f"{contract.fqn}: {named}")
            _info(
                f"{contract.fqn}: {kind} {named if isinstance(named, str) else getattr(named, '__qualname__', named)} ({provider}),"
                f" region_dispatch {contract.region_dispatch}:"
                f" {'ordinary operators, validated' if contract.region_dispatch else 'a black box to validate mode'}"
            )
            return compute
        return None

    def _install_loss(self) -> None:
        loss = self.plan.loss
        if loss is None:
            return
        descriptor, provider = get_registry().loss(loss.name)
        context = self._context(self.plan.boundaries[0], self.model)
        function = call_factory(descriptor.factory, context, dict(loss.options), f"loss {loss.name}")
        self.journal.set_attribute(self.model, "_loss_function", function)
        _info(f"loss: {loss.name} ({provider}) on logits sharded over tp")

    def _wrap_root(self) -> None:
        state = self._state(self.model, runs=True)
        shares = tuple(axis for axis in self.groups if axis == "cp" or (axis == "dp" and self.core_dp))
        state.run = Root(self.model, self.state, self.plan.sequence_parallel, shares, state.run)


def _info(text: str) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        logger.info(text)


def install(model: nn.Module, plan: ShardingPlan, mesh: DeviceMesh, mode: str, data_parallel: str) -> Installed:
    """Changes `model` in place, on every rank of `mesh`; any error leaves it as it was. The journal is not committed yet."""
    return _Installer(model, plan, mesh, mode, data_parallel == "core").install()
