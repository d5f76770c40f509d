"""Reading along with a log that is rotated, emptied, removed and made anew: every byte once, and in order."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metal_supervisor.supervisord.logfile import BLOCK_BYTES, CUT, LogFile

BACKUPS = 3


def rotate(path: Path) -> None:
    """What supervisord does with a log that is full."""
    for number in range(BACKUPS, 1, -1):
        younger = path.with_name(f"{path.name}.{number - 1}")
        if younger.exists():
            younger.replace(path.with_name(f"{path.name}.{number}"))
    if path.exists():
        path.replace(path.with_name(f"{path.name}.1"))
    path.touch()


def append(path: Path, text: str) -> None:
    with path.open("ab") as file:
        file.write(text.encode())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "x.log"


def tail(path: Path, lines: int | None) -> str:
    log = LogFile(path)
    try:
        return b"".join(log.tail(lines)).decode()
    finally:
        log.close()


def fresh(log: LogFile) -> str:
    return b"".join(log.fresh()).decode()


@pytest.mark.parametrize(
    ("lines", "found"),
    [(0, ""), (1, "5\n"), (2, "4\n5\n"), (4, "2\n3\n4\n5\n"), (9, "1\n2\n3\n4\n5\n"), (None, "1\n2\n3\n4\n5\n")],
)
def test_the_last_lines_are_those_of_older_files_too(path: Path, lines: int | None, found: str) -> None:
    for each in ("1\n2\n", "", "3\n4\n", "5\n"):
        append(path, each)
        if each != "5\n":
            rotate(path)
    path.with_name("x.log.why").write_text("no part of it\n")
    assert tail(path, lines) == found


def test_a_line_that_is_not_whole_counts_and_long_ones_are_whole(path: Path) -> None:
    append(path, f"first\n{'x' * 3 * BLOCK_BYTES}\nlast")
    assert tail(path, 1) == "last"
    assert len(tail(path, 2)) == 3 * BLOCK_BYTES + 5
    assert tail(path, 3).startswith("first\n")


def test_a_file_that_is_not_there_yet_is_read_from_its_beginning(path: Path) -> None:
    log = LogFile(path)
    assert list(log.tail(10)) == [] and fresh(log) == ""
    append(path, "one\n")
    assert fresh(log) == "one\n" and fresh(log) == ""
    log.close()


@pytest.mark.parametrize("way", ["emptied", "removed", "removed with an older one beside it"])
def test_a_file_that_was_emptied_or_removed_is_gone_on_with(path: Path, way: str) -> None:
    if "older" in way:
        append(path, "old\n")
        rotate(path)
    append(path, "before\n")
    log = LogFile(path)
    assert b"".join(log.tail(1)) == b"before\n"
    if way == "emptied":
        os.truncate(path, 0)
    else:
        path.unlink()
    assert fresh(log) == ""
    append(path, "new\n")
    assert fresh(log) == "new\n"
    log.close()


@pytest.mark.parametrize("way", ["emptied", "removed", "rotated"])
def test_where_a_log_begins_anew_is_told_but_a_line_may_go_on_behind_a_rotation(path: Path, way: str) -> None:
    append(path, "ha")
    log = LogFile(path)
    assert list(log.tail(1)) == [b"ha"]
    if way == "rotated":
        rotate(path)
        append(path, "lf\n")
        assert list(log.fresh()) == [b"lf\n"]
    elif way == "emptied":
        os.truncate(path, 0)
        assert list(log.fresh()) == [CUT] and list(log.fresh()) == []
    else:
        append(path, "lf")
        path.unlink()
        append(path, "new\n")
        assert list(log.fresh()) == [b"lf", CUT, b"new\n"] and list(log.fresh()) == []
    log.close()


def test_what_was_written_before_a_rotation_and_between_two_is_not_lost(path: Path) -> None:
    append(path, "0\n")
    log = LogFile(path)
    assert b"".join(log.tail(1)) == b"0\n"
    for number in range(1, 4):
        append(path, f"{number}\n")
        rotate(path)
    append(path, "4\n")
    assert fresh(log) == "1\n2\n3\n4\n"
    log.close()


@settings(max_examples=60)
@given(st.lists(st.sampled_from(["write", "rotate", "read", "long"]), max_size=25))
def test_whatever_happens_between_two_looks_every_byte_comes_once(steps: list[str]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "x.log"
        append(path, "begin\n")
        log, written, read, kept = LogFile(path), "begin\n", "", 0
        read += b"".join(log.tail(None)).decode()
        for number, step in enumerate(steps):
            if step == "rotate" and kept < BACKUPS:  # more than are kept between two looks are lost to everybody
                rotate(path)
                kept += 1
            elif step == "read":
                read += fresh(log)
                assert read == written
                kept = 0
            elif step != "rotate":
                text = f"{number}\n" * (1 if step == "write" else 20_000)
                append(path, text)
                written += text
        assert read + fresh(log) == written
        log.close()
