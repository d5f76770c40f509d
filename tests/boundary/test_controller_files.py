"""Files that the controller writes: its report on a full disk, and specs that are no longer used."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from metal_supervisor import launch
from metal_supervisor.controller import controller_status, loop, plan
from metal_supervisor.controller.controller_status import ControllerStatus
from metal_supervisor.controller.gateway_keys import GatewayKeys
from metal_supervisor.controller.loop import Controller
from metal_supervisor.controller.program_files import ProgramFiles
from metal_supervisor.controller.snapshot import Snapshot
from metal_supervisor.host.exit_watch import ExitWatch
from metal_supervisor.settings.loader import Settings
from metal_supervisor.settings.schema import SECRET_KEYS
from metal_supervisor.spec.processes import ProgramState, RunNote, State
from metal_supervisor.spec.references import Holding
from metal_supervisor.spec.types import Engine, Probe, Program
from metal_supervisor.state import programs
from metal_supervisor.state.directory import StateDir
from metal_supervisor.state.reports import CONTROLLER_REPORT
from tests.boundary.test_many_stops import record
from tests.boundary.test_placement import NoKube


def test_what_a_full_disk_kept_from_the_sidecar_is_told_once_there_is_room(
    state: StateDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    kube: Any = SimpleNamespace(server_name="s", requests=1)
    status = ControllerStatus(Settings(state_dir=str(state.path)), state, kube)
    placer: Any = SimpleNamespace(error="", unwatched="", cloned=False, foreign=dict, speaks_for=lambda *_: ())
    placed: Any = SimpleNamespace(namespaces=(), silent=())

    def told(memory: int) -> bool:
        snapshot = Snapshot(1.0, {}, True, {}, {}, {}, {})
        return status.publish(snapshot, "", [], lambda _: 1 / 0, (placer, placed), {"left": memory})

    def no_space(*_: Any, **__: Any) -> bool:
        raise OSError(errno.ENOSPC, "No space left on device")

    assert told(1) and not told(1)
    with monkeypatch.context() as full:
        full.setattr(controller_status, "write_atomic", no_space)
        with pytest.raises(OSError, match="No space"):
            told(2)
    assert told(2) and state.report(CONTROLLER_REPORT)["memory"] == {"left": 2}


def test_a_spec_that_cannot_be_written_delays_no_other_engine(state: StateDir, monkeypatch: pytest.MonkeyPatch) -> None:
    write = state.write_spec

    def no_space_for_p(made: Program) -> bool:
        if made.name == "p":
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(made)

    monkeypatch.setattr(state, "write_spec", no_space_for_p)
    files = ProgramFiles(state, Settings(state_dir=str(state.path)))
    records: Any = [SimpleNamespace(program=name, edition="a") for name in ("p", "q")]
    composed = {name: Program(name, "a", "{}") for name in ("p", "q")}
    files.write_specs(records, composed)
    assert state.specs_on_file() == ["q"]
    monkeypatch.undo()
    files.write_specs(records, composed)
    assert sorted(state.specs_on_file()) == ["p", "q"]


def test_keys_of_a_secret_that_cannot_be_copied_fail_no_pass(state: StateDir, caplog: pytest.LogCaptureFixture) -> None:
    settings = Settings(state_dir=str(state.path), gateway="127.0.0.1:9443", gateway_keys_secret="ops/keys")
    keys, found = GatewayKeys(settings), Holding(200, {"keys": "one"})
    (state.path / SECRET_KEYS).write_text("")  # in its way, as a full disk would be
    keys.keep(found)
    assert "the gateway's keys cannot be had" in caplog.text
    (state.path / SECRET_KEYS).unlink()
    keys.keep(found)
    assert settings.gateway_keys_path and settings.gateway_keys_path.read_text() == "one"
    other = replace(settings, gateway_keys_secret="ops/new")
    GatewayKeys(other).keep(Holding(403, {}, "may not"))
    assert other.gateway_keys_path and not other.gateway_keys_path.exists(), "the keys of one Secret are no other's"
    assert not settings.gateway_keys_path.exists()


def test_a_spec_is_written_once_its_memory_is_granted_and_goes_with_its_service(state: StateDir) -> None:
    files = ProgramFiles(state, Settings(state_dir=str(state.path)))
    record: Any = SimpleNamespace(program="p", edition="a")
    files.write_specs([record], {"p": Program("p", "a", '{"edition": "a"}')})
    edit = Program("p", "b", '{"edition": "b", "env": {"KEY": "secret"}}')
    files.write_specs([record], {"p": edit})
    assert state.spec_of("p") == {"edition": "a"}
    granted: Any = SimpleNamespace(program="p", edition="b")
    files.write_specs([granted], {"p": edit})
    assert state.spec_of("p")["edition"] == "b"
    files.collect([granted], Snapshot(2.0, {}, True, {}, {}, {}, {}))
    assert state.specs_on_file() == ["p"]
    files.collect([], Snapshot(2.0, {}, True, {}, {}, {}, {}))
    assert not state.specs_on_file()


def test_where_confinement_has_become_required_a_controller_keeps_no_spec_without_a_policy(state: StateDir) -> None:
    """An edit in the queue keeps it from being composed again."""
    made = record("s")
    open_one = programs.compose(made.program, Engine(("/bin/engine",), (), "/", Probe()), 18100, "::1", state.home)
    state.write_record(replace(made, edition=open_one.edition))
    state.write_spec(open_one)
    settings, nothing = Settings(state_dir=str(state.path), confinement="required"), cast(Any, None)
    controller = Controller(settings, state, cast(Any, NoKube()), nothing, lambda: True)
    controller.applier.files.write_specs(controller.records.values(), controller.prerequisites.composed)
    assert state.spec_of(made.program)["confinement"] is None


def test_an_engine_whose_stand_in_lasts_longer_does_not_wake_one_pass_after_another() -> None:
    """As with a stand-in that was halted: its own exit is waited for."""
    own, gone = os.getpid(), 2**22 + 1
    row = ProgramState("default.tiny", State.RUNNING, own, 1.0, 0.0)
    note = RunNote(gone, own, "ticks 1", {"edition": "s.json"}, (1.0,), 0.0, "", "")
    for pid, started, watched in (
        (gone, "ticks 1", {own}),
        (own, "ticks 1", {own}),
        (os.getppid(), launch.start_time(os.getppid()), {own, os.getppid()}),
    ):
        notes = {row.name: replace(note, pid=pid, started=started)}
        snapshot: Any = Snapshot(2.0, {}, True, {}, {row.name: row}, notes, {})
        assert loop.Controller._pids(snapshot) == watched
    ended: list[int] = []
    ExitWatch(ended.append).watch_only(loop.Controller._pids(replace(snapshot, notes={row.name: note})))
    assert not ended


def test_files_that_cannot_be_removed_are_reported_once_and_fail_no_pass(
    state: StateDir, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kube, nothing = cast(Any, NoKube()), cast(Any, None)
    controller = Controller(Settings(state_dir=str(state.path)), state, kube, nothing, lambda: True)
    left, removable = record("left"), record("removable")
    controller.records = {each.key: each for each in (left, removable)}
    forget = state.forget

    def refused(program: str) -> None:
        if program == left.program:
            raise PermissionError(errno.EPERM, "Operation not permitted", program)
        forget(program)

    monkeypatch.setattr(state, "forget", refused)
    monkeypatch.setattr(plan, "after_steps", lambda *_: None)
    snapshot = Snapshot(1.0, {}, True, {}, {}, {}, {})
    for _ in range(3):
        controller._settle(snapshot, [])
    assert list(controller.records) == [left.key] and len(caplog.records) == 1
    assert [each["name"] for each in controller.controller_status._notices] == [f"files of {left.program}"]
    monkeypatch.setattr(state, "forget", forget)
    controller._settle(snapshot, [])
    assert not controller.records and not controller.controller_status._notices


def test_a_notice_of_records_that_cannot_be_kept_goes_with_the_next_good_write(
    state: StateDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    kube, nothing = cast(Any, NoKube()), cast(Any, None)
    controller = Controller(Settings(state_dir=str(state.path)), state, kube, nothing, lambda: True)
    made = record("s")
    controller.records = {made.key: made}

    def no_inode(*_: Any) -> bool:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(state, "write_record", no_inode)
        controller._keep_records([made])
    assert [each["name"] for each in controller.controller_status._notices] == ["records"]
    controller._keep_records([made])
    assert not controller.controller_status._notices
