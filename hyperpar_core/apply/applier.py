"""Puts a plan on a model: parameters, head counts, boundaries (deepest first), the loss. All or nothing."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from ..collectives.functional import AxisGroup, axis_group
from ..collectives.transition import Transition, transitions
from ..placement import Layout, Placement, SharedShard
from ..plan.boundaries import find_structure
from ..plan.build import find_family
from ..plan.contract import Contract
from ..plan.gradients import computes_on_parts
from ..plan.sharding_plan import ShardingPlan
from ..plan.shared_experts import block_of
from ..plan.stacks import as_held
from ..plugins import call_factory, get_registry
from .attributes import set_count
from .checks import Checks
from .cut_input import CutInput
from .expert_mesh import build_expert_mesh, parameter_mesh
from .expert_stack import ExpertStack
from .generated import ModuleState, state_of
from .held import Held
from .journal import Journal
from .meshes import axis_groups, submesh
from .misuse import refuse_resize, refuse_save
from .parameters import BoundView, SharedSlice, distribute, gradient_placements, held_placements, pieces
from .regions import BoundStep, ModelState, Region
from .root import Root, Stack
from .router_logits import AuxLoss, RouterLogits
from .rows import Block, Rows
from .streams import Streams, at_boundary, declares_randomness, projections, refuse_layerdrop
from .validate import ParameterView, Validation, raise_mismatch, register_strategies, sees_local

__all__ = ["Installed", "install"]

logger = logging.getLogger("hyperpar")


@dataclass
class Installed:
    """What stands on the model after an apply."""

    journal: Journal
    state: ModelState
    held: Held
    parameters: dict[
        str, tuple[nn.Parameter, tuple[Any, ...]]
    ]  # {first name: (DTensor parameter, placements of its gradient)}
    mesh: DeviceMesh | None  # the dense parameters' mesh; None when no axis is active
    expert_mesh: DeviceMesh | None  # (edp, ep); None when ep is 1
    expert_sums: AxisGroup | None  # the ranks of edp that the core sums gradients over


class _Inner:
    """The forward of a child that an inner wrapper took over."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward = forward

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.forward(module, *args, **kwargs)


