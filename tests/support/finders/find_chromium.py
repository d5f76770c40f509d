#!/usr/bin/env python3
"""Tests look at the page in a real browser, and not every machine has one.

Prints the absolute path of a Chromium or Chrome (diagnostics go to stderr): `$METAL_SUPERVISOR_CHROMIUM`, else one that
is installed, else, for root on Debian, the package `chromium`, which apt-get installs: 400 MB, once.

    python -m tests.support.finders.find_chromium
"""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
import tempfile
from pathlib import Path

from find_llama_server import is_program, missing, say

from tests.support.finders import debian
from tests.support.finders.find_mlx import NotFound, main

NAMES = "chromium", "chromium-browser", "google-chrome", "google-chrome-stable"
APPLICATIONS = (
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
    "/Applications/Chromium.app/Contents/MacOS/Chromium",
)
TIMEOUT_S = 600.0


def find(*, install_it: bool = True) -> Path:
    """Absolute path of a browser. Raises NotFound."""
    if named := os.environ.get("METAL_SUPERVISOR_CHROMIUM"):
        if not is_program(Path(named)):
            raise NotFound(f"METAL_SUPERVISOR_CHROMIUM={named} is not an executable file")
        return Path(named)
    if found := _installed():
        return found
    if not install_it:
        raise missing("chromium")
    if not shutil.which("apt-get") or os.getuid() != 0:
        raise NotFound("there is no Chromium here; install one (on Debian: apt-get install chromium)")
    with open(Path(tempfile.gettempdir(), "find-chromium.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not _installed():
            say("installing chromium")
            debian.run(["apt-get", "update", "-q"], timeout_s=TIMEOUT_S)
            packages = "chromium", "fonts-dejavu-core"
            debian.run(["apt-get", "install", "-y", "-q", "--no-install-recommends", *packages], timeout_s=TIMEOUT_S)
    if found := _installed():
        return found
    raise NotFound("the package chromium has no program of that name")


def _installed() -> Path | None:
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    return Path(found) if found else next((Path(path) for path in APPLICATIONS if is_program(Path(path))), None)


if __name__ == "__main__":
    sys.exit(main(sys.argv, __doc__, find))
