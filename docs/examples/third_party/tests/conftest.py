"""Rank processes as fixtures."""

from hyperpar_core.testing.pytest_plugin import *  # noqa: F403
