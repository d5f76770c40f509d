"""Asks each engine whether it serves: often while it loads, seldom once it does.

One small thread per engine, because a hung engine must not delay the news of another. Readiness is the
answer of this very process: a probe belongs to a pid, and the answer of an earlier one counts for nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from metal_supervisor.boundary import engines
from metal_supervisor.core.types import Probe

READY_EVERY_S = 15.0
DOUBT_EVERY_S = 1.0
DRAIN_EVERY_S = 0.2
FAILURES = 3
# (until this many seconds after the start, ask this often): quick models are noticed at once, slow ones cheaply.
LOADING_PACE = ((3.0, 0.02), (15.0, 0.1), (120.0, 0.5), (float("inf"), 2.0))


@dataclass(frozen=True)
class Target:
    """One engine process to be asked."""

    pid: int
    host: str
    port: int
    probe: Probe


@dataclass(frozen=True)
class Finding:
    """What is known of a target."""

    ready: bool
    message: str


class _Asker(threading.Thread):
    """Asks one target until told to end."""

    def __init__(self, target: Target, on_change: Callable[[], None]) -> None:
        super().__init__(name=f"probe {target.port}", daemon=True)
        self.target, self._on_change = target, on_change
        self.finding = Finding(False, "")
        self.answered = False
        self._over = threading.Event()
        self._since = time.monotonic()

    def end(self) -> None:
        """Makes the thread end at its next breath."""
        self._over.set()

    def run(self) -> None:
        failures = 0
        while not self._over.is_set():
            was = self.finding
            answer = engines.probe(self.target.port, self.target.probe, identify=not was.ready, host=self.target.host)
            failures = 0 if answer.ready else failures + 1
            if answer.ready or not was.ready or failures >= FAILURES:
                self.finding = Finding(answer.ready, answer.message)
            first, self.answered = not self.answered, True
            if (first or self.finding != was) and not self._over.is_set():
                self._on_change()
            self._over.wait(self._pause_s(failures))

    def _pause_s(self, failures: int) -> float:
        if self.finding.ready:
            return DOUBT_EVERY_S if failures else READY_EVERY_S
        age_s = time.monotonic() - self._since
        return next(pause_s for until_s, pause_s in LOADING_PACE if age_s < until_s)


class _Drain(threading.Thread):
    """Asks one engine that is to stop whether it still answers somebody, until it does not."""

    def __init__(self, target: Target, on_change: Callable[[], None]) -> None:
        super().__init__(name=f"drain {target.port}", daemon=True)
        self.target, self._on_change = target, on_change
        self.busy: bool | None = None
        self.over = threading.Event()

    def run(self) -> None:
        while not self.over.is_set():
            was, self.busy = self.busy, engines.busy(self.target.port, self.target.probe, self.target.host)
            if self.busy != was:
                self._on_change()
            if not self.busy:
                return
            self.over.wait(DRAIN_EVERY_S)


class Prober:
    """All the askers, one per program."""

    def __init__(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change
        self._askers: dict[str, _Asker] = {}
        self._drains: dict[str, tuple[str, _Drain]] = {}

    def ask_only(self, targets: Mapping[str, Target]) -> None:
        """Asks exactly these from now on."""
        for program, asker in list(self._askers.items()):
            if targets.get(program) != asker.target:
                asker.end()
                del self._askers[program]
        for program in targets.keys() - self._askers.keys():
            asker = self._askers[program] = _Asker(targets[program], self._on_change)
            asker.start()

    def busy(self, program: str, token: str, target: Target | None) -> bool | None:
        """Whether an engine that is to stop still answers somebody; None before the first answer.

        `token` names the withdrawal that has been carried out, "" if none has: then nothing is asked.
        """
        known = self._drains.get(program)
        if known and (known[0] != token or known[1].target != target):
            known[1].over.set()
            del self._drains[program]
            known = None
        if not token or target is None:
            return None
        if known is None:
            known = self._drains[program] = token, _Drain(target, self._on_change)
            known[1].start()
        return known[1].busy

    def finding(self, program: str) -> Finding | None:
        """What is known of a program's engine, None before its first answer."""
        asker = self._askers.get(program)
        return asker.finding if asker and asker.answered else None
