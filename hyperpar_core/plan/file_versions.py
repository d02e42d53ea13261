"""Versions of override and plan files: an older file is brought up to today's, or an error says what changed since.

A version changes when a key gets another meaning or goes. A new key with a default doesn't change it: older files load as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import OverrideError

__all__ = ["CHANGES", "VERSION", "FileChange", "brought_up"]

VERSION = 1


@dataclass(frozen=True)
class FileChange:
    """What changed from one version to the next. `upgrade(data) -> data`; None where a person has to decide, which `text` says."""

    text: str
    upgrade: Callable[[dict[str, Any]], dict[str, Any]] | None = None


CHANGES: Mapping[int, FileChange] = {}  # {version: what changed from it to the next}


def brought_up(data: dict[str, Any], where: str) -> dict[str, Any]:
    """`data`, the mapping of a file, as the file of today's version that means the same; OverrideError where there is none."""
    version = data.get("version")
    if type(version) is not int or not 1 <= version <= VERSION:
        newer = type(version) is int and version > VERSION
        advice = " It is of a newer hyperpar: update this one." if newer else ""
        raise OverrideError(f"{where}: version {version!r:.60}; this hyperpar reads version {_readable()}.{advice}")
    for old in range(version, VERSION):
        change = CHANGES[old]
        if change.upgrade is None:
            raise OverrideError(
                f"{where}: version {version}, and this hyperpar reads {VERSION}. Since version {old}: {change.text}\n"
                "  Make a plan anew with build_plan; edit an override file as said, and write its new version."
            )
        data = {**change.upgrade(data), "version": old + 1}
    return data


def _readable() -> str:
    return "1" if VERSION == 1 else f"1 to {VERSION}"
