"""How restarts and ends of an engine are counted: by its own starts, never by its launcher's "not now"."""

from __future__ import annotations

import errno
import os
import select
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from metal_supervisor.cluster.report import UNLOADED
from metal_supervisor.launch import NOW, SOON
from metal_supervisor.memory.machine_memory import Held
from metal_supervisor.sidecar.counters import Counters
from metal_supervisor.sidecar.memory_sampler import SampledEngine
from metal_supervisor.sidecar.observer import EngineView, Observer, ServiceView
from metal_supervisor.sidecar.probes import ProbeFinding, ProbeTarget
from metal_supervisor.sidecar.publisher import Published
from metal_supervisor.spec.instants import utc
from metal_supervisor.spec.processes import Observed, ProgramState, RunNote, State
from metal_supervisor.spec.record import Verdict
from metal_supervisor.spec.types import Standing
from metal_supervisor.spec.withdrawal import withdrawal_token
from metal_supervisor.state import kept_files
from metal_supervisor.state.directory import StateDir
from metal_supervisor.state.doorbell import Doorbell
from tests.boundary.test_failure_registrar import OUTLOOK, SERVICE
from tests.support.records import accept

RECORD = accept(SERVICE, None, OUTLOOK, 100.0)
NAME = RECORD.program


class Quiet:
    """A prober and a meter that know nothing but what they are told."""

    found: ProbeFinding | None = None
    memory: Held | None = None

    def finding(self, _program: str) -> ProbeFinding | None:
        return self.found

    def busy(self, *_: Any) -> bool | None:
        return None

    def held(self, _engine: SampledEngine) -> Held | None:
        return self.memory


class Life:
    """A program of supervisord under the eyes of an observer."""

    def __init__(self, base: Path) -> None:
        self.state = StateDir(base / "state")
        self.state.create()
        self.quiet = Quiet()
        self.published, self.record = Published(), RECORD
        self.began = time.time()
        self.note = RunNote(0, 0, "", {"edition": RECORD.edition}, (), 0.0, "", "")
        self.begin()

    def begin(self) -> None:
        """A sidecar that has just started."""
        quiet: Any = self.quiet
        self.observer = Observer(self.state, quiet, quiet, Counters(), lambda _: self.published, set())

    def look(self, state: State, row_pid: int, pid: int) -> Observed:
        row = ProgramState(NAME, state, row_pid, self.began, 0.0)
        target = ProbeTarget(pid, "127.0.0.1", 18100, RECORD.probe)
        records: Mapping[str, Any] = {NAME: self.record}
        engine = EngineView(pid, target, SampledEngine(pid, "", 0), None)
        return self.observer.see(ServiceView(self.record, row, self.note, engine), records, False).observed

    def engine(self, pid: int, at: float) -> Observed:
        """An engine is started, and looked at."""
        self.note = replace(
            self.note, pid=pid, launcher_pid=pid, starts=(*self.note.starts, self.began + at), refused=""
        )
        return self.look(State.STARTING, pid, pid)

    def refusal(self, pid: int) -> Observed:
        """A launcher that ends with 75: it is looked at before it has noted that, and afterwards."""
        self.look(State.STARTING, pid, pid)
        self.note = replace(self.note, pid=0, launcher_pid=pid, refused="CrashLoopBackOff")
        return self.look(State.BACKOFF, 0, 0)


def test_a_crash_loop_shows_its_restarts_and_not_those_of_its_launcher(tmp_path: Path) -> None:
    life = Life(tmp_path)
    life.engine(1000, 1)
    life.look(State.BACKOFF, 0, 0)
    for start in range(1, 8):
        life.engine(1000 + 10 * start, 1 + start)
        life.look(State.BACKOFF, 0, 0)
        for refusal in range(1, 4):
            seen = life.refusal(1000 + 10 * start + refusal)
    assert seen.restarts == 7, "started eight times"
    assert sum(seen.exits.values()) == 8, "and ended eight times"


def test_an_engine_that_was_held_is_failing_until_it_serves_or_another_spec_is_asked_for(tmp_path: Path) -> None:
    life = Life(tmp_path)
    asked = replace(RECORD, asked="first")
    life.record = asked
    assert not life.engine(1000, 1).failing and not life.look(State.BACKOFF, 0, 0).failing
    held = life.look(State.FATAL, 0, 0)
    assert held.failing == "first"
    life.begin()  # a sidecar that has just started knows it, too
    for state, pid in ((State.STARTING, 1001), (State.BACKOFF, 0), (State.STARTING, 1002), (State.EXITED, 0)):
        seen = life.look(state, pid, pid)
        assert seen.failing == "first" and seen.message == held.message, state
    life.record = replace(RECORD, asked="second")
    assert not life.look(State.STARTING, 1003, 1003).failing
    life.look(State.FATAL, 0, 0)
    life.quiet.found = ProbeFinding(True, "", True)
    assert not life.look(State.RUNNING, 1004, 1004).failing


