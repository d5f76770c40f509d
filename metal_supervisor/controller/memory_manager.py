"""Memory management of the controller: footprints, admission, eviction and readmission of engines.

Pure functions decide (`controller.admission`, `memory.eviction`); this module feeds them with measurements.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Literal

from metal_supervisor.controller import admission
from metal_supervisor.controller.admission import EVICTED_DRAIN_S, AdmissionRules, Up
from metal_supervisor.controller.on_demand import Yielding
from metal_supervisor.controller.plan import live_note
from metal_supervisor.controller.pressure_watch import MemoryState, Watchdog
from metal_supervisor.controller.snapshot import Room, Snapshot
from metal_supervisor.memory import eviction
from metal_supervisor.memory.budget import Budget
from metal_supervisor.memory.ledger import Entry, Ledger
from metal_supervisor.memory.pressure import Level, Watch
from metal_supervisor.runtimes.probing import Asked
from metal_supervisor.settings.loader import Settings
from metal_supervisor.spec.document import string, whole
from metal_supervisor.spec.processes import LIVE
from metal_supervisor.spec.record import Record
from metal_supervisor.spec.resources import rank_of
from metal_supervisor.spec.types import Json, Key
from metal_supervisor.spec.withdrawal import requested_at
from metal_supervisor.state.directory import StateDir

CALM = Level.NORMAL.value
FORGIVEN_AFTER_S = 86_400.0
ENDS_WITHIN_S = 10.0
"""How long an engine takes to end once it may not answer any more, and its memory to be free."""

log = logging.getLogger("controller")


def _charged(record: Record | None, edition: str) -> int:
    """Bytes that are reserved for the engine of a record, if that is of this edition."""
    started = record is not None and (record.edition in (None, edition) or not edition)
    return record.reserved_bytes if record is not None and started else 0


class Memory:
    """Memory state between passes."""

    def __init__(self, settings: Settings, directory: StateDir, wake: Callable[[], None]) -> None:
        self._settings, self._state = settings, directory
        self.watchdog = Watchdog(settings, wake)
        self.ledger = Ledger(0, {})
        self._leaving: frozenset[Key] = frozenset()
        self._exited_at: float | None = None
        """Monotonic time at which the last evicted engine had exited."""
        self._returned_at: float | None = None
        """Unix time of the latest return."""
        self._evictions = 0
        self._skipped: Counter[str] = Counter()
        self._skipping = ""
        self._reserved: dict[Key, tuple[int, int]] = {}
        """Engine that was up in the last pass -> (its pid, the most that was reserved for that process)."""
        self._seen = MemoryState()
        """What the watchdog knew at the beginning of the pass."""

    def start(self) -> None:
        """Start the watchdog; if it is enabled, take its first sample now, before any decision."""
        if self._settings.memory_watchdog_interval:
            self.watchdog.look()
        self.watchdog.start()

    @property
    def budget(self) -> Budget:
        """Memory that models may use on this Mac."""
        return self.watchdog.budget

    @property
    def _left_bytes(self) -> int:
        """Bytes left of the present budget, which may be another than that of the last pass."""
        return self.budget.bytes - self.ledger.charged_bytes

    @property
    def room(self) -> Room:
        """Budget and available memory, as of the last pass."""
        blocked = frozenset(key for key, each in self.ledger.decisions.items() if each.blocked)
        return Room(self.budget.total_bytes, self.budget.bytes, self._left_bytes, blocked)

    # ── footprints ───────────────────────────────────────────────────────────────────────────────

    def ups(self, records: Mapping[Key, Record], proposals: Mapping[Key, Record], snapshot: Snapshot) -> dict[Key, Up]:
        """The engines that are up, and what each holds.

        `records`: those by which they were started. `proposals` are for engines whose record was lost: they count by
        name, for what is wanted now says little about what runs; by size too if its spec is lost as well.
        """
        before, self._reserved = self._reserved, {}
        engines: dict[Key, Record] = {**proposals, **records}
        found = {}
        for key, each in engines.items():
            state = snapshot.table.get(each.program)
            if state is None or state.state not in LIVE or each.is_daemon:
                continue
            note, seen = live_note(snapshot.notes.get(each.program), state), snapshot.observed.get(each.program)
            spec = note.spec if note else self._state.spec_of(each.program)  # which its launcher is about to read
            edition = string(spec, "edition")
            pid = note.pid if note else state.pid
            known_pid, known_bytes = before.get(key, (0, 0))
            record = records.get(key)
            reserved = max(
                whole(spec, "reserved_bytes"),
                _charged(record, edition),  # a damaged spec has none, and records change
                known_bytes if known_pid == pid else 0,
            )
            if not reserved and record is None:
                reserved = each.reserved_bytes
            self._reserved[key] = pid, reserved
            measured = seen.memory_bytes if seen and note and seen.pid == pid else 0
            found[key] = Up(edition, string(spec, "asked"), max(reserved, measured))
        return found

    # ── admission ────────────────────────────────────────────────────────────────────────────────

    def settle(
        self,
        proposals: Mapping[Key, Record],
        before: Mapping[Key, Record],
        ups: Mapping[Key, Up],
        yielding: Mapping[Key, Yielding],
        now: float,
    ) -> dict[Key, Record]:
        """The records of this pass, by the memory there is. `yielding`: as for `admission.settle`."""
        mode: Literal["enforce", "warn"] = "warn" if self._settings.memory_check_mode == "warn" else "enforce"
        rules = AdmissionRules(self.budget.bytes, mode, self._settings.preemption, self._paused(before))
        records, self.ledger = admission.settle(proposals, before, ups, rules, now, yielding)
        return records

    def _paused(self, records: Mapping[Key, Record]) -> str:
        """Reason why no engine that takes memory may start, "" if they may."""
        seen = self._seen
        level = self.watchdog.level(seen)
        short = level not in (None, Level.NORMAL)
        if seen.young and seen.watch.known_at is not None:
            # Too few samples yet: the previous controller's level counts until this one has its own.
            knew = any(record.pressure is not None and record.pressure[0] != CALM for record in records.values())
            short = short or knew or seen.watch.raw is not Level.NORMAL
        why = seen.watch.why if level not in (None, Level.NORMAL) else seen.watch.reading
        return f"the machine is short of memory ({why}); it starts by itself once that is over" if short else ""

    # ── eviction and readmission ─────────────────────────────────────────────────────────────────

    def relieve(self, records: Mapping[Key, Record], ups: Mapping[Key, Up], snapshot: Snapshot) -> dict[Key, Record]:
        """Records after a check of the memory pressure: at most one engine is marked as evicted, or as readmitted.

        Also while the API is unreachable.
        """
        self._seen = seen = self.watchdog.seen
        level, now, notes = self.watchdog.level(seen), snapshot.now, snapshot.notes
        result = {
            key: record if record.is_daemon else _forgiven(self._pressed(record, level), now)
            for key, record in records.items()
        }
        leaving = frozenset(key for key, record in records.items() if record.evicted_at is not None and key in ups)
        if self._leaving - leaving:
            self._exited_at = time.monotonic()
        self._leaving = leaving
        running = {key: record for key, record in records.items() if key in ups and record.runs}
        bind = self._settings.bind_address

        def asked() -> dict[Key, Asked]:
            return {
                key: Asked(notes[record.program].pid, record.host or bind, record.port, record.probe)
                for key, record in running.items()
                if record.port is not None and record.program in notes
            }

        self.watchdog.ask_about(asked)
        if level is Level.CRITICAL:
            ending = any(key in ups and _ends_soon(record, now) for key, record in records.items())
            if not asked().keys() - seen.busy.keys():  # one that has just come up may be busy: the next sample asks it
                self._evict(result, running, ups, ending, now)
        else:
            self._skipping = ""
            self._return(result, now)
        return result

    def _pressed(self, record: Record, level: Level | None) -> Record:
        """The record with the machine's pressure level, for its conditions."""
        if level is None or (level is Level.NORMAL and record.pressure is None):
            return record
        if self._seen.young and record.pressure is not None and level is Level.NORMAL:
            return record  # too early to say that it is over
        if record.pressure is not None and record.pressure[0] == level.value:
            return record
        return replace(record, pressure=(level.value, self._seen.watch.why))

    def _evict(
        self,
        records: dict[Key, Record],
        running: Mapping[Key, Record],
        ups: Mapping[Key, Up],
        ending: bool,
        now: float,
    ) -> None:
        if not self._settings.eviction_enabled:
            return self._skip("disabled", "--eviction-enabled is not set")
        sample, watch, pace = self._seen.sample, self._seen.watch, self.watchdog.pace
        if sample is None or not eviction.may_evict(watch, self._exited_at, ending, time.monotonic(), pace):
            return None
        candidates = [
            Entry(
                key,
                rank_of(record.priority),
                ups[key].bytes,
                waits=False,
                asked=0.0,
                admitted=record.admitted_at,
                protected=record.protected,
                busy=self._seen.busy.get(key, False),
            )
            for key, record in running.items()
        ]
        choice = eviction.choose(candidates, sample.total_bytes - (sample.available_bytes or 0))
        if choice.victim is None:
            return self._skip(choice.skipped, choice.text)
        self._skipping = ""
        self._evictions += 1
        log.warning("evicted", extra={"service": "/".join(choice.victim), "why": choice.text, "level": watch.why})
        victim = records[choice.victim]
        why, evictions = f"{watch.why}; {choice.text}", victim.evictions + 1
        records[choice.victim] = replace(victim, evicted_at=now, evicted_why=why, evictions=evictions)
        return None

    def _skip(self, reason: str, text: str) -> None:
        """Note the reason why no engine is evicted; log and count it only when it changes."""
        if reason != self._skipping:
            self._skipping = reason
            self._skipped[reason] += 1
            log.warning("no engine is evicted", extra={"reason": reason, "why": text})

    def _return(self, records: dict[Key, Record], now: float) -> None:
        away = [
            record
            for key, record in records.items()
            if record.evicted_at is not None and key not in self._leaving and self._would_fit(record)
        ]
        if not away:
            return
        watch, clock = self._seen.watch, time.monotonic()
        if not self._settings.memory_watchdog_interval:  # no watchdog: only the backoff counts
            watch = Watch(normal_since=0.0, known_at=clock)
        key = eviction.may_return(away, watch, clock, self._returned_at, self.watchdog.pace, clock=now)
        if key is None:
            return
        self._returned_at = now
        log.info("returns", extra={"service": "/".join(key)})
        records[key] = replace(records[key], evicted_at=None)

    def _would_fit(self, record: Record) -> bool:
        """True if its return leaves enough memory available; otherwise it would be evicted again."""
        sample = self._seen.sample
        never = record.reserved_bytes > self.budget.bytes  # that is for admission to say
        if never or sample is None or sample.available_bytes is None:
            return True
        return sample.available_bytes - record.reserved_bytes >= self._seen.warning_bytes

    def again_in_s(self, records: Mapping[Key, Record]) -> float | None:
        """Seconds until the next pass that an evicted engine's return needs, None if none is evicted."""
        away = any(record.evicted_at is not None for record in records.values())
        return self.watchdog.pace.return_every_s / 4 if away else None

    # ── report ───────────────────────────────────────────────────────────────────────────────────

    def said(self) -> Json:
        """Memory report for /status, the metrics and the node Lease; sizes in bytes."""
        sample, level = self._seen.sample, self.watchdog.level(self._seen)
        return {
            "total": self.budget.total_bytes,
            "budget": self.budget.bytes,
            "because": self.budget.explain(),
            "charged": self.ledger.charged_bytes,
            "left": self._left_bytes,
            "waiting": sum(bool(each.position) for each in self.ledger.decisions.values()),
            "pressure": level.value if level else "Unknown",
            "why": self._seen.watch.why,
            "available": sample.available_bytes if sample else None,
            "wired": sample.wired_bytes if sample else None,
            "swap": sample.swap_used_bytes if sample else None,
            "problems": list(sample.problems) if sample else [],
            "evictions": self._evictions,
            "skipped": dict(self._skipped),
        }


def _ends_soon(record: Record, now: float) -> bool:
    """True if an engine is ending, and not kept by a long answer: memory that comes then comes too late."""
    if record.runs and not record.withdraw:
        return False
    since = requested_at(record.withdraw) if record.withdraw else now
    return abs(now - since) < EVICTED_DRAIN_S + ENDS_WITHIN_S


def _forgiven(record: Record, now: float) -> Record:
    """The record, without its past evictions once it has run for FORGIVEN_AFTER_S."""
    long_ago = record.runs and bool(record.evictions) and now - record.admitted_at > FORGIVEN_AFTER_S
    return replace(record, evictions=0) if long_ago else record
