"""What a plugin must be like to be let in. Every check raises PluginError with one sentence."""

from __future__ import annotations

import ast
import functools
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import importlib_metadata

from ..descriptors import (
    API_VERSION,
    CHECK_NAMES,
    CONTEXT_NAMES,
    ROLES,
    TEMPLATES,
    CollectiveLowerer,
    InnerWrapper,
    Limit,
    LocalComputeFactory,
    LossFactory,
    ModelFamily,
    PluginInfo,
    SpecialHandler,
)
from ..errors import PluginError
from ..placement import PLAN_AXES
from .factories import factory_parameters

__all__ = ["check_descriptor", "check_info", "installed_version", "private_imports"]

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_SENTINELS = ("auto", "none", "null", "true", "false", "yes", "no", "on", "off")  # other words in a YAML file

# What plugins may import of the core (and anything below testing).
_PUBLIC = {
    "hyperpar_core",
    "hyperpar_core.descriptors",
    "hyperpar_core.placement",
    "hyperpar_core.errors",
    "hyperpar_core.collectives.functional",
    "hyperpar_core.batch",
    "hyperpar_core.testing",
}


# ---- versions


@functools.cache
def installed_version(distribution: str) -> str | None:
    """The version of an installed distribution, or None."""
    try:
        return importlib_metadata.version(distribution)
    except Exception:  # not installed, or with damaged metadata
        return None


def check_info(info: object) -> None:
    """A PluginInfo that this core, this torch and this transformers satisfy."""
    from packaging.requirements import InvalidRequirement, Requirement  # comes with transformers

    if not isinstance(info, PluginInfo):
        raise PluginError(f"hyperpar_plugin_info returned {info!r}, expected a PluginInfo")
    if not isinstance(info.api, str) or not re.fullmatch(r"\d+\.\d+", info.api):
        raise PluginError(f"PluginInfo.api is {info.api!r}, expected a version such as {API_VERSION!r}")
    major, minor = map(int, info.api.split("."))
    core_major, core_minor = map(int, API_VERSION.split("."))
    if major != core_major or minor > core_minor:
        raise PluginError(f"it was written for core API {info.api}, this core has API {API_VERSION}")
    if not isinstance(info.requires, tuple):
        raise PluginError(f"PluginInfo.requires is {info.requires!r}, expected a tuple such as ('torch>=2.9',)")
    for text in info.requires:
        try:
            requirement = Requirement(text)
        except (InvalidRequirement, TypeError):
            raise PluginError(f"PluginInfo.requires has {text!r}, which is no PEP 508 requirement") from None
        if requirement.url or requirement.extras:
            raise PluginError(f"PluginInfo.requires has {text!r}: write a plain range, without extras or an address")
        if requirement.marker is not None and not requirement.marker.evaluate():
            continue
        installed = installed_version(requirement.name)
        if installed is None:
            raise PluginError(f"it needs {text}, and {requirement.name} isn't installed")
        if not requirement.specifier.contains(installed, prereleases=True):
            raise PluginError(f"it needs {text}, and {requirement.name} {installed} is installed")


# ---- descriptors


def check_descriptor(descriptor: Any) -> None:
    """Types and values of every field; signatures of what would be called."""
    kind = type(descriptor).__name__
    name = descriptor.name
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name.lower() in _SENTINELS:
        raise PluginError(
            f"{kind} has name {name!r}: a name starts with a letter, has letters, digits, _ . - only, "
            f"and is none of {', '.join(_SENTINELS)}"
        )
    where = f"{kind} {name!r}"
    _expect(isinstance(descriptor.summary, str), where, "summary", descriptor.summary, "a text")
    next(check for of, check in _CHECKS.items() if isinstance(descriptor, of))(descriptor, where)


def _expect(right: bool, where: str, field: str, value: object, expected: str) -> None:
    if not right:
        raise PluginError(f"{where}: {field} is {value!r}, expected {expected}")


