"""docs/quickstart.md: from a model file to an answer on a pseudo terminal, with a stopwatch.

Run by hand, `python -m tests.support.pages.quickstart "$(python -m tests.support.finders.find_gemma)"`. It uses the
default ports; the home directory is one of its own, and so is all that is written.
"""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.support.finders.find_gemma import FILE
from tests.support.system import engine_path

NAME = "gemma-3-270m-q4-k-m"
PAGE = Path("docs/quickstart.md")
RUNS = 5
LIMIT_S = 120.0
WIDTH = 118
SERVE = f"metal-supervisor serve ~/models/{FILE}"
CHAT = f'metal-supervisor chat {NAME} "The three largest cities of France are"'
BEGIN = "<!-- recorded -->"
END = "<!-- end of the recording -->"


@dataclass(frozen=True)
class Lap:
    """One run."""

    ready_s: float
    """From the first key to Ready."""
    token_s: float
    """From the second command to the first letter of its answer."""
    stopped_s: float
    """From Ctrl-C to the end of the command."""
    text: str
    """The terminal's."""
    answer: str
    """What the second command has printed until it is ended."""


@contextlib.contextmanager
def home(model: Path) -> Iterator[Path]:
    """A home directory with the model, and with the commands on its PATH."""
    with tempfile.TemporaryDirectory(prefix="quickstart-") as place:
        base = Path(place)
        for each in ("models", "bin"):
            (base / each).mkdir()
        shutil.copyfile(model, base / "models" / FILE)
        for name, path in (("llama-server", engine_path()), ("metal-supervisor", command())):
            (base / "bin" / name).write_text(f'#!/bin/sh\nexec {path} "$@"\n')
            (base / "bin" / name).chmod(0o755)
        yield base


def command() -> Path:
    """The command of this environment."""
    return Path(sys.executable).parent / "metal-supervisor"


class Terminal:
    """A pseudo terminal with a shell's environment."""

    def __init__(self, base: Path, line: str, settings: Mapping[str, str]) -> None:
        path = f"{base / 'bin'}:{os.environ['PATH']}"
        shell = {"HOME": str(base), "PATH": path, "TERM": "xterm", "NO_COLOR": "1"}
        env = {**shell, "COLUMNS": str(WIDTH), "LINES": "40", **settings}
        self.began, self.text = time.monotonic(), ""
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            os.chdir(base / "models")  # in a checkout, which may have a system of its own, commands name this one
            os.execve("/bin/sh", ["sh", "-c", f"exec {line}"], env)

    def until(self, found: Callable[[str], bool]) -> float:
        """Seconds from its start until its text is as wanted."""
        while not found(self.text):
            if time.monotonic() - self.began > LIMIT_S:
                raise SystemExit(f"not within {LIMIT_S:g} s:\n{self.text}")
            if select.select([self._fd], [], [], 0.1)[0]:
                try:
                    self.text += os.read(self._fd, 65_536).decode(errors="replace")
                except OSError:  # what a terminal answers when its last program has ended
                    raise SystemExit(f"it ended too early:\n{self.text}") from None
        return time.monotonic() - self.began

    def end(self) -> float:
        """Press Ctrl-C; seconds until the command has ended."""
        began = time.monotonic()
        with contextlib.suppress(OSError):  # it may have ended
            os.write(self._fd, b"\x03")
            while piece := os.read(self._fd, 65_536):
                self.text += piece.decode(errors="replace")
        os.waitpid(self.pid, 0)
        os.close(self._fd)
        return time.monotonic() - began


def lap(base: Path, settings: Mapping[str, str]) -> Lap:
    """From nothing to an answer, and back; with settings from the environment."""
    shutil.rmtree(base / ".metal-supervisor", ignore_errors=True)
    serving = Terminal(base, SERVE, settings)
    try:
        ready_s = serving.until(lambda text: bool(re.search(rf"chat {NAME}\b.*Ctrl-C stops", text, re.DOTALL)))
        asking = Terminal(base, CHAT, settings)
        token_s = asking.until(lambda text: bool(text.strip()))
        asking.end()
    finally:
        stopped_s = serving.end()
    return Lap(ready_s, token_s, stopped_s, shown(base, serving.text), asking.text)


def shown(base: Path, text: str) -> str:
    """The terminal's text without the way its lines end, and with the home directory as `~`."""
    plain = text.replace("\r\n", "\n").replace("^C", "^C\n").replace(str(base), "~")
    programs = Path(sys.executable).parent  # a reader has them on the PATH
    plain = plain.replace(f' PATH={programs}:"$PATH"', "").replace(f"{programs}/", "")
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", plain).strip("\n")


def page(before: str, laps: list[Lap]) -> str:
    """The page with the recording of the median run."""
    middle = sorted(laps, key=lambda each: each.ready_s)[len(laps) // 2]

    def told(values: list[float]) -> str:
        return f"{statistics.median(values):.1f} s ({min(values):.1f} to {max(values):.1f})"

    rows = [
        ("typed", "2 commands, the second in another terminal"),
        ("first command to Ready", told([each.ready_s for each in laps])),
        ("second command to the first token", told([each.token_s for each in laps])),
        ("Ctrl-C to *nothing is left running*", told([each.stopped_s for each in laps])),
    ]
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    head_row = f"| | median of {len(laps)} (least to most) |\n| --- | --- |"
    made = f"{BEGIN}\n```text\n$ {SERVE}\n{middle.text}\n```\n\n{head_row}\n{table}\n{END}"
    head, rest = before.split(BEGIN)
    return head + made + rest.partition(END)[2]


def main() -> None:
    with home(Path(sys.argv[1])) as base:
        laps = [lap(base, {}) for _ in range(RUNS)]
    PAGE.write_text(page(PAGE.read_text(), laps))


if __name__ == "__main__":
    main()