def test_an_engine_that_its_launcher_refuses_is_not_failing(tmp_path: Path) -> None:
    life = Life(tmp_path)
    life.note = replace(life.note, refused="PortInUse")
    assert not life.look(State.FATAL, 0, 0).failing


@pytest.mark.parametrize("fronted", [False, True])
def test_where_the_cluster_names_the_gateway_a_withdrawal_waits_for_no_write(tmp_path: Path, fronted: bool) -> None:
    life = Life(tmp_path)
    life.published = Published(fronted=fronted)
    life.record = replace(RECORD, withdraw=withdrawal_token(time.time()))
    assert (life.engine(1000, 1).withdrawn == life.record.withdraw) is fronted
    life.record = RECORD
    assert not life.look(State.RUNNING, 1000, 1000).withdrawn


def test_a_start_that_ended_between_two_looks_is_counted_and_no_other_sidecar_counts_it_again(tmp_path: Path) -> None:
    life = Life(tmp_path)
    life.engine(1000, 1)
    life.note = replace(life.note, starts=tuple(life.began + at for at in (1, 2, 3)))
    assert life.engine(1030, 4).restarts == 3
    life.begin()
    assert life.look(State.RUNNING, 1030, 1030).restarts == 3


def test_restarts_are_counted_after_the_clock_was_set_back(tmp_path: Path) -> None:
    """None was until the clock came to the last start before that again."""
    life = Life(tmp_path)
    life.engine(1000, 1)
    for start in range(1, 4):
        seen = life.engine(1000 + start, start - 3600)
        assert seen.restarts == life.look(State.RUNNING, 1000 + start, 1000 + start).restarts == start
    life.note = replace(life.note, starts=())
    assert life.engine(1010, -7200).restarts == 3, "of a new spec"
    life.begin()
    assert life.engine(1011, -7100).restarts == 4


def test_a_crash_after_a_long_run_is_counted_though_the_launcher_forgot_the_start(tmp_path: Path) -> None:
    life = Life(tmp_path)
    life.engine(1000, -3600)
    life.quiet.found = ProbeFinding(True, "", True)
    life.look(State.RUNNING, 1000, 1000)
    assert life.look(State.EXITED, 0, 0).restarts == 1
    life.note = replace(life.note, starts=())
    assert life.engine(1010, 1).restarts == 1


def test_only_a_start_after_a_rest_is_a_load_for_a_request(tmp_path: Path) -> None:
    life = Life(tmp_path)
    life.record = runs = replace(RECORD, idle_s=600.0, queued_at=life.began - 456)
    life.quiet.found = ProbeFinding(True, "", True)
    assert not life.engine(1000, 1).wakes, "the system was restarted, and nobody asked for it"
    life.look(State.EXITED, 0, 0)
    assert not life.engine(1010, 2).wakes, "it crashed"
    life.record = replace(runs, verdict=Verdict(Standing.WAIT, UNLOADED, "unused", life.began), queued_at=None)
    life.look(State.STOPPING, 1010, 1010)
    life.look(State.STOPPED, 0, 0)
    life.record = replace(runs, queued_at=life.began)
    assert list(life.engine(1020, 3).wakes) == [utc(life.began)]
    life.look(State.EXITED, 0, 0)
    assert len(life.engine(1030, 4).wakes) == 1


def test_an_orderly_stop_counts_nothing(tmp_path: Path) -> None:
    life = Life(tmp_path)
    life.engine(1000, 1)
    life.look(State.STOPPING, 1000, 1000)
    life.look(State.STOPPED, 0, 0)
    life.note = replace(life.note, starts=())
    assert life.engine(1010, 2).restarts == 0


