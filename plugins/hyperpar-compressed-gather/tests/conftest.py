"""Rank pools for the tests here, and this folder where the ranks can import from."""

import sys
from pathlib import Path

from hyperpar_core.testing.pytest_plugin import *  # noqa: F403

sys.path.insert(0, str(Path(__file__).parent))
