"""Many services that stop in one pass of the controller: it waits for none of them, and writes each record once."""

from __future__ import annotations

import http.server
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from metal_supervisor.controller.applier import Applier
from metal_supervisor.controller.loop import Controller
from metal_supervisor.controller.plan import Action, Hung, Step, Stopping
from metal_supervisor.controller.snapshot import Snapshot
from metal_supervisor.runtimes import probing
from metal_supervisor.settings.loader import Settings
from metal_supervisor.spec.processes import Diff, Observed, ProgramState, RunNote, State
from metal_supervisor.spec.record import Record
from metal_supervisor.spec.types import Standing
from metal_supervisor.state.directory import StateDir
from metal_supervisor.state.programs import program_name
from tests.boundary.test_failure_registrar import OUTLOOK, SERVICE
from tests.boundary.test_placement import NoKube
from tests.support.records import accept

ENGINES = 12
GONE = Standing.REMOVING


def record(name: str, port: int = 18100) -> Record:
    made = accept(replace(SERVICE, name=name, uid=name), None, OUTLOOK, 100.0)
    program = program_name(made.key)
    probe = replace(made.probe, busy_path="/slots")
    return replace(made, program=program, edition="a", port=port, probe=probe)


@pytest.fixture
def patient_server() -> Iterator[int]:
    """The port of a server that answers once all engines have been asked, and then says that none is busy."""
    all_asked = threading.Barrier(ENGINES)

    class Slots(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            all_asked.wait(30)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"[]")

        def log_message(self, *_: Any) -> None:
            """Says nothing."""

    class Server(http.server.ThreadingHTTPServer):
        request_queue_size = 2 * ENGINES
        daemon_threads = True

        def handle_error(self, *_: Any) -> None:
            """Says nothing: a client that asked alone has gone."""

    with Server(("127.0.0.1", 0), Slots) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        all_asked.abort()
        server.shutdown()


def test_stopping_engines_are_asked_all_at_once_while_the_sidecar_is_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patient_server: int
) -> None:
    monkeypatch.setattr(probing, "BUSY_S", 10.0)
    state = StateDir(tmp_path / "state")
    state.create()
    rpc: Any = None
    applier = Applier(state, rpc, Settings())
    records = [replace(record(f"s{number}", patient_server), withdraw="1.0") for number in range(ENGINES)]
    now = time.time()
    table, notes = {}, {}
    for number, each in enumerate(records):
        spec = each.edition or ""
        table[each.program] = ProgramState(each.program, State.RUNNING, 1000 + number, now - 60, 0.0)
        notes[each.program] = RunNote(1000 + number, 1000 + number, "t", {"edition": spec}, (), 0.0, "", "")
        applier.files.ours.add(each.program)
        applier._stopping[each.program] = Stopping(asked_at=time.monotonic() - 60)
    applier._diff = Diff(removed=frozenset(table))
    steps = applier.plan(
        [replace(each, verdict=replace(each.verdict, standing=GONE)) for each in records],
        Snapshot(now, {}, True, {}, table, notes, {}),
        lambda _: False,
    )
    assert {step.program for step in steps if step.do is Action.STOP} == set(table)


def test_one_that_was_told_to_end_and_serves_again_is_no_longer_told(tmp_path: Path) -> None:
    rpc: Any = None
    applier, each = Applier(StateDir(tmp_path / "state"), rpc, Settings()), record("back")
    row = ProgramState(each.program, State.RUNNING, 1000, 1.0, 0.0)
    note = RunNote(1000, 1000, "t", {"edition": each.edition}, (1.0,), 0.0, "", "")
    seen = Observed(each.program, 1000, True, 1.0, "RUNNING")
    applier._told[each.program] = 1000, Hung("it hangs", 1.0)
    snapshot = Snapshot(100.0, {}, True, {}, {each.program: row}, {each.program: note}, {each.program: seen})
    assert applier.plan([each], snapshot, lambda _: False) == []
    assert not applier._told


def test_withdrawing_many_services_writes_each_record_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = StateDir(tmp_path / "state")
    state.create()
    rpc: Any = None
    kube: Any = NoKube()
    controller = Controller(Settings(state_dir=str(state.path)), state, kube, rpc, lambda: True)
    made = [record(f"s{number}") for number in range(500)]
    controller.records = {each.key: each for each in made}
    controller._keep_records(made)
    written: list[str] = []
    write = state.write_record

    def counted(each: Record) -> bool:
        written.append(each.program)
        return write(each)

    monkeypatch.setattr(state, "write_record", counted)
    snapshot: Any = type("Snapshot", (), {"now": time.time(), "table": {}, "notes": {}})()
    began = time.monotonic()
    for each in made:
        assert controller._perform(Step(Action.WITHDRAW, each.program, "it is to end"), snapshot)
    print(f"500 services withdrawn in {time.monotonic() - began:.2f} s")
    assert sorted(written) == sorted(each.program for each in made)
    kept, _ = state.records()
    assert all(each.withdraw for each in kept.values()) and len(kept) == 500
