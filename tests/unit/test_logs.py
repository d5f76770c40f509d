"""Log lines: one line each, fields that can be read back, as text and as JSON."""

from __future__ import annotations

import io
import json
import logging
import math
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metal_supervisor.settings import logging as logs
from metal_supervisor.settings.logging import (
    LEVEL_FILE,
    JsonFormatter,
    LogLevel,
    TextFormatter,
    configure,
    entry_in,
    text_lines,
)

PROPERTY = settings(max_examples=100, database=None, derandomize=True)
HOSTILE = [
    "a\nb",
    "\r",
    "\x1b[31m",
    "\x1b]0;title\x07",
    "\x9b2J",
    "\x00",
    "\x7f",
    "\x85",
    "\u2028",
    "\u2029",
    "\u202e",
    "\u2066",
    "\u200b",
    "\ufeff",
    "\U0010ffff",
    "\U000e0041",
    "🦙é",
    "",
    " ",
    "\\",
    '"',
    "}",
    '{"ts": "x"}\n{"level": "error"}',
    "100%",
    "%s",
    "</script>",
]
HALVES = {"\ud800": "\\ud800", "a\udcff\ud83d": "a\\udcff\\ud83d", "\ude00\ud83d": "\\ude00\\ud83d"}
"""Texts with halves of characters, as a file name may have them, and how they are spelled out."""
CHARACTERS = st.text(st.characters(), max_size=20) | st.sampled_from([*HOSTILE, *HALVES])
Form = type[logging.Formatter]


def record(message: str = "pass", *args: object, **fields: object) -> logging.LogRecord:
    found = logging.makeLogRecord(
        {
            "name": "controller",
            "levelname": "INFO",
            "levelno": 20,
            "msg": message,
            "args": args,
            "created": 0.5,
            **fields,
        }
    )
    found.msecs = 999.9
    return found


def line(message: str = "pass", *args: object, **fields: object) -> str:
    return TextFormatter().format(record(message, *args, **fields))


def entry(message: str = "pass", *args: object, **fields: object) -> dict[str, Any]:
    """What a reader of JSON finds in the line; one that is stricter than Python's."""
    text = JsonFormatter().format(record(message, *args, **fields))
    assert text.isascii() and text.isprintable()

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    found: dict[str, Any] = json.loads(text, parse_constant=refuse)
    json.dumps(found, ensure_ascii=False).encode("utf-8")  # no half of a character
    return found


def failed(error: Exception) -> Any:
    """The exc_info of an error that was raised."""
    try:
        raise error
    except type(error):
        return sys.exc_info()


# ── text ─────────────────────────────────────────────────────────────────────────────────────────


def test_a_line_is_time_level_logger_message_and_fields() -> None:
    assert line(did="start default.tiny: new", count=3) == (
        '1970-01-01T00:00:00.999Z INFO controller pass did="start default.tiny: new" count=3'
    )


def test_a_line_without_fields_ends_with_its_message() -> None:
    assert line("took %d ms", 5).endswith("INFO controller took 5 ms")


def test_an_empty_value_is_shown_as_such() -> None:
    assert line(why="").endswith(' why=""')


@PROPERTY
@given(CHARACTERS)
def test_a_value_never_breaks_the_line_nor_reaches_the_terminal_raw(value: str) -> None:
    text = line(why=value)
    assert text.isprintable()
    text.encode("utf-8")


@PROPERTY
@given(CHARACTERS)
def test_a_message_of_a_library_never_breaks_the_line_either(value: str) -> None:
    assert len(line("got %s", value).splitlines()) == 1
    assert entry("got %s", value)["msg"].startswith("got ")


@pytest.mark.parametrize("value", ['a" level="x', 'say "hi" now', 'q"uote', "back\\slash here", "a=b c"])
def test_a_value_cannot_pass_for_another_field(value: str) -> None:
    tail = line(why=value, next="1").partition(" pass ")[2]
    found = re.findall(r'(\w+)=("(?:[^"\\]|\\.)*"|[^\s"]+)(?: |$)', tail)
    assert [name for name, _ in found] == ["why", "next"]


def test_an_exception_is_shown_with_its_traceback_below_its_line() -> None:
    first, *rest = line("failed", exc_info=failed(RuntimeError("boom\n2026 INFO fake\x1b[2J"))).split("\n")
    assert first.endswith("INFO controller failed") and rest[0] == "  Traceback (most recent call last):"
    assert rest[-2:] == ["  RuntimeError: boom", "  2026 INFO fake [2J"], "nor does it pass for a line of its own"


# ── JSON ─────────────────────────────────────────────────────────────────────────────────────────


def test_an_object_has_when_how_bad_who_and_what_and_then_the_fields() -> None:
    found = entry(did="start default.tiny: new", count=3)
    assert list(found.items()) == [
        ("ts", "1970-01-01T00:00:00.999Z"),
        ("level", "info"),
        ("logger", "controller"),
        ("msg", "pass"),
        ("did", "start default.tiny: new"),
        ("count", 3),
    ]