def _bool(value: object, where: str, field: str) -> None:
    _expect(isinstance(value, bool), where, field, value, "True or False")


def _texts(value: object) -> bool:
    return isinstance(value, tuple) and all(isinstance(item, str) and item for item in value)


def _mapping_of(value: object, *kinds: type) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(key, str) and key and isinstance(item, kinds) for key, item in value.items()
    )


def _factory(descriptor: InnerWrapper | LocalComputeFactory | LossFactory, where: str) -> None:
    _expect(callable(descriptor.factory), where, "factory", descriptor.factory, "a callable")
    axis = descriptor.needs_axis
    _expect(axis is None or axis in PLAN_AXES, where, "needs_axis", axis, f"None or one of {', '.join(PLAN_AXES)}")
    try:
        factory_parameters(descriptor.factory, where)
    except PluginError as error:
        raise PluginError(str(error).rstrip(".")) from None
    if descriptor.traffic is not None:
        call = "traffic(*, contract, shapes, tokens, ranks, width)"
        _callable_with(descriptor.traffic, where, "traffic", call, contract=None, shapes={}, tokens=0, ranks=1, width=2)


def _inner_wrapper(descriptor: InnerWrapper, where: str) -> None:
    _factory(descriptor, where)
    style = descriptor.forward_style
    _expect(style in ("hf", "qkv"), where, "forward_style", style, "'hf' or 'qkv'")
    _bool(descriptor.region_dispatch, where, "region_dispatch")
    if descriptor.check is None:
        return
    _expect(callable(descriptor.check), where, "check", descriptor.check, "a callable")
    options = factory_parameters(descriptor.factory, where).keys() - CONTEXT_NAMES
    unknown = sorted(factory_parameters(descriptor.check, where, "check").keys() - CHECK_NAMES - options)
    known = ", ".join(sorted(CHECK_NAMES | options))
    _expect(not unknown, where, "check", descriptor.check, f"one that asks for {known} only, not {', '.join(unknown)}")


def _local_compute(descriptor: LocalComputeFactory, where: str) -> None:
    _factory(descriptor, where)
    _expect(_texts(descriptor.expects), where, "expects", descriptor.expects, "a tuple of attribute names")
    _bool(descriptor.region_dispatch, where, "region_dispatch")


def _callable_with(function: Callable[..., Any], where: str, field: str, call: str, *args: Any, **kwargs: Any) -> None:
    _expect(callable(function), where, field, function, f"a callable, {call}")
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except (TypeError, ValueError) as error:
        raise PluginError(f"{where}: {field} can't be called as {call}: {error}") from None


def _special_handler(descriptor: SpecialHandler, where: str) -> None:
    call = "sections(shape, *, module, param_name, config)"
    _callable_with(descriptor.sections, where, "sections", call, (), module=None, param_name="", config=None)


def _lowerer(descriptor: CollectiveLowerer, where: str) -> None:
    _callable_with(descriptor.lower, where, "lower", "lower(transition)", None)
    axes = descriptor.axes
    known = _texts(axes) and set(axes) <= set(PLAN_AXES)
    _expect(known, where, "axes", axes, f"a tuple of {', '.join(PLAN_AXES)}")
    _expect(_texts(descriptor.backends), where, "backends", descriptor.backends, "a tuple such as ('nccl', 'gloo')")
    _bool(descriptor.exact, where, "exact")
    error = descriptor.error
    right = error is None or (isinstance(error, float) and not descriptor.exact and 0 < error < 1)
    _expect(right, where, "error", error, "None, or with exact=False a part of the largest value, between 0 and 1")


