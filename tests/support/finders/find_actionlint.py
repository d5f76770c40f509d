#!/usr/bin/env python3
"""Workflows of GitHub are checked where nothing runs them: by actionlint, which Go builds out of its module.

Prints the absolute path of one (diagnostics go to stderr): `$METAL_SUPERVISOR_ACTIONLINT`, else `actionlint` on PATH or
in Homebrew's prefixes, else a build in `$METAL_SUPERVISOR_CACHE`, else in `~/.cache/metal-supervisor/engines`: 8 MB, in
a quarter of a minute, once.

    python -m tests.support.finders.find_actionlint
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.support.finders import go_program
from tests.support.finders.find_mlx import NotFound, main

__all__ = ["NotFound", "find"]

PROGRAM = go_program.Program(
    "actionlint",
    "a checker of workflows",
    "github.com/rhysd/actionlint",
    "v1.7.8",
    "h1:3d+N9ourgAxVYG4z2IFxFIk/YiT6V+VnKASfXGwT60E=",
    "METAL_SUPERVISOR_ACTIONLINT",
)


def find(cache: Path | None = None, *, install_it: bool = True) -> Path:
    """Absolute path of an actionlint, built into the cache if need be. Raises NotFound."""
    return go_program.find(PROGRAM, cache, install_it=install_it)


if __name__ == "__main__":
    sys.exit(main(sys.argv, __doc__, find))