@pytest.mark.parametrize(("value", "back"), [*zip(HOSTILE, HOSTILE, strict=True), *HALVES.items()], ids=ascii)
def test_whatever_a_value_holds_it_is_one_line_and_comes_back(value: str, back: str) -> None:
    assert entry(why=value)["why"] == back


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (3, 3),
        (0, 0),
        (-1.5, -1.5),
        (True, True),
        (False, False),
        (None, None),
        (HTTPStatus.OK, 200),
        (2**63 - 1, 2**63 - 1),
        (-(2**63), str(-(2**63))),
        (2**70, str(2**70)),
        (math.inf, "inf"),
        (math.nan, "nan"),
        (1e300, 1e300),
        ([1, "x"], "[1, 'x']"),
        ({"a": 1}, "{'a': 1}"),
        (b"x", "b'x'"),
        (Path("/p"), "/p"),
        (ValueError("no"), "no"),
    ],
)
def test_numbers_and_truth_stay_what_they_are_and_all_else_is_text(value: object, shown: object) -> None:
    found = entry(value=value)["value"]
    assert (found, type(found)) == (shown, type(shown))
    assert f" value={found}" in line(value=value).replace('"', "")


def test_a_field_whose_name_is_taken_has_an_underscore_and_in_text_its_own_name() -> None:
    found = entry(level="Critical", ts=1, logger="x", exc="y", level_="z", exc_info=failed(KeyError("k")))
    assert (found["ts"], found["level"], found["logger"]) == ("1970-01-01T00:00:00.999Z", "info", "controller")
    assert (found["level_"], found["ts_"], found["logger_"], found["exc_"]) == ("Critical", 1, "x", "y")
    assert found["level__"] == "z" and "KeyError: 'k'" in found["exc"]
    assert " pass level=Critical ts=1 logger=x exc=y " in line(level="Critical", ts=1, logger="x", exc="y", z=1)


def test_a_traceback_is_a_value_like_any_other() -> None:
    found = entry("failed", exc_info=failed(RuntimeError("boom \udcff\u2028")))
    assert found["exc"].startswith("Traceback") and found["exc"].endswith("RuntimeError: boom \\udcff\u2028")


def test_a_very_long_value_keeps_its_beginning_and_a_traceback_its_end() -> None:
    found = entry("m" * 9000, why="x" * 100_000, exc_info=failed(ValueError("y" * 100_000 + " the end")))
    assert found["why"] == "x" * logs.LONGEST_VALUE + f"… ({100_000 - logs.LONGEST_VALUE} more characters)"
    assert found["msg"].startswith("m" * logs.LONGEST_VALUE + "… (")
    assert found["exc"].endswith("yyy the end") and len(found["exc"]) < logs.LONGEST_TRACEBACK + 40
    assert re.match(r"\(\d+ more characters\) …", found["exc"])
    assert len(line(why="x" * 100_000)) < logs.LONGEST_VALUE + 200


def test_one_that_is_just_not_too_long_is_whole() -> None:
    assert entry(why="x" * logs.LONGEST_VALUE)["why"] == "x" * logs.LONGEST_VALUE


class Rude:
    def __str__(self) -> str:
        raise RuntimeError("no word from me")


def test_a_value_that_cannot_be_shown_costs_no_line() -> None:
    assert entry(why=Rude())["why"] == "<Rude>"
    assert entry(why=10**5000)["why"] == "<int>", "so long a number has no text in Python"
    assert entry("%d of %d", "x")["msg"] == "%d of %d", "a library's message that does not fit its arguments"


@pytest.mark.parametrize("form", [TextFormatter, JsonFormatter])
def test_a_message_that_cannot_be_shown_costs_no_line(form: Form) -> None:
    given = record("")
    given.msg = Rude()
    assert "<Rude>" in form().format(given)


# ── from one form to the other ───────────────────────────────────────────────────────────────────


@PROPERTY
@given(CHARACTERS, CHARACTERS | st.integers() | st.floats() | st.booleans() | st.none())
def test_a_line_that_was_kept_as_json_is_read_as_the_text_it_would_have_been(message: str, value: object) -> None:
    given = record("got %s", message, value=value, level="x", exc_info=failed(RuntimeError(message)))
    found = entry_in(JsonFormatter().format(given))
    assert found is not None and text_lines(found) == TextFormatter().format(given)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "{}",
        "[]",
        "null",
        "plain words",
        '{"ts": "t", "level": "info", "logger": "x"}',
        "[" * 100_000,
        '{"ts": 1, "level": "info", "logger": "x", "msg": "m"}',
        '{"a": ' * 100_000,
        '{"ts": ' + "9" * 5000 + "}",
        ' {"ts": "t", "level": "info", "logger": "x", "msg": "m"}',
        "{\x00}",
        "{\ud800",
    ],
)
def test_any_other_line_is_none_of_ours(text: str) -> None:
    assert entry_in(text) is None


