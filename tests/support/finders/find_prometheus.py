#!/usr/bin/env python3
"""What a Prometheus makes of our metrics, alerts and dashboard only a real one can tell.

Prints the absolute path of a directory that has usr/bin/prometheus and usr/bin/promtool in it (diagnostics go to
stderr): `/` where they are installed, else what is in Debian's package, which apt-get fetches into
`$METAL_SUPERVISOR_CACHE`, else into `~/.cache/metal-supervisor/engines`, once. Nothing is installed.

    python -m tests.support.finders.find_prometheus
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.support.finders import debian
from tests.support.finders.find_mlx import NotFound, main

__all__ = ["NotFound", "find"]

PROGRAMS = "usr/bin/prometheus", "usr/bin/promtool"


def find(cache: Path | None = None, *, install_it: bool = True) -> Path:
    """Absolute path of a directory with Prometheus and promtool in it. Raises NotFound."""
    return debian.find("prometheus", PROGRAMS, cache, install_it=install_it)


if __name__ == "__main__":
    sys.exit(main(sys.argv, __doc__, find))
