"""What an engine that is up counts for, and when one that is ending still counts as about to free its memory."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from metal_supervisor.controller.admission import EVICTED_DRAIN_S, Up
from metal_supervisor.controller.memory_manager import Memory, _ends_soon
from metal_supervisor.controller.pressure_watch import MemoryState
from metal_supervisor.controller.snapshot import Snapshot
from metal_supervisor.memory.pressure import Level, MemorySample, Watch
from metal_supervisor.settings.loader import Settings
from metal_supervisor.spec.processes import ProgramState, RunNote, State
from metal_supervisor.spec.record import Record
from metal_supervisor.spec.types import Engine, Key, Probe
from metal_supervisor.spec.withdrawal import withdrawal_token
from metal_supervisor.state import programs
from metal_supervisor.state.directory import StateDir
from tests.support.records import a_record

GIB = 1 << 30


def test_a_smaller_file_at_the_same_path_is_charged_as_what_it_is_now(tmp_path: Path) -> None:
    directory = StateDir(tmp_path / "state")
    directory.create()
    memory = Memory(Settings(state_dir=str(directory.path)), directory, lambda: None)
    engine = Engine(("/bin/x", "-m", "/Users/Shared/m.gguf"), (), "/", Probe())

    def charged(pid: int, size: int) -> int:
        made = programs.compose("default.tiny", engine, 9000, "127.0.0.1", directory.home, "asked", size, 0, False)
        record = a_record(edition=made.edition, reserved_bytes=size)
        note = RunNote(pid, pid, "s", json.loads(made.spec), (), 0.0, "", "")
        row = ProgramState(record.program, State.RUNNING, pid, 1.0, 0.0)
        snapshot = Snapshot(1.0, {}, True, {}, {record.program: row}, {record.program: note}, {})
        found = memory.ups({record.key: record}, {}, snapshot)
        return found[record.key].bytes

    assert charged(10, 40 * GIB) == 40 * GIB
    assert charged(10, 20 * GIB) == 40 * GIB, "the engine that runs was started with the larger one"
    memory.ups({}, {}, Snapshot(1.0, {}, True, {}, {}, {}, {}))  # it has ended
    assert charged(11, 20 * GIB) == 20 * GIB


def test_what_is_left_is_of_the_budget_as_it_is_now(tmp_path: Path) -> None:
    """An administrator may raise Metal's wired limit while engines run."""
    memory = Memory(Settings(), StateDir(tmp_path), lambda: None)
    budget, raised = memory.budget, memory.budget.bytes + GIB
    memory.watchdog.budget = replace(budget, bytes=raised)
    assert (memory.room.budget, memory.room.left, memory.said()["left"]) == (raised, raised, raised)


def test_no_engine_is_evicted_before_one_that_has_just_come_up_was_asked_whether_it_is_busy(tmp_path: Path) -> None:
    memory = Memory(Settings(eviction_enabled=True), StateDir(tmp_path), lambda: None)
    now, programs_of = time.monotonic(), ("default.large", "default.small")
    large, small = (a_record(name=each[8:], program=each, edition="x", port=1) for each in programs_of)
    records = {each.key: each for each in (large, small)}
    ups = {large.key: Up("x", "", 40 * GIB), small.key: Up("x", "", 30 * GIB)}
    notes = dict.fromkeys(programs_of, RunNote(1, 1, "s", {"edition": "x"}, (), 0.0, "", ""))
    snapshot = Snapshot(1.0, {}, True, {}, {}, notes, {})
    critical = Watch(level=Level.CRITICAL, raw=Level.CRITICAL, at=now, known_at=now, desperate=True)

    def evicted(busy: dict[Key, bool]) -> list[str]:
        memory.watchdog.seen = MemoryState(critical, MemorySample(now, 100 * GIB, 1 * GIB), 0, busy)
        return [each.name for each in memory.relieve(records, ups, snapshot).values() if each.evicted_at]

    assert evicted({}) == evicted({small.key: False}) == [], "the larger one has not been asked"
    assert memory.watchdog._engines().keys() == records.keys(), "the next sample asks it"
    assert evicted({large.key: True, small.key: False}) == ["small"]
    assert evicted({large.key: False, small.key: False}) == ["large"]


NOW = time.time()
RUNS = a_record(edition="aaaaaaaaaaaa")


@pytest.mark.parametrize(
    ("record", "soon"),
    [
        (RUNS, False),
        (replace(RUNS, withdraw=withdrawal_token(NOW - 1)), True),
        (replace(RUNS, withdraw=withdrawal_token(NOW - EVICTED_DRAIN_S)), True),
        (replace(RUNS, withdraw=withdrawal_token(NOW - 3600)), False),  # a long answer keeps it
        (replace(RUNS, withdraw=withdrawal_token(NOW + 3600)), False),  # the clock was set back
    ],
)
def test_an_engine_that_a_long_answer_keeps_is_not_about_to_end(record: Record, soon: bool) -> None:
    assert _ends_soon(record, NOW) is soon
