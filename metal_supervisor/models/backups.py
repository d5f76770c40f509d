"""Exclude fetched models from Time Machine: hundreds of gigabytes that can be fetched again fill its disk in a night.

Temporary directories are detected as well, because macOS empties them.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

TMUTIL = "/usr/bin/tmutil"
TIMEOUT_S = 10.0
TEMPORARY = ("/tmp", "/private/tmp", "/var/tmp", "/private/var/tmp", "/var/folders", "/private/var/folders")


def exclude(
    directory: Path, run: Callable[..., Any] = subprocess.run, platform: str = sys.platform
) -> Sequence[str] | None:
    """Exclude a directory from Time Machine, also after it is moved. Returns the command, None if none could be run.

    A failure is ignored: it is no reason not to fetch a model.
    """
    if platform != "darwin":
        return None
    command = (TMUTIL, "addexclusion", str(directory))
    try:
        run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return command


def is_temporary(directory: Path) -> bool:
    """True if a directory is in a place that the system empties."""
    found = {Path(each) for each in (*TEMPORARY, tempfile.gettempdir())}
    return any(directory.is_relative_to(each) or directory.resolve().is_relative_to(each.resolve()) for each in found)
