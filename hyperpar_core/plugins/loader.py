"""The door for plugins: finding them, letting them in and listing them. What they offer is looked up in the registry.

`get_registry()` loads every entry point of group `hyperpar` once per process, when something first asks. Each plugin is
let in whole or left out whole, and no failure of one changes what another registers:

    broken     it doesn't import, a hook raises, a descriptor is malformed, its versions don't fit, or a name clashes
    disabled   named in HYPERPAR_DISABLE_PLUGINS
    excluded   not named in HYPERPAR_LOAD_PLUGINS, where that is set

Two plugins under one name, or two descriptors of one kind under one name: both plugins are left out, as neither has the
better claim, and asking for anything that they offered raises the clash. The core's own plugin always stays.
"""

from __future__ import annotations

import difflib
import inspect
import logging
import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import importlib_metadata
import pluggy

from .. import hookspecs
from ..changes import API_VERSION, to_current, understated
from ..errors import PluginError
from .checks import check_descriptor, check_info, installed_version, private_imports
from .factories import describe_error
from .finding import Settings, find_plugins
from .registry import KINDS, Plugin, Registry

__all__ = ["get_registry", "load", "plugin_report", "reset"]

SLOW = 1.0  # seconds
_INFO = "hyperpar_plugin_info"
_OUR_HOOKS = frozenset({_INFO, *(kind.hook for kind in KINDS.values())})
_log = logging.getLogger("hyperpar_core.plugins")


# ---- letting in


def load(distributions: Iterable[Any] | None = None, environ: Mapping[str, str] | None = None) -> Registry:
    """Loads the plugins of `distributions` (default: all that are installed) as `environ` (default: os.environ) says.

    Raises PluginError only in strict mode, and for a HYPERPAR_ variable that can't be read.
    """
    settings = Settings.read(os.environ if environ is None else environ)
    found = find_plugins(importlib_metadata.distributions() if distributions is None else distributions)
    for sentence in settings.without_effect([one.plugin for one in found]):
        if settings.strict:
            raise PluginError(f"{sentence}.")
        _log.warning("%s.", sentence)
    plugins = [settings.status_of(one.plugin) for one in found]
    plugins = _leave_out_rivals(plugins, _names_claimed(plugins))
    for index, (plugin, one) in enumerate(zip(plugins, found, strict=True)):
        if plugin.status == "loaded":
            plugins[index] = _let_in(plugin, one.entry_point)
            if settings.trace:
                _trace(plugins[index])
        _refuse_if(settings.strict, plugins[index])
    plugins = _leave_out_rivals(plugins, _descriptors_claimed(plugins))
    for plugin in plugins:
        _refuse_if(settings.strict, plugin)
        if plugin.status == "broken":
            _log.warning("plugin %s is left out: %s.", plugin, plugin.reason)
        elif plugin.deprecations and plugin.status == "loaded":
            _log.warning("plugin %s: %s.", plugin, "; ".join(plugin.deprecations))
    return Registry(plugins)


def _refuse_if(strict: bool, plugin: Plugin) -> None:
    if strict and plugin.status == "broken":
        raise PluginError(f"plugin {plugin} is broken: {plugin.reason}. (HYPERPAR_STRICT_PLUGINS=1)") from plugin.error


def _trace(plugin: Plugin) -> None:
    what = ", ".join(f"{KINDS[kind].noun} {one.name}" for kind, some in plugin.offers.items() for one in some)
    outcome = what if plugin.status == "loaded" else f"left out: {plugin.reason}"
    print(f"hyperpar: {plugin} in {plugin.seconds:.3f} s: {outcome}", file=sys.stderr)


def _let_in(plugin: Plugin, entry_point: Any) -> Plugin:
    """Imports one plugin and calls its hooks: loaded with all that it offers, or broken with the reason."""
    start = time.perf_counter()
    offers: dict[type, tuple[Any, ...]] = {}
    error: BaseException | None = None
    heard = _Heard()
    try:
        heard = _collect(entry_point.load(), plugin.provider.plugin, offers)
        reason = ""
    except PluginError as refused:
        error, reason = refused, str(refused)
    except (Exception, SystemExit) as raised:  # whatever the plugin does, the others load
        error, reason = raised, describe_error(raised)
    seconds = time.perf_counter() - start
    plugin = replace(plugin, seconds=seconds, offers=offers, **vars(heard))
    return plugin if error is None else replace(plugin, status="broken", reason=reason, error=error)


