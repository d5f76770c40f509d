"""Text made fit for a terminal: harmless, and in columns.

Servers, users and engines write what is shown, so none of it may move the cursor or colour what follows.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence


def printable(text: str) -> str:
    """Fit for a terminal: no character that moves the cursor, colours, or turns the writing round."""
    return text if text.isprintable() else "".join(char if char.isprintable() else "?" for char in text)


def shortened(text: str, longest: int) -> str:
    """A text made printable and cut to `longest` characters, with `…` at the cut."""
    return printable(text if len(text) <= longest else f"{text[: longest - 1]}…")


def escaped(text: str) -> str:
    """The text on one line, without control sequences."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def cells(text: str) -> int:
    """Width of a printable text in a terminal's cells."""
    return sum(_width(char) for char in text)


def _width(char: str) -> int:
    return 0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """The rows of cells as lines, columns aligned; the cells are escaped, and an empty one is a dash."""
    shown = [[escaped(cell) or "-" for cell in row] for row in rows]
    widths = [max(map(cells, column)) for column in zip(*shown, strict=True)]
    return [
        "  ".join(cell + " " * (width - cells(cell)) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in shown
    ]
