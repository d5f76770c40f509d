"""An output in memory that claims to be a terminal of some width."""

from __future__ import annotations

import io
import os
import re

import pytest

from metal_supervisor.cli import render

SEQUENCE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class SizedTerminal(io.StringIO):
    """Output that claims to be a terminal."""

    def __init__(self, patch: pytest.MonkeyPatch, columns: int = 100) -> None:
        super().__init__()
        self._patch = patch
        patch.setenv("TERM", "xterm-256color")
        for name in ("NO_COLOR", "FORCE_COLOR"):
            patch.delenv(name, raising=False)
        self.resize(columns)

    def resize(self, columns: int, lines: int = 24) -> None:
        """Give it another size."""
        self._patch.setattr(render, "size_of", lambda _: os.terminal_size((columns, lines)))

    def isatty(self) -> bool:
        return True

    def fresh(self) -> str:
        """What came since the last call, without the sequences that erase, colour or move."""
        text = SEQUENCE.sub("", self.getvalue())
        self.seek(0)
        self.truncate()
        return text
