"""What the controller believes that its engines hold: by what they run from, not by what they were edited to."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from metal_supervisor.controller import reconcile
from metal_supervisor.controller.memory_manager import Memory
from metal_supervisor.controller.snapshot import Snapshot
from metal_supervisor.settings.loader import Settings
from metal_supervisor.spec.processes import Observed, ProgramState, RunNote, State
from metal_supervisor.spec.record import Verdict
from metal_supervisor.spec.types import Standing
from metal_supervisor.state.directory import StateDir
from tests.support.records import a_record

OLD = "000000000001"
NEW = "000000000002"
RECORD = a_record(
    "one",
    program="default.one",
    model="m",
    verdict=Verdict(Standing.RUN, "Admitted", "", 0.0),
    endpoint=None,
    edition=OLD,
    reserved_bytes=100,
)
UP = {"default.one": ProgramState("default.one", State.RUNNING, 7, 1.0, 0.0)}
NOTE = RunNote(7, 7, "x", {"edition": OLD, "reserved_bytes": 100}, (), 0.0, "", "")


def world(table: Any = UP, notes: Any = MappingProxyType({}), observed: Any = MappingProxyType({})) -> Snapshot:
    return Snapshot(1.0, {}, True, {}, table, notes, observed)


def books(path: Path) -> tuple[Memory, StateDir]:
    directory = StateDir(path)
    (path / "specs").mkdir(parents=True, exist_ok=True)
    directory.spec_path("default.one").write_text(json.dumps({"edition": NEW, "reserved_bytes": 300}))
    return Memory(Settings(memory_fraction=0.5), directory, lambda: None), directory


def test_an_engine_is_charged_by_its_launcher_s_note_and_what_was_measured(tmp_path: Path) -> None:
    memory, _ = books(tmp_path)
    key, edited = RECORD.key, replace(RECORD, edition=NEW, reserved_bytes=300)
    assert memory.ups({key: edited}, {}, world(notes={"default.one": NOTE}))[key].bytes == 100
    seen = {"default.one": Observed("default.one", 7, True, 0.0, "RUNNING", memory_bytes=170)}
    held = memory.ups({key: edited}, {}, world(UP, {"default.one": NOTE}, seen))[key]
    assert (held.edition, held.bytes) == (OLD, 170)
    assert memory.ups({key: edited}, {}, world({}, {"default.one": NOTE}, seen)) == {}


def test_without_a_note_it_is_charged_by_the_spec_that_its_launcher_is_about_to_read(tmp_path: Path) -> None:
    memory, directory = books(tmp_path)
    for notes in ({}, {"default.one": replace(NOTE, launcher_pid=6)}):
        held = memory.ups({RECORD.key: RECORD}, {}, world(UP, notes))[RECORD.key]
        assert (held.edition, held.bytes) == (NEW, 300)
    directory.spec_path("default.one").unlink()
    memory, _ = Memory(Settings(memory_fraction=0.5), directory, lambda: None), directory
    assert memory.ups({RECORD.key: RECORD}, {}, world())[RECORD.key].bytes == 100, "the record by which it was started"


def test_an_engine_whose_record_and_spec_are_lost_is_charged_as_what_is_wanted_of_it(tmp_path: Path) -> None:
    memory, _ = books(tmp_path)
    key, wanted = RECORD.key, reconcile.unchanged(replace(RECORD, edition=NEW, reserved_bytes=300))
    notes = {"default.one": NOTE}
    assert memory.ups({}, {key: wanted}, world(notes=notes))[key].bytes == 100, "its spec says more"
    memory, directory = books(tmp_path)
    directory.spec_path("default.one").unlink()
    assert memory.ups({}, {key: wanted}, world())[key].bytes == 300
