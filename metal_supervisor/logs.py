"""Log lines: a constant message with fields, for people by default, one line each whatever they hold.

How much is told can be changed while a program runs: by a word in the state directory, which it looks at in every pass.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from pathlib import Path

LEVEL_FILE = "log-level"
LEVELS = ("debug", "info", "warning", "error")
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class LineFormatter(logging.Formatter):
    """`2026-11-21T09:00:00Z INFO controller pass did="start default.tiny: new"`."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        fields = [f"{key}={_shown(value)}" for key, value in vars(record).items() if key not in _STANDARD]
        parts = [f"{stamp}.{record.msecs:03.0f}Z", record.levelname, record.name, _plain(record.getMessage()), *fields]
        text = " ".join(parts)
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        return text


def _shown(value: object) -> str:
    text = _plain(str(value))
    if text and not set(' "=') & set(text):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _plain(text: str) -> str:
    """The text without anything that could end a line or move a cursor."""
    return "".join(char if char.isprintable() else " " for char in text)


def die_with_threads() -> None:
    """Makes an unexpected error in any thread end the process: supervisord starts a whole one in its place.

    A process that goes on without its watch, or without its registrar, looks healthy and is not.
    """

    def on_error(arguments: threading.ExceptHookArgs) -> None:
        name = arguments.thread.name if arguments.thread else "?"
        error = arguments.exc_value
        info = (type(error), error, arguments.exc_traceback) if error is not None else None
        logging.getLogger("threads").error("thread died; so does the process", extra={"which": name}, exc_info=info)
        os._exit(70)

    threading.excepthook = on_error


def configure(level: str) -> None:
    """Everything to standard error, which supervisord keeps and rotates."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("waitress").setLevel(logging.WARNING)
    logging.getLogger("urllib3").setLevel(logging.WARNING)


class Level:
    """The level of one program: the word in the state directory, or the setting where there is none."""

    def __init__(self, state: Path, setting: str) -> None:
        self._path, self._setting, self._now = state / LEVEL_FILE, setting, setting

    def look(self) -> None:
        """Takes the word up if it is another by now; what is none of the four words is none."""
        wanted = word_of(self._path) or self._setting
        if wanted != self._now:
            self._now = wanted
            logging.getLogger().setLevel(wanted.upper())
            logging.getLogger("logs").log(logging.getLevelName(wanted.upper()), "level", extra={"now": wanted})


def word_of(path: Path) -> str:
    """The level that a file names, "" if it names none."""
    try:
        word = path.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""
    return word if word in LEVELS else ""
