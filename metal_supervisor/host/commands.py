"""Runners of small system programs such as launchctl, pmset and ioreg.

Nothing here raises, and nothing is looked up on PATH: callers name a program by its absolute path, because launchd's
PATH is a short one. Callers get their `Runner` as an argument, so that tests can answer with recordings from a Mac.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

TIMEOUT_S = 5.0
SAID_CHARS = 300
NOT_FOUND = 127
"""A shell's exit code for a program that is missing."""
TIMED_OUT = 124
"""Exit code of `timeout` for a program that did not end in time."""


@dataclass(frozen=True)
class Done:
    """Result of a program."""

    code: int
    """Its exit code; negative: the signal that ended it."""
    out: str
    err: str

    @property
    def ok(self) -> bool:
        return self.code == 0

    @property
    def text(self) -> str:
        """Output and errors together; "" if it could not be run, or was ended at its time limit."""
        return "" if self.code in (NOT_FOUND, TIMED_OUT) else self.out + self.err

    @property
    def said(self) -> str:
        """Its errors, or else its output, on one line."""
        return " ".join((self.err or self.out).split())[:SAID_CHARS] or "it said nothing"

    @property
    def last_line(self) -> str:
        """The last line of its errors, or else of its output."""
        lines = (self.err or self.out).strip().splitlines()
        return lines[-1] if lines else ""


Runner = Callable[[Sequence[str], float], Done]
"""(argv, timeout in seconds) -> its result. Does not raise."""


class Feeder(Protocol):
    """A runner that can also give a program its standard input."""

    def __call__(self, argv: Sequence[str], timeout_s: float, content: bytes = b"", /) -> Done:
        """Run it and return its result. Does not raise."""


def run(argv: Sequence[str], timeout_s: float = TIMEOUT_S, content: bytes = b"", /, own_session: bool = True) -> Done:
    """Run a program, whose standard input is `content`; without a terminal if in a session of its own."""
    try:
        done = subprocess.run(
            list(argv),
            input=content or None,
            stdin=None if content else subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s,
            start_new_session=own_session,
        )
    except subprocess.TimeoutExpired:
        return Done(TIMED_OUT, "", f"{argv[0]} did not end within {timeout_s:g} s")
    except OSError as error:
        return Done(NOT_FOUND, "", f"{argv[0]}: {error.strerror}")
    return Done(done.returncode, done.stdout.decode("utf-8", "replace"), done.stderr.decode("utf-8", "replace"))


run_here: Feeder = partial(run, own_session=False)
"""`run` within this terminal's session, so that sudo can ask for a password there."""
