"""Every error that hyperpar raises. All of them are `HyperparError`.

An error names the module, the number, what was declared, what was needed and what to do, in at most about eight lines.
"""

from __future__ import annotations

__all__ = [
    "ApplyError",
    "CheckpointError",
    "HyperparError",
    "OverrideError",
    "PlacementMismatch",
    "PlanError",
    "PluginError",
    "RankMismatch",
    "Refused",
]


class HyperparError(Exception):
    """The base of all errors of hyperpar."""


class PluginError(HyperparError):
    """A plugin is missing, broken, or offers something that can't be used."""


class PlanError(HyperparError):
    """The model, the mesh and the overrides don't make a plan."""


class OverrideError(PlanError):
    """An override entry or a plan file is malformed, or hits nothing."""


class Refused(PlanError):
    """The input is right, but it can't be parallelised rightly so. The text has a cause and what would work."""


class ApplyError(HyperparError):
    """A plan can't be put on this model, or a planned model is used in a way that it doesn't support."""


class CheckpointError(HyperparError):
    """A checkpoint or a folder of weights can't be written, or doesn't fit what it is read into."""


class PlacementMismatch(HyperparError):
    """Validate mode: a region yields another placement than its contract declares."""


class RankMismatch(HyperparError):
    """Ranks hold different plans, plugins, versions or weights, or one of them refused."""
