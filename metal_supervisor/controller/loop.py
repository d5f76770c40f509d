"""The controller: wake -> snapshot -> plan -> apply -> one sentence in the log.

One thread decides. Watches, the model store, exits and the doorbell only wake it; every pass starts from
what is there now, so a lost wake costs time and nothing else. It never waits for a fetch, a load or a
drain: those are states in a record. It can die at any moment: supervisord keeps the models, and the next
controller finds everything in the state directory.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from metal_supervisor import launch
from metal_supervisor.cluster import status_mode
from metal_supervisor.cluster.kube import Kube
from metal_supervisor.cluster.manifests import api_path
from metal_supervisor.cluster.network_watcher import NetworkWatcher
from metal_supervisor.cluster.reflector import Reflector, is_edited
from metal_supervisor.controller import on_demand, plan
from metal_supervisor.controller.admission import Up
from metal_supervisor.controller.applier import Applier
from metal_supervisor.controller.assignment import Assignment
from metal_supervisor.controller.awake import Awake, in_use
from metal_supervisor.controller.controller_status import ControllerStatus, ModelFiles
from metal_supervisor.controller.memory_manager import Memory
from metal_supervisor.controller.plan import Action, Step
from metal_supervisor.controller.prerequisites.confinement_policies import require_policies
from metal_supervisor.controller.prerequisites.prerequisites import Prerequisites
from metal_supervisor.controller.reasons import Reasons
from metal_supervisor.controller.resource_filter import ResourceFilter
from metal_supervisor.controller.snapshot import Snapshot
from metal_supervisor.host import machine
from metal_supervisor.host.exit_watch import ExitWatch
from metal_supervisor.models.backups import is_temporary
from metal_supervisor.models.headers import Headers
from metal_supervisor.models.remote.remote_headers import read_listing
from metal_supervisor.models.store import Store
from metal_supervisor.models.store_context import terms_of
from metal_supervisor.placement.placement import Placement
from metal_supervisor.runtimes.builds import Builds
from metal_supervisor.runtimes.metal_device import Metal, Question, question_of
from metal_supervisor.settings.loader import Settings
from metal_supervisor.spec.processes import LIVE
from metal_supervisor.spec.record import Record
from metal_supervisor.spec.types import Json, Key
from metal_supervisor.state import gateway_note, use_notes
from metal_supervisor.state.directory import StateDir
from metal_supervisor.state.doorbell import Doorbell, ring
from metal_supervisor.state.home import StateError
from metal_supervisor.state.throttle import Throttle
from metal_supervisor.state.trees import TrashCollector
from metal_supervisor.supervisord.client import BrokenFile, Refused, Supervisord, Unavailable
from metal_supervisor.supervisord.poker import Poker

TICK_S = 15.0
RETRY_S = 1.0
SOONEST_S = 0.02
ACKNOWLEDGED_S = 0.1
STARTED_S = 0.5
SHARE = 0.25
"""Share of a core that many passes in a row may take."""
LONGEST_PAUSE_S = 0.1
"""Longest pause between two passes."""
TELLING = frozenset({Action.WITHDRAW, Action.ADD, Action.START})
"""Steps whose outcome rings: an acknowledgement by the sidecar, or the launcher's note."""
log = logging.getLogger("controller")


