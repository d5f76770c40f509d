"""Processes whose output is read as it comes: before a terminal of some size, or into a pipe."""

from __future__ import annotations

import codecs
import contextlib
import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import termios
import time

WITHIN_S = 30.0


class Terminal:
    """A process before a terminal of some size."""

    def __init__(self, arguments: list[str], columns: int = 80) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self.process = subprocess.Popen(
            arguments,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**os.environ, "TERM": "xterm"},
            start_new_session=True,
        )
        os.close(slave)
        self.seen = ""
        self._decode = codecs.getincrementaldecoder("utf-8")().decode  # a character may come in two parts

    def until(self, word: str) -> str:
        """What came up to a word, and with it."""
        until = time.monotonic() + WITHIN_S
        while word not in self.seen:
            assert select.select([self._master], [], [], until - time.monotonic())[0], self.seen
            self.seen += self._decode(os.read(self._master, 65536))
        found, _, self.seen = self.seen.partition(word)
        return found + word

    def rest(self) -> str:
        """Waits for its end; what else it wrote."""
        with contextlib.suppress(OSError):  # on Linux the end of a terminal is an error
            while part := os.read(self._master, 65536):
                self.seen += self._decode(part)
        os.close(self._master)
        return self.seen


class Following:
    """A process that writes into a pipe until it is told to end."""

    def __init__(self, arguments: list[str]) -> None:
        self.process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0)
        self.seen = b""

    def until(self, end: bytes) -> bytes:
        """What came, up to these bytes."""
        assert self.process.stdout is not None
        until = time.monotonic() + WITHIN_S
        while end not in self.seen:
            assert select.select([self.process.stdout], [], [], until - time.monotonic())[0], self.seen
            part = self.process.stdout.read(65536)
            assert part, (self.seen, self.process.stderr and self.process.stderr.read())
            self.seen += part
        found, _, self.seen = self.seen.partition(end)
        return found + end

    def close(self) -> tuple[int, bytes]:
        """Ends it as Ctrl-C does: (exit code, what it said)."""
        self.process.send_signal(signal.SIGINT)
        _, said = self.process.communicate(timeout=WITHIN_S)
        return self.process.returncode, said
