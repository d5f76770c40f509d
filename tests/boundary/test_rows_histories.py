"""Random histories of engines: rows that are kept are as if each had been made anew, in every pass."""

from __future__ import annotations

import random
import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from metal_supervisor import launch
from metal_supervisor.cluster.report import UNLOADED
from metal_supervisor.memory.machine_memory import Held
from metal_supervisor.settings.loader import Settings
from metal_supervisor.sidecar.counters import Counters
from metal_supervisor.sidecar.memory_sampler import SampledEngine
from metal_supervisor.sidecar.observer import Observer
from metal_supervisor.sidecar.probes import ProbeFinding, ProbeTarget
from metal_supervisor.sidecar.publisher import Published
from metal_supervisor.sidecar.rows import MacView, PassView, Rows
from metal_supervisor.spec.processes import LIVE, ProgramState, RunNote, State
from metal_supervisor.spec.record import Record, Verdict
from metal_supervisor.spec.types import Key, Standing
from metal_supervisor.spec.withdrawal import NO_WITHDRAWAL, withdrawal_token
from metal_supervisor.state.directory import StateDir
from tests.support.effort import cases
from tests.support.records import ADMITTED, a_record

NAMES = ("default.a", "default.b", "default.c")
FOUND = (
    ProbeFinding(True, "", True),
    ProbeFinding(False, "loading"),
    ProbeFinding(False, "silent", True),
    ProbeFinding(False, "silent", True, "it does no work"),
)
EVENTS = (
    "start",
    "start",
    "note",
    "note",
    "run",
    "probe",
    "probe",
    "probe",
    "crash",
    "reap",
    "reap",
    "stop",
    "give up",
    "refuse",
    "stand in",
    "record",
    "record",
    "publish",
    "measure",
    "requests",
    "mac",
    "go",
)


class Side:
    """Rows of one sidecar, with a prober and a meter that know what the history says."""

    def __init__(self, history: History, base: Path) -> None:
        self._history, self.state = history, StateDir(base)
        self.state.create()
        ours: Any = self
        self.asked: dict[str, ProbeTarget] = {}
        self.ending: set[str] = set()
        self.told: list[Any] = []
        self.counters = Counters()
        observer = Observer(self.state, ours, ours, self.counters, history.of, history.dead)
        self.rows = Rows(Settings(state_dir=str(base)), observer, lambda *told: self.told.append(told))
        self.observer = observer

    def ask_only(self, targets: Mapping[str, Any], ending: Collection[str] = ()) -> None:
        self.asked = {name: each[0] for name, each in targets.items()}
        self.ending = set(ending) & self.asked.keys()

    def finding(self, program: str) -> ProbeFinding | None:
        asked = self.asked.get(program)
        return self._history.found.get((program, asked.pid)) if asked is not None else None

    def busy(self, program: str, token: str, target: ProbeTarget | None) -> bool | None:
        return self._history.busy.get(program, False) if token and target is not None else None

    def held(self, engine: SampledEngine) -> Held | None:
        return self._history.held.get(engine.pid)

    def measure_only(self, _engines: object) -> None:
        pass

    def look(self, view: PassView) -> list[Any]:
        self.told.clear()
        self.rows.look(view)
        self.observer.forget_all_but(view.records.keys())
        seen = self.state.observations(), self.counters.counted().starts
        return [self.rows.all, self.rows.wanted, [*self.told], self.asked, self.ending, *seen]


