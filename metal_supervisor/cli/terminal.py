"""What commands print on a terminal: messages, exit codes, and live lines that are rewritten in place.

Live lines are at the bottom, below others that stay, and only on a terminal: a file or a pipe would be filled with
control characters, and unreadable.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Callable, Sequence
from typing import TextIO

from metal_supervisor.spec.terminal_text import fitted
from metal_supervisor.spec.user_error import UserError

OK = 0
FAILED = 1
USAGE = 2
"""Exit code: the command line, or what it names, cannot be used."""
NOT_FOUND = 4
"""Exit code: nothing has that name. 3 is `NOT_RUNNING`."""
INTERRUPTED = 130
UP_AND_CLEAR = "\x1b[{}A\r\x1b[J"
CLEAR = "\r\x1b[J"
UNWRITTEN = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF})
"""Errors of a write that failed for good."""
USUAL = os.terminal_size((80, 24))


class CommandError(UserError):
    """A command that cannot be carried out; the text says why and what to do. `code`: its exit code."""

    def __init__(self, text: str, code: int = 1) -> None:
        super().__init__(text)
        self.code = code


def say(text: str) -> None:
    """Print a message about the command itself."""
    sys.stderr.write(f"metal-supervisor: {text}\n")


def output_problem(error: OSError) -> str:
    """Message if an error is one of writing to stdout, "" if it is another's; then discard what is not yet printed."""
    if error.errno not in UNWRITTEN or error.filename is not None:
        return ""
    try:  # the failed write may have been to a file: another one to stdout decides
        sys.stdout.write("\n")
        sys.stdout.flush()
        return ""
    except OSError as again:
        discard_output()
        return f"the output cannot be written: {again.strerror}; send it somewhere else"


def discard_output() -> None:
    """Send stdout to nowhere: the interpreter flushes it once more at its exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def columns(out: TextIO) -> int | None:
    """Columns of the output if it is a terminal, else None."""
    return size_of(out).columns if can_redraw(out) else None


def colours(out: TextIO) -> bool:
    """True if the output is a terminal, and the user has not set NO_COLOR."""
    return can_redraw(out) and not os.environ.get("NO_COLOR")


def can_redraw(out: TextIO) -> bool:
    """True if the output is a terminal on which lines can be rewritten."""
    return not out.closed and out.isatty() and os.environ.get("TERM", "") not in ("", "dumb")


def size_of(out: TextIO) -> os.terminal_size:
    """Current columns and lines of a terminal: windows get resized."""
    with contextlib.suppress(OSError, ValueError):
        found = os.get_terminal_size(out.fileno())
        if found.columns > 0 and found.lines > 0:
            return found
    return USUAL


class Live:
    """Block of live lines; without a terminal nothing is drawn. Not safe to use from more than one thread.

    `paint` colours a line after it was cut to the size of the terminal.
    """

    def __init__(self, out: TextIO, paint: Callable[[str], str] = str) -> None:
        self._out, self._paint = out, paint
        self._shown: list[str] = []
        self.possible = can_redraw(out)
        """True if the output is a terminal that can do it."""

    def size(self) -> os.terminal_size:
        """Current columns and lines."""
        return size_of(self._out)

    def draw(self, lines: Sequence[str]) -> None:
        """Show exactly these lines, cut to the size of the terminal."""
        if not self.possible:
            return
        size = self.size()
        fresh = [self._paint(fitted(each, size.columns - 1)) for each in lines[: max(1, size.lines - 1)]]
        if fresh == self._shown:
            return
        self._write(self._back() + "\n".join(fresh))
        self._shown = fresh

    def clear(self) -> None:
        """Remove the lines, so that others can be written in their place."""
        if self._shown:
            self._write(self._back())
            self._shown = []

    def _back(self) -> str:
        if not self._shown:
            return ""
        above = len(self._shown) - 1
        return UP_AND_CLEAR.format(above) if above else CLEAR

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # the terminal was closed
            self._out.write(text)
            self._out.flush()
