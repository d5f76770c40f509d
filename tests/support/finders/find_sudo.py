#!/usr/bin/env python3
"""Tests ask a real sudo what a rule allows, and a container seldom has one.

Prints the absolute path of a directory that has usr/bin/sudo and usr/sbin/visudo in it (diagnostics go to stderr):
`/` where sudo is installed, else what is in Debian's package, which apt-get fetches into `$METAL_SUPERVISOR_CACHE`,
else into `~/.cache/metal-supervisor/engines`: 7 MB, once. Nothing is installed, and none of it is set-user-ID.

    python -m tests.support.finders.find_sudo
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.support.finders import debian
from tests.support.finders.find_mlx import NotFound, main

__all__ = ["NotFound", "find"]

PROGRAMS = "usr/bin/sudo", "usr/sbin/visudo"


def find(cache: Path | None = None, *, install_it: bool = True) -> Path:
    """Absolute path of a directory with sudo in it. Raises NotFound."""
    return debian.find("sudo", PROGRAMS, cache, install_it=install_it)


if __name__ == "__main__":
    sys.exit(main(sys.argv, __doc__, find))
