"""Servers that a test starts must not outlive it, not even when it is killed.

A guard is a small process that holds the other end of a pipe. It is told which process groups there are; when the
pipe closes, because their starter has ended in whatever way, it kills those that are left. That needs nothing of the
system that macOS does not have.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

STOP_TIMEOUT_S = 10.0

_SCRIPT = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
groups = set()
for line in sys.stdin:
    known = groups.add if line[0] == "+" else groups.discard
    known(int(line[1:]))
for group in groups:
    try:
        os.killpg(group, signal.SIGKILL)
    except OSError:
        pass
"""


class Guard:
    """Starts and ends processes, each the leader of its own group."""

    def __init__(self) -> None:
        command = [sys.executable, "-I", "-S", "-c", _SCRIPT]
        self._guard = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, start_new_session=True)

    def close(self) -> None:
        """Lets the guard kill what is left, and waits for it."""
        with contextlib.suppress(OSError):
            assert self._guard.stdin
            self._guard.stdin.close()
        self._guard.wait()

    def _tell(self, text: str) -> None:
        assert self._guard.stdin
        self._guard.stdin.write(text + "\n")
        self._guard.stdin.flush()

    def start(
        self, command: list[str], log: Path, *, cwd: Path | None = None, env: dict[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Starts a process whose output is appended to a file."""
        with log.open("ab") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=cwd,
                env=env,
                start_new_session=True,
            )
        self._tell(f"+{process.pid}")
        return process

    def stop(self, process: subprocess.Popen[bytes], timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Ends a process: politely, then by force."""
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout_s)
        self.kill(process)

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        """Ends a process and its group at once."""
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        self._tell(f"-{process.pid}")