@PROPERTY
@given(st.dictionaries(CHARACTERS, st.recursive(CHARACTERS | st.none(), st.lists, max_leaves=3)), CHARACTERS)
def test_a_line_that_only_looks_like_ours_harms_no_terminal(fields: dict[str, Any], evil: str) -> None:
    text = json.dumps({**fields, **dict.fromkeys(logs.KEYS, evil)})
    found = entry_in(text)
    assert found is not None
    assert all(each.isprintable() for each in text_lines(found).split("\n"))


# ── a program's log ──────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    logger = logging.getLogger()
    before = logger.handlers[:], logger.level, {name: logging.getLogger(name).level for name in ("waitress", "urllib3")}
    yield logger
    logger.handlers[:], logger.level = before[0], before[1]
    for name, level in before[2].items():
        logging.getLogger(name).setLevel(level)
    logging.captureWarnings(False)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_everything_goes_to_standard_error_at_the_configured_level(
    root: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    configure("warning")
    logging.getLogger("controller").info("quiet")
    logging.getLogger("controller").warning("loud", extra={"file": "x"})
    configure("debug")
    logging.getLogger("urllib3").info("chatter of a library")
    assert stream.getvalue().rstrip().endswith("WARNING controller loud file=x")
    assert stream.getvalue().count("\n") == 1


@pytest.mark.parametrize(
    ("stream", "form", "is_json"),
    [
        (Terminal, "auto", False),
        (io.StringIO, "auto", True),
        (Terminal, "json", True),
        (io.StringIO, "json", True),
        (Terminal, "text", False),
        (io.StringIO, "text", False),
    ],
)
def test_people_get_text_and_machines_json_unless_somebody_chose(
    root: logging.Logger, monkeypatch: pytest.MonkeyPatch, stream: Callable[[], io.StringIO], form: str, is_json: bool
) -> None:
    made = stream()
    monkeypatch.setattr(sys, "stderr", made)
    configure("info", form)
    logging.getLogger("controller").info("pass", extra={"did": "nothing"})
    assert (entry_in(made.getvalue()) is not None) == is_json
    assert is_json or made.getvalue().endswith("Z INFO controller pass did=nothing\n")


def written(code: str) -> tuple[int, list[dict[str, Any]]]:
    """(exit code, what it logged) of a program of ours; every line has to be JSON."""
    begin = "import threading, time, warnings; from metal_supervisor.settings import logging as logs; "
    begin += "logs.configure('info');"
    done = subprocess.run(
        [sys.executable, "-c", f"{begin} logs.die_with_threads(); {code}"], capture_output=True, text=True, timeout=20
    )
    return done.returncode, [json.loads(each) for each in done.stderr.splitlines()]


def test_an_unexpected_error_in_a_thread_ends_the_process_and_is_logged() -> None:
    code, (told,) = written("threading.Thread(target=lambda: 1 / 0, name='watch').start(); time.sleep(30)")
    assert code == 70
    assert (told["level"], told["msg"], told["which"]) == ("error", "thread died; so does the process", "watch")
    assert told["exc"].endswith("ZeroDivisionError: division by zero")


def test_an_unexpected_end_of_a_program_and_a_warning_of_a_library_are_lines_too() -> None:
    code, (warned, told) = written("warnings.warn('old\\nthing', stacklevel=1); 1 / 0")
    assert code == 1
    assert (warned["level"], warned["logger"]) == ("warning", "py.warnings") and "old\nthing" in warned["msg"]
    assert told["msg"] == "program died" and told["exc"].endswith("ZeroDivisionError: division by zero")


@pytest.fixture
def root_level() -> Iterator[None]:
    before = logging.getLogger().level
    logging.getLogger().setLevel(logging.INFO)
    yield
    logging.getLogger().setLevel(before)


def test_the_level_is_that_of_the_file_while_it_is_there_and_else_the_setting(tmp_path: Path, root_level: None) -> None:
    level, path = LogLevel(tmp_path, "info"), tmp_path / LEVEL_FILE
    for word, expected in (("debug\n", logging.DEBUG), ("error", logging.ERROR), (None, logging.INFO)):
        path.unlink(missing_ok=True) if word is None else path.write_text(word)
        level.look()
        assert logging.getLogger().level == expected


@pytest.mark.parametrize("content", [b"", b"loud", b"\xff", b"debug\ninfo", b"DEBUG\0"])
def test_a_file_that_names_no_level_changes_none(tmp_path: Path, root_level: None, content: bytes) -> None:
    (tmp_path / LEVEL_FILE).write_bytes(content)
    LogLevel(tmp_path, "info").look()
    assert logging.getLogger().level == logging.INFO


def test_a_change_is_told_once_whatever_the_new_level(
    tmp_path: Path, root_level: None, caplog: pytest.LogCaptureFixture
) -> None:
    level = LogLevel(tmp_path, "info")
    (tmp_path / LEVEL_FILE).write_text("error")
    level.look()
    level.look()
    assert [(each.levelno, each.name, each.__dict__["now"]) for each in caplog.records] == [(40, "logs", "error")]
