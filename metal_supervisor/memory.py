"""This Mac's memory, as the controller spends it: what engines hold, who may start, who has to go, who returns.

What is decided is decided by pure functions (`core.admission`, `core.eviction`); this is where they get their
numbers from and where their verdicts become records.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Literal

from metal_supervisor.boundary.state import StateDir
from metal_supervisor.config import Settings
from metal_supervisor.core import admission, eviction
from metal_supervisor.core.admission import Held, Rules
from metal_supervisor.core.budget import Budget
from metal_supervisor.core.eviction import Candidate, Returning
from metal_supervisor.core.ledger import Ledger
from metal_supervisor.core.plan import live_note
from metal_supervisor.core.pressure import Level
from metal_supervisor.core.resources import PRIORITIES
from metal_supervisor.core.types import LIVE, Json, Key, Observed, ProgramState, Record, RunNote, Standing
from metal_supervisor.lookout import Room
from metal_supervisor.watchdog import Asked, Watchdog

log = logging.getLogger("controller")


class Memory:
    """Holds what has to be remembered of the memory between passes."""

    def __init__(self, settings: Settings, directory: StateDir, wake: Callable[[], None]) -> None:
        self._settings, self._state = settings, directory
        self.watchdog = Watchdog(settings, wake)
        self.ledger = Ledger(self.budget.bytes, 0, {})
        self._leaving: frozenset[Key] = frozenset()
        self._exited_at: float | None = None
        """Monotonic time at which the last engine that was stopped for want of memory was gone."""
        self._returned_at: float | None = None
        """Unix time of the latest return."""
        self._evictions = 0
        self._skipped: Counter[str] = Counter()
        self._skipping = ""

    def start(self) -> None:
        """Begins to watch."""
        self.watchdog.start()

    @property
    def budget(self) -> Budget:
        """What models may have on this Mac."""
        return self.watchdog.budget

    @property
    def room(self) -> Room:
        """How much there is, as of the last pass."""
        return Room(self.budget.total_bytes, self.budget.bytes, self.ledger.left_bytes)

    # ── what is held ─────────────────────────────────────────────────────────────────────────────

    def held(
        self,
        records: Mapping[Key, Record],
        table: Mapping[str, ProgramState],
        notes: Mapping[str, RunNote],
        observed: Mapping[str, Observed],
    ) -> dict[Key, Held]:
        """The engines that are up, and what each holds."""
        found = {}
        for key, record in records.items():
            state, seen = table.get(record.program), observed.get(record.program)
            if state is None or state.state not in LIVE:
                continue
            note = live_note(notes.get(record.program), state)
            spec = self._state.read_spec(note.spec_file) if note else {}
            said = spec.get("reserved_bytes")
            reserved = said if isinstance(said, int) and said > 0 else record.reserved_bytes
            measured = seen.memory_bytes if seen and note and seen.pid == note.pid else 0
            found[key] = Held(note.spec_file if note else record.spec_file or "", max(reserved, measured))
        return found

    # ── who may start ────────────────────────────────────────────────────────────────────────────

    def settle(
        self, decided: Mapping[Key, Record], before: Mapping[Key, Record], held: Mapping[Key, Held], now: float
    ) -> dict[Key, Record]:
        """The records as there is room for them."""
        level, watch = self.watchdog.level, self.watchdog.watch
        short = level is not None and level is not Level.NORMAL
        mode: Literal["enforce", "warn"] = "warn" if self._settings.memory_check_mode == "warn" else "enforce"
        rules = Rules(
            self.budget.bytes,
            mode,
            self._settings.preemption,
            f"the machine is short of memory ({watch.why}); it starts by itself once that is over" if short else "",
        )
        records, self.ledger = admission.settle(decided, before, held, rules, now)
        return records

    # ── who has to go, and who returns ───────────────────────────────────────────────────────────

    def relieve(self, records: Mapping[Key, Record], held: Mapping[Key, Held], now: float) -> dict[Key, Record]:
        """The records after a look at the pressure: one may have to go, one may come back."""
        level = self.watchdog.level
        result = {key: self._pressed(record, level) for key, record in records.items()}
        leaving = frozenset(key for key, record in records.items() if record.evicted_at is not None and key in held)
        if self._leaving - leaving:
            self._exited_at = time.monotonic()
        self._leaving = leaving
        running = {key: record for key, record in records.items() if key in held and _runs(record)}
        self.watchdog.engines = {
            key: Asked(record.host or self._settings.bind_address, record.port, record.probe)
            for key, record in running.items()
            if record.port is not None
        }
        if level is Level.CRITICAL:
            self._evict(result, running, held, bool(leaving), now)
        else:
            self._skipping = ""
            self._return(result, now)
        return result

    def _pressed(self, record: Record, level: Level | None) -> Record:
        """A record with the machine's level, as its conditions are to show it."""
        watch = self.watchdog.watch
        if level is None or (level is Level.NORMAL and record.pressure is None):
            return record
        if record.pressure is not None and record.pressure[0] == level.value:
            return record
        return replace(record, pressure=(level.value, watch.why))

    def _evict(
        self,
        records: dict[Key, Record],
        running: Mapping[Key, Record],
        held: Mapping[Key, Held],
        leaving: bool,
        now: float,
    ) -> None:
        if not self._settings.eviction_enabled:
            return self._skip("disabled", "--eviction-enabled is not set")
        watchdog = self.watchdog
        sample, watch = watchdog.sample, watchdog.watch
        if sample is None or not eviction.may_evict(watch, self._exited_at, leaving, time.monotonic(), watchdog.pace):
            return None
        candidates = [
            Candidate(
                key,
                PRIORITIES.get(record.priority, PRIORITIES["normal"]),
                held[key].bytes,
                record.admitted_at,
                record.protected,
                key in watchdog.busy,
            )
            for key, record in running.items()
        ]
        used = sample.total_bytes - (sample.available_bytes or 0)
        choice = eviction.choose(candidates, used)
        if choice.victim is None:
            return self._skip(choice.skipped, choice.text)
        self._skipping = ""
        self._evictions += 1
        log.warning("evicted", extra={"service": "/".join(choice.victim), "why": choice.text, "level": watch.why})
        records[choice.victim] = admission.evict(records[choice.victim], f"{watch.why}; {choice.text}", now)
        return None

    def _skip(self, reason: str, text: str) -> None:
        """Notes why nobody is stopped; told when it changes, not with every look."""
        if reason != self._skipping:
            self._skipping = reason
            self._skipped[reason] += 1
            log.warning("nobody is evicted", extra={"reason": reason, "why": text})

    def _return(self, records: dict[Key, Record], now: float) -> None:
        away = [
            Returning(key, PRIORITIES.get(record.priority, 0), record.evicted_at, max(record.evictions, 1))
            for key, record in records.items()
            if record.evicted_at is not None and key not in self._leaving and self._would_fit(record)
        ]
        watchdog = self.watchdog
        key = eviction.may_return(
            away, watchdog.watch, time.monotonic(), self._returned_at, watchdog.pace, clock=now
        )
        if key is None:
            return
        self._returned_at = now
        log.info("returns", extra={"service": "/".join(key)})
        records[key] = replace(records[key], evicted_at=None)

    def _would_fit(self, record: Record) -> bool:
        """Whether its return would leave enough available; if not it would only have to go again."""
        sample = self.watchdog.sample
        if sample is None or sample.available_bytes is None:
            return True
        return sample.available_bytes - record.reserved_bytes >= self.watchdog.warning_bytes

    def again_in_s(self, records: Mapping[Key, Record]) -> float | None:
        """When a pass is worthwhile only because somebody may return."""
        away = any(record.evicted_at is not None for record in records.values())
        return self.watchdog.pace.return_every_s / 4 if away else None

    # ── what is told ─────────────────────────────────────────────────────────────────────────────

    def said(self) -> Json:
        """What /status, the metrics and the node Lease show."""
        watchdog = self.watchdog
        sample, level = watchdog.sample, watchdog.level
        return {
            "total": self.budget.total_bytes,
            "budget": self.budget.bytes,
            "because": self.budget.explain(),
            "charged": self.ledger.charged_bytes,
            "left": self.ledger.left_bytes,
            "waiting": sum(not each.admitted for each in self.ledger.decisions.values()),
            "pressure": level.value if level else "Unknown",
            "why": watchdog.watch.why,
            "available": sample.available_bytes if sample else None,
            "swap": sample.swap_used_bytes if sample else None,
            "problems": list(sample.problems) if sample else [],
            "evictions": self._evictions,
            "skipped": dict(self._skipped),
        }


def _runs(record: Record) -> bool:
    return record.spec_file is not None and record.verdict.standing is Standing.RUN
