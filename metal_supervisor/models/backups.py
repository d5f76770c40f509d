"""Exclude fetched models from Time Machine: hundreds of gigabytes that can be fetched again fill its disk in a night.

Temporary directories are detected as well, because macOS empties them.
"""

from __future__ import annotations

import functools
import sys
import tempfile
from pathlib import Path

from metal_supervisor.host import commands

TMUTIL = "/usr/bin/tmutil"
TIMEOUT_S = 10.0
TEMPORARY = ("/tmp", "/private/tmp", "/var/tmp", "/private/var/tmp", "/var/folders", "/private/var/folders")


@functools.cache
def exclude(directory: Path, run: commands.Runner = commands.run, platform: str = sys.platform) -> None:
    """Exclude a directory from Time Machine, also after it is moved.

    Done once in each process. A failure is ignored: it is no reason not to fetch a model.
    """
    if platform == "darwin":
        run((TMUTIL, "addexclusion", str(directory)), TIMEOUT_S)


def is_temporary(directory: Path) -> bool:
    """True if a directory is in a place that the system empties."""
    found = {Path(each) for each in (*TEMPORARY, tempfile.gettempdir())}
    return any(directory.is_relative_to(each) or directory.resolve().is_relative_to(each.resolve()) for each in found)
