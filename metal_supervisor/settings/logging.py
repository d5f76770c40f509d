"""Log lines: a constant message with fields, as text or JSON, always on one line each.

Both forms show the same entry, so a line that was kept as JSON can be read as text. docs/logs.md has the grammar.

The level can be changed while a program runs, by a file in the state directory that is read in every pass.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import threading
import time
from pathlib import Path
from types import TracebackType

LEVEL_FILE = "log-level"
LEVELS = ("debug", "info", "warning", "error")
AUTO = "auto"
TEXT = "text"
JSON = "json"
FORMATS = (AUTO, TEXT, JSON)
LONGEST_VALUE = 4096
"""In characters; a longer value keeps its beginning."""
LONGEST_TRACEBACK = 16384
"""In characters; a longer traceback keeps its end."""
KEYS = ("ts", "level", "logger", "msg")
RESERVED = frozenset({*KEYS, "exc"})
STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
"""Attributes of every record of Python's logging: no field can have such a name."""
LONGEST_NUMBER = 2**63

Scalar = str | int | float | bool | None


# ── entries ──────────────────────────────────────────────────────────────────────────────────────


def entry_of(record: logging.LogRecord) -> dict[str, Scalar]:
    """Entry of a log record: ts, level, logger and msg, then its fields under their own names, then exc.

    Numbers, booleans and None are kept, everything else becomes text. A field whose name is taken gets a trailing
    underscore.
    """
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    entry: dict[str, Scalar] = {
        "ts": f"{stamp}.{int(record.msecs):03d}Z",
        "level": record.levelname.lower(),
        "logger": _text(record.name),
        "msg": _message(record),
    }
    for name, value in vars(record).items():
        if name not in STANDARD:
            entry[_free(name, entry)] = _scalar(value)
    if record.exc_info:
        entry["exc"] = _end(_whole(logging.Formatter().formatException(record.exc_info)))
    return entry


def _message(record: logging.LogRecord) -> str:
    """The record's message; only its format if that does not match its arguments, as may happen in a library."""
    try:
        return _text(record.getMessage())
    except Exception:  # noqa: BLE001 - an imperfect line is better than none
        return _said(record.msg)


def _free(name: str, entry: dict[str, Scalar]) -> str:
    while name in RESERVED or name in entry:
        name += "_"
    return name


def _scalar(value: object) -> Scalar:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int) and abs(value) < LONGEST_NUMBER:
        return int(value)
    if isinstance(value, float) and math.isfinite(value):
        return float(value)
    return _said(value)


def _said(value: object) -> str:
    """`str` of an object, or its type's name if that raises."""
    try:
        return _text(str(value))
    except Exception:  # noqa: BLE001 - a value's own code must not lose the line
        return f"<{type(value).__name__}>"


def _text(text: str) -> str:
    text = _whole(text)
    over = len(text) - LONGEST_VALUE
    return text if over <= 0 else f"{text[:LONGEST_VALUE]}… ({over} more characters)"


def _end(text: str) -> str:
    over = len(text) - LONGEST_TRACEBACK
    return text if over <= 0 else f"({over} more characters) …{text[over:]}"


def _whole(text: str) -> str:
    """The text with lone surrogates escaped: not every JSON parser accepts them."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


# ── the two forms of a line ──────────────────────────────────────────────────────────────────────


def json_line(entry: dict[str, Scalar]) -> str:
    """An entry as one line of ASCII JSON, without line breaks or control characters."""
    return json.dumps(entry, allow_nan=False)


def text_lines(entry: dict[str, Scalar]) -> str:
    """`2026-11-21T09:00:00.000Z INFO controller pass did="start default.tiny: new"`, and a traceback below, indented.

    No line contains control characters.
    """
    ts, level, logger, msg = (_plain(str(entry[key])) for key in KEYS)
    fields = [f"{_plain(_bare(name))}={_shown(value)}" for name, value in entry.items() if name not in RESERVED]
    trace = [f"  {_plain(line)}" for line in str(entry.get("exc", "")).splitlines()]
    return "\n".join([" ".join([ts, level.upper(), logger, msg, *fields]), *trace])


def entry_in(line: str) -> dict[str, Scalar] | None:
    """Entry of a line in our JSON form; None for any other line."""
    if not line.startswith("{"):
        return None
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    ours = isinstance(found, dict) and all(isinstance(found.get(key), str) for key in KEYS)
    return found if ours else None


def _bare(name: str) -> str:
    """A field's own name, without the underscore that only JSON needs."""
    return name[:-1] if name.endswith("_") and name.rstrip("_") in RESERVED else name


def _shown(value: object) -> str:
    text = _plain(str(value))
    if text and not set(' "=') & set(text):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _plain(text: str) -> str:
    """The text with a space for each unprintable character, such as a line break or control character."""
    return "".join(char if char.isprintable() else " " for char in text)


class TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return text_lines(entry_of(record))


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return json_line(entry_of(record))


# ── a program's log ──────────────────────────────────────────────────────────────────────────────


def die_with_threads() -> None:
    """Make an unexpected error in any thread end the process; supervisord then starts a new one.

    A process that continued without its watch or its registrar would look healthy and not be. An error that ends the
    main thread is logged too, on a line like any other.
    """

    def on_error(arguments: threading.ExceptHookArgs) -> None:
        name = arguments.thread.name if arguments.thread else "?"
        error = arguments.exc_value
        info = (type(error), error, arguments.exc_traceback) if error is not None else None
        logging.getLogger("threads").error("thread died; so does the process", extra={"which": name}, exc_info=info)
        os._exit(70)

    def on_end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        logging.getLogger("threads").error("program died", exc_info=(kind, error, trace))

    threading.excepthook = on_error
    sys.excepthook = on_end


def configure(level: str, form: str = AUTO) -> None:
    """Log everything to standard error, which supervisord writes to a file and rotates.

    `form`: text or json; auto is text on a terminal and JSON otherwise.
    """
    people = sys.stderr.isatty() if form == AUTO else form == TEXT
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(TextFormatter() if people else JsonFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)
    logging.getLogger("urllib3").setLevel(logging.ERROR)  # its other lines have whole URLs


class LogLevel:
    """Log level of one program: the one in its file of the state directory, or the setting without a valid file."""

    def __init__(self, state: Path, setting: str) -> None:
        self._path, self._setting, self._now = state / LEVEL_FILE, setting, setting

    def look(self) -> None:
        """Apply the level in the file if it has changed; anything but one of the four levels counts as none."""
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
