#!/usr/bin/env python3
"""Tests need a real S3 server, one that checks signatures itself, and no package registry has one ready to run.

Prints the absolute path of a Versity S3 gateway that works here (diagnostics go to stderr). The first of:

1. `$METAL_SUPERVISOR_VERSITYGW`, if set; then nothing else is tried;
2. `versitygw` on PATH, or in Homebrew's prefixes;
3. a build of MODULE in `$METAL_SUPERVISOR_CACHE`, else in `~/.cache/metal-supervisor/engines`: 45 MB that Go makes in
   two minutes, once.

Go's caches for it are 750 MB that nobody needs again, so they are in a directory of their own, which goes away. Several
callers at once are safe (one builds, the others wait), and so is killing it: the program appears whole or not at all.

    python tools/find_s3.py
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from find_llama_server import HOMEBREW, default_cache, is_program, missing
from find_mlx import NotFound, main
from kube_guard import Guard

MODULE, VERSION = "github.com/versity/versitygw", "v1.8.0"
CHECKSUM = "h1:au+wI+aybno/STsQiSm35Uu6Q6iK5MWReQxgO6SEMFc="
"""Of the module; what it needs in turn is in its own go.sum."""
NAME = "versitygw"
VARIABLE = "METAL_SUPERVISOR_VERSITYGW"
TIMEOUT_S = 1200.0


def say(text: str) -> None:
    print(f"find_s3: {text}", file=sys.stderr, flush=True)


def find(cache: Path | None = None, *, install_it: bool = True) -> Path:
    """Absolute path of a versitygw, built into the cache if need be. Raises NotFound."""
    if named := os.environ.get(VARIABLE):
        path = Path(named).expanduser().absolute()
        if not is_program(path):
            raise NotFound(f"{VARIABLE}={named} is not an executable file")
        return path
    if found := shutil.which(NAME, path=os.pathsep.join([os.environ.get("PATH", os.defpath), *HOMEBREW])):
        return Path(found).absolute()
    root = (cache or default_cache()).expanduser().absolute()
    program = root / f"{NAME}-{VERSION}" / NAME
    if not is_program(program):
        if not install_it:
            raise missing(NAME)
        if not shutil.which("go"):
            raise NotFound(f"there is no go here to build an S3 server with; install it, or {NAME}, and set {VARIABLE}")
        with _locked(root):
            if not is_program(program):
                build(program.parent)
    return program


@contextlib.contextmanager
def _locked(root: Path) -> Iterator[None]:
    """One builder at a time; whatever a killed one left is removed first."""
    root.mkdir(parents=True, exist_ok=True)
    with open(root / ".s3-lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for left in root.glob(".s3-part-*"):
            shutil.rmtree(left, ignore_errors=True)
        yield


def build(target: Path) -> None:
    """Makes the directory `target` with the program in it; hold the lock. Raises NotFound."""
    say(f"building {MODULE} {VERSION} (once, two minutes)")
    started_s = time.monotonic()
    part = Path(tempfile.mkdtemp(prefix=".s3-part-", dir=target.parent))
    try:
        said = _run(["go", "mod", "download", "-json", f"{MODULE}@{VERSION}"], part, part)
        told = json.loads(said[said.find("{") :])
        if told.get("Sum") != CHECKSUM:
            raise NotFound(f"{MODULE} {VERSION} has the checksum {told.get('Sum')}, which is not {CHECKSUM}")
        out = part / "out"
        command = ["nice", "-n", "10", "go", "build", "-trimpath", "-ldflags", "-s -w", "-o", f"{out}{os.sep}"]
        _run([*command, f"./cmd/{NAME}"], part, Path(told["Dir"]))
        if not is_program(out / NAME):
            raise NotFound(f"{' '.join(command)} made no program")
        shutil.rmtree(target, ignore_errors=True)
        out.rename(target)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    say(f"built in {time.monotonic() - started_s:.0f} s, {(target / NAME).stat().st_size >> 20} MiB")


def _run(command: list[str], part: Path, cwd: Path) -> str:
    """Standard output of a command that is killed with us. Raises NotFound with its last lines."""
    environment = {
        **os.environ,
        "CGO_ENABLED": "0", "GOTOOLCHAIN": "local", "GOWORK": "off",
        "GOFLAGS": "-mod=readonly -modcacherw -buildvcs=false",
        "GOCACHE": str(part / "cache"), "GOMODCACHE": str(part / "modules"), "GOTMPDIR": str(part),
    }  # fmt: skip
    log = part / "log"
    log.write_bytes(b"")
    guard = Guard()
    try:
        code = guard.start(command, log, cwd=cwd, env=environment).wait(TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotFound(f"{' '.join(command)}: {error}") from None
    finally:
        guard.close()
    said = log.read_text("utf-8", "replace")
    if code != 0:
        last = "\n".join(said.strip().splitlines()[-20:])
        raise NotFound(f"{' '.join(command)} failed; install {NAME}, and set {VARIABLE}:\n{last}")
    return said


if __name__ == "__main__":
    sys.exit(main(sys.argv, __doc__, find))
