"""The sidecar's loop: wake -> what is there -> what it means -> tell everybody.

It reads supervisord, the records and its own probes, keeps an observation per service for the controller,
hands the registrar what the cluster should show, and replaces the board that HTTP answers from. A death is
seen through the pid, at once: the endpoint goes out while supervisord is still being poked awake.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from metal_supervisor import __version__, launch
from metal_supervisor.accounts import Renewal
from metal_supervisor.boundary import host
from metal_supervisor.boundary.doorbell import Doorbell, ring
from metal_supervisor.boundary.exits import ExitWatch
from metal_supervisor.boundary.kube import Kube
from metal_supervisor.boundary.memory import Held
from metal_supervisor.boundary.roam import AddressBook
from metal_supervisor.boundary.state import SESSION_FILE, StateDir, write_atomic
from metal_supervisor.boundary.supervisord import Refused, Supervisord, Unavailable
from metal_supervisor.config import Settings
from metal_supervisor.core import first_request
from metal_supervisor.core.attachment import Attachment
from metal_supervisor.core.claims import PREFIX, UNSCHEDULABLE
from metal_supervisor.core.liveness import Limits
from metal_supervisor.core.report import CRASH_LOOP, HELD, MOVED, Happening, Report, happening, report
from metal_supervisor.core.types import (
    LIVE,
    Json,
    Key,
    ModelFile,
    Observed,
    ProgramState,
    Record,
    RunNote,
    Standing,
    State,
)
from metal_supervisor.sidecar import farewell, sharing, words
from metal_supervisor.sidecar.board import Board, Recent, Row
from metal_supervisor.sidecar.fleetnode import FleetNode
from metal_supervisor.sidecar.gatherer import Gatherer
from metal_supervisor.sidecar.inventory import Inventory, noted
from metal_supervisor.sidecar.membership import Membership, new_session
from metal_supervisor.sidecar.meter import Engine, Meter
from metal_supervisor.sidecar.power import PowerFile
from metal_supervisor.sidecar.probes import Finding, Prober, Target
from metal_supervisor.sidecar.registrar import Around, Registrar
from metal_supervisor.sidecar.slumber import Slumber
from metal_supervisor.sidecar.statuses import Wanted, WantedModel
from metal_supervisor.sidecar.tallies import Tallies

TICK_S = 15.0
RETRY_S = 1.0
WITHDRAW_ALL_S = 2.0
MEMORY_STEP_BYTES = 16 << 20
MOST_HAPPENINGS = 20
# Below the 2 s that the controller waits for an answer.
UNCONFIRMED_S = 1.0
log = logging.getLogger("sidecar")


def _asked_at(token: str) -> float:
    """Unix time at which a withdrawal was asked for."""
    try:
        return float(token)
    except ValueError:
        return 0.0


class Sidecar:
    """Everything the sidecar holds between passes; the files and the cluster hold the rest."""

    def __init__(self, settings: Settings, directory: StateDir, kube: Kube, supervisord: Supervisord) -> None:
        self.settings, self.state, self.kube, self.supervisord = settings, directory, kube, supervisord
        self.bell = Doorbell(directory.path, "sidecar")
        self.wake = self.bell.ring
        self.node = host.node_name(directory.path, settings.node_name)
        self.board = Board(node=self.node)
        self._attached: dict[str, Attachment | None] = {}
        """The notes of attendants, as of this pass."""
        self._rows: list[Row] = []
        """What was seen in the latest pass, shared daemons included."""
        self.membership = Membership(kube, self.node, settings.lease_duration, self._session())
        listed = settings.fleet_node == "on" and not settings.embedded
        fleet_node = FleetNode(kube, self.node, host.memory_bytes()) if listed else None
        self._tallies = Tallies()
        self.registrar = Registrar(
            kube, self.node, self.membership, self.wake, settings.embedded, fleet_node, self._tallies
        )
        limits = Limits(settings.llama_server_startup_timeout, settings.hang_timeout)
        self.prober = Prober(self.wake, limits, self._key_of, self._tallies.probed)
        self.exits = ExitWatch(self._exited)
        self._meter = Meter(self.wake)
        self._gatherer = Gatherer(settings.bind_address, self._key_of)
        self._dead: set[int] = set()
        self._news = threading.Event()
        """A process has ended, and no pass has told of it."""
        self._observed = directory.observations()
        self._reports: dict[Key, Report] = {}
        self._happenings: deque[Recent] = deque(maxlen=MOST_HAPPENINGS)
        self._address = ""
        """What pods were told last."""
        self._table: Mapping[str, ProgramState] = {}
        self._supervisord_since, self._table_read = 0.0, False
        self._inventory = Inventory(settings, self.wake)
        self._slumber = Slumber(directory.path, self.registrar)
        self._power = PowerFile(directory.path, settings.apple_power_enabled)
        self._leaving = threading.Event()
        self.addresses = AddressBook(kube, settings.host_ip, settings.embedded, self._roamed)

    def _renew_token(self) -> None:
        """Keeps this Mac's own token young, if it has one."""
        path = Path(self.settings.kubeconfig).expanduser()
        renewal = Renewal(path, self.settings.context, self.kube)
        while True:
            time.sleep(renewal.step())

    def _session(self) -> str:
        """A name for this run, kept with the latest before it: the controller tells ours from another Mac's."""
        path, session = self.state.path / SESSION_FILE, new_session()
        before: list[str] = []
        with contextlib.suppress(OSError, ValueError):
            found = json.loads(path.read_text("utf-8"))
            before = [str(each) for each in found][-4:] if isinstance(found, list) else []
        write_atomic(path, json.dumps([*before, session]), durable=False)
        return session

    def current(self) -> Board:
        """The board, with what is counted elsewhere."""
        counted = self._tallies.counted()
        told, power = self._gatherer.told(), self._power.reading
        return replace(self.board, requests=self.kube.requests, power=power, counted=counted, told=told)

    def _roamed(self) -> None:
        """The machine has slept, or is somewhere else."""
        self.registrar.look_now()
        self.wake()

    def _exited(self, pid: int) -> None:
        self._dead.add(pid)
        self._news.set()
        self.wake()
        with contextlib.suppress(Unavailable, Refused):
            self.supervisord.poke()
        self.wake()

    def run(self, stopped: Callable[[], bool]) -> None:
        """Passes until told to stop; takes the endpoints out if the whole system stops."""
        if self.settings.embedded:
            self.addresses.look()  # loopback does not change
        else:
            self.addresses.start()
            self.addresses.wait(RETRY_S)
        self.registrar.start()
        self._meter.start()
        if self.settings.engine_metrics:
            self._gatherer.start()
        self._inventory.start()
        self._power.start()
        if not self.settings.embedded:
            threading.Thread(target=self._renew_token, name="token", daemon=True).start()
        pause_s = 0.0
        while not stopped():
            self.bell.wait(pause_s)
            began = time.monotonic()
            try:
                self.one_pass()
                self._tallies.passed(time.monotonic() - began)
                # supervisord tells nobody when it gives up on a program; look often while it may.
                held = any(row.state in (State.BACKOFF, State.STOPPING) for row in self._table.values())
                held = held or bool(self._supervisord_since)
                asked = any(row.record.withdraw and not row.observed.drained for row in self._rows)
                pause_s = UNCONFIRMED_S / 4 if asked else RETRY_S if held else TICK_S
                pause_s = min(pause_s, self._slumber.again_in_s)
            except Exception:
                log.exception("pass failed; it is tried again")
                pause_s = RETRY_S
        if self._whole_system_stops():
            self._leave()

    def _whole_system_stops(self) -> bool:
        """Whether supervisord is going down, and not the sidecar alone: that must not touch an endpoint."""
        try:
            self.supervisord.call("supervisor.getState")
        except (Unavailable, Refused) as error:
            return "shutting down" in str(error)
        return False

    def _leave(self) -> None:
        """Takes the endpoints out, lets running answers end, then tells all engines at once to end.

        supervisord would stop one after another, and launchd's patience with all of it has a limit.
        """
        self._leaving.set()
        self.one_pass()
        if not self.registrar.flush(WITHDRAW_ALL_S):
            log.warning("endpoints could not be withdrawn in time")
        live = [row for row in self.board.rows if row.observed.pid]
        started = {row.observed.pid: launch.start_time(row.observed.pid) for row in live}
        answering = {
            row.record.program: self._target(row.record, row.observed.pid) for row in live if not row.observed.hung
        }
        if not farewell.answers_ended(self.prober, answering, self.settings.stop_timeout):
            log.warning("some answers are cut: they did not end in time", extra={"seconds": self.settings.stop_timeout})
        farewell.end(started)  # before the cluster is told, which may hang
        self.registrar.release()

    # ── one pass ─────────────────────────────────────────────────────────────────────────────────

    def one_pass(self) -> None:
        """One pass: observe, keep, tell."""
        error = self._read_table()
        if self._slumber.look():
            self.addresses.look_now()
        records = self._read_records()
        notes = self.state.run_notes()
        told = self._controller()
        found = {name: self._engine_pid(self._table.get(name), notes.get(name)) for name in records}
        pids = sharing.pids_with_daemons(records, found)
        self._attached = {name: self.state.attachment(name) for name, record in records.items() if record.daemon}
        alive = {
            name: record
            for name, record in records.items()
            if pids[name] and sharing.is_asked(record, self._attached.get(name), pids[name])
        }
        self.prober.ask_only(
            {name: (self._target(each, pids[name]), self._known(each, pids[name])) for name, each in alive.items()},
            {name for name, each in alive.items() if self._ending(each, self._table.get(name))},
        )
        self._rows = [
            self._row(each, self._table.get(name), notes, pids[name], records) for name, each in records.items()
        ]
        rows = [row for row in self._rows if not row.record.is_daemon]
        self._meter.measure_only(
            {pid: self._engine(records[name], notes, pid) for name, pid in pids.items() if pid}
        )
        self._gatherer.follow(rows, notes)
        self._tallies.forget_all_but(records.keys())
        for program in self._observed.keys() - records.keys():
            del self._observed[program]
            self.state.forget_observed(program)
        self._register(rows, told)
        self._slumber.answer()
        trouble, since = self.registrar.trouble
        self.board = Board(
            at=time.time(),
            passed_at=time.monotonic(),
            controller_at=self._heard_of(told),
            rows=tuple(rows),
            supervisord_error=error,
            supervisord_since=self._supervisord_since,
            controller=told,
            cluster_error=trouble,
            cluster_since=since,
            node=self.node,
            address=self.addresses.choice,
            engines=self._inventory.offers,
            happenings=tuple(self._happenings),
            programs={
                name: row.state.value
                for name, row in self._table.items()
                if name not in records or records[name].is_daemon
            },
        )

    def _read_records(self) -> dict[str, Record]:
        """The records; one that cannot be read is taken as it last was, until the controller has mended it."""
        good, bad = self.state.records()
        before = {row.record.program: row.record for row in self._rows}
        # Its record is removed only after its program: until then it was lost, and is being made again.
        lost = {name for name in before if name in bad or name in self._table}
        return {**{name: before[name] for name in lost}, **good}

    def _read_table(self) -> str:
        """Reads supervisord's table; returns why that failed, and keeps the last one then."""
        if self._news.is_set():  # an endpoint goes out before supervisord is asked: that one may hang
            self._news.clear()
            self.wake()
            return self.board.supervisord_error
        try:
            self._table = self.supervisord.table()
        except (Unavailable, Refused) as error:
            self._supervisord_since = self._supervisord_since or time.monotonic()
            return str(error)
        self._supervisord_since, self._table_read = 0.0, True
        self._dead &= {row.pid for row in self._table.values()} | {seen.pid for seen in self._observed.values()}
        self.exits.watch_only(
            {row.pid for row in self._table.values() if row.state in LIVE}
            | {seen.pid for seen in self._observed.values() if seen.pid not in self._dead}
        )
        return ""

    def _controller(self) -> Json:
        try:
            told = json.loads((self.state.path / "controller.json").read_text("utf-8"))
        except (OSError, ValueError):
            return self.board.controller
        return told if isinstance(told, dict) else {}

    def _heard_of(self, told: Json) -> float:
        """When the controller last told of a pass, by the clock that cannot be set."""
        if told.get("at") == self.board.controller.get("at") and self.board.controller_at:
            return self.board.controller_at
        return time.monotonic() if told.get("at") else 0.0

    def _engine_pid(self, row: ProgramState | None, note: RunNote | None) -> int:
        """Pid of the engine of a program, 0 if there is none: the survivor's, where a launcher stands in."""
        if not self._table_read and note and note.pid and launch.start_time(note.pid) == note.started:
            return 0 if note.pid in self._dead else note.pid  # supervisord has not answered yet, its engines may
        if row is None or row.state not in (*LIVE,) or row.pid in self._dead:
            return 0
        pid = note.pid if note and note.launcher_pid == row.pid else row.pid
        return 0 if pid in self._dead else pid

    def _target(self, record: Record, pid: int) -> Target:
        # Whoever runs it, a daemon of the user's own listens where they told it to, which others may not reach.
        strange = record.daemon and record.host != self.settings.bind_address and not self.settings.embedded
        reached_at = self.addresses.address if strange else ""
        return Target(pid, record.host or self.settings.bind_address, record.port or 0, record.probe, reached_at)

    def _ending(self, record: Record, row: ProgramState | None) -> bool:
        """Whether an engine is to end."""
        return bool(record.withdraw) or self._leaving.is_set() or (row is not None and row.state is State.STOPPING)

    def _key_of(self, program: str) -> tuple[str, str]:
        """The key that a program's engine wants, as far as its own environment tells."""
        note = self.state.run_note(program)
        return first_request.key_of(self.state.read_spec(note.spec_file if note else "").get("env"))

    def _known(self, record: Record, pid: int) -> Finding:
        """What an earlier look, or an earlier sidecar, found of this very process: it must not take out what serves."""
        before = self._observed.get(record.program)
        same = before is not None and before.pid == pid
        return Finding(before.ready, before.message, before.served) if same and before else Finding(False, "")

    def _row(
        self,
        record: Record,
        row: ProgramState | None,
        notes: Mapping[str, RunNote],
        pid: int,
        records: Mapping[str, Record],
    ) -> Row:
        """Observes one service, keeps the observation, and reports on it."""
        before, note = self._observed.get(record.program), notes.get(record.program)
        if row is not None and row.state in LIVE and not pid and before is not None and before.pid in self._dead:
            return self._just_died(record, before)
        finding = self.prober.finding(record.program) or self._known(record, pid)
        if record.daemon:
            ours = record.daemon in records and records[record.daemon].spec_file is not None
            daemon = self._observed.get(record.daemon) if ours else None
            finding = sharing.judged(record, finding, self._attached.get(record.program), pid, daemon)
        published = self.registrar.published(record.key)
        word = row.state.value if row else ""
        word = State.STOPPING.value if self._leaving.is_set() and pid else word
        ready = bool(pid) and finding.ready and word != State.STOPPING.value
        now = time.time()
        died = before is not None and before.pid not in (0, pid)
        message = finding.message
        if note and note.refused not in ("", CRASH_LOOP) and not pid:
            message = note.refused_message
        elif word in HELD:
            message = words.why_down(self.state, record, note)
        crashed = died and not self._planned(record, word)
        if crashed:
            self.state.keep_crash_log(record.program)
        # What is asked after the endpoint went out tells that nobody else will come. Where the cluster cannot be told,
        # nobody may be cut for that either.
        overdue = bool(record.withdraw) and now - _asked_at(record.withdraw) > UNCONFIRMED_S
        carried_out = record.withdraw if published.withdrawn == record.withdraw or overdue else ""
        busy = self.prober.busy(record.program, carried_out, self._target(record, pid) if pid else None)
        held = self._meter.held(self._engine(record, notes, pid)) if pid else None
        held = sharing.share(record, held, records.values())
        last_exit = self._exit(record, before, died, word)
        observed = Observed(
            program=record.program,
            pid=pid,
            ready=ready,
            since=before.since if before and before.ready == ready else now,
            state=word,
            message="" if ready else message,
            withdrawn=published.withdrawn,
            busy=bool(busy),
            drained=carried_out if busy is False or not pid else "",
            restarts=(before.restarts if before else 0) + int(crashed),
            exits=words.exits(before, words.manner(last_exit, crashed) if died else ""),
            served=bool(pid) and finding.served,
            hung=finding.hung if pid else "",
            last_exit=last_exit,
            published=message if message.startswith(sharing.UNREACHABLE) else published.problem,
            memory_bytes=self._charged(pid, held, before),
        )
        known = before is not None and before.pid == pid and before.served
        if observed.served and not known and row is not None and row.pid == pid:
            self._tallies.started(record.program, max(0.0, now - row.start))
        self._observed[record.program] = observed
        if self.state.write_observed(observed):
            ring(self.state.path, "controller")
        told = report(record, observed, self._slumber.coming is not None)
        self._announce(record, told, observed, crashed)
        address = self.addresses.address
        where = f"{address}:{record.port}" if told.wants_slice and address else ""
        return Row(record, observed, told, where, held.rss_bytes if held else 0)

    def _engine(self, record: Record, notes: Mapping[str, RunNote], pid: int) -> Engine:
        """A process as it is measured: of a model on a shared daemon, the daemon's."""
        note = notes.get(record.daemon or record.program)
        if record.daemon and note is not None and note.pid:
            return Engine(note.pid, note.started, 0)
        return Engine(pid, note.started if note is not None and note.pid == pid else "", record.mapped_bytes)

    def _charged(self, pid: int, held: Held | None, before: Observed | None) -> int:
        """What an engine is charged for what it holds; small changes are no news, and no file is written for them."""
        if not pid:
            return 0
        known = before.memory_bytes if before is not None and before.pid == pid else 0
        found = held.charged_bytes if held else known
        return known if known and abs(found - known) < max(known // 50, MEMORY_STEP_BYTES) else found

    def _just_died(self, record: Record, before: Observed) -> Row:
        """A death that supervisord has not told of yet: the endpoint goes out, and the rest follows once it has.

        How the engine ended, what is counted and the Event wait for supervisord's word.
        """
        observed = replace(before, pid=0, ready=False, served=False, hung="", message="the engine has ended")
        self.state.write_observed(observed)
        return Row(record, observed, report(record, observed), "", 0)

    def _planned(self, record: Record, word: str) -> bool:
        """Whether the controller, or a human, made the process end."""
        ours = bool(record.withdraw) or record.verdict.standing is not Standing.RUN or self._leaving.is_set()
        return ours or record.stopped_by_hand or word in ("STOPPING", "STOPPED")

    def _exit(self, record: Record, before: Observed | None, died: bool, word: str) -> str:
        if before is None or died or not before.last_exit or word in HELD:
            return words.ended(self.state, record.program)
        return before.last_exit

    def _announce(self, record: Record, told: Report, observed: Observed, died: bool) -> None:
        """Makes an Event of a change that deserves one, and a log line of any change."""
        before = self._reports.get(record.key)
        self._reports[record.key] = told
        if before is None or (before.phase, before.reason) != (told.phase, told.reason):
            detail = {"service": record.program, "phase": told.phase, "reason": told.reason, "why": told.message}
            log.info("service", extra=detail)
        lines = "\n".join(words.last_lines(self.state, record.program)) if died or told.reason == CRASH_LOOP else ""
        ended = f"the engine ended: {observed.last_exit or 'unknown'}\n{lines}" if died else ""
        what = happening(before, told, ended, lines)
        if what and not record.is_daemon and not (before is None and what.type == "Normal"):
            self.registrar.tell(record, what)
            self._happenings.append(Recent(time.time(), "/".join(record.key), what))

    def _register(self, rows: list[Row], told: Json) -> None:
        where = self.addresses.address, self.addresses.problem
        self._tell_of_move(where[0])
        wanted = {row.record.key: Wanted(row.record, row.report, *where) for row in rows}
        models = {}
        for name, item in (told.get("models") or {}).items():
            namespace, _, short = name.partition("/")
            with contextlib.suppress(KeyError, TypeError):  # written by another version
                file = ModelFile(**item["file"])
                models[namespace, short] = WantedModel(item["uid"], item["generation"], item["source"], file)
        known = {row.record.key for row in self._rows}
        self._reports = {key: value for key, value in self._reports.items() if key in known}
        self.registrar.want(wanted, models, self._around(rows, told))

    def _tell_of_move(self, address: str) -> None:
        """An Event if pods are told another address of this Mac from now on: what they knew is worth nothing."""
        if address and self._address and address != self._address:
            text = f"this Mac is reached at {address} now, and no longer at {self._address}; its endpoints say so"
            what = Happening("Normal", MOVED, text)
            self.registrar.tell_of_mac(what)
            self._happenings.append(Recent(time.time(), self.node, what))
        self._address = address or self._address

    def _around(self, rows: list[Row], told: Json) -> Around:
        """What surrounds this Mac, from the controller's report."""
        if self.settings.embedded:
            return Around()
        cluster: Json = told["cluster"] if isinstance(told.get("cluster"), dict) else {}
        watched = self.settings.namespace
        where = {watched} if watched else {row.record.namespace for row in rows} | set(told.get("namespaces") or [])
        silent = [tuple(each) for each in told.get("silent") or [] if isinstance(each, list) and len(each) == 2]
        operator = cluster.get("operator")
        return Around(
            operator if isinstance(operator, bool) else None,
            frozenset(where),
            tuple((str(namespace), str(node)) for namespace, node in silent),
            tuple(sorted(self._notes(told).items())),
            str(cluster.get("cloned") or ""),
        )

    def _notes(self, told: Json) -> dict[str, str]:
        """What the node Lease says of this Mac."""
        memory = told["memory"] if isinstance(told.get("memory"), dict) else {}
        notes = {
            **{PREFIX + name: text for name, text in host.capabilities(self._inventory.chip).items()},
            **noted(self._inventory.offers),
            PREFIX + "version": __version__,
            PREFIX + "address": self.addresses.address,
            **{f"{PREFIX}memory-{name}": str(memory[name]) for name in ("budget", "left") if name in memory},
        }
        if word := self.state.cordoned():
            notes[UNSCHEDULABLE] = word
        return notes