@dataclass(frozen=True)
class _Heard:
    """What a plugin says beside its descriptors: the fields of the same names in its record."""

    states_versions: bool = True
    deprecations: tuple[str, ...] = ()
    unstated: tuple[str, ...] = ()


def _collect(plugin: Any, name: str, offers: dict[type, tuple[Any, ...]]) -> _Heard:
    """Fills `offers` with the checked descriptors of one plugin, brought up to this core's API.

    Each plugin has a pluggy manager of its own: its hooks can neither see nor change another plugin's.
    """
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    implemented = _implemented(manager, plugin)
    api = API_VERSION  # what states none is taken as written for this one
    if _INFO in implemented:  # first: where the versions don't fit, nothing else that is wrong is news
        _check_arguments(_INFO, implemented[_INFO])
        for info in _answers(_INFO, implemented[_INFO]):
            check_info(info)
            api = info.api
    for hook, functions in sorted(implemented.items()):
        if hook in _OUR_HOOKS:
            _check_arguments(hook, functions)
    manager.register(plugin, name)
    try:
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        unknown = str(error).split(" in plugin ")[0]
        near = difflib.get_close_matches(unknown.split("'")[1], _OUR_HOOKS, n=1)
        hint = f", nearest: {near[0]}" if near else ""
        raise PluginError(f"{unknown} (core API {API_VERSION}{hint})") from None
    for kind in KINDS:
        descriptors: list[Any] = []
        for answer in _answers(KINDS[kind].hook, implemented.get(KINDS[kind].hook, [])):
            if not isinstance(answer, (list, tuple)) or not all(isinstance(one, kind) for one in answer):
                raise PluginError(f"{KINDS[kind].hook} returned {_short(answer)}, expected a list of {kind.__name__}")
            descriptors += answer
        offers[kind] = tuple(sorted(descriptors, key=lambda one: str(one.name)))
    deprecations: list[str] = []
    for kind, offered in offers.items():  # last: what is left out for a malformed descriptor is known by its names
        brought = [to_current(descriptor, api) for descriptor in offered]
        offered = tuple(descriptor for descriptor, _ in brought)
        offers[kind] = offered
        deprecations += [note for _, said in brought for note in said]
        for descriptor in offered:
            check_descriptor(descriptor)
        for one, after in pairwise(offered):
            if one.name == after.name:
                raise PluginError(f"it offers two {KINDS[kind].noun} descriptors named {one.name!r}")
    claim = understated((one for some in offers.values() for one in some), api)
    return _Heard(_INFO in implemented, tuple(deprecations), (claim,) if claim else ())


def _implemented(manager: pluggy.PluginManager, plugin: Any) -> dict[str, list[Any]]:
    """{hook: functions} of a plugin; PluginError for what would silently do nothing."""
    implemented = defaultdict(list)
    unmarked = []
    for attribute in dir(plugin):
        options = manager.parse_hookimpl_opts(plugin, attribute)
        if options is None:
            if attribute in _OUR_HOOKS:
                unmarked.append(attribute)
            continue
        idle = [key for key in ("wrapper", "hookwrapper", "tryfirst", "trylast") if options.get(key)]
        if idle:
            raise PluginError(f"{attribute} is marked {', '.join(idle)}, which does nothing: plugins' hooks run apart")
        implemented[options.get("specname") or attribute].append(getattr(plugin, attribute))
    if unmarked:
        raise PluginError(f"{', '.join(unmarked)} isn't marked with @hookimpl (from hyperpar_core import hookimpl)")
    if not implemented:
        raise PluginError("it implements no hook: mark them with @hookimpl (from hyperpar_core import hookimpl)")
    return implemented


def _check_arguments(hook: str, functions: list[Any]) -> None:
    empty, variadic = inspect.Parameter.empty, (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    for function in functions:
        signature = inspect.signature(function)
        parameters = signature.parameters.values()
        asked = ", ".join(one.name for one in parameters if one.default is empty and one.kind not in variadic)
        if asked:
            raise PluginError(f"{hook}{signature} asks for {asked}: hooks of core API {API_VERSION} take no arguments")


def _answers(hook: str, functions: list[Any]) -> list[Any]:
    """What the functions of one hook return."""
    answers = []
    for function in functions:
        try:
            answers.append(function())
        except Exception as error:
            raise PluginError(f"{hook} raised {describe_error(error)}") from error
    return answers


def _short(value: object) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) < 120 else f"{text[:120]}..."


