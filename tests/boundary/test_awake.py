"""When this Mac is kept awake: while something is wanted on it, told once, and a hand's word counts."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from metal_supervisor.controller import boot
from metal_supervisor.controller.awake import PROGRAM, Awake, in_use
from metal_supervisor.settings.loader import Settings
from metal_supervisor.spec.processes import ProgramState, State
from metal_supervisor.spec.record import Record, Verdict
from metal_supervisor.spec.types import Standing
from metal_supervisor.state.directory import StateDir
from metal_supervisor.supervisord.client import Refused, Unavailable

TABLE = {PROGRAM: ProgramState(PROGRAM, State.STOPPED, 0, 0.0, 0.0)}
WANTED = Record(
    namespace="default",
    name="tiny",
    uid="u",
    generation=1,
    program="default.tiny",
    model="m",
    runtime="llama-server",
    replicas=1,
    mode="chat",
    priority="normal",
    verdict=Verdict(Standing.RUN, "Admitted", "", 0.0),
    endpoint=None,
    port=18100,
    host="127.0.0.1",
    edition="a",
)


class Supervisord:
    """What it is told, and what it answers."""

    def __init__(self, *errors: Exception) -> None:
        self.told: list[str] = []
        self._errors = list(errors)

    def _hear(self, word: str, program: str) -> None:
        assert program == PROGRAM
        self.told.append(word)
        if self._errors:
            raise self._errors.pop()

    def start(self, program: str) -> None:
        self._hear("start", program)

    def stop(self, program: str) -> None:
        self._hear("stop", program)


def told(wanted: list[bool], *errors: Exception, table: Any = TABLE) -> list[str]:
    supervisord: Any = Supervisord(*errors)
    awake = Awake(supervisord)
    for each in wanted:
        awake.look(each, table)
    return list(supervisord.told)


def test_it_is_told_at_the_start_and_when_that_changes() -> None:
    assert told([True, True, True]) == ["start"]
    assert told([False, False]) == ["stop"], "one that an earlier controller started"
    assert told([True, False, False, True]) == ["start", "stop", "start"]
    assert told([True, False], table={}) == [], "there is no such program here"


def test_a_refusal_is_not_argued_with_and_an_outage_is_made_good() -> None:
    assert told([True, True], Refused(50, "SPAWN_ERROR")) == ["start"]
    supervisord: Any = Supervisord(Unavailable("away"))
    awake = Awake(supervisord)
    with pytest.raises(Unavailable):
        awake.look(True, TABLE)
    awake.look(True, TABLE)
    assert supervisord.told == ["start", "start"]


@pytest.mark.parametrize(
    ("record", "state", "expected"),
    [
        (WANTED, None, True),
        (replace(WANTED, stopped_by_hand=True), State.STOPPED, False),
        (replace(WANTED, edition=None), None, False),
        (replace(WANTED, edition=None, verdict=Verdict(Standing.WAIT, "Downloading", "", 0.0)), None, True),
        (replace(WANTED, edition=None, verdict=Verdict(Standing.WAIT, "Checking", "", 0.0)), None, True),
        (replace(WANTED, edition=None, verdict=Verdict(Standing.WAIT, "Pending", "", 0.0)), None, True),
        (replace(WANTED, edition=None, verdict=Verdict(Standing.WAIT, "InsufficientMemory", "", 0.0)), None, False),
        (replace(WANTED, edition=None, verdict=Verdict(Standing.FAILED, "DownloadFailed", "", 0.0)), None, False),
        (replace(WANTED, verdict=Verdict(Standing.STOPPED, "", "", 0.0)), State.STOPPED, False),
        (replace(WANTED, verdict=Verdict(Standing.REMOVING, "", "", 0.0)), State.RUNNING, True),
        (replace(WANTED, verdict=Verdict(Standing.REMOVING, "", "", 0.0)), State.STOPPING, True),
        (replace(WANTED, verdict=Verdict(Standing.SUSPENDED, "", "", 0.0)), State.EXITED, False),
    ],
)
def test_an_engine_that_is_wanted_or_has_not_ended_keeps_it_awake(
    record: Record, state: State | None, expected: bool
) -> None:
    table = {} if state is None else {record.program: ProgramState(record.program, state, 9, 0.0, 0.0)}
    assert in_use([record], table) is expected
    assert not in_use([], table)


def test_a_service_on_demand_keeps_it_awake_also_without_an_engine() -> None:
    verdict = Verdict(Standing.WAIT, "Unloaded", "", 1.0)
    rests = replace(WANTED, edition=None, idle_s=60.0, verdict=verdict)
    assert in_use([rests], {}) and not in_use([replace(rests, idle_s=None)], {})


def test_there_is_a_program_for_it_only_where_there_is_one_to_run(tmp_path: Path) -> None:
    directory = StateDir(tmp_path)
    directory.create()
    path = tmp_path / "it's awake"

    def text(caffeinate: str) -> str:
        boot.write_conf(directory, Settings(caffeinate=caffeinate))
        return (tmp_path / "supervisord.conf").read_text()

    # The last two stand for a directory that is closed to this user, which none is to root: they raise as that does.
    for absent in ("", str(path), str(tmp_path), "~no-such-user/it", str(tmp_path / ("x" * 300))):
        assert "caffeinate" not in text(absent)
    path.write_text("")
    assert "caffeinate" not in text(str(path)), "it cannot be executed"
    path.chmod(0o755)
    assert "[program:caffeinate]" in text(str(path))
    assert "it's" not in text(str(path)), "whatever it is called, no ini has it"
    path.write_text('#!/bin/sh\necho "$@"\n')
    said = subprocess.run([tmp_path / "current" / "awake"], capture_output=True, text=True, check=True).stdout
    assert said == f"-i -s -w {os.getpid()}\n", "it ends with whoever started it"
