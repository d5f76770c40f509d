#!/usr/bin/env python3
"""Tests hold what we know of macOS against Apple's own headers, which the Zig compiler brings along.

Prints the absolute path of a `zig` (diagnostics go to stderr): `$METAL_SUPERVISOR_ZIG`, else that of PACKAGE in
`$METAL_SUPERVISOR_CACHE`, else in `~/.cache/metal-supervisor/engines`: 380 MB, once. With it comes what it links
programs for macOS with, which takes it half a minute to make: in the directory CACHE beside it.

    python -m tests.support.finders.find_zig
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from find_llama_server import Cache, Unusable, appearing, default_cache, is_program, missing, pip_install

from tests.support.finders.find_mlx import NotFound, main

PACKAGE = "ziglang==0.15.2"
"""Its headers are those of macOS 15.5."""
VARIABLE = "METAL_SUPERVISOR_ZIG"
CACHE = "cache"
TARGETS = "aarch64-macos", "x86_64-macos"
LINKED = "-nostdlib", "-lSystem", "-shared"
TIMEOUT_S = 600.0


def find(cache: Path | None = None, *, install_it: bool = True) -> Path:
    """Absolute path of a zig, installed into the cache if need be. Raises NotFound."""
    if named := os.environ.get(VARIABLE):
        if not is_program(Path(named)):
            raise NotFound(f"{VARIABLE}={named} is not an executable file")
        return Path(named)
    root = (cache or default_cache()).expanduser().absolute()
    home = root / PACKAGE.replace("==", "-")
    zig = home / "ziglang" / "zig"
    if not is_program(zig):
        if not install_it:
            raise missing("zig")
        with Cache(root).locked():
            if not is_program(zig):
                _install(home)
    return zig


def command(zig: Path, target: str, *arguments: str) -> list[str]:
    """A compiler of C for one of TARGETS."""
    return [str(zig), "cc", "-target", target, "-Wall", "-Werror", *arguments]


def environment(zig: Path) -> dict[str, str]:
    """Variables by which zig uses what has been made for it."""
    made = str(zig.parent.parent / CACHE)
    return {**os.environ, "ZIG_GLOBAL_CACHE_DIR": made, "ZIG_LOCAL_CACHE_DIR": made}


def _install(home: Path) -> None:
    """Makes the directory, whole or not at all; hold the lock. Raises NotFound."""
    try:
        with appearing(home) as part:
            pip_install("zig", part)
            zig, source = part / "ziglang" / "zig", part / "empty.c"
            source.write_text("int empty;\n")
            for target in TARGETS:
                done = subprocess.run(
                    command(zig, target, *LINKED, str(source), "-o", str(part / "empty")),
                    env=environment(zig),
                    capture_output=True,
                    text=True,
                    timeout=TIMEOUT_S,
                )
                if done.returncode != 0:
                    raise NotFound(f"{PACKAGE} cannot link for {target}: {done.stderr.strip()[-300:]}")
    except (OSError, Unusable, subprocess.TimeoutExpired) as error:
        raise NotFound(f"{PACKAGE}: {error}; install Zig, and set {VARIABLE}") from None


if __name__ == "__main__":
    sys.exit(main(sys.argv, __doc__, find))
