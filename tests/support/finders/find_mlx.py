#!/usr/bin/env python3
"""Tests need a real mlx_lm.server, which is a hundred packages that nobody wants beside their own.

Prints the absolute path of one that works here, in a virtual environment of its own that is made the first time
(diagnostics go to stderr). The first of:

1. `$METAL_SUPERVISOR_MLX_LM_SERVER`, if set; then nothing else is tried;
2. what `tools/locks/mlx.txt` names, in `$METAL_SUPERVISOR_CACHE`, else in `~/.cache/metal-supervisor/engines`: 350 MB,
   made by pip in a minute.

Several callers at once are safe, and so is killing it: an environment counts once it carries its mark.

    python -m tests.support.finders.find_mlx
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import locked
from find_llama_server import INSTALL_TIMEOUT_S, NotFound, default_cache, is_program, missing

MLX = ("mlx==0.32.4 ; sys_platform == 'darwin'", "mlx[cpu]==0.32.4 ; sys_platform == 'linux'")
PACKAGES = ("mlx-lm==0.32.2", *MLX)
"""What tests/support/finders/lock.py locks, with all that these need."""
LOCK = "mlx"
PYTHON = "3.11"
"""mlx-lm is for this one and newer."""
MARK = "complete"
VARIABLE = "METAL_SUPERVISOR_MLX_LM_SERVER"


def say(text: str) -> None:
    print(f"find_mlx: {text}", file=sys.stderr, flush=True)


def find(cache: Path | None = None, *, install_it: bool = True) -> Path:
    """Absolute path of an mlx_lm.server, installed into the cache if need be. Raises NotFound."""
    return program("mlx_lm.server", "mlx_lm", VARIABLE, LOCK, cache, install_it)


def program(name: str, part: str, variable: str, lock: str, cache: Path | None, install_it: bool) -> Path:
    """Absolute path of a program of Python packages, in an environment of its own that a file in tools/locks describes.

    `part`: its name in tests/support/finders/prepare.py. Raises NotFound.
    """
    if named := os.environ.get(variable):
        path = Path(named).expanduser().absolute()
        if not is_program(path):
            raise NotFound(f"{variable}={named} is not an executable file")
        return path
    root = (cache or default_cache()).expanduser().absolute()
    version = f"py{sys.version_info.major}{sys.version_info.minor}"
    home = root / f"{lock}-{locked.digest(lock)}-{version}"
    if not (home / MARK).is_file():
        if not install_it:
            raise missing(part)
        root.mkdir(parents=True, exist_ok=True)
        # A lock of its own: whoever waits for a llama-server need not wait for this.
        with open(root / f".{name}-lock", "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if not (home / MARK).is_file():
                _install(home, variable, lock)
    return home / "bin" / name


def _install(home: Path, variable: str, lock: str) -> None:
    """Makes the environment, in its place: its scripts name its path. Raises NotFound."""
    wanted = f"{locked.LOCKS}/{lock}.txt"
    say(f"installing {wanted}, once")
    shutil.rmtree(home, ignore_errors=True)
    # The interpreter behind a virtual environment, because the cache outlives the checkout that the environment is in.
    python = getattr(sys, "_base_executable", None) or sys.executable
    # The pip of this environment fills the other: to put one into each takes three seconds.
    pip = [sys.executable, "-m", "pip", "--python", str(home / "bin" / "python"), "install"]
    pip += ["--quiet", "--disable-pip-version-check", "--no-input"]
    # The lock has all that is needed; some of what oMLX's packages ask for besides is left out of it.
    checked = [*pip, *locked.CHECKED, "--no-deps", "-r", str(locked.path(lock))]
    commands = [[python, "-m", "venv", "--without-pip", str(home)], checked]
    for command in commands:
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=False)
            why = locked.reason(done.stderr) if done.returncode else ""
        except (OSError, subprocess.TimeoutExpired) as error:
            why = f"{type(error).__name__}: {error}"
        if why:
            with contextlib.suppress(OSError):
                shutil.rmtree(home)
            raise NotFound(f"pip could not install {wanted} ({why}); install it, and set {variable}")
    (home / MARK).touch()


def main(argv: list[str], doc: str | None, find: Callable[[], Path]) -> int:
    """The command line of a program that finds one: `doc` is its help."""
    if len(argv) > 1:
        print(doc, file=sys.stderr)
        return 0 if argv[1:] in (["-h"], ["--help"]) else 2
    try:
        print(find())
    except NotFound as error:
        print(f"{Path(argv[0]).stem}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv, __doc__, find))
