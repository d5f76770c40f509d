"""Programs that tests need beside the product: looked for here, tools/prepare.py installs them beforehand."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

from find_llama_server import NotFound


def found(find: Callable[..., Path]) -> Path:
    """Absolute path of a program; skips the test, with the reason, where it is missing.

    `find`: that of one of tools/find_*.py.
    """
    try:
        return find(install_it=False)
    except NotFound as error:
        pytest.skip(str(error))
