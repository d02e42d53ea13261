"""Makes `linear_tools` importable for the tests here, and for the ranks that run their functions."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
