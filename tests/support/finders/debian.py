"""Programs out of Debian's packages, for tests that need a real one: unpacked into a cache, never installed.

apt-get fetches and dpkg unpacks; neither needs root, and nothing of this system is changed.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from find_llama_server import default_cache, is_program, missing

from tests.support.finders.find_mlx import NotFound

TIMEOUT_S = 120.0


def find(package: str, programs: Sequence[str], cache: Path | None = None, *, install_it: bool = True) -> Path:
    """Absolute path of a directory that has all of the programs in it, e.g. usr/bin/sudo; `/` where they are installed.

    Else the package is unpacked into the cache, once. Raises NotFound.
    """
    if _complete(Path("/"), programs):
        return Path("/")
    root = (cache or default_cache()).expanduser().absolute()
    target = root / package
    if not _complete(target, programs):
        if not install_it:
            raise missing(package)
        if not (shutil.which("apt-get") and shutil.which("dpkg")):
            raise NotFound(f"there is no {package} here, and no apt-get to fetch one with")
        root.mkdir(parents=True, exist_ok=True)
        with open(root / f".{package}-lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not _complete(target, programs):
                _fetch(package, programs, target)
    return target


def _complete(directory: Path, programs: Sequence[str]) -> bool:
    return all(is_program(directory / program) for program in programs)


def _fetch(package: str, programs: Sequence[str], target: Path) -> None:
    """Makes the directory, whole or not at all; hold the lock. Raises NotFound."""
    with tempfile.TemporaryDirectory(prefix=f".{package}-part-", dir=target.parent) as part:
        run(["apt-get", "download", "-q", package], part)
        for found in Path(part).glob("*.deb"):
            run(["dpkg", "-x", str(found), f"{part}/out"], part)
        for program in programs:
            (Path(part) / "out" / program).chmod(0o755)
        if not _complete(Path(part) / "out", programs):
            raise NotFound(f"the package of {package} has no {' or no '.join(programs)}")
        shutil.rmtree(target, ignore_errors=True)
        (Path(part) / "out").rename(target)


def run(command: list[str], directory: str | None = None, timeout_s: float = TIMEOUT_S) -> None:
    """Runs a command of Debian's that asks nobody anything. Raises NotFound with its last words."""
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    try:
        done = subprocess.run(
            command,
            cwd=directory,
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotFound(f"{' '.join(command)}: {error}") from None
    if done.returncode:
        raise NotFound(f"{' '.join(command)} failed: {done.stderr.strip()[-300:]}")