def test_the_controller_is_woken_for_what_it_decides_by_and_not_for_words(tmp_path: Path) -> None:
    life = Life(tmp_path)
    bell = Doorbell(life.state.path, "controller")

    def rung() -> bytes:
        ready, _, _ = select.select([bell], [], [], 0)
        return os.read(bell.fileno(), 10) if ready else b""

    life.record = replace(RECORD, reserved_bytes=1000)
    life.engine(1000, 1)
    assert not rung(), "its launcher rings"
    life.quiet.found = ProbeFinding(False, "the engine is loading its model")
    assert life.look(State.STARTING, 1000, 1000).message
    assert not rung()
    life.quiet.found = ProbeFinding(True, "", True)
    life.look(State.STARTING, 1000, 1000)
    assert rung() == SOON, "only those that wait for a turn have to know"
    life.look(State.RUNNING, 1000, 1000)
    life.quiet.memory = Held(1000, 1000, 1000)
    assert life.look(State.RUNNING, 1000, 1000).memory_bytes == 1000
    assert not rung(), "so much is reserved for it"
    life.quiet.memory = Held(1 << 30, 1 << 30, 1 << 30)
    life.look(State.RUNNING, 1000, 1000)
    assert rung() == SOON
    life.quiet.found = ProbeFinding(False, "it does not answer", True)
    life.look(State.RUNNING, 1000, 1000)
    assert rung() == NOW
    life.quiet.found = ProbeFinding(True, "", True, "it hangs")
    life.look(State.RUNNING, 1000, 1000)
    assert rung() == NOW, "it is up again, and there is more to it"
    life.look(State.FATAL, 0, 0)
    assert rung() == NOW
    life.state.forget_observed(NAME)
    life.begin()
    life.look(State.FATAL, 0, 0)
    assert rung() == NOW, "no launcher rings for it"


def test_a_planned_end_that_no_pass_saw_is_no_crash(tmp_path: Path) -> None:
    """The next engine is up, and the withdrawal forgotten, before the sidecar looks again."""
    life = Life(tmp_path)
    life.engine(1000, -3600)
    life.quiet.found = ProbeFinding(True, "", True)
    life.look(State.RUNNING, 1000, 1000)
    life.record = replace(RECORD, withdraw=withdrawal_token(time.time()))
    life.published = Published(withdrawn=life.record.withdraw)
    assert life.look(State.RUNNING, 1000, 1000).withdrawn
    life.record, life.published = RECORD, Published()
    life.note = replace(life.note, starts=())
    assert life.engine(1010, 1).restarts == 0


def test_what_could_not_be_written_wakes_the_controller_once_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = Life(tmp_path)
    bell = Doorbell(life.state.path, "controller")
    life.engine(1000, 1)
    bell.wait(0)
    life.quiet.found = ProbeFinding(True, "", True)
    with monkeypatch.context() as full:
        full.setattr(kept_files, "write_atomic", no_space)
        assert life.look(State.RUNNING, 1000, 1000).ready
    assert not life.state.observations()[NAME].ready
    assert life.look(State.RUNNING, 1000, 1000).ready
    assert life.state.observations()[NAME].ready
    ready, _, _ = select.select([bell], [], [], 0)
    assert ready


def no_space(*_: object, **__: object) -> bool:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_what_a_process_says_of_itself_is_known_to_the_next_sidecar_and_goes_with_the_process(tmp_path: Path) -> None:
    life = Life(tmp_path)
    log = life.state.log_path(NAME)
    log.write_text("load_model: loading model 'm'\nload_tensors: offloaded 2/3 layers to GPU\n")
    life.quiet.found = ProbeFinding(True, "", True, model_name="org/Phi-4")
    counts = {"layersOffloaded": 2, "layersTotal": 3}
    assert (found := life.look(State.RUNNING, 7, 7)).model_name == "org/Phi-4" and found.acceleration == counts
    life.begin()
    life.quiet.found = None
    log.write_text("")
    assert (found := life.look(State.RUNNING, 7, 7)).model_name == "org/Phi-4" and found.acceleration == counts
    assert (found := life.look(State.RUNNING, 8, 8)).model_name == "" and found.acceleration == {}


def test_whether_an_engine_is_confined_is_known_by_its_own_note_alone(tmp_path: Path) -> None:
    life = Life(tmp_path)
    for changes, known in (
        ({"pid": 7, "confined": True}, True),
        ({"pid": 7}, False),
        ({"pid": 6, "confined": True}, None),  # the launcher could not replace the note of the engine before
        ({"pid": 7, "confined": True, "restored": True}, None),
    ):
        life.note = replace(RunNote(0, 7, "", {}, (), 0.0, "", ""), **changes)
        assert life.look(State.RUNNING, 7, 7).confined is known
