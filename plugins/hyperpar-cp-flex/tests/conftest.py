"""Puts this folder's helper modules, and those of the distribution that this one builds on, where tests and ranks can import them."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "hyperpar-cp-sdpa" / "tests")]