# ---- clashes


def _leave_out_rivals(plugins: list[Plugin], claims: Mapping[str, list[Plugin]]) -> list[Plugin]:
    """`plugins` with all rivals broken that claim one name, except the core's own. `claims`: {what: by whom}.

    Decided over all claims before any plugin is left out, so that no order matters.
    """
    reasons: dict[int, str] = {}
    for what, rivals in sorted(claims.items()):
        if len(rivals) > 1:
            advice = "uninstall one, or name it in HYPERPAR_DISABLE_PLUGINS"
            if any(rival.is_core for rival in rivals):
                advice = "the core's own stays"
            reason = f"{what} is claimed by {' and by '.join(map(str, rivals))}: {advice}"
            for rival in rivals:
                if not rival.is_core:
                    reasons.setdefault(id(rival), reason)
    return [replace(one, status="broken", reason=reasons[id(one)]) if id(one) in reasons else one for one in plugins]


def _names_claimed(plugins: Iterable[Plugin]) -> dict[str, list[Plugin]]:
    """Plugin names, known before anything is imported."""
    claims = defaultdict(list)
    for plugin in plugins:
        if plugin.status == "loaded":
            claims[f"plugin name {plugin.provider.plugin!r}"].append(plugin)
    return claims


def _descriptors_claimed(plugins: Iterable[Plugin]) -> dict[str, list[Plugin]]:
    """Names of descriptors, per kind."""
    claims = defaultdict(list)
    for plugin in plugins:
        for kind, descriptors in plugin.offers.items() if plugin.status == "loaded" else ():
            for descriptor in descriptors:
                claims[f"{KINDS[kind].noun} {descriptor.name!r}"].append(plugin)
    return claims


# ---- once per process


class _Process:
    """The registry of this process, loaded by the first thread that asks."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.registry: Registry | None = None
        self.loading = False

    def get(self) -> Registry:
        with self.lock:
            if self.loading:
                raise PluginError("it asks for the plugins while they are loading: ask when a factory is called")
            if self.registry is None:
                self.loading = True
                try:
                    self.registry = load()
                finally:
                    self.loading = False
            return self.registry

    def reset(self) -> None:
        with self.lock:
            self.registry = None


_process = _Process()


def get_registry() -> Registry:
    """The plugins of this process, loaded at the first call. Each rank loads its own; apply_plan compares them."""
    return _process.get()


def reset() -> None:
    """Forgets what was loaded, so that the next `get_registry()` loads again: for tests, and after an install."""
    installed_version.cache_clear()
    _process.reset()


# ---- listing


def plugin_report(registry: Registry | None = None) -> list[dict[str, Any]]:
    """Every plugin that was found, sorted by name: what `hyperpar plugins --json` prints.

    name, distribution, version, status (loaded | broken | disabled | excluded), reason, notes (what works but shouldn't
    stay so), seconds (to load), registers {kind: [names]} and entry_point.
    """
    return [
        {
            "name": plugin.provider.plugin,
            "distribution": plugin.provider.distribution,
            "version": plugin.provider.version,
            "entry_point": plugin.module,
            "status": plugin.status,
            "reason": plugin.reason,
            "notes": _notes(plugin) if plugin.status == "loaded" and not plugin.is_core else [],
            "seconds": round(plugin.seconds, 4),
            "registers": _registers(plugin) if plugin.status == "loaded" else {},
        }
        for plugin in (get_registry() if registry is None else registry).plugins
    ]


def _registers(plugin: Plugin) -> dict[str, list[str]]:
    return {KINDS[kind].key: [one.name for one in some] for kind, some in plugin.offers.items() if some}


def _notes(plugin: Plugin) -> list[str]:
    module = plugin.module.split(":")[0].strip()
    notes = [*plugin.deprecations, *plugin.unstated, *(f"imports the core's private module {name}" for name in private_imports(module))]
    if plugin.seconds > SLOW:
        notes.append(f"took {plugin.seconds:.1f} s to load: import heavy modules in the factories")
    if not plugin.states_versions:
        notes.append(f"states no versions: implement {_INFO}")
    return notes
