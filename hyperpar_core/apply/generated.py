"""Generated subclasses: how a module gets a boundary's forward and local parameters without a change to its code.

A module of a plan gets a subclass of its own class, shared by all modules of that class with the same needs. What is particular to
one module stands in its `__dict__`, so that deepcopy and pickling carry it, and nothing closes over a module.
"""

from __future__ import annotations

import copyreg
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from ..errors import ApplyError
from .generation import in_step
from .misuse import refuse_ddp

__all__ = ["STATE", "ModuleState", "generated_class", "original_forward", "plain_name", "state_of"]

STATE = "_hyperpar"


class ModuleState:
    """What hyperpar knows of one module.

    region  the region that owns the module's direct parameters, or None
    run     the behaviour of the module's own forward (a Region, a Root, an inner forward), or None
    local   {parameter or section: (placements of its gradient, what makes the region's view of it or None)}
    packed  {parameter: (dim, its sections)}, for parameters that are held in sections
    """

    def __init__(self) -> None:
        self.region: Any = None
        self.run: Any = None
        self.local: dict[str, tuple[tuple[Any, ...], Callable[[torch.Tensor], torch.Tensor] | None]] = {}
        self.packed: dict[str, tuple[int, tuple[str, ...]]] = {}


def plain_name(name: str) -> str:
    """A parameter's name without the components that wrappers of torch put into it."""
    return ".".join(part for part in name.split(".") if part not in ("_checkpoint_wrapped_module", "_orig_mod"))


def state_of(module: nn.Module) -> ModuleState | None:
    """The state that a plan gave this module, or None."""
    return module.__dict__.get(STATE)


def _read(module: nn.Module, name: str) -> Any:
    state = module.__dict__[STATE]
    if name in state.packed:
        dim, sections = state.packed[name]
        if not state.region.active:
            raise RuntimeError(
                f"{name} is held in sections ({', '.join(sections)}); applied.full_parameters() has it whole"
            )
        return torch.cat([_read(module, section) for section in sections], dim)
    parameter = module.__dict__["_parameters"].get(name)
    if not state.region.active or not isinstance(parameter, DTensor):
        return parameter
    placements, view = state.local[name]
    if len(placements) != parameter.device_mesh.ndim:
        raise ApplyError(
            f"{state.region.fqn}: its code reads {name} of a {type(module).__name__}, of which FSDP holds"
            " a part on each rank: that module isn't called itself.\n  fully_shard the module whose code reads it."
        )
    local = local_part(parameter, placements)
    return local if view is None else view(local)


@functools.lru_cache(maxsize=1024)
def _label(spec: DTensorSpec, placements: tuple[Any, ...], mesh: int) -> DTensorSpec:
    """What a gradient of a parameter is: the parameter's mesh and shape, its own placements. mesh: its id; that of an earlier job of
    this process is equal to it, and its process groups are gone."""
    return DTensorSpec(spec.mesh, placements, tensor_meta=spec.tensor_meta)


class _LocalPart(torch.autograd.Function):
    """DTensor.to_local for a parameter; its gradient is labelled in place. torch's own takes twenty times as long to label it."""

    @staticmethod
    def forward(ctx: Any, parameter: DTensor, placements: tuple[Any, ...]) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.label = _label(parameter._spec, placements, id(parameter._spec.mesh))
        local = parameter._local_tensor
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[Any, None]:
        if grad is None:
            return None, None
        return DTensor(grad.contiguous(), ctx.label, requires_grad=False), None


def local_part(parameter: DTensor, placements: tuple[Any, ...]) -> torch.Tensor:
    """This rank's part of a parameter; `placements` label its gradient. Differentiable."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return parameter.to_local(grad_placements=placements)
    part: torch.Tensor = _LocalPart.apply(parameter, placements)  # type: ignore[no-untyped-call]
    return part


def _parameter_property(name: str) -> property:
    def get(self: nn.Module) -> Any:
        try:
            return _read(self, name)
        except (
            AttributeError
        ) as error:  # an AttributeError would make Module.__getattr__ hand out the DTensor in silence
            raise RuntimeError(f"reading {type(self).__name__}.{name} failed: {error}") from error

    def put(self: nn.Module, value: Any) -> None:
        self.register_parameter(name, value)

    return property(get, put)


def _ignored_by_ddp() -> property:
    """What DistributedDataParallel asks a module for first."""
    name = "_ddp_params_and_buffers_to_ignore"

    def get(self: nn.Module) -> Any:
        if any(isinstance(parameter, DTensor) for parameter in self.parameters()):
            refuse_ddp()
        if name not in self.__dict__:
            raise AttributeError(name)
        return self.__dict__[name]

    def put(self: nn.Module, value: Any) -> None:
        self.__dict__[name] = value

    return property(get, put)


_classes: dict[tuple[type, tuple[str, ...], bool], type] = {}


def _rebuild(base: type, names: tuple[str, ...], runs: bool) -> Any:
    cls = generated_class(base, names, runs)
    return object.__new__(cls)


def generated_class(base: type, names: tuple[str, ...], runs: bool) -> type:
    """The subclass of `base` with local access to the parameters `names`, and, when `runs`, with a forward that the state decides.

    It keeps `__module__` and `__qualname__`: transformers keys registries by them. It pickles as (base, names, runs).
    """
    key = (base, names, runs)
    if key in _classes:
        return _classes[key]
    members: dict[str, Any] = {name: _parameter_property(name) for name in names}
    members.update(
        __module__=base.__module__, __qualname__=base.__qualname__, __doc__=base.__doc__, _hyperpar_base=base
    )
    members["_ddp_params_and_buffers_to_ignore"] = _ignored_by_ddp()
    if runs:

        @functools.wraps(base.forward)  # type: ignore[attr-defined]
        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return self.__dict__[STATE].run(self, args, kwargs)

        members["forward"] = forward
        if hasattr(base, "generate"):

            @functools.wraps(base.generate)
            def generate(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
                synced = getattr(self.__dict__[STATE].run, "synced", False)
                return base.generate(self, *args, **(in_step(kwargs) if synced else kwargs))

            members["generate"] = generate

    def __reduce_ex__(self: Any, protocol: int) -> Any:
        state: Any = super(cls, self).__reduce_ex__(protocol)
        if state[0] is not copyreg.__newobj__:  # type: ignore[attr-defined]
            return state
        return (_rebuild, key, *state[2:])

    members["__reduce_ex__"] = __reduce_ex__
    cls: Any = type(base.__name__, (base,), members)
    _classes[key] = cls
    return cls  # type: ignore[no-any-return]


def original_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The forward that the module's own class has, whatever a plan put in front of it. For wrappers and local computes."""
    base = getattr(type(module), "_hyperpar_base", type(module))
    return base.forward(module, *args, **kwargs)


def in_backward() -> bool:
    """Whether the caller runs inside a backward: a checkpointed forward that is computed again. Compiled code can't tell."""
    return not torch.compiler.is_compiling() and bool(torch._C._current_graph_task_id() != -1)
