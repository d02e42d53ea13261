"""Makes `core_tools` and the helpers here importable for the tests, and for the ranks that run their functions."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / "core"), str(Path(__file__).parent)]