class _Installer:
    def __init__(
        self,
        model: nn.Module,
        plan: ShardingPlan,
        mesh: DeviceMesh,
        mode: str,
        core_dp: bool,
        report: Callable[[str, str], None] | None,
        checks: Checks | None,
    ) -> None:
        self.model, self.plan, self.mesh, self.mode, self.checks = model, plan, mesh, mode, checks
        self.groups = axis_groups(mesh)
        self.axes = tuple(plan.sizes)
        self.parameter_mesh = submesh(mesh, dp=core_dp)
        # (edp, ep), and the part of it that the core itself sums over: where experts live
        ep = plan.ep_size
        self.expert_mesh = build_expert_mesh(mesh, ep) if ep > 1 else None
        self.expert_parameter_mesh = parameter_mesh(mesh, ep, dp=core_dp) if ep > 1 else None
        self.core_dp = core_dp
        shared = [block_of(c, plan.boundaries) for c in plan.boundaries if c.template == "shared_expert"]
        self.blocks = {block.fqn for block in shared if block is not None}
        self.journal = Journal()
        self.state = ModelState(report)
        streams = self._streams()
        self.real = report is None  # fake tensors draw no numbers
        self.streams = streams if self.real else None
        self.parameters: dict[str, tuple[nn.Parameter, tuple[Any, ...]]] = {}
        self.gradients: dict[int, tuple[Any, ...]] = {}  # {id of a DTensor parameter: placements of its gradient}
        self.original_names = {
            id(m): tuple(n for n, p in m._parameters.items() if p is not None) for m in model.modules()
        }

    def install(self) -> Installed:
        try:
            computes = {c.fqn: self._compute(c) for c in self.plan.boundaries}
            self._stack_experts()
            self._distribute()
            self._set_counts()
            for contract in sorted(self.plan.boundaries, key=lambda c: -c.fqn.count(".")):
                self._wrap(contract, computes[contract.fqn])
            self._wrap_routers()
            self._wrap_stack()
            self._wrap_root()
            self._install_loss()
        except BaseException:
            self.journal.roll_back()
            raise
        experts = self.expert_parameter_mesh
        sums = axis_group(experts["edp"]) if experts is not None and "edp" in (experts.mesh_dim_names or ()) else None
        return Installed(self.journal, self.state, self.held, self.parameters, self.parameter_mesh, self.expert_mesh, sums)

    def _streams(self) -> Streams | None:
        """What the model draws its random numbers from; None where it draws none, or alone."""
        family, _ = find_family(self.model)
        draws = family is not None and family.facts.get("draws") is True
        if not self.groups or not (draws or declares_randomness(self.model)):
            return None
        refuse_layerdrop(self.model, self.plan)
        rest = tuple(group.rank for axis, group in self.groups.items() if axis != "tp")
        return Streams(self.groups.get("tp"), rest, self.mesh.device_type == "cuda")

    # parameters

    def _stack_experts(self) -> None:
        """Puts a stack in the place of every list of expert modules, block by block; from then on the plan speaks of the stacks."""
        stacked = [(f"{c.fqn}.{path}" if c.fqn else path) for c in self.plan.boundaries for path in c.stacked]
        self.plan = as_held(self.plan)
        mesh = self.expert_parameter_mesh
        for fqn in stacked:
            experts = self.model.get_submodule(fqn)
            assert isinstance(experts, nn.ModuleList) and mesh is not None
            stack = ExpertStack(experts)
            self.original_names[id(stack)] = tuple(stack.names)
            for name, parameter in list(stack._parameters.items()):
                assert parameter is not None
                contract, local = self.plan.owner(f"{fqn}.{name}")
                stack._parameters.update(self._distributed(contract, local, f"{fqn}.{name}", parameter, mesh))
            self.journal.replace_list(self.model, fqn, stack, experts)

    def _distribute(self) -> None:
        made: dict[int, dict[str, nn.Parameter]] = {}
        for owner_name, owner in self.model.named_modules():
            for name, parameter in list(owner._parameters.items()):
                if parameter is None or isinstance(owner, ExpertStack):
                    continue
                fqn = f"{owner_name}.{name}" if owner_name else name
                contract, local = self.plan.owner(fqn)
                mesh = self.expert_parameter_mesh if "ep" in contract.params[local] else self.parameter_mesh
                if mesh is None:
                    continue
                if id(parameter) not in made:
                    made[id(parameter)] = self._distributed(contract, local, fqn, parameter, mesh)
                self.journal.replace_parameter(owner, name, fqn, made[id(parameter)])

    def _distributed(
        self, contract: Contract, local: str, fqn: str, parameter: nn.Parameter, mesh: DeviceMesh
    ) -> dict[str, nn.Parameter]:
        """{name: the DTensor parameter}, or one for each section of a packed parameter."""
        name = fqn.rpartition(".")[2]
        result = {}
        for piece, value, held, grad in pieces(contract, local, name, parameter):
            result[piece] = distribute(value, mesh, held_placements(held, mesh, parameter.ndim))
            prefix = fqn[: len(fqn) - len(name)]
            self.gradients[id(result[piece])] = gradient_placements(grad, mesh, parameter.ndim)
            self.parameters[f"{prefix}{piece}"] = (result[piece], self.gradients[id(result[piece])])
        return result

    # boundaries

    def _set_counts(self) -> None:
        for contract in self.plan.boundaries:
            module = self.model.get_submodule(contract.fqn)
            if not sees_local(contract, self.mode):
                continue
            for attribute, divisor in contract.divide.items():
                set_count(self.journal, module, attribute, divide=divisor)
            for attribute, value in contract.counts.items():
                set_count(self.journal, module, attribute, value=value)

    def _wrap(self, contract: Contract, compute: Callable[..., Any] | None) -> None:
        module = self.model.get_submodule(contract.fqn)
        names = [p for p in inspect.signature(type(module).forward).parameters][1:]
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
        inside = None if child else compute
        first = next(iter(contract.in_dst), "")
        if contract.fqn in self.blocks:
            inside = Block(self.state, first, names.index(first), inside)
        region = Region(
            contract.fqn, self.state, inputs, outputs, contract.out_names, (contract.in_src, contract.out_dst),
            inside, keep, self._validation(contract),
            (None, None) if self.streams is None else at_boundary(self.streams, contract),
        )  # fmt: skip
        nested = contract.template == "shared_expert"
        self._state(module, runs=True).run = Rows(self.state, first, names.index(first), region) if nested else region
        if child:
            target = module.get_submodule(str(contract.inner_target))
            self._state(target, runs=True).run = _Inner(compute)  # type: ignore[arg-type]
        for name, forward in getattr(compute, "children", {}).items():
            self._state(module.get_submodule(name), runs=True).run = _Inner(forward)
        if self.streams is not None:
            for projection, run in projections(self.streams, contract, module):
                if state_of(projection) is None:
                    self._state(projection, runs=True).run = run
        self._adopt(contract, module, region)
        install = getattr(compute, "install", None)
        if install is not None:  # what it changes beside the forward, a config's attention name, say; it hands back the inverse
            self.journal.on_undo(install(module.get_submodule(str(contract.inner_target)) if child else module))

    def _adopt(self, contract: Contract, module: nn.Module, region: Region) -> None:
        """Gives every module that holds parameters of this boundary local access to them while `region` runs."""
        for parameter in contract.params:
            path, _, name = parameter.rpartition(".")
            owner = module.get_submodule(path)
            sections = contract.sections.get(parameter, ())
            names = [f"{name}_{section.name}" for section in sections] or [name]
            if not isinstance(owner._parameters[names[0]], DTensor):
                continue
            state = self._state(owner, runs=False)
            state.region = region
            if sections:
                state.packed[name] = (sections[0].dim, tuple(names))
            for i, piece in enumerate(names):
                view = self._view(contract, parameter, sections[i].placement if sections else None)
                validation = region.validation
                if validation is not None and validation.dispatch:
                    held = self.plan.parameters[f"{contract.fqn}.{parameter}" if contract.fqn else parameter]
                    layout = contract.param_use.get(parameter, contract.params[parameter])
                    view = ParameterView(
                        validation, parameter, torch.Size(held), layout, contract.param_grad[parameter], view
                    )
                state.local[piece] = (self.gradients[id(owner._parameters[piece])], view)

    def _validation(self, contract: Contract) -> Validation | None:
        """What validate mode does at a boundary; None in production, and where no plan axis is active."""
        mesh = submesh(self.mesh, dp=False)
        if self.mode != "validate" or mesh is None:
            return None
        register_strategies()
        return Validation(contract, mesh, self.axes, self.state.report or raise_mismatch, self.state)

    def _view(
        self, contract: Contract, parameter: str, section: Placement | None
    ) -> Callable[[Tensor], Tensor] | None:
        """What makes the region's view of a parameter, or of a section, out of the local part, where that is another."""
        seen = contract.param_use.get(parameter, {}).get("tp") if section is None else section
        if seen is None or (section is not None and not isinstance(section, SharedShard)):
            return None
        if isinstance(seen, SharedShard):
            return SharedSlice(seen.dim, self.groups["tp"].ranks // seen.copies, self.groups["tp"].rank // seen.copies)
        (step,) = transitions(contract.params[parameter], {"tp": seen}, {}, ("tp",))
        return BoundView(self._lower(contract, step), self.groups["tp"])

    def _state(self, module: nn.Module, runs: bool) -> ModuleState:
        """The module's state; its class is generated on first need."""
        state = state_of(module)
        if state is None:
            distributed = any(isinstance(p, DTensor) for p in module._parameters.values())
            names = self.original_names[id(module)] if distributed else ()
            state = self.journal.set_class(module, names, runs)
        return state

    def _steps(
        self, contract: Contract, src: Layout, dst: Layout, grad: Layout, width: int | None
    ) -> tuple[BoundStep, ...]:
        steps = []
        for t in transitions(src, dst, grad, self.axes):
            last = isinstance(t.src, Shard) and t.src.dim == -1
            tokens = width is not None or not contract.features  # attention weights, say, have heads in dim 1
            steps.append(BoundStep(t, self.groups[t.axis], self._lower(contract, t), width if last else None, tokens))
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
            "tp_mesh": self._axis("tp"), "cp_mesh": self._axis("cp"), "mode": self.mode, "model": self.model,
            "ep_mesh": None if self.expert_mesh is None else self.expert_mesh["ep"],
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
        for module in self.model.modules():
            if hasattr(module, "resize_token_embeddings"):
                self.journal.set_attribute(module, "resize_token_embeddings", refuse_resize)
            if hasattr(module, "save_pretrained"):
                self.journal.set_attribute(module, "save_pretrained", refuse_save)
        state = self._state(self.model, runs=True)
        self.held = Held(self.model, self.parameters)
        shares = tuple(axis for axis in self.groups if axis == "cp" or (axis == "dp" and self.core_dp))
        cut = CutInput(self.model, self.groups["cp"], self.plan.cp_order) if "cp" in self.groups else None
        aux = AuxLoss(prod(self.groups[axis].ranks for axis in ("dp", "cp") if axis in self.groups))
        synced = "dp" in self.groups and self.plan.ep_size * self.groups["dp"].ranks > self.mesh.size()
        state.run = Root(
            self.model, self.state, self.plan.sequence_parallel, shares, state.run, aux, cut, self.streams, self.checks,
            self.groups if self.real else {}, self.held, synced,
        )  # fmt: skip

    def _wrap_routers(self) -> None:
        """Around the module that holds the decoder layers: what makes the routers' logits whole."""
        blocks = [c for c in self.plan.boundaries if c.template == "moe_mlp"]
        layers = find_structure(self.model).layers
        if not blocks or not layers:
            return
        seen = [next(iter(c.in_dst.values())) for c in blocks]
        tokens = seen[0] if all(layout == seen[0] for layout in seen) else None
        partial = any(computes_on_parts(c, "tp") for c in blocks)
        state = self._state(self.model.get_submodule(layers[0].rpartition(".")[0].rpartition(".")[0]), runs=True)
        state.run = RouterLogits(state.run, self.groups, tokens, partial)

    def _wrap_stack(self) -> None:
        layers = find_structure(self.model).layers
        base = layers[0].rpartition(".")[0].rpartition(".")[0] if layers else ""
        if base and self.plan.sequence_parallel:
            state = self._state(self.model.get_submodule(base), runs=True)
            state.run = Stack(state.run)


def _info(text: str) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        logger.info(text)


def install(
    model: nn.Module,
    plan: ShardingPlan,
    mesh: DeviceMesh,
    mode: str,
    data_parallel: str,
    report: Callable[[str, str], None] | None = None,
    checks: Checks | None = None,
) -> Installed:
    """Changes `model` in place, on every rank of `mesh`; any error leaves it as it was. The journal is not committed yet.

    report: where validate mode notes a mismatch; by default it raises PlacementMismatch.
    """
    return _Installer(model, plan, mesh, mode, data_parallel == "core", report, checks).install()
