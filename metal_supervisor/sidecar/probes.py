"""Readiness probes of the engines: frequent while an engine loads, seldom once it serves.

A hung engine does not delay the probes of another: see probe_threads.py. A probe belongs to a pid:
answers of an earlier process do not count. If an engine does not answer, signs of work by its process tell a busy one
from a hung one. Once per process, health is not enough: it has to answer the smallest request of its mode.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from metal_supervisor.host import liveness, local_status, processes
from metal_supervisor.host.liveness import HangLimits, ProbeResult, Pulse
from metal_supervisor.host.local_status import ANY_V4, ANY_V6
from metal_supervisor.runtimes import probing
from metal_supervisor.runtimes.probing import FirstRequest, ProbeAnswer
from metal_supervisor.sidecar.probe_threads import ProbeThreads
from metal_supervisor.spec.types import Probe

READY_EVERY_S = 15.0
"""Pause between two probes of an engine that serves."""
LONGEST_REST_S = 60.0
"""Longest such pause, when many engines serve."""
MOST_A_SECOND = 4
"""Most probes a second of all engines that serve."""
DOUBT_EVERY_S = 1.0
DRAIN_EVERY_S = 0.2
PATIENT_S = 5.0
SILENT_S = 0.5
"""For the health of an engine whose work loop has not answered in time already."""
FIRST_LOOK_S = 0.2
FIRST_AGAIN_S = 1.0
FIRST_AWAITED = "its first answer is waited for"
SOONEST_S = 0.02
"""Shortest pause between two looks at an engine that loads."""
SHARE = 0.03
"""That pause as a share of the time that the engine has loaded for."""
LATEST_S = 1.0
"""Longest such pause."""


@dataclass(frozen=True)
class ProbeTarget:
    """One engine process to be asked."""

    pid: int
    bind: str
    """The address it was told to listen on."""
    port: int
    probe: Probe
    reached_at: str = ""
    """Address at which pods reach it, if that has to be probed too, else ""."""

    @property
    def host(self) -> str:
        """Address to send probes to."""
        return local_status.asked_at(self.bind)


@dataclass(frozen=True)
class ProbeFinding:
    """The result of probing a target."""

    ready: bool
    message: str
    served: bool = False
    """It has been ready before."""
    hung: str = ""
    """Reason why it should be restarted, or ""."""
    model_name: str = ""
    """As `Observed.model_name`."""


def rest_s(engines: int) -> float:
    """Seconds between probes of an engine that serves, among so many: a Mac at rest must not pay for each of them."""
    return min(LONGEST_REST_S, max(READY_EVERY_S, engines / MOST_A_SECOND))


class _Asker:
    """Probes one target until it is `over`. One thread at a time calls it."""

    def __init__(self, prober: Prober, program: str, target: ProbeTarget, known: ProbeFinding) -> None:
        self._prober, self._program, self.target, self._limits = prober, program, target, prober.limits
        self.ending = False
        """The engine is to end; a first request of the probe would only delay it."""
        self.rest_s = READY_EVERY_S
        self._first: FirstRequest | None = None
        self._first_failed = False
        self._model_name = known.model_name
        self._pulse = Pulse(born=time.monotonic(), ready=known.ready, served=known.served)
        self.finding = known
        self.answered = False
        self._elsewhere, self._elsewhere_at = "", self._pulse.born
        self._seen_loading: ProbeAnswer | None = None
        """Result of `_ours` while it loads, so that its first answer need not wait for that. None without one, and once
        it has answered anything else in between, or nothing.
        """
        self._asks_one = False
        """The next look at it is at its work loop alone: each second one, while all is well."""
        self.over = False

    def once(self) -> float | None:
        """Probe once; returns the seconds until the next probe, None if there is to be none."""
        if not self.over:
            was = self.finding
            self._pulse = pulse = liveness.heard(self._pulse, self._look(), self._limits)
            self.finding = ProbeFinding(pulse.ready, pulse.message, pulse.served, pulse.hung, self._model_name)
            self.answered = True
            if self.finding != was and not self.over:
                same = replace(self.finding, message=was.message) == was
                (self._prober.on_message if same else self._prober.on_change)()
        if self.over:
            self._give_up_first()
            return None
        return self._pause_s()

    def _look(self) -> ProbeResult:
        if self._first is not None:
            return self._first_looked_at(self._first)
        target, asked_at, works = self.target, time.monotonic(), None
        # The first silence is doubted at once; an engine that is in doubt is given longer.
        patience_s = PATIENT_S if self._pulse.failures else probing.TIMEOUT_S
        if self._asks_one:
            works = probing.works(target.port, target.probe, target.host)
            self._asks_one = False
            if works:
                self._prober.on_probe(self._program, time.monotonic() - asked_at)
                return self._seen(True, True, "")
        wait_s = patience_s if works is None else SILENT_S
        answer = probing.probe(target.port, target.probe, not self._pulse.ready, target.host, wait_s)
        self._prober.on_probe(self._program, time.monotonic() - asked_at)
        before, self._seen_loading = self._seen_loading, None
        if answer.loading and not self._pulse.ready and not target.reached_at:
            self._seen_loading = before or self._ours()
        elif answer.ready and not self._pulse.ready:
            answer = before if before is not None and before.ready else self._ours()
            if answer.ready and target.probe.first_path and not self._pulse.served:
                key = self._prober.key_of(self._program)
                self._first = FirstRequest(target.port, target.probe, key, self._limits.loading_s, target.host)
                return self._first_looked_at(self._first)
        elif answer.refused:
            told = "the engine does not listen any more" if self._pulse.served else answer.message
            answer = ProbeAnswer(False, self._misplaced() or told)
        if answer.ready and works is None:
            works = probing.works(target.port, target.probe, target.host, patience_s)
            self._asks_one = bool(works)
        turns = not answer.ready or works is not False
        message = answer.message if turns else "its work loop takes no requests"
        return self._seen(answer.ready, turns, message)

    def _seen(self, answers: bool, turns: bool, message: str, asked: bool = False) -> ProbeResult:
        """A probe result, with signs of work if the probe failed and they matter."""
        now, target = time.monotonic(), self.target
        closely = not (answers and turns) and liveness.wants_signs(self._pulse, now, self._limits)
        return ProbeResult(
            now, answers, turns, message, processes.signs(target.pid, target.port) if closely else None, asked
        )

    def _first_looked_at(self, first: FirstRequest) -> ProbeResult:
        """A probe result while the first request runs: that may take long, and the engine is watched meanwhile."""
        answer = None if self.ending else first.wait(FIRST_LOOK_S)
        if answer is not None or self.ending:
            self._give_up_first()
        if answer is None:
            return self._seen(False, True, FIRST_AWAITED, asked=True)
        self._first_failed, self._model_name = not answer.ready, first.model_name
        return self._seen(answer.ready, True, answer.message, asked=not answer.ready)

    def _give_up_first(self) -> None:
        if self._first is not None:
            self._first.close()
            self._first = None

    def _ours(self) -> ProbeAnswer:
        """Check that the answer came from this very process, at the address it was told to listen on."""
        target = self.target
        if target.reached_at and not probing.answers_at(target.reached_at, target.port):
            text = f"it does not answer at {target.reached_at}:{target.port}, where pods would ask it; "
            fix = "make it listen there (OLLAMA_HOST=0.0.0.0), or set --ollama-url off to have one supervised"
            return ProbeAnswer(False, f"DaemonUnreachable: {text}{fix}")
        if target.probe.shared:
            return ProbeAnswer(True, "")  # the record of the daemon identifies the process
        found = processes.listens(target.pid, target.port)
        if found is None or self._reachable(found):
            return ProbeAnswer(True, "")
        if not found:
            stranger = processes.port_holder(target.port)
            return ProbeAnswer(False, f"port {target.port} is answered by {stranger}, not by the engine")
        return ProbeAnswer(False, self._on(found))

    def _misplaced(self) -> str:
        """Message about the wrong address that a refusing engine listens on, or ""; looked up every SIGNS_EVERY_S."""
        now = time.monotonic()
        if now - self._elsewhere_at >= liveness.SIGNS_EVERY_S:
            found = processes.listens(self.target.pid, self.target.port) or frozenset()
            self._elsewhere, self._elsewhere_at = self._on(found) if found and not self._reachable(found) else "", now
        return self._elsewhere

    def _reachable(self, found: frozenset[str]) -> bool:
        """True if the addresses listened on include the configured one."""
        return self.target.bind in found or (self.target.bind == ANY_V4 and ANY_V6 in found)

    def _on(self, found: frozenset[str]) -> str:
        return f"the engine listens on {', '.join(sorted(found))}, not on {self.target.bind}"

    def _pause_s(self) -> float:
        if self._first is not None:
            return 0.0
        if self._pulse.ready:
            return DOUBT_EVERY_S if self._pulse.failures else self.rest_s
        if self._pulse.served:
            return DOUBT_EVERY_S
        loaded_s = time.monotonic() - self._pulse.born
        pause_s = min(LATEST_S, max(SOONEST_S, SHARE * loaded_s))
        return max(pause_s, FIRST_AGAIN_S) if self._first_failed or self.ending else pause_s


class _Drain(threading.Thread):
    """Polls an engine that is to stop until it has no requests in flight."""

    def __init__(self, target: ProbeTarget, on_change: Callable[[], None]) -> None:
        super().__init__(name=f"drain {target.port}", daemon=True)
        self.target, self._on_change = target, on_change
        self.busy: bool | None = None
        self.over = threading.Event()

    def run(self) -> None:
        while not self.over.is_set():
            was, target = self.busy, self.target
            self.busy = probing.is_busy(target.pid, target.port, target.probe, target.host)
            if self.busy != was:
                self._on_change()
            if not self.busy:
                return
            self.over.wait(DRAIN_EVERY_S)


class Prober:
    """All probes."""

    def __init__(
        self,
        on_change: Callable[[], None],
        on_message: Callable[[], None],
        limits: HangLimits,
        key_of: Callable[[str], tuple[str, str]] = lambda _program: ("", ""),
        on_probe: Callable[[str, float], None] = lambda _program, _seconds: None,
    ) -> None:
        """`on_message`: called if no more than the message of a finding has changed.

        `key_of`: program -> result of `first_request.key_of` for its engine. `on_probe`: called with the program and
        the seconds of each probe. Several threads call them all.
        """
        self.on_change, self.on_message = on_change, on_message
        self.limits, self.key_of, self.on_probe = limits, key_of, on_probe
        self._askers: dict[str, _Asker] = {}
        self._threads = ProbeThreads()
        self._drains: dict[str, tuple[str, _Drain]] = {}

    def ask_only(self, targets: Mapping[str, tuple[ProbeTarget, ProbeFinding]], ending: Collection[str] = ()) -> None:
        """Probe exactly these targets from now on. A target's given finding counts until its first probe.

        Engines in `ending` are sent no first request any more: it would delay their end.
        """
        for program, asker in list(self._askers.items()):
            target = targets[program][0] if program in targets else None
            if target is not asker.target and target != asker.target:
                asker.over = True
                del self._askers[program]
        for program in targets.keys() - self._askers.keys():
            asker = _Asker(self, program, *targets[program])
            asker.ending = program in ending
            self._threads.add(asker.once)
            self._askers[program] = asker
        pause_s = rest_s(len(self._askers))
        for program, asker in self._askers.items():
            asker.ending, asker.rest_s = program in ending, pause_s

    def busy(self, program: str, token: str, target: ProbeTarget | None) -> bool | None:
        """True if an engine that is to stop has requests in flight; None before it is known.

        `token`: the withdrawal that has been carried out, "" if none has: then the engine is not asked.
        """
        known = self._drains.get(program)
        if known and (known[0] != token or known[1].target != target):
            known[1].over.set()
            del self._drains[program]
            known = None
        if not token or target is None:
            return None
        if known is None:
            known = token, _Drain(target, self.on_change)
            known[1].start()
            self._drains[program] = known
        return known[1].busy

    def finding(self, program: str) -> ProbeFinding | None:
        """Latest finding about a program's engine, None before the first probe."""
        asker = self._askers.get(program)
        return asker.finding if asker and asker.answered else None
