"""`metal-supervisor logs`: prints the log of an engine or of one of our own programs, and follows it if asked.

It reads the files alone, so it works while everything is down. An engine may print anything: a terminal gets it
escaped, a pipe gets it unchanged. JSON lines of our own programs are shown as text on a terminal, and unchanged in a
pipe, where a program reads them.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import select
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from metal_supervisor.cli.terminal import FAILED, INTERRUPTED, NOT_FOUND
from metal_supervisor.settings.logging import entry_in, text_lines
from metal_supervisor.spec.names import Aliases, Unknown, aliases, meant
from metal_supervisor.spec.terminal_text import escaped
from metal_supervisor.state import gateway_note
from metal_supervisor.state.directory import StateDir
from metal_supervisor.supervisord.logfile import CUT, LogFile

LOOK_EVERY_S = 0.2
OURS = (
    "controller",
    "sidecar",
    "apiserver",
    "supervisord",
    "power",
    *gateway_note.PROGRAMS,
    "caffeinate",
    "boot",
)
LAYOUT = frozenset("\n\t")
LONGEST_LINE = 1 << 20
"""In characters; a longer line is split."""


@dataclass(frozen=True)
class LogsOrder:
    """Order for a log: its program, how many lines, and options."""

    name: str
    lines: int | None
    """Number of last lines to print, None for all."""
    follow: bool = False
    previous: bool = False
    """The log before its latest crash; for our own programs, the previous file."""


def known(state: StateDir) -> dict[str, Aliases]:
    """Everything that has a log here: services, shared daemons, our own programs, and former services."""
    records = state.records()[0]
    left = (path.name.removesuffix(".log") for path in (state.path / "log").glob("*.log"))
    plain = {name: ({name, name.replace(".", "/", 1)},) for name in (*left, *OURS)}
    return {**plain, **{program: aliases(record) for program, record in records.items()}}


def run(state: StateDir, order: LogsOrder, out: TextIO, say: Callable[[str], None]) -> int:
    """Print the log. Returns the exit code: 1 if there is none, 4 if the name is unknown, 130 if interrupted."""
    try:
        program = meant(order.name, known(state))
    except Unknown as unknown:
        say(escaped(str(unknown)))
        return NOT_FOUND
    path = _path(state, program, order.previous)
    if not path.exists() and not order.follow:
        say(_nothing(state, program, order.previous))
        return FAILED
    write = _Writer(out, program in OURS)
    log = LogFile(path)
    try:
        write.all(log.tail(order.lines))
        while order.follow and not order.previous and not write.unread(LOOK_EVERY_S):
            write.all(log.fresh())
        write.end()
    except KeyboardInterrupt:
        return 0 if order.follow else INTERRUPTED
    finally:
        log.close()
    return 0


def _path(state: StateDir, program: str, previous: bool) -> Path:
    log = state.log_path(program)
    if not previous:
        return log
    return log.with_name(f"{log.name}.1") if program in OURS else state.crash_log_path(program)


def _nothing(state: StateDir, program: str, previous: bool) -> str:
    if previous and program in OURS:
        return f"{program} has no log before its present one"
    if previous:
        return f"{program} has not crashed: there is no log of that"
    record = state.record_of(program)
    why = f"; see: metal-supervisor explain {'/'.join(record.key)}" if record is not None else ""
    return f"{program} has written no log yet{why}"


class _Writer:
    """Writer of blocks of bytes: to a terminal as lines with control characters escaped, else unchanged.

    `ours`: the log is that of our own program, whose lines may be JSON.
    """

    def __init__(self, out: TextIO, ours: bool) -> None:
        self._out, self._ours = out, ours
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace") if out.isatty() else None
        self._begun = ""
        """Beginning of an incomplete line."""
        self._poll = _poll_of(out)

    def all(self, blocks: Iterable[bytes]) -> None:
        """Write blocks, and flush."""
        for block in blocks:
            if block == CUT:
                self.end()
            elif self._decoder is None:
                self._out.buffer.write(block)
            else:
                *whole, self._begun = (self._begun + self._decoder.decode(block)).split("\n")
                for line in whole:
                    self._line(line)
                if len(self._begun) > LONGEST_LINE:
                    self.end()
        self._out.flush()

    def end(self) -> None:
        """End an incomplete line on a terminal, so that more of the log, or a prompt, begins on its own line."""
        if self._decoder is not None and (begun := self._begun + self._decoder.decode(b"", True)):
            self._begun = ""
            self._line(begun)
            self._out.flush()

    def unread(self, wait_s: float) -> bool:
        """Wait for up to `wait_s`; True as soon as the reader has closed the pipe."""
        return bool(self._poll.poll(wait_s * 1000))

    def _line(self, line: str) -> None:
        entry = entry_in(line) if self._ours else None
        text = line if entry is None else text_lines(entry)
        self._out.write("".join(char if char in LAYOUT else escaped(char) for char in f"{text}\n"))


def _poll_of(out: TextIO) -> select.poll:
    """A poll that reports when a pipe has lost its reader; for any other output it only times out."""
    found = select.poll()
    with contextlib.suppress(OSError, ValueError):
        mode = os.fstat(out.fileno()).st_mode
        if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
            found.register(out.fileno(), 0)
    return found
