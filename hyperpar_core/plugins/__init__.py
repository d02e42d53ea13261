"""The door for plugins: loading them, listing them, looking up what they offer, calling their factories."""

from __future__ import annotations

from .factories import call_check, call_factory, check_factory
from .loader import get_registry, load, plugin_report, reset
from .registry import Plugin, Provider, Registry

__all__ = [
    "Plugin",
    "Provider",
    "Registry",
    "call_check",
    "call_factory",
    "check_factory",
    "get_registry",
    "load",
    "plugin_report",
    "reset",
]
