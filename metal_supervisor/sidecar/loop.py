"""The sidecar's loop: wake -> observe -> judge -> report.

It reads supervisord, the records and its own probes, keeps an observation per service for the controller, hands the
registrar the desired state of the cluster's objects, and replaces the board that HTTP answers from. The exit of a
process is noticed at once, by its pid: the endpoint is withdrawn before supervisord has reaped the process.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace

from metal_supervisor import launch
from metal_supervisor.cluster.accounts import Renewal
from metal_supervisor.cluster.kube import Kube
from metal_supervisor.cluster.network_watcher import AddressBook
from metal_supervisor.cluster.report import MOVED, Happening
from metal_supervisor.host import machine
from metal_supervisor.host.exit_watch import ExitWatch
from metal_supervisor.host.liveness import HangLimits
from metal_supervisor.settings.loader import Settings
from metal_supervisor.sidecar import shutdown
from metal_supervisor.sidecar.board import GATEWAY_AWAY_S, Board, Recent, Row
from metal_supervisor.sidecar.cluster_context import ALONE, ClusterContext, cluster_context, models_of, node_notes
from metal_supervisor.sidecar.counters import Counters
from metal_supervisor.sidecar.fleetnode import FleetNode
from metal_supervisor.sidecar.inventory import Inventory
from metal_supervisor.sidecar.membership import Membership, session_kept
from metal_supervisor.sidecar.memory_sampler import MemorySampler
from metal_supervisor.sidecar.observer import UNCONFIRMED_S, Observer
from metal_supervisor.sidecar.power import PowerFile
from metal_supervisor.sidecar.probes import Prober
from metal_supervisor.sidecar.registrar import Registrar
from metal_supervisor.sidecar.rows import MacView, PassView, Rows
from metal_supervisor.sidecar.scratch_watch import ScratchWatch
from metal_supervisor.sidecar.statuses import WantedModel
from metal_supervisor.spec.document import mapping
from metal_supervisor.spec.processes import LIVE, ProgramState, RunNote, State
from metal_supervisor.spec.record import Record
from metal_supervisor.spec.types import Json, Key
from metal_supervisor.state import gateway_note
from metal_supervisor.state.directory import SESSION_FILE, StateDir
from metal_supervisor.state.doorbell import Doorbell
from metal_supervisor.state.reports import CONTROLLER_REPORT
from metal_supervisor.state.throttle import Throttle
from metal_supervisor.supervisord.client import Refused, ShuttingDown, Supervisord, Unavailable
from metal_supervisor.supervisord.poker import Poker
from metal_supervisor.supervisord.table_reader import TableReader

TICK_S = 15.0
RETRY_S = 1.0
TOKEN_EVERY_S = 60.0
NEWS_S = 60.0
"""Age of the controller's report from which peers that it calls silent are left alone."""
WITHDRAW_ALL_S = 2.0
SHARE = 0.25
"""Share of a core that many passes in a row may take."""
LONGEST_PAUSE_S = 0.2
"""Longest pause between two passes."""
MOST_HAPPENINGS = 20
log = logging.getLogger("sidecar")


def _stays_away(worker: ProgramState) -> bool:
    """True for a worker of the gateway that stands by, or has ended, and not just now, as in a restart."""
    up = worker.state in LIVE or worker.state is State.BACKOFF
    if worker.name == gateway_note.WORKERS[0] and not (worker.start or worker.stop):
        return False  # supervisord is about to start it, for the first time or since an upgrade replaced its section
    return not up and not 0 <= time.time() - worker.stop < GATEWAY_AWAY_S


