"""`metal-supervisor logs` as a process of its own, on the files of a system of which nothing runs."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from metal_supervisor.cli import logs as logs_command
from metal_supervisor.settings.logging import LEVEL_FILE
from metal_supervisor.state.directory import StateDir
from tests.support.pseudo import WITHIN_S, Following, Terminal
from tests.support.records import a_record
from tests.support.system import eventually
from tests.support.typed import typed

TINY = a_record(endpoint=None)
EVIL = b"\x1b]0;title\x07\x1b[2J\x9b31m\r\xff caf\xc3\xa9\ttab\n"


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    directory = StateDir(tmp_path / "state")
    directory.create()
    directory.write_record(TINY)
    return directory


@pytest.fixture
def log(state: StateDir) -> Path:
    path = state.log_path("default.tiny")
    path.write_bytes(b"".join(b"line %d\n" % number for number in range(1, 201)))
    return path


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def command(state: StateDir, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "metal_supervisor", "logs", "--state-dir", str(state.path), *arguments]


def logs(state: StateDir, *arguments: str) -> tuple[int, bytes, str]:
    done = typed(*command(state, *arguments)[3:])
    return done.returncode, done.stdout.encode("utf-8", "surrogateescape"), done.stderr


@contextlib.contextmanager
def following(state: StateDir, *arguments: str) -> Iterator[Following]:
    """One that ends with the block, in order and without a word."""
    made = Following(command(state, "-f", *arguments))
    try:
        yield made
        assert made.close() == (0, b"")
    finally:
        made.process.kill()
        made.process.wait()


@pytest.mark.parametrize(("lines", "count"), [((), 100), (("-n", "3"), 3), (("-n", "all"), 200), (("-n", "0"), 0)])
def test_the_last_lines_of_an_engines_log(state: StateDir, log: Path, lines: tuple[str, ...], count: int) -> None:
    code, out, said = logs(state, "default/tiny", *lines)
    assert (code, said, out.count(b"\n")) == (0, "", count)
    assert not count or out.endswith(b"line 200\n")


@pytest.mark.parametrize("name", ["default.tiny", "tiny"])
def test_it_goes_by_its_other_names_too(state: StateDir, log: Path, name: str) -> None:
    assert logs(state, name, "-n", "1") == (0, b"line 200\n", "")


@pytest.mark.parametrize("word", ["-1", "x", "²"])
def test_a_number_of_lines_that_is_none_is_refused(state: StateDir, log: Path, word: str) -> None:
    code, _, said = logs(state, "tiny", f"--lines={word}")
    assert code == 2 and "is neither a number of lines nor all" in said


def test_our_own_programs_and_what_was_a_service_once_have_logs_too(state: StateDir) -> None:
    for name in ("controller", "supervisord", "default.gone"):
        state.log_path(name).write_text(f"of {name}\n")
        assert logs(state, name) == (0, f"of {name}\n".encode(), "")
    state.log_path("controller").with_name("controller.log.1").write_text("before\n")
    assert logs(state, "controller", "--previous") == (0, b"before\n", "")


def test_what_an_engine_wrote_before_it_crashed(state: StateDir, log: Path) -> None:
    code, out, said = logs(state, "tiny", "--previous")
    assert (code, out) == (1, b"") and "default.tiny has not crashed" in said
    state.keep_crash_log("default.tiny")
    log.write_bytes(b"a new life\n")
    assert logs(state, "tiny", "--previous", "-n", "1") == (0, b"line 200\n", "")


def test_one_that_has_no_log_yet_says_so(state: StateDir) -> None:
    code, out, said = logs(state, "tiny")
    assert (code, out) == (1, b"") and "default.tiny has written no log yet; see: metal-supervisor explain" in said


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("default/tyni", "there is no 'default/tyni'; did you mean default.tiny?"),
        ("../../etc/passwd", "there is no '../../etc/passwd'"),
        ("\x1b[2J\n", "there is no '\\x1b[2J\\n'"),
        ("twin", "'twin' may be any of a.twin, b.twin; say which"),
    ],
)
def test_a_name_that_nobody_has_or_several_have_is_told_with_what_there_is(
    state: StateDir, name: str, says: str
) -> None:
    for namespace in ("a", "b"):
        state.write_record(replace(TINY, namespace=namespace, name="twin", program=f"{namespace}.twin"))
    code, out, said = logs(state, name)
    assert (code, out) == (4, b"") and says in said and said.count("\n") == 1


def test_into_a_pipe_every_byte_goes_as_it_is(state: StateDir, log: Path) -> None:
    log.write_bytes(EVIL)
    assert logs(state, "tiny")[1] == EVIL


def test_onto_a_terminal_nothing_goes_that_it_would_act_on(state: StateDir, log: Path) -> None:
    log.write_bytes(EVIL + b"no end of a line \xe2\x82")
    terminal = Terminal(command(state, "tiny"))
    shown = terminal.rest()
    assert terminal.process.wait(WITHIN_S) == 0
    assert "\\x1b]0;title\\x07\\x1b[2J\ufffd31m\\r\ufffd café\ttab\r\nno end of a line" in shown
    assert shown.endswith("\r\n") and all(char.isprintable() or char in "\r\n\t" for char in shown)


def test_following_goes_on_when_the_file_is_rotated_emptied_removed_and_made_anew(state: StateDir, log: Path) -> None:
    with following(state, "tiny", "-n", "1") as along:
        assert along.until(b"200\n") == b"line 200\n"
        append(log, b"half a li")
        assert along.until(b"half a li") == b"half a li"
        append(log, b"ne\nbefore the rotation\n")
        log.replace(log.with_name(f"{log.name}.1"))
        log.write_bytes(b"after it\n")
        assert along.until(b"after it\n") == b"ne\nbefore the rotation\nafter it\n"
        os.truncate(log, 0)
        eventually(lambda: position(along.process.pid, log) == 0, WITHIN_S, "the emptied file to be noticed")
        append(log, b"emptied\n")
        assert along.until(b"emptied\n") == b"emptied\n"
        log.unlink()
        append(log, b"anew\n")
        assert along.until(b"anew\n") == b"anew\n"


def position(pid: int, path: Path) -> int | None:
    """Where a process reads in a file; None while it has it not open."""
    for each in psutil.Process(pid).open_files():
        if each.path == str(path):
            return int(getattr(each, "position", 0))
    return None


def test_following_waits_for_a_log_that_is_not_there_yet(state: StateDir) -> None:
    with following(state, "tiny") as along:
        eventually(lambda: psutil.Process(along.process.pid).status() == psutil.STATUS_SLEEPING, WITHIN_S, "it to wait")
        append(state.log_path("default.tiny"), b"at last\n")
        assert along.until(b"at last\n") == b"at last\n"


def test_following_ends_when_its_reader_has_gone_though_nothing_is_written(state: StateDir, log: Path) -> None:
    along = Following(command(state, "-f", "tiny", "-n", "1"))
    along.until(b"line 200\n")
    assert along.process.stdout is not None and along.process.stderr is not None
    along.process.stdout.close()
    with along.process.stderr:
        assert along.process.wait(WITHIN_S) == 0 and along.process.stderr.read() == b""


def test_following_on_a_terminal_ends_clean_with_ctrl_c(state: StateDir, log: Path) -> None:
    terminal = Terminal(command(state, "tiny", "-f", "-n", "1"))
    terminal.until("line 200\r\n")
    append(log, b"\x1b[31mred\n")
    assert "\x1b" not in terminal.until("red\r\n")
    terminal.process.send_signal(signal.SIGINT)
    assert "Traceback" not in terminal.rest() and terminal.process.wait(WITHIN_S) == 0


STAMP = b'{"ts": "2026-11-21T09:00:00.000Z", '
OURS = STAMP + b'"level": "info", "logger": "controller", "msg": "pass", "did": "%s", "n": 3}\n'


def shown_on_a_terminal(state: StateDir, *arguments: str) -> str:
    terminal = Terminal(command(state, *arguments))
    shown = terminal.rest()
    assert terminal.process.wait(WITHIN_S) == 0
    assert all(char.isprintable() or char in "\r\n\t" for char in shown)
    return shown


def test_lines_of_ours_are_text_on_a_terminal_and_anything_between_them_is_as_it_is(state: StateDir) -> None:
    evil = OURS % rb"\u001b[2J a\nb \u202e \ud800"
    other = b'{"ts": "x"} Traceback (most recent call last):\n  indented \x1b[2J\n'
    state.log_path("controller").write_bytes(OURS % b"start default.tiny: new" + other + evil + b"no end {")
    assert shown_on_a_terminal(state, "controller") == (
        '2026-11-21T09:00:00.000Z INFO controller pass did="start default.tiny: new" n=3\r\n'
        '{"ts": "x"} Traceback (most recent call last):\r\n  indented \\x1b[2J\r\n'
        '2026-11-21T09:00:00.000Z INFO controller pass did=" [2J a b    " n=3\r\n'
        "no end {\r\n"
    )


def test_a_traceback_of_ours_is_below_its_line(state: StateDir) -> None:
    told = OURS.replace(b'"n": 3', rb'"exc": "Traceback:\n  File x\nBoom: \u009b2J"') % b"x"
    state.log_path("sidecar").write_bytes(told)
    assert shown_on_a_terminal(state, "sidecar") == (
        "2026-11-21T09:00:00.000Z INFO controller pass did=x\r\n  Traceback:\r\n    File x\r\n  Boom:  2J\r\n"
    )


def test_what_an_engine_writes_is_never_taken_for_ours(state: StateDir, log: Path) -> None:
    log.write_bytes(OURS % b"x")
    assert shown_on_a_terminal(state, "tiny") == (OURS % b"x").decode().replace("\n", "\r\n")


def test_into_a_pipe_our_own_lines_go_byte_for_byte(state: StateDir) -> None:
    content = OURS % b"x" + EVIL + OURS % rb"\u001b" + b"no end"
    state.log_path("controller").write_bytes(content)
    assert logs(state, "controller")[1] == content


def test_a_line_of_ours_that_comes_in_two_parts_is_shown_when_it_is_whole(state: StateDir) -> None:
    path = state.log_path("controller")
    path.write_bytes(OURS % b"first")
    terminal = Terminal(command(state, "controller", "-f"))
    terminal.until("did=first n=3\r\n")
    append(path, (OURS % b"second")[:50])
    eventually(lambda: position(terminal.process.pid, path) == path.stat().st_size, WITHIN_S, "the half to be read")
    append(path, (OURS % b"second")[50:] + b"plain\n")
    assert terminal.until("plain\r\n").endswith("INFO controller pass did=second n=3\r\nplain\r\n")
    terminal.process.send_signal(signal.SIGINT)
    assert terminal.process.wait(WITHIN_S) == 0


@pytest.mark.parametrize("way", ["emptied", "removed"])
def test_half_a_line_is_not_put_before_what_comes_after_the_log_was_emptied(state: StateDir, way: str) -> None:
    path = state.log_path("controller")
    path.write_bytes(OURS % b"first")
    terminal = Terminal(command(state, "controller", "-f"))
    terminal.until("did=first n=3\r\n")
    append(path, b'{"ts": "half \xc3')
    eventually(lambda: position(terminal.process.pid, path) == path.stat().st_size, WITHIN_S, "the half to be read")
    if way == "emptied":
        os.truncate(path, 0)
        eventually(lambda: position(terminal.process.pid, path) == 0, WITHIN_S, "the emptied file to be noticed")
    else:
        path.unlink()  # as `supervisorctl clear` does
    append(path, OURS % b"second" + b"plain\n")
    told = "2026-11-21T09:00:00.000Z INFO controller pass did=second n=3\r\nplain\r\n"
    assert terminal.until("plain\r\n") == '{"ts": "half \ufffd\r\n' + told
    terminal.process.send_signal(signal.SIGINT)
    assert terminal.process.wait(WITHIN_S) == 0


def test_a_line_without_an_end_is_not_waited_for(state: StateDir) -> None:
    state.log_path("controller").write_bytes(b"{" + b"x" * (logs_command.LONGEST_LINE + 70_000) + b"\n" + OURS % b"y")
    shown = shown_on_a_terminal(state, "controller", "-n", "all")
    assert shown.count("x") == logs_command.LONGEST_LINE + 70_000 and shown.endswith("pass did=y n=3\r\n")


def test_how_much_is_to_be_logged_is_kept_for_the_next_start_of_a_system_that_is_down(state: StateDir) -> None:
    done = typed("log-level", "debug", "--state-dir", str(state.path))
    kept = f"nothing runs in {state.path} (--state-dir): this counts from its next start"
    assert (done.returncode, done.stdout) == (0, "") and done.stderr.strip().endswith(kept)
    assert (state.path / LEVEL_FILE).read_text() == "debug\n"