def _family(descriptor: ModelFamily, where: str) -> None:
    matches = descriptor.matches
    right = callable(matches) or (_texts(matches) and bool(matches))
    _expect(right, where, "matches", matches, "a tuple of model types or matches(model) -> bool")
    _expect(_mapping_of(descriptor.roles, str), where, "roles", descriptor.roles, "{pattern: role}")
    for pattern, role in descriptor.roles.items():
        _expect(role in ROLES, where, f"role of {pattern!r}", role, f"one of {', '.join(ROLES)}")
    boundaries = descriptor.boundaries  # "" is the model itself
    right = isinstance(boundaries, Mapping) and all(
        isinstance(pattern, str) and isinstance(boundary, str | Mapping | None)
        for pattern, boundary in boundaries.items()
    )
    _expect(right, where, "boundaries", boundaries, "{pattern: template}")
    for pattern, boundary in boundaries.items():
        if boundary is None:
            continue
        template = boundary if isinstance(boundary, str) else boundary.get("template", TEMPLATES[0])
        _expect(template in TEMPLATES, where, f"template of {pattern!r}", template, f"one of {', '.join(TEMPLATES)}")
    _expect(_mapping_of(descriptor.handlers, str), where, "handlers", descriptor.handlers, "{pattern: handler name}")
    _expect(_mapping_of(descriptor.facts, object), where, "facts", descriptor.facts, "{name: value}")
    right = _mapping_of(descriptor.suggestions, Sequence)
    _expect(right, where, "suggestions", descriptor.suggestions, "{axis: [entries]}")
    axes = ", ".join(PLAN_AXES)
    for axis, entries in descriptor.suggestions.items():
        right = axis in PLAN_AXES and all(isinstance(entry, Mapping) for entry in entries)
        _expect(right, where, f"suggestion for {axis!r}", entries, f"a list of override entries for one of {axes}")
    limits = descriptor.limits
    right = isinstance(limits, tuple) and all(
        isinstance(limit, Limit) and isinstance(limit.cause, str) and limit.cause and callable(limit.applies)
        for limit in limits
    )
    _expect(right, where, "limits", limits, "a tuple of Limit(cause, applies)")


_CHECKS: dict[type, Callable[[Any, str], None]] = {
    InnerWrapper: _inner_wrapper,
    LocalComputeFactory: _local_compute,
    SpecialHandler: _special_handler,
    CollectiveLowerer: _lowerer,
    LossFactory: _factory,
    ModelFamily: _family,
}


# ---- imports


def private_imports(module: str) -> list[str]:
    """Imports of private modules of the core in the package that `module` belongs to: "module (file:line)" each."""
    found = []
    for root, path in _sources(module):
        try:
            text = path.read_text(encoding="utf-8")
            tree = ast.parse(text) if "hyperpar_core" in text else ast.Module([], [])
        except (OSError, ValueError, SyntaxError):
            continue
        found += [f"{name} ({path.relative_to(root)}:{line})" for name, line in _imported(tree) if _is_private(name)]
    return list(dict.fromkeys(found))


def _sources(module: str) -> Iterator[tuple[Path, Path]]:
    """(folder, file) of each source file of the outermost regular package of `module`, or of the module itself."""
    parts = module.split(".")
    for depth in range(1, len(parts) + 1):
        file = getattr(sys.modules.get(".".join(parts[:depth])), "__file__", None)
        if file:
            path = Path(file)
            root = path.parent.parent if path.name == "__init__.py" else path.parent
            for source in sorted(path.parent.rglob("*.py")) if path.name == "__init__.py" else [path]:
                yield root, source
            return


def _imported(tree: ast.AST) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            for alias in node.names:  # `from package import name` is an import of package.name where that is a module
                name = f"{node.module}.{alias.name}"
                yield (name if node.module == "hyperpar_core" or name in _PUBLIC else node.module), node.lineno


def _is_private(name: str) -> bool:
    if name.split(".")[0] != "hyperpar_core" or name in _PUBLIC or name.startswith("hyperpar_core.testing."):
        return False
    if name.count(".") > 1:
        return True
    attribute = getattr(sys.modules.get("hyperpar_core"), name.split(".")[1], None)
    if attribute is not None and not isinstance(attribute, ModuleType):
        return False
    return importlib.util.find_spec(name) is not None
