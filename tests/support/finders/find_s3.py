#!/usr/bin/env python3
"""Tests need a real S3 server, one that checks signatures itself, and no package registry has one ready to run.

Prints the absolute path of a Versity S3 gateway that works here (diagnostics go to stderr). The first of:

1. `$METAL_SUPERVISOR_VERSITYGW`, if set; then nothing else is tried;
2. `versitygw` on PATH, or in Homebrew's prefixes;
3. a build of its Go module in `$METAL_SUPERVISOR_CACHE`, else in `~/.cache/metal-supervisor/engines`: 45 MB that Go
   makes in two minutes, once.

    python -m tests.support.finders.find_s3
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.support.finders import go_program
from tests.support.finders.find_mlx import NotFound, main

__all__ = ["NotFound", "find"]

VARIABLE = "METAL_SUPERVISOR_VERSITYGW"
PROGRAM = go_program.Program(
    "versitygw",
    "an S3 server",
    "github.com/versity/versitygw",
    "v1.8.0",
    "h1:au+wI+aybno/STsQiSm35Uu6Q6iK5MWReQxgO6SEMFc=",
    VARIABLE,
)


def find(cache: Path | None = None, *, install_it: bool = True) -> Path:
    """Absolute path of a versitygw, built into the cache if need be. Raises NotFound."""
    return go_program.find(PROGRAM, cache, install_it=install_it)


if __name__ == "__main__":
    sys.exit(main(sys.argv, __doc__, find))
