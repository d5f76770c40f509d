#!/usr/bin/env python3
"""Clients that people have, and twine, which judges what is to be published: many packages that none of ours needs.

Prints the absolute path of a Python that has them, in a virtual environment of its own that is made the first time
(430 MB; diagnostics go to stderr). The first of:

1. `$METAL_SUPERVISOR_CLIENTS`, if set; then nothing else is tried;
2. what `tools/locks/clients.txt` names, in `$METAL_SUPERVISOR_CACHE`, else in `~/.cache/metal-supervisor/engines`.

    python -m tests.support.finders.find_clients
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.support.finders.find_mlx import NotFound, main, program

__all__ = ["NotFound", "find"]

VARIABLE = "METAL_SUPERVISOR_CLIENTS"
LOCK = "clients"
PACKAGES = ("langchain-openai>=1", "litellm>=1.70", "twine>=6")
"""What tests/support/finders/lock.py locks, with all that these need."""


def find(cache: Path | None = None, *, install_it: bool = True) -> Path:
    """Absolute path of the Python, installed into the cache if need be. Raises NotFound."""
    return program("python", "clients", VARIABLE, LOCK, cache, install_it)


if __name__ == "__main__":
    sys.exit(main(sys.argv, __doc__, find))
