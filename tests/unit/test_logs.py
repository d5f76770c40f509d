"""Log lines: one line each, fields that can be read back."""

from __future__ import annotations

import io
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metal_supervisor.logs import LEVEL_FILE, Level, LineFormatter, configure

PROPERTY = settings(max_examples=100, deadline=None, database=None, derandomize=True)
CHARACTERS = st.text(st.characters(), max_size=20) | st.sampled_from(["a\nb", "\r", "\x1b[31m", "\u2028", "\ud800", ""])


def line(message: str = "pass", *args: object, **fields: object) -> str:
    record = logging.makeLogRecord(
        {
            "name": "controller", "levelname": "INFO", "levelno": 20, "msg": message, "args": args, "created": 0.5,
            **fields,
        }
    )
    record.msecs = 500.0
    return LineFormatter().format(record)


def test_a_line_is_time_level_logger_message_and_fields() -> None:
    assert line(did="start default.tiny: new", count=3) == (
        '1970-01-01T00:00:00.500Z INFO controller pass did="start default.tiny: new" count=3'
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


@pytest.mark.parametrize("value", ['a" level="x', 'say "hi" now', 'q"uote', "back\\slash here", "a=b c"])
def test_a_value_cannot_pass_for_another_field(value: str) -> None:
    tail = line(why=value, next="1").partition(" pass ")[2]
    found = re.findall(r'(\w+)=("(?:[^"\\]|\\.)*"|[^\s"]+)(?: |$)', tail)
    assert [name for name, _ in found] == ["why", "next"]


def test_an_exception_is_shown_with_its_traceback() -> None:
    try:
        raise RuntimeError("boom")
    except RuntimeError:
        text = line("failed", exc_info=sys.exc_info())
    assert "RuntimeError: boom" in text and "Traceback" in text


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    logger = logging.getLogger()
    before = logger.handlers[:], logger.level, {name: logging.getLogger(name).level for name in ("waitress", "urllib3")}
    yield logger
    logger.handlers[:], logger.level = before[0], before[1]
    for name, level in before[2].items():
        logging.getLogger(name).setLevel(level)


def test_everything_goes_to_standard_error_at_the_configured_level(
    root: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    configure("warning")
    logging.getLogger("controller").info("quiet")
    logging.getLogger("controller").warning("loud", extra={"file": "x"})
    configure("debug")
    logging.getLogger("urllib3").info("chatter of a library")
    assert stream.getvalue().rstrip().endswith("WARNING controller loud file=x")
    assert stream.getvalue().count("\n") == 1


def test_an_unexpected_error_in_a_thread_ends_the_process_and_is_logged() -> None:
    code = (
        "import threading, time; from metal_supervisor import logs; logs.configure('info'); logs.die_with_threads();"
        "threading.Thread(target=lambda: 1 / 0, name='watch').start(); time.sleep(30)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20)
    assert done.returncode == 70
    assert "thread died; so does the process which=watch" in done.stderr and "ZeroDivisionError" in done.stderr


@pytest.fixture
def root_level() -> Iterator[None]:
    before = logging.getLogger().level
    logging.getLogger().setLevel(logging.INFO)
    yield
    logging.getLogger().setLevel(before)


def test_the_level_is_that_of_the_file_while_it_is_there_and_else_the_setting(tmp_path: Path, root_level: None) -> None:
    level, path = Level(tmp_path, "info"), tmp_path / LEVEL_FILE
    for word, expected in (("debug\n", logging.DEBUG), ("error", logging.ERROR), (None, logging.INFO)):
        path.unlink(missing_ok=True) if word is None else path.write_text(word)
        level.look()
        assert logging.getLogger().level == expected


@pytest.mark.parametrize("content", [b"", b"loud", b"\xff", b"debug\ninfo", b"DEBUG\0"])
def test_a_file_that_names_no_level_changes_none(tmp_path: Path, root_level: None, content: bytes) -> None:
    (tmp_path / LEVEL_FILE).write_bytes(content)
    Level(tmp_path, "info").look()
    assert logging.getLogger().level == logging.INFO


def test_a_change_is_told_once_whatever_the_new_level(
    tmp_path: Path, root_level: None, caplog: pytest.LogCaptureFixture
) -> None:
    level = Level(tmp_path, "info")
    (tmp_path / LEVEL_FILE).write_text("error")
    level.look()
    level.look()
    assert [(each.levelno, each.name, each.__dict__["now"]) for each in caplog.records] == [(40, "logs", "error")]
