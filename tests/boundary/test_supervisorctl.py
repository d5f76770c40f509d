"""`supervisorctl models` with the real supervisorctl, on files of a system of which nothing runs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from metal_supervisor.controller import boot
from metal_supervisor.spec.processes import Observed
from metal_supervisor.spec.record import Record, Verdict
from metal_supervisor.spec.terminal_text import escaped
from metal_supervisor.spec.types import Standing
from metal_supervisor.state.directory import StateDir
from metal_supervisor.supervisord.ctl_plugin import COLUMNS, LONGEST_WHY, NOT_FOUND, row
from tests.support.records import a_record

NOW = 1000.0
RECORD = a_record(port=18100, edition="0123456789ab")
UP = Observed("default.tiny", os.getpid(), True, 1.0, "RUNNING", memory_bytes=3 << 30, restarts=2)
EVIL = "x\nevil/other  Ready\r\x1b[2J\u202egpj\u2028%(here)s;`id`"


def cells(record: Record, observed: Observed | None) -> dict[str, str]:
    return dict(zip(COLUMNS, row(record, observed, "http://127.0.0.1:18100/v1", NOW), strict=True))


def test_one_that_serves_says_where_and_nothing_more() -> None:
    assert cells(RECORD, UP) == {
        "NAME": "default/tiny",
        "PHASE": "Ready",
        "RUNTIME": "llama-server",
        "PORT": "18100",
        "MEMORY": "3.0 GiB",
        "RESTARTS": "2",
        "ENDPOINT": "http://127.0.0.1:18100/v1",
        "WHY": "",
    }


def test_one_that_serves_and_was_edited_badly_says_so() -> None:
    assert cells(replace(RECORD, warning=("InvalidSpec", "no")), UP)["WHY"] == "InvalidSpec: no"


def test_one_that_is_not_ready_says_why_and_where_is_left_out() -> None:
    told = cells(RECORD, replace(UP, ready=False, message="its first answer is waited for"))
    assert (told["PHASE"], told["ENDPOINT"]) == ("Creating", "")
    assert told["WHY"] == "Loading: its first answer is waited for"


def test_without_a_supervisord_only_an_engine_that_outlived_it_is_ready() -> None:
    rests = replace(RECORD, idle_s=60.0, front_port=18200, verdict=Verdict(Standing.WAIT, "Unloaded", "", 1.0))
    for record in (RECORD, rests):
        told = dict(zip(COLUMNS, row(record, replace(UP, pid=0, ready=False), "http://x", NOW, up=False), strict=True))
        assert (told["PHASE"], told["ENDPOINT"]) == ("Stopped", "") and told["WHY"].startswith("NotRunning: ")
    assert row(RECORD, UP, "", NOW, up=False) == row(RECORD, UP, "", NOW)


def test_one_that_could_not_be_published_says_so_though_it_serves() -> None:
    told = cells(RECORD, replace(UP, published="forbidden"))
    assert (told["PHASE"], told["WHY"]) == ("Creating", "PublishFailed: forbidden")


@pytest.mark.parametrize(("due", "words"), [(NOW + 35, "next attempt in 35 s"), (NOW - 1, "next attempt is due")])
def test_one_in_a_crash_loop_says_when_it_is_tried_again_however_long_its_last_words(due: float, words: str) -> None:
    told = cells(replace(RECORD, retry_at=due), Observed("default.tiny", 0, False, 1.0, "FATAL", message="x" * 999))
    assert told["WHY"].startswith("CrashLoopBackOff: xxx") and told["WHY"].endswith(f"…; {words}")
    assert len(told["WHY"]) < LONGEST_WHY + 50


@pytest.mark.parametrize("text", [EVIL, "\0", "\x9b31m", "\ud800", "…"])
def test_whatever_is_written_is_one_line_that_a_terminal_does_not_act_on(text: str) -> None:
    assert escaped(text).isprintable()
    told = cells(RECORD, replace(UP, ready=False, message=text))
    assert all(cell.isprintable() for cell in told.values())


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    directory = StateDir(tmp_path / "state")
    directory.create()
    text = (boot.TEMPLATES / "supervisord.conf").read_text()
    text = text.replace("@HOME@", directory.home).replace("@SOCKET@", directory.socket).replace("@STOP_WAIT@", "60")
    (directory.path / "supervisord.conf").write_text(text)
    return directory


def supervisorctl(state: StateDir, *arguments: str, **env: str) -> tuple[int, list[str]]:
    """(exit status, lines) of the real one."""
    done = subprocess.run(
        [str(Path(sys.executable).parent / "supervisorctl"), "-c", f"{state.path}/supervisord.conf", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **env},
        encoding="utf-8",
    )
    assert not done.stderr
    return done.returncode, done.stdout.splitlines()


def test_the_command_lists_chooses_and_fails_for_a_name_that_there_is_not(state: StateDir) -> None:
    assert supervisorctl(state, "models") == (0, ["no InferenceService is this Mac's"])
    other = replace(
        RECORD,
        name="other",
        program="default.other",
        edition=None,
        verdict=Verdict(Standing.WAIT, "ModelNotReady", EVIL, 1.0),
    )
    for each in (RECORD, other):
        state.write_record(each)
    state.write_observed(UP)
    status, lines = supervisorctl(state, "models")
    assert (status, len(lines)) == (0, 3) and lines[0].split() == list(COLUMNS)
    assert lines[1].startswith("default/other  Pending") and "ModelNotReady: x\\nevil/other" in lines[1]
    assert lines[2].split()[:2] == ["default/tiny", "Ready"] and "http://127.0.0.1:18100/v1" in lines[2]
    for name in ("default.tiny", "default/tiny"):
        status, chosen = supervisorctl(state, "models", name)
        assert (status, len(chosen)) == (0, 2) and chosen[1].split()[:2] == ["default/tiny", "Ready"]
    assert supervisorctl(state, "models", "no\x1b[2Jne") == (NOT_FOUND, ["no\\x1b[2Jne: ERROR (no such service)"])
    status, both = supervisorctl(state, "models", "default.tiny", "nope")
    assert status == NOT_FOUND and len(both) == 3


@pytest.mark.parametrize("word", ["RUNNING", "STOPPING"])
def test_an_engine_that_has_gone_is_not_called_ready_because_nobody_was_there_to_see_it(
    state: StateDir, word: str
) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    state.write_record(RECORD)
    state.write_observed(replace(UP, pid=ended.pid, state=word))
    _, lines = supervisorctl(state, "models")
    assert lines[1].split()[1] == "Stopped" and "NotRunning" in lines[1]


def test_a_record_that_cannot_be_read_hides_no_other(state: StateDir) -> None:
    state.write_record(RECORD)
    state.record_path("default.broken").write_text("{\n")
    status, lines = supervisorctl(state, "models")
    assert status == 0 and lines[1].startswith("default/tiny")
    assert lines[2].startswith("default.broken: its record cannot be read: ")


def test_a_terminal_that_knows_no_unicode_gets_escapes(state: StateDir) -> None:
    state.write_record(replace(RECORD, verdict=Verdict(Standing.FAILED, "InvalidSpec", "naïve …", time.time())))
    _, lines = supervisorctl(state, "models", PYTHONIOENCODING="ascii")
    assert "na\\xefve \\u2026" in lines[1]


def test_there_is_help(state: StateDir) -> None:
    status, lines = supervisorctl(state, "help", "models")
    assert status == 0 and lines[0].startswith("models\t") and "No help" not in "".join(lines)
    assert "models" in " ".join(supervisorctl(state, "help")[1]).split()
    assert "No help" not in "".join(supervisorctl(state, "help", "status")[1])
