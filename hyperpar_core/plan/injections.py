"""What runs inside boundaries besides the model's own code: what an entry may leave open, and what is refused.

`check_injection` and `require_wrappers` run when a plan is made, and again before it is applied: a plan may have been edited by hand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from ..descriptors import InnerWrapper, LocalComputeFactory, ModelFamily
from ..errors import OverrideError, PlanError, Refused
from ..plugins import call_check, check_factory, get_registry
from .contract import Contract, callable_name
from .names import fold_names, listed, nearest
from .overrides import paste

__all__ = ["check_convolutions", "check_injection", "completed", "provided", "require_wrappers"]

NEEDS_CP = ("attention", "linear_attention")


def completed(contract: Contract) -> Contract:
    """The contract with the region_dispatch that a registered name's descriptor states; OverrideError where an entry says another."""
    kind, named = _injected(contract)
    if not isinstance(named, str):
        return contract
    stated = _descriptor(kind, named).region_dispatch
    if contract.region_dispatch not in (None, stated):
        raise OverrideError(
            f"{contract.fqn}: region_dispatch is {str(contract.region_dispatch).lower()}, and {named} states {str(stated).lower()};"
            " leave it out."
        )
    return replace(contract, region_dispatch=stated)


def _injected(contract: Contract) -> tuple[str, Any]:
    if contract.inner_wrapper is not None:
        return "inner_wrapper", contract.inner_wrapper
    return "local_compute", contract.local_compute_fn


def _descriptor(kind: str, name: str) -> InnerWrapper | LocalComputeFactory:
    found: InnerWrapper | LocalComputeFactory = getattr(get_registry(), kind)(name)[0]
    return found


def check_injection(contract: Contract, module: nn.Module, model: nn.Module, sizes: Mapping[str, int]) -> None:
    """Refuses an injection that can't run at `module`, or would do nothing. `sizes`: active axes, ep among them.

    OverrideError for a wrong declaration, PluginError for a name or an option that isn't there, and what a wrapper's own check says.
    """
    fqn = contract.fqn
    _check_target(contract, module)
    kind, named = _injected(contract)
    dispatch = contract.region_dispatch
    if named is None:
        if dispatch is True:
            raise OverrideError(
                f"{fqn}: region_dispatch: true without an injection is what every boundary has; leave it out."
            )
        if contract.options:
            raise OverrideError(
                f"{fqn}: options {listed(contract.options)} would go to nothing: no inner_wrapper, no local_compute_fn."
            )
        return
    if isinstance(named, str):
        descriptor = _descriptor(kind, named)
        factory, axis = descriptor.factory, descriptor.needs_axis
        if dispatch is not descriptor.region_dispatch:
            raise OverrideError(
                f"{fqn}: region_dispatch is {str(dispatch).lower()}, and {named} states {str(descriptor.region_dispatch).lower()}."
            )
        if axis is not None and axis not in sizes:
            raise OverrideError(
                f"{fqn}: {named} works over {axis}, and {axis} is 1 here.\n  Write `when: {axis}` in its entry, or leave it out."
            )
        if isinstance(descriptor, LocalComputeFactory):
            _check_expected(fqn, named, descriptor.expects, module)
    else:
        factory = named
        if dispatch is None:
            raise OverrideError(
                f"{fqn}: a callable needs region_dispatch: false if it communicates or runs custom kernels, true if it has"
                " ordinary operators only."
            )
    text = named if isinstance(named, str) else callable_name(named)
    check_factory(factory, contract.options, f"{fqn}: {text}")
    if isinstance(named, str) and isinstance(descriptor, InnerWrapper):
        target = module if contract.inner_target == "self" else module.get_submodule(str(contract.inner_target))
        context = {
            "module": module, "target_module": target, "fqn": fqn, "contract": contract, "model": model, "sizes": dict(sizes),
        }  # fmt: skip
        call_check(descriptor, context, contract.options, f"{fqn}: {named}")


def _check_target(contract: Contract, module: nn.Module) -> None:
    fqn, target = contract.fqn, contract.inner_target
    if contract.inner_wrapper is not None and contract.local_compute_fn is not None:
        raise OverrideError(f"{fqn}: inner_wrapper and local_compute_fn exclude each other; clear one with none.")
    if contract.inner_wrapper is not None and target is None:
        raise OverrideError(f"{fqn}: inner_wrapper without inner_target; write inner_target: self, or a child's name.")
    if target is not None and contract.inner_wrapper is None:
        raise OverrideError(f"{fqn}: inner_target without inner_wrapper.")
    if target in (None, "self"):
        if contract.inner_out_src is not None:
            raise OverrideError(
                f"{fqn}: inner_out_src speaks of a child as inner_target, and it is {target or 'none'}."
            )
        return
    try:
        module.get_submodule(target)
    except AttributeError:
        children = [name for name, _ in module.named_modules() if name]
        raise OverrideError(
            f"{fqn}: inner_target {target!r} is no module of it.{nearest(target, children)} Children: {listed(children)}."
        ) from None
    if contract.inner_out_src is None:
        raise OverrideError(
            f"{fqn}: a child as inner_target needs inner_out_src: first_input, or a layout of its output."
        )