class Sidecar:
    """State of the sidecar between passes; all else is in files and in the cluster."""

    def __init__(self, settings: Settings, directory: StateDir, kube: Kube, supervisord: Supervisord) -> None:
        self.settings, self.state, self.kube, self.supervisord = settings, directory, kube, supervisord
        self.bell = Doorbell(directory.path, "sidecar")
        self.wake = self.bell.ring
        self.node = machine.node_name(directory.path, settings.node_name)
        self.board = Board(str(directory.path), node=self.node)
        self._found_at: object = None
        """Time of the controller's report that was there at the start."""
        self._gateway: Json = {}
        """The gateway's note."""
        self._models_told: tuple[Json, dict[Key, WantedModel]] = {}, {}
        """The controller's report, and the Models in it."""
        session = session_kept(directory.path / SESSION_FILE)
        self.membership = Membership(kube, self.node, settings.lease_duration, session)
        listed = settings.fleet_node == "on" and not settings.embedded
        fleet_node = FleetNode(kube, self.node, machine.memory_bytes()) if listed else None
        self._counters = Counters()
        self.registrar = Registrar(
            kube,
            self.node,
            self.membership,
            self.wake,
            settings.embedded,
            fleet_node,
            self._counters,
            settings.namespace,
        )
        limits = HangLimits(settings.llama_server_startup_timeout, settings.hang_timeout)
        self.prober = Prober(self.wake, self.bell.ring_later, limits, self.state.key_of, self._counters.probed)
        self._poker = Poker(directory.socket, self.wake)
        self.exits = ExitWatch(self._exited)
        self._meter = MemorySampler(self.bell.ring_later, directory.path / "runs")
        self._scratch = ScratchWatch(directory, lambda: [row.record for row in self._rows.all], self._tell)
        self._dead: set[int] = set()
        self._news = threading.Event()
        """Set while a process has ended that no pass has reported yet."""
        self._table_reader = TableReader(supervisord)
        self._happenings: deque[Recent] = deque(maxlen=MOST_HAPPENINGS)
        self._address = ""
        """The address last advertised, "" before the first."""
        self._table: Mapping[str, ProgramState] = {}
        self._read: tuple[dict[str, Record], dict[str, RunNote]] | None = None
        """The records and the launchers' notes."""
        self._supervisord_since = 0.0
        self._inventory = Inventory(settings, self.wake)
        self._observer = Observer(
            directory, self.prober, self._meter, self._counters, self.registrar.published, self._dead
        )
        self._rows = Rows(settings, self._observer, self._tell)
        self._power = PowerFile(directory.path, settings.apple_power_enabled)
        self._leaving = threading.Event()
        self.addresses = AddressBook(kube, settings.host_ip, settings.embedded, self._roamed)

    def _renew_token(self) -> None:
        """Renew this Mac's own token before it expires, if it has one."""
        path = self.settings.kubeconfig_path
        renewal = Renewal(path, self.settings.context, self.kube)
        while True:
            time.sleep(min(renewal.step(), TOKEN_EVERY_S))  # a pause stands still while the Mac sleeps

    def current(self) -> Board:
        """The board with the current counters and power."""
        counted, power = self._counters.counted(), self._power.reading
        return replace(self.board, requests=self.kube.requests, power=power, counted=counted)

    def _roamed(self) -> None:
        """React to a wake from sleep, or to a change of network."""
        self.registrar.look_now()
        self.wake()

    def _exited(self, pid: int) -> None:
        self._dead.add(pid)
        self._news.set()
        self._table_reader.interrupt()
        self.wake()
        self._poker.ask()

    def run(self, stopped: Callable[[], bool]) -> None:
        """Run passes until `stopped`; withdraw the endpoints if the whole system stops."""
        if self.settings.embedded:
            self.addresses.look()  # loopback does not change
        else:
            self.addresses.start()
            self.addresses.wait(RETRY_S)
        self.registrar.start()
        self._meter.start()
        self._scratch.start()
        self._inventory.start()
        self._power.start()
        if not self.settings.embedded:
            threading.Thread(target=self._renew_token, name="token", daemon=True).start()
        pause_s, throttle = 0.0, Throttle(SHARE, LONGEST_PAUSE_S)
        while not stopped():
            self.bell.wait(pause_s)
            began = time.monotonic()
            throttle.begin()
            try:
                self.one_pass()
                self._counters.passed(time.monotonic() - began)
                self._news.wait(throttle.pause_s())  # an exit does not wait
                # supervisord sends no event when it gives up on a program; poll it while it may.
                held = any(row.state in (State.BACKOFF, State.STOPPING) for row in self._table.values())
                held = held or bool(self._supervisord_since or self.board.gateway_since)
                asked = any(row.record.withdraw and not row.observed.drained for row in self._rows.all)
                pause_s = UNCONFIRMED_S / 4 if asked else RETRY_S if held else TICK_S
            except Exception:
                log.exception("pass failed; it is tried again")
                pause_s = RETRY_S
        if self._whole_system_stops():
            self._leave()

    def _whole_system_stops(self) -> bool:
        """True if supervisord is shutting down. A stop of the sidecar alone must not touch an endpoint."""
        try:
            self.supervisord.call("supervisor.getState")
        except ShuttingDown:
            return True
        except (Unavailable, Refused):
            pass
        return False

    def _leave(self) -> None:
        """Withdraw the endpoints, let requests in flight finish, then terminate all engines at once.

        supervisord would stop one after another, and launchd limits the time for all of it.
        """
        self._leaving.set()
        try:
            self.one_pass()
        except Exception:
            log.exception("the last pass failed; all endpoints are withdrawn as they were known")
            self.registrar.withdraw_all()
        if not self.registrar.flush(WITHDRAW_ALL_S):
            log.warning("endpoints could not be withdrawn in time")
        live = [row for row in self.board.rows if row.observed.pid]
        started = {row.observed.pid: launch.start_time(row.observed.pid) for row in live}
        answering = {
            row.record.program: self._rows.target(row.record, row.observed.pid) for row in live if not row.observed.hung
        }
        if not shutdown.answers_ended(self.prober, answering, self.settings.stop_timeout):
            log.warning("some answers are cut: they did not end in time", extra={"seconds": self.settings.stop_timeout})
        shutdown.end(started)  # before the Lease is released: that request may hang
        self.registrar.release()

    # ── one pass ─────────────────────────────────────────────────────────────────────────────────

    def one_pass(self) -> None:
        """Run one pass: observe, persist, report."""
        error = self._read_table()
        if self._read is None or error is not None:  # else its endpoint goes out before anything is read anew
            self._read = self._read_records(), self.state.run_notes()
        records, notes = self._read
        told = self.state.report(CONTROLLER_REPORT) or self.board.controller  # the same object until there is another
        self._gateway = self.state.report(gateway_note.FILE) if self.settings.gateway_on else {}
        choice = self.addresses.choice
        mac = MacView(choice.address, choice.problem, self._fronts(), self._leaving.is_set())
        self._rows.look(PassView(records, self._table, notes, mac))
        found = [row for row in self._rows.all if not row.record.is_daemon]
        self._counters.forget_all_but(records.keys())
        self._observer.forget_all_but(records.keys())
        self._register(found, told)
        trouble, since = self.registrar.trouble
        self.board = Board(
            state_dir=str(self.state.path),
            at=time.time(),
            passed_at=time.monotonic(),
            controller_at=self._heard_of(told),
            rows=tuple(found),
            supervisord_error=self.board.supervisord_error if error is None else error,
            supervisord_since=self._supervisord_since,
            controller=told,
            cluster_error=trouble,
            cluster_since=since,
            node=self.node,
            address=self.addresses.choice,
            engines=self._inventory.offers,
            gateway=self._gateway,
            gateway_at=self._heard_of_gateway(),
            gateway_url=self.settings.gateway_url if self.settings.gateway_on else "",
            gateway_since=self._gateway_since(),
            happenings=tuple(self._happenings),
            programs={
                name: row.state.value
                for name, row in self._table.items()
                if name not in records or records[name].is_daemon
            },
        )

    def _read_records(self) -> dict[str, Record]:
        """The records by program; an unreadable one is used as it last was, until the controller has repaired it."""
        good, bad = self.state.records()
        before = {row.record.program: row.record for row in self._rows.all}
        # Its record is removed only after its program: until then it was lost, and is being made again.
        lost = {name for name in before if name in bad or name in self._table}
        return {**{name: before[name] for name in lost}, **good}

    def _read_table(self) -> str | None:
        """Read supervisord's process table. Returns the error, and keeps the previous table, if that fails; else "".

        None, with the previous table kept, as soon as an engine has ended: supervisord may hang.
        """
        try:
            table = self._table_reader.read(self._news.is_set)
        except (Unavailable, Refused) as error:
            self._supervisord_since = self._supervisord_since or time.monotonic()
            return str(error)
        if table is None:
            self._news.clear()
            self.wake()
            return None
        self._table, self._supervisord_since = table, 0.0
        observed = {seen.pid for seen in self._observer.observations.values()}
        self._dead &= {row.pid for row in self._table.values()} | observed
        self.exits.watch_only({row.pid for row in self._table.values() if row.state in LIVE} | (observed - self._dead))
        return ""

    def _heard_of(self, told: Json) -> float:
        """Monotonic time at which the controller last reported a pass, 0 if it never did."""
        if told.get("at") == self.board.controller.get("at") and self.board.controller_at:
            return self.board.controller_at
        return time.monotonic() if told.get("at") else 0.0

    def _gateway_runs(self) -> bool:
        """True if a worker of the gateway runs."""
        workers = (self._table.get(name) for name in gateway_note.WORKERS)
        return any(worker and worker.state is State.RUNNING for worker in workers)

    def _gateway_since(self) -> float:
        """Monotonic time since when the gateway is on and none of its workers runs, 0 otherwise."""
        if not self.settings.gateway_on or self._gateway_runs():
            return 0.0
        return self.board.gateway_since or time.monotonic()

    def _heard_of_gateway(self) -> float:
        """Monotonic time at which the gateway last looked at its services, 0 if no worker of it runs."""
        if not self._gateway_runs():
            return 0.0
        same = self._gateway.get("at") == self.board.gateway.get("at") and self.board.gateway_at
        return self.board.gateway_at if same else time.monotonic()

    def _fronts(self) -> tuple[int, ...]:
        """Ports at which the gateway listens for on-demand services; none once it was stopped.

        The gateway's holder keeps them open for the next worker, and answers no request.
        """
        workers = [row for name in gateway_note.WORKERS if (row := self._table.get(name)) is not None]
        if gateway_note.WORKERS[0] in self._table and all(map(_stays_away, workers)):  # an upgrade may be replacing it
            return ()
        found = self._gateway.get("fronts")
        return tuple(found) if isinstance(found, list) else ()

    def _tell(self, record: Record, what: Happening) -> None:
        """Post an Event about a service."""
        self.registrar.tell(record, what)
        self._happenings.append(Recent(time.time(), "/".join(record.key), what))

    def _register(self, found: list[Row], told: Json) -> None:
        self._tell_of_move(self.addresses.choice.address)
        models = mapping(told, "models")
        if models != self._models_told[0]:
            self._models_told = models, models_of(models)
        self.registrar.want(self._rows.wanted, self._models_told[1], self._cluster_context(found, told))

    def _tell_of_move(self, address: str) -> None:
        """Post an Event if the advertised address of this Mac has changed: the old one is no longer valid."""
        if address and self._address and address != self._address:
            text = f"this Mac is reached at {address} now, and no longer at {self._address}; its endpoints say so"
            what = Happening("Normal", MOVED, text)
            self.registrar.tell_of_mac(what)
            self._happenings.append(Recent(time.time(), self.node, what))
        self._address = address or self._address

    def _cluster_context(self, rows: list[Row], told: Json) -> ClusterContext:
        if self.settings.embedded:
            return ALONE
        notes = node_notes(self._inventory, self.addresses.choice.address, told, self.state.cordoned())
        found = cluster_context(self.settings.namespace, rows, told, notes)
        return found if self._is_news(told) else replace(found, silent=())

    def _is_news(self, told: Json) -> bool:
        """True if the controller has reported since this sidecar started, and lately.

        What was true yesterday, before this Mac was shut down, says nothing about which of its peers live.
        """
        at = told.get("at")
        self._found_at = at if self._found_at is None else self._found_at
        return at != self._found_at and time.monotonic() - self._heard_of(told) < NEWS_S
