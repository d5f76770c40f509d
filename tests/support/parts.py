"""Programs that tests need beside the product: looked for here, and installed beforehand by finders/prepare.py."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from find_llama_server import NotFound

from tests.support.finders.find_mlx import MARK


def found(find: Callable[..., Path]) -> Path:
    """Absolute path of a program; skips the test, with the reason, where it is missing.

    `find`: that of one of finders/find_*.py.
    """
    try:
        return find(install_it=False)
    except NotFound as error:
        pytest.skip(str(error))


ASKED = ("--help", "serve --help", "--version")
REMEMBERED = """
import sys
if (said := {said!r}.get(" ".join(sys.argv[1:]))) is not None:
    sys.stdout.write(said[1])
    sys.stderr.write(said[2])
    sys.exit(said[0])
"""


def quick(script: Path) -> Path:
    """A copy of a script, which says from memory what it says of itself: it imports its libraries for a second first.

    It is kept in the script's environment, which never changes. A script of another environment is left as it is.
    """
    home = script.parents[1]
    path = home / "quick" / script.name
    if path.exists() or not (home / MARK).exists():
        return path if path.exists() else script
    said = {}
    for words in ASKED:
        done = subprocess.run([str(script), *words.split()], capture_output=True, text=True, timeout=120)
        said[words] = done.returncode, done.stdout, done.stderr
    shebang, _, rest = script.read_text().partition("\n")
    path.parent.mkdir(exist_ok=True)
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.write_text(f"{shebang}{REMEMBERED.format(said=said)}{rest}")
    new.chmod(0o755)
    return new.replace(path)
