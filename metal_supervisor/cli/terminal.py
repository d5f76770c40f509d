"""Messages and exit codes of commands, and a stdout that cannot be written."""

from __future__ import annotations

import errno
import os
import sys

from metal_supervisor.spec.user_error import UserError

OK = 0
FAILED = 1
USAGE = 2
"""Exit code: the command line, or what it names, cannot be used."""
NOT_FOUND = 4
"""Exit code: nothing has that name. 3 is `NOT_RUNNING`."""
INTERRUPTED = 130
UNWRITTEN = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF})
"""Errors of a write that failed for good."""


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
