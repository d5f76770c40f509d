"""Programs that Go builds once out of a pinned module, for tests that need a real one.

Go's caches for a build are hundreds of megabytes that nothing needs again, so they are in a directory of their own,
which goes away. Several callers at once are safe (one builds, the others wait), and so is killing it: the program
appears whole or not at all.
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
from dataclasses import dataclass
from pathlib import Path

from find_llama_server import HOMEBREW, NotFound, default_cache, is_program, missing

from tests.support.kube.kube_guard import Guard

TIMEOUT_S = 1200.0


@dataclass(frozen=True)
class Program:
    """One program, and where it comes from."""

    name: str
    what: str
    """What it is, with an article."""
    module: str
    version: str
    checksum: str
    """Of the module; what it needs in turn is in its own go.sum."""
    variable: str
    """Names another one, which is then taken."""


def find(program: Program, cache: Path | None = None, *, install_it: bool = True) -> Path:
    """Absolute path: the one that the variable names, else one on PATH or Homebrew's, else a build. Raises NotFound."""
    if named := os.environ.get(program.variable):
        path = Path(named).expanduser().absolute()
        if not is_program(path):
            raise NotFound(f"{program.variable}={named} is not an executable file")
        return path
    if found := shutil.which(program.name, path=os.pathsep.join([os.environ.get("PATH", os.defpath), *HOMEBREW])):
        return Path(found).absolute()
    root = (cache or default_cache()).expanduser().absolute()
    built = root / f"{program.name}-{program.version}" / program.name
    if not is_program(built):
        if not install_it:
            raise missing(program.name)
        if not shutil.which("go"):
            advice = f"install it, or {program.name}, and set {program.variable}"
            raise NotFound(f"there is no go here to build {program.what} with; {advice}")
        with _locked(root, program.name):
            if not is_program(built):
                build(program, built.parent)
    return built


def say(text: str) -> None:
    print(f"go_program: {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _locked(root: Path, name: str) -> Iterator[None]:
    """One builder at a time; whatever a killed one left is removed first."""
    root.mkdir(parents=True, exist_ok=True)
    with open(root / f".{name}-lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for left in root.glob(f".{name}-part-*"):
            shutil.rmtree(left, ignore_errors=True)
        yield


def build(program: Program, target: Path) -> None:
    """Makes the directory `target` with the program in it; hold the lock. Raises NotFound."""
    say(f"building {program.module} {program.version}, once")
    started_s = time.monotonic()
    part = Path(tempfile.mkdtemp(prefix=f".{program.name}-part-", dir=target.parent))
    try:
        advice = f"install {program.name}, and set {program.variable}"
        said = run(["go", "mod", "download", "-json", f"{program.module}@{program.version}"], part, part, advice)
        told = json.loads(said[said.find("{") :])
        if (found := told.get("Sum")) != program.checksum:
            module = f"{program.module} {program.version}"
            raise NotFound(f"{module} has the checksum {found}, which is not {program.checksum}")
        out = part / "out"
        command = ["nice", "-n", "10", "go", "build", "-trimpath", "-ldflags", "-s -w", "-o", f"{out}{os.sep}"]
        run([*command, f"./cmd/{program.name}"], part, Path(told["Dir"]), advice)
        if not is_program(out / program.name):
            raise NotFound(f"{' '.join(command)} made no program")
        shutil.rmtree(target, ignore_errors=True)
        out.rename(target)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    size_mib = (target / program.name).stat().st_size >> 20
    say(f"built in {time.monotonic() - started_s:.0f} s, {size_mib} MiB")


def run(command: list[str], part: Path, cwd: Path, advice: str, timeout_s: float = TIMEOUT_S, **more: str) -> str:
    """Standard output of a command that is killed with us. Raises NotFound with the advice and its last lines.

    `part`: directory of all that it writes; `more`: variables of its environment beside Go's.
    """
    environment = {
        **os.environ,
        "CGO_ENABLED": "0",
        **more,
        "GOTOOLCHAIN": "local",
        "GOWORK": "off",
        "GOFLAGS": "-mod=readonly -modcacherw -buildvcs=false",
        "GOCACHE": str(part / "cache"),
        "GOMODCACHE": str(part / "modules"),
        "GOTMPDIR": str(part),
    }
    log = part / "log"
    log.write_bytes(b"")
    guard = Guard()
    try:
        code = guard.start(command, log, cwd=cwd, env=environment).wait(timeout_s)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotFound(f"{' '.join(command)}: {error}") from None
    finally:
        guard.close()
    said = log.read_text("utf-8", "replace")
    if code != 0:
        last = "\n".join(said.strip().splitlines()[-20:])
        raise NotFound(f"{' '.join(command)} failed; {advice}:\n{last}")
    return said
