"""Programs that tests need beside the product: looked for here, and installed beforehand by finders/prepare.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from find_llama_server import NotFound


def found(find: Callable[..., Path]) -> Path:
    """Absolute path of a program; skips the test, with the reason, where it is missing.

    `find`: that of one of finders/find_*.py.
    """
    try:
        return find(install_it=False)
    except NotFound as error:
        pytest.skip(str(error))