class Controller:
    """The controller's state between passes, all of which can be rebuilt from the state directory and the cluster."""

    def __init__(
        self,
        settings: Settings,
        directory: StateDir,
        kube: Kube,
        supervisord: Supervisord,
        metal: Question | None = None,
    ) -> None:
        """`metal`: replaces the check of this Mac's Metal device."""
        self.settings, self.state, self.kube, self.supervisord = settings, directory, kube, supervisord
        self.bell = Doorbell(directory.path, "controller")
        self.wake = self.bell.ring
        found, bad = directory.records()
        self.records: dict[Key, Record] = {record.key: record for record in found.values()}
        self.controller_status = ControllerStatus(settings, directory, kube)
        for program, reason in bad.items():
            directory.quarantine(directory.record_path(program), reason)
            self.controller_status.quarantined(f"{program}.json", reason)
        if settings.model_store and is_temporary(settings.store_path):
            self.controller_status.tell("--model-store", f"{settings.store_path} is temporary: the system empties it")
        known = frozenset(record.uid for record in self.records.values() if record.uid)
        self.services = Reflector(
            kube,
            api_path("inferenceservices", settings.namespace),
            self.wake,
            known,
            namespace=settings.namespace,
            is_news=self._is_news,
            history=self.controller_status.history_before(),
        )
        known = frozenset(record.model_uid for record in self.records.values() if record.model_uid)
        path = api_path("models", settings.namespace)
        self.models = Reflector(kube, path, self.wake, known, is_news=self._is_news)
        self._news = object()
        self.store = Store(settings.store_path, self._tell, terms_of(settings), read_listing)
        self.reasons = Reasons(settings.runtime)
        self._poker = Poker(directory.socket, self.wake)
        self.exits = ExitWatch(lambda _pid: self._poker.ask())
        self.node = machine.node_name(directory.path, settings.node_name)
        self.placement = Placement(settings, directory, kube, self.node, self.wake)
        self.applier = Applier(directory, supervisord, settings)
        headers, builds = Headers(self._tell), Builds(settings, self._tell)
        self.metal = Metal(metal or question_of(settings), self._tell)
        self.prerequisites = Prerequisites(settings, directory, self.store, headers, builds, self._tell)
        self.model_files = ModelFiles(self.store, headers.latest)
        # Again: the controller before it wrote its own until it ended.
        require_policies(directory, settings.confinement)
        resource_filter = ResourceFilter(settings, self.node)
        self.assignment = Assignment(
            settings, kube, resource_filter, self.placement, self.store, self.prerequisites, self._tell
        )
        self.awake = Awake(supervisord)
        self.memory = Memory(settings, directory, self._tell)
        self._unkept = ""
        self._trash = TrashCollector(directory.path / "trash")
        self._problems: dict[str, str] = {}
        """Subject -> its problem, as shown in /status."""
        self._hurried = False
        """The next pass is not to wait for more news."""
        self._untold = False
        """The sidecar and the gateway have not been told yet of what was written."""
        """The latest pass did not come to its end."""

    # ── the loop ─────────────────────────────────────────────────────────────────────────────────

    def _is_news(self, before: Json, now: Json) -> bool:
        """True for an edit, and for the first signs of LLMKube's operator; called by the watches' threads."""
        signs = not self.controller_status.operator and status_mode.wrote(before) != status_mode.wrote(now)
        return signs or is_edited(before, now)

    def _tell(self) -> None:
        """Wake the controller for news that no snapshot shows; called by any thread."""
        self._news = object()
        self.wake()

    def run(self, stopped: Callable[[], bool]) -> None:
        """Run passes until `stopped`."""
        self.services.start()
        self.models.start()
        self.placement.start()
        self.memory.start()
        self.metal.start()
        self._trash.start()
        if not self.settings.embedded:  # loopback outlasts every sleep and every network
            NetworkWatcher(self.kube).start()
        pause_s, throttle = 0.0, Throttle(SHARE, LONGEST_PAUSE_S)
        while not stopped():
            self.bell.wait(pause_s, self._hurried)
            began, pause_s = time.monotonic(), RETRY_S
            throttle.begin()
            try:
                pause_s = self.one_pass()
                self.controller_status.passed(time.monotonic() - began)
            except Unavailable as error:
                log.warning("supervisord does not answer", extra={"error": str(error)})
            except (Refused, BrokenFile, StateError, OSError) as error:
                log.error("pass failed; it is tried again", extra={"error": repr(error)[:300]})
            except Exception:
                log.exception("pass failed unexpectedly; it is tried again")
            if self._untold:
                self._tell_readers()
            time.sleep(throttle.pause_s())

    # ── one pass ─────────────────────────────────────────────────────────────────────────────────

    def one_pass(self) -> float:
        """One pass; returns the seconds after which the next is worthwhile without a wake."""
        self.state.refresh_link()
        snapshot = self._observe()
        known = plan.with_hands(self.records, snapshot.table, snapshot.notes)
        ups = self.memory.ups(known, {}, snapshot)
        before = self.memory.relieve(known, ups, snapshot)
        proposals = self.assignment.propose(before, snapshot)
        if proposals.keys() - known.keys():  # one whose record was lost may be up
            ups = self.memory.ups(before, proposals, snapshot)
        self.records = self._admitted(proposals, before, ups, snapshot)
        # A spec before the record that names it, and both before the section: an interruption leaves a runnable state.
        files = self.applier.files
        files.write_specs(self.records.values(), self.prerequisites.composed)
        written = self._keep_records(self.records.values())
        if not written.isdisjoint(snapshot.table):  # a program that comes can wait for the end of the pass
            self._tell_readers()
        complete = snapshot.complete and not self.assignment.unsure
        files.write_sections(self.records.values(), complete, snapshot)
        self.applier.reload(self.controller_status.quarantined)
        steps = self.applier.plan(self.records.values(), snapshot, self.prerequisites.daemons.is_users)
        done = [step for step in steps if self._perform(step, snapshot)]
        self.applier.sweep(snapshot)
        self._settle(snapshot, steps)
        self._report("trash", self._trash.problem)
        self.awake.look(in_use(self.records.values(), snapshot.table), snapshot.table)
        self._publish(snapshot, steps, done)
        self.exits.watch_only(self._pids(snapshot))
        pause_s = self._pause_s(snapshot, steps, done)
        self._hurried = self._is_awaited(steps)
        return pause_s

    def _pause_s(self, snapshot: Snapshot, steps: Sequence[Step], done: Sequence[Step]) -> float:
        """Seconds after which another pass is worthwhile without a wake."""
        if self.applier.lacks or any(step.do not in TELLING for step in done):
            return SOONEST_S
        self.applier.files.collect(self.records.values(), snapshot)
        later = [step.again_in_s for step in steps if step.do is Action.WAIT]
        later += [ACKNOWLEDGED_S if step.do is Action.WITHDRAW else STARTED_S for step in done]
        if any(self._stopped_just_now(record, snapshot) for record in self.records.values()):
            later.append(plan.HAND_GRACE_S)
        again = (
            self.assignment.placed.again_in_s,
            self.assignment.again_in_s,
            self.memory.again_in_s(self.records),
            self.prerequisites.daemons.again_in_s,
            on_demand.again_in_s(self.records, snapshot),
        )
        later += [each for each in again if each is not None]
        if snapshot.operator is None and snapshot.services is not None:
            later.append(status_mode.UNDECIDED_S)
        return min([TICK_S, *(max(SOONEST_S, pause_s) for pause_s in later)])

    def _is_awaited(self, steps: Sequence[Step]) -> bool:
        """True if an engine waits for its turn to start, or for memory: one that came up may make way for it."""
        queued = any(not each.admitted for each in self.memory.ledger.decisions.values())
        return queued or any(step.do is Action.WAIT for step in steps)

    def _observe(self) -> Snapshot:
        news, services, models = self._news, self.services.seen, self.models.seen  # news first: later ones count anew
        synced = services.synced and models.synced
        table = self.supervisord.table()
        return Snapshot(
            now=time.time(),
            services=services.as_of_news if synced else None,
            complete=synced and not services.doubtful_until and not models.doubtful_until,
            models=models.as_of_news,
            restored_at=services.went_back_at,
            table=table,
            notes=self.state.run_notes(),
            observed=self.state.observations(),
            uses=use_notes.read(self.state.path),
            taken=gateway_note.taken(self.state.report(gateway_note.FILE)),
            operator=self.controller_status.look_for_operator(services.items if synced else None, models.items),
            metal=self.metal.seen,
            room=self.memory.room,
            news=news,
        )

    def _admitted(
        self,
        proposals: Mapping[Key, Record],
        before: Mapping[Key, Record],
        ups: Mapping[Key, Up],
        snapshot: Snapshot,
    ) -> dict[Key, Record]:
        """The records of this pass: the proposals as far as memory allows, and the shared daemons that they need."""
        had = {
            key: record if key in ups or self._can_start(record) else replace(record, edition=None)
            for key, record in before.items()
        }
        budget_bytes = None if self.settings.uses_claims else self.memory.budget.bytes
        asked = on_demand.settle(proposals, had, ups, snapshot, budget_bytes)
        yielding = on_demand.yields(asked, had, snapshot)
        # No memory is reserved for a shared daemon itself, only for the models on it.
        daemons = {key: record for key, record in before.items() if record.is_daemon}
        settled = self.memory.settle(asked, had, ups, yielding, snapshot.now) | daemons
        return self.prerequisites.daemons.keep(settled, snapshot)

    def _can_start(self, record: Record) -> bool:
        """True if the spec that a record names exists."""
        return record.edition in (None, self.state.spec_of(record.program).get("edition"))

    # ── after the decisions ──────────────────────────────────────────────────────────────────────

    def _stopped_just_now(self, record: Record, snapshot: Snapshot) -> bool:
        """True if a stop by hand is too recent to be kept over a restart."""
        state = snapshot.table.get(record.program)
        return record.stopped_by_hand and state is not None and not plan.stays_stopped(state, snapshot.now)

    def _keep_records(self, records: Collection[Record]) -> set[str]:
        """Write those of the records that changed; returns their programs."""
        changed, problem = set[str](), ""
        for record in records:
            try:
                if self.state.write_record(record):
                    changed.add(record.program)
            except OSError as error:  # stops must work on a full disk too
                problem = f"records cannot be kept: {error.strerror}"
        self._unkept = problem or (self._unkept if len(records) < len(self.records) else "")
        self._report("records", self._unkept)
        self._untold |= bool(changed)
        return changed

    def _tell_readers(self) -> None:
        """Wake the sidecar and the gateway, which read what was written."""
        self._untold = False
        for reader in ("sidecar", "gateway"):
            ring(self.state.path, reader)

    def _perform(self, step: Step, snapshot: Snapshot) -> bool:
        """Carry one step out; False for one that only waits or warns, or that supervisord refuses."""
        if step.do is Action.WAIT:
            return False
        if step.do is Action.ALARM:
            log.error("program needs a human", extra={"program": step.program, "why": step.why})
            return False
        if step.do is Action.WITHDRAW:
            self._change_record(step.program, withdraw=self.applier.ask_withdrawal(step, snapshot.now))
            return True
        if step.do is Action.STOP:
            self._change_record(step.program, stop_sent=True)
        try:
            self.applier.perform(step, snapshot)
        except Refused as error:  # it must not prevent the other steps
            log.error("step refused", extra={"program": step.program, "step": step.do.value, "error": str(error)})
            return False
        return True

    def _change_record(self, program: str, **changes: Any) -> None:
        for key, record in self.records.items():
            if record.program == program:
                self.records[key] = replace(record, **changes)
                self._keep_records((self.records[key],))  # all of them, for each step, would be quadratic
                self._tell_readers()
                return

    def _settle(self, snapshot: Snapshot, steps: Sequence[Step]) -> None:
        """Forget finished business: removed services, completed withdrawals, past retries."""
        busy = {step.program for step in steps if step.do not in (Action.START, Action.ADD)}
        before = len(self.records)
        for key, record in list(self.records.items()):
            name = record.program
            state, note = snapshot.table.get(name), snapshot.notes.get(name)
            kept = plan.after_steps(record, state, note, name in busy, snapshot.now)
            if kept is None:
                if self._forgotten(name):
                    del self.records[key]
                    self._untold = True
            elif kept is not record:
                self.records[key] = kept
                self._keep_records((kept,))
        if len(self.records) < before:
            self.state.remove_left_logs({*snapshot.table, *(record.program for record in self.records.values())})
        self.applier.forget_all_but(busy)
        self.prerequisites.keep(self.records.values())

    def _forgotten(self, program: str) -> bool:
        """Remove a program's files; False if that failed, which is reported once and tried again in later passes."""
        try:
            self.state.forget(program)
        except OSError as error:
            self._report(f"files of {program}", f"they cannot be removed: {error}")
            return False
        self._report(f"files of {program}", "")
        self._trash.wake()
        return True

    def _report(self, name: str, problem: str) -> None:
        """Log a problem and show it in /status, once; "" withdraws it."""
        if problem != self._problems.get(name, ""):
            self._problems[name] = problem
            self.controller_status.tell(name, problem)
            if problem:
                log.error("housekeeping failed", extra={"subject": name, "error": problem})

    @staticmethod
    def _pids(snapshot: Snapshot) -> set[int]:
        """Pids of the processes whose exit wakes the controller."""
        pids = {row.pid for row in snapshot.table.values() if row.state in LIVE}
        # The note of an engine that ended stays, and its stand-in may: its pid would wake each pass for the next.
        noted = [note for note in map(snapshot.live_note, snapshot.notes) if note is not None and note.pid not in pids]
        return pids | {note.pid for note in noted if note.pid and launch.start_time(note.pid) == note.started}

    def _publish(self, snapshot: Snapshot, steps: Sequence[Step], done: Sequence[Step]) -> None:
        """One sentence for the log, and the report that the sidecar reads."""
        sentence = "; ".join(f"{step.do.value} {step.program}: {step.why}" for step in done)
        if sentence:
            log.info("pass", extra={"did": sentence})
        used = {(each.namespace, each.model) for each in self.records.values()}
        self.model_files.keep(snapshot.models.keys())
        self._untold |= self.controller_status.publish(
            snapshot,
            sentence,
            (self.services, self.models),
            partial(self.model_files.state, used=used),
            (self.placement, self.assignment.placed),
            self.memory.said(),
            self.store.slots(),
            self.reasons.told(self.records.values(), snapshot, steps),
        )
