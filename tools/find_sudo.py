#!/usr/bin/env python3
"""Tests ask a real sudo what a rule allows, and a container seldom has one.

Prints the absolute path of a directory that has usr/bin/sudo and usr/sbin/visudo in it (diagnostics go to stderr):
`/` where sudo is installed, else what is in Debian's package, which apt-get fetches into `$METAL_SUPERVISOR_CACHE`,
else into `~/.cache/metal-supervisor/engines`: 7 MB, once. Nothing is installed, and none of it is set-user-ID.

    python tools/find_sudo.py
"""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from find_llama_server import default_cache, is_program
from find_mlx import NotFound, main

PROGRAMS = "usr/bin/sudo", "usr/sbin/visudo"
TIMEOUT_S = 120.0


def find(cache: Path | None = None) -> Path:
    """Absolute path of a directory with sudo in it. Raises NotFound."""
    if _has_sudo(Path("/")):
        return Path("/")
    root = (cache or default_cache()).expanduser().absolute()
    target = root / "sudo"
    if not _has_sudo(target):
        if not (shutil.which("apt-get") and shutil.which("dpkg")):
            raise NotFound("there is no sudo here, and no apt-get to fetch one with")
        root.mkdir(parents=True, exist_ok=True)
        with open(root / ".sudo-lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not _has_sudo(target):
                _fetch(target)
    return target


def _has_sudo(directory: Path) -> bool:
    return all(is_program(directory / program) for program in PROGRAMS)


def _fetch(target: Path) -> None:
    """Makes the directory, whole or not at all; hold the lock. Raises NotFound."""
    with tempfile.TemporaryDirectory(prefix=".sudo-part-", dir=target.parent) as part:
        _run(["apt-get", "download", "-q", "sudo"], part)
        for package in Path(part).glob("*.deb"):
            _run(["dpkg", "-x", str(package), f"{part}/out"], part)
        for program in PROGRAMS:
            (Path(part) / "out" / program).chmod(0o755)
        if not _has_sudo(Path(part) / "out"):
            raise NotFound(f"the package of sudo has no {' or no '.join(PROGRAMS)}")
        shutil.rmtree(target, ignore_errors=True)
        (Path(part) / "out").rename(target)


def _run(command: list[str], directory: str) -> None:
    try:
        done = subprocess.run(
            command, cwd=directory, capture_output=True, text=True, timeout=TIMEOUT_S, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotFound(f"{' '.join(command)}: {error}") from None
    if done.returncode:
        raise NotFound(f"{' '.join(command)} failed: {done.stderr.strip()[-300:]}")


if __name__ == "__main__":
    sys.exit(main(sys.argv, __doc__, find))