def _check_expected(fqn: str, name: str, expects: Sequence[str], module: nn.Module) -> None:
    missing = [attribute for attribute in expects if not hasattr(module, attribute)]
    if missing:
        children = listed(child for child, _ in module.named_children())
        raise OverrideError(
            f"{fqn}: {name} needs {listed(expects)}, and {type(module).__name__} has no {listed(missing)}.\n"
            f"  Its children: {children}."
        )


def require_wrappers(boundaries: Sequence[Contract], sizes: Mapping[str, int], family: ModelFamily | None) -> None:
    """PlanError where cp is active and an attention boundary has nothing that attends over cp: a wrapper is never chosen silently.

    Refused where that boundary is linear attention, for which no wrapper is suggested.
    """
    if "cp" not in sizes:
        return
    without = [c for c in boundaries if c.template in NEEDS_CP and not _works_over_cp(c)]
    missing = [c.fqn for c in without]
    if not missing:
        return
    linear = [c.fqn for c in without if c.template == "linear_attention"]
    if linear:
        raise Refused(
            f"cp={sizes['cp']} is active, and {fold_names(linear)[0]!r} ({len(linear)} in all) is linear attention: it carries a state"
            " along the sequence, which wrappers of attention don't hand on.\n  Plan without cp, or declare a wrapper that was made for it."
        )
    offered = [(w, provider) for w, provider in get_registry().offered(InnerWrapper) if w.needs_axis == "cp"]
    entries = [e for e in (family.suggestions.get("cp", ()) if family else ()) if "inner_wrapper" in e]
    installed = [w.name for w, _ in offered]
    hint = f"{family.name} suggests {entries[0]['inner_wrapper']}; " if family and entries else ""
    by_provider: dict[str, list[str]] = {}
    for wrapper, provider in offered:
        by_provider.setdefault(str(provider), []).append(wrapper.name)
    known = "; ".join(f"{listed(names, 6)} ({provider})" for provider, names in by_provider.items())
    known = f"installed: {known}; {_transformers()}" if offered else "installed: none (pip install hyperpar-cp-sdpa)"
    name = next((e["inner_wrapper"] for e in entries if e["inner_wrapper"] in installed), None)
    name = name or (entries[0]["inner_wrapper"] if entries else installed[0] if installed else "sdpa_hf_ring")
    first = sorted((w for w, _ in offered if w.summary), key=lambda w: w.name != name)
    when = [f"  {w.name}: {w.summary}" for w in first][:3]
    match = f"*.{missing[0].rpartition('.')[2]}"
    entry = f'{{match: "{match}", when: cp, inner_target: self, inner_wrapper: {name}}}'
    raise PlanError(
        f"cp={sizes['cp']} is active, and attention boundary {fold_names(missing)[0]!r} ({len(missing)} in all) declares no"
        " inner wrapper that works over cp.\n"
        + "\n".join([f"  {hint}{known}", *when, paste([entry])])
    )


def check_convolutions(model: nn.Module, boundaries: Sequence[Contract], sizes: Mapping[str, int]) -> None:
    """Refused where cp is active and a convolution along the sequence would see this rank's tokens only."""
    if "cp" not in sizes:
        return
    covered = tuple(f"{c.fqn}." for c in boundaries if c.fqn and _works_over_cp(c))
    for fqn, module in model.named_modules():
        if isinstance(module, nn.Conv1d) and module.kernel_size != (1,) and not fqn.startswith(covered):
            raise Refused(
                f"cp={sizes['cp']} is active, and {fqn} convolves along the sequence, of which each rank has a part.\n"
                "  Plan without cp, or declare a wrapper that was made for it."
            )


def _works_over_cp(contract: Contract) -> bool:
    """A callable owns its semantics; a registered name says the axis that it works over."""
    kind, named = _injected(contract)
    return named is not None and (not isinstance(named, str) or _descriptor(kind, named).needs_axis == "cp")


def _transformers() -> str:
    from ..plugins.checks import installed_version

    return f"transformers {installed_version('transformers')}"


def provided(boundaries: Sequence[Contract]) -> dict[str, str]:
    """{"kind name": "distribution version"} of everything that boundaries name; PluginError for what isn't there."""
    registry = get_registry()
    used: dict[str, str] = {}
    for contract in boundaries:
        kind, named = _injected(contract)
        for what, name in (
            (kind, named),
            ("lowerer", contract.lowerer),
            *(("special_handler", handler) for handler in contract.special_handlers.values()),
        ):
            if isinstance(name, str) and f"{what} {name}" not in used:
                used[f"{what} {name}"] = str(getattr(registry, what)(name)[1])
    return used