class History:
    """What happens to three programs and their services. `starts`: launch.start_time of each process that lives."""

    def __init__(self, seed: int, base: Path, starts: dict[int, str]) -> None:
        self.chance, self._starts, self.now, self._pid = random.Random(seed), starts, 1000.0, 100
        self.table: dict[str, ProgramState] = {}
        self.notes: dict[str, RunNote] = {}
        self.found: dict[tuple[str, int], ProbeFinding] = {}
        self.held: dict[int, Held] = {}
        self.published: dict[Key, Published] = {}
        self.busy: dict[str, bool] = {}
        self.dead: set[int] = set()
        self.mac = MacView("192.0.2.1")
        self.records = {name: self._record(name) for name in NAMES}
        self.sides = Side(self, base / "keeps"), Side(self, base / "anew")

    def of(self, key: Key) -> Published:
        return self.published.get(key, Published())

    def _record(self, name: str) -> Record:
        on_demand = self.chance.random() < 0.3
        return a_record(
            name.partition(".")[2],
            port=18100 + NAMES.index(name),
            edition="x",
            queued_at=self.now,
            idle_s=60.0 if on_demand else None,
            front_port=19000 if on_demand else None,
        )

    def _born(self) -> int:
        self._pid += 1
        self._starts[self._pid] = f"ticks {self._pid}"
        return self._pid

    def happen(self) -> None:
        """One event; some mean nothing to the program that they are for."""
        self.now += self.chance.choice([0.1, 0.5, 3.0, 700.0])
        what, name = self.chance.choice(EVENTS), self.chance.choice(NAMES)
        row, note = self.table.get(name), self.notes.get(name)
        if row is not None and row.state in LIVE:
            self._to_live(what, name, row, note)
        elif what == "start":
            self.table[name] = ProgramState(name, State.STARTING, self._born(), self.now, row.stop if row else 0.0)
        elif what == "give up" and row is not None:
            self.table[name] = replace(row, state=self.chance.choice([State.BACKOFF, State.FATAL, State.STOPPED]))
        elif what == "go" and name in self.records:
            self.table.pop(name, None)
            self.notes.pop(name, None)
            del self.records[name]
        elif what == "go":
            self.records[name] = self._record(name)
        if name in self.records:
            self._to_any(what, name, self.records[name], note.pid if note else 0)

    def _to_live(self, what: str, name: str, row: ProgramState, note: RunNote | None) -> None:
        if what == "note":
            starts = (*(note.starts if note else ()), self.now)[-self.chance.randint(1, 20) :]
            born = self._starts.get(row.pid, "")
            self.notes[name] = RunNote(
                row.pid, row.pid, born, {"edition": "x"}, starts, 0.0, "", "", self.chance.random() < 0.5
            )
        elif what == "refuse" and note is not None:
            why = self.chance.choice(["PortInUse", "CrashLoopBackOff", "Revoked"])
            self.notes[name] = replace(note, pid=0, launcher_pid=row.pid, started="", refused=why)
        elif what == "stand in" and note is not None and note.pid:
            self.table[name] = replace(row, pid=self._born(), state=State.STARTING)
            self.notes[name] = replace(note, launcher_pid=self.chance.choice([self._pid, note.launcher_pid]))
        elif what == "run":
            self.table[name] = replace(row, state=State.RUNNING)
        elif what == "stop":
            self.table[name] = replace(row, state=State.STOPPING)
        elif what == "crash":
            ended = note.pid if note is not None and note.pid else row.pid
            self._starts.pop(ended, None)
            self.dead.add(ended)
        elif what == "reap" and self.dead & {row.pid, note.pid if note else 0}:
            self._starts.pop(row.pid, None)
            how = self.chance.choice(["exit status 1", "terminated by SIGKILL"])
            for side in self.sides:
                with (side.state.path / "log" / "supervisord.log").open("a") as log:
                    log.write(f"exited: {name} ({how}; not expected)\n")
            self.table[name] = replace(row, state=State.EXITED, pid=0, stop=self.now)

    def _to_any(self, what: str, name: str, record: Record, pid: int) -> None:
        if what == "probe":
            self.found[name, pid] = self.chance.choice(FOUND)
        elif what == "publish":
            self.published[record.key] = self.chance.choice(
                [
                    Published(),
                    Published(problem="PublishFailed: x"),
                    Published(record.withdraw, out=True),
                    Published(fronted=True),
                ]
            )
        elif what == "measure":
            self.held[pid] = Held(self.chance.randrange(1 << 30), 5, self.chance.randrange(1 << 20))
        elif what == "requests":
            self.busy[name] = self.chance.random() < 0.5
        elif what == "mac":
            fronts = self.chance.choice([(), (19000,)])
            self.mac = MacView(self.chance.choice(["192.0.2.1", ""]), "", fronts, self.chance.random() < 0.2)
        elif what == "record":
            self.records[name] = self.chance.choice(
                [
                    replace(record, withdraw=withdrawal_token(self.now)),
                    replace(record, withdraw=NO_WITHDRAWAL),
                    replace(record, verdict=ADMITTED),
                    replace(record, verdict=Verdict(Standing.WAIT, UNLOADED, "u", 1.0)),
                    replace(record, verdict=Verdict(Standing.STOPPED, "ManuallyScaledToZero", "", 1.0)),
                    replace(record, peers_ready=1 - record.peers_ready),
                    replace(record, retry_at=self.now + 10.0),
                    replace(record, stopped_by_hand=not record.stopped_by_hand),
                    replace(record, queued_at=self.now),
                ]
            )


@pytest.mark.parametrize("seed", range(cases(300)))
def test_a_row_that_is_kept_is_the_one_that_would_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    starts: dict[int, str] = {}
    history, kept = History(seed, tmp_path, starts), 0
    monkeypatch.setattr(launch, "start_time", lambda pid: starts.get(pid, ""))
    monkeypatch.setattr(time, "time", lambda: history.now)
    keeps, anew = history.sides
    for _ in range(60):
        for _ in range(history.chance.randint(1, 3)):
            history.happen()
        observed = {each.pid for each in anew.observer.observations.values()}
        history.dead.intersection_update({row.pid for row in history.table.values()} | observed)
        view = PassView(dict(history.records), dict(history.table), dict(history.notes), history.mac)
        anew.rows._anew_at = 0.0
        assert keeps.look(view) == anew.look(view)
        kept += len(keeps.rows._kept)
    assert kept, "some were"
