"""How many cases are tried by tests that could go on for ever.

They are the same in every run, so all of them are for CI (`METAL_EFFORT=all`), and for whoever changes what they try;
`make test` has the first tenth: somewhat more where each is a process, less where that is known to be enough.
"""

from __future__ import annotations

import os

ALL = os.environ.get("METAL_EFFORT") == "all"


def cases(count: int, share: int = 10) -> int:
    """How many of so many are tried here and now: all, or one in `share`."""
    return count if ALL else max(1, count // share)
