"""The tests, run from a checkout; `tests/support` has what they stand on."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))  # tools are scripts, not a package
