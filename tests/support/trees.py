"""Directories nested more deeply than a path can name."""

from __future__ import annotations

import os
from pathlib import Path


def nest(top: Path, depth: int) -> None:
    """Make so many directories, one in the other; the first is `top`."""
    top.mkdir()
    inner = os.open(top, os.O_RDONLY)
    for _ in range(depth - 1):
        os.mkdir("d", dir_fd=inner)
        outer, inner = inner, os.open("d", os.O_RDONLY, dir_fd=inner)
        os.close(outer)
    os.close(inner)
