"""The observation of one service, combined from supervisord, its launcher, its probe and its publication.

Each observation is kept as a file, for the controller and for the next sidecar. The exit of a process is noticed by its
pid, before supervisord reports it: then only the endpoint is withdrawn, and the exit status follows from supervisord.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from metal_supervisor import launch
from metal_supervisor.cluster.report import CRASH_LOOP, HELD, rests
from metal_supervisor.launch import NOW, SOON
from metal_supervisor.memory.machine_memory import Held
from metal_supervisor.sidecar import exit_messages, sharing
from metal_supervisor.sidecar.acceleration import LLAMA, LOAD_BYTES, LOAD_LINES, acceleration
from metal_supervisor.sidecar.counters import Counters
from metal_supervisor.sidecar.memory_sampler import MemorySampler, SampledEngine
from metal_supervisor.sidecar.probes import ProbeFinding, Prober, ProbeTarget
from metal_supervisor.sidecar.publisher import Published
from metal_supervisor.spec.attachment import Attachment
from metal_supervisor.spec.instants import utc
from metal_supervisor.spec.processes import LIVE, Observed, ProgramState, RunNote, State
from metal_supervisor.spec.record import Record
from metal_supervisor.spec.types import Key, Standing
from metal_supervisor.spec.withdrawal import NO_WITHDRAWAL, WithdrawalToken, requested_at
from metal_supervisor.state.directory import StateDir
from metal_supervisor.state.doorbell import ring
from metal_supervisor.supervisord.exits import Exits

MEMORY_STEP_BYTES = 16 << 20
MOST_WAKES = 10
# Below the 2 s that the controller waits for an answer.
UNCONFIRMED_S = 1.0


@dataclass(frozen=True)
class EngineView:
    """The engine of a service in one pass."""

    pid: int
    """0 if there is none."""
    target: ProbeTarget
    sampled: SampledEngine
    """The process whose memory is measured."""
    attachment: Attachment | None
    """Of a model on a shared daemon: its attacher's note."""
    probed: tuple[ProbeTarget, ProbeFinding] | None = None
    """As for `Prober.ask_only`; None if it is not probed."""


@dataclass(frozen=True)
class ServiceView:
    """Inputs of an observation: what a pass of the sidecar has read about one service."""

    record: Record
    row: ProgramState | None
    """Its program in supervisord's table."""
    note: RunNote | None
    """Its launcher's note."""
    engine: EngineView


@dataclass(frozen=True)
class LastSeen:
    """The outcome of one observation."""

    observed: Observed
    rss_bytes: int = 0
    crashed: bool = False
    settled: bool = True
    """False for an exit that supervisord has not reported yet: no Event is posted for it."""
    kept: bool = True
    """False if it could not be written, as on a full disk: it has to be made again."""


class Observer:
    """Makes the observations, and keeps the previous one of each service."""

    def __init__(
        self,
        state: StateDir,
        prober: Prober,
        meter: MemorySampler,
        counters: Counters,
        published: Callable[[Key], Published],
        dead: Collection[int],
    ) -> None:
        """`published`: a service's publication; `dead`: pids that have ended, maintained by the loop."""
        self.state, self.prober, self.meter, self._counters = state, prober, meter, counters
        self.published, self.dead = published, dead
        self._exits = Exits(state.path / "log" / "supervisord.log")
        self._before = dict(state.observations())
        self._unkept: set[str] = set()
        """Programs whose latest observation could not be written."""
        self._engines: dict[str, int] = {}
        """Program -> latest pid that its launcher noted as an engine."""
        self._rested: set[str] = set()
        """On-demand programs that were at rest, and have not served since: their next start is for a request."""

    @property
    def observations(self) -> Mapping[str, Observed]:
        """The latest observation of each program."""
        return self._before

    def forget_all_but(self, programs: Collection[str]) -> None:
        """Forget the observations of all other programs, files included."""
        for program in self._before.keys() - set(programs):
            del self._before[program]
            self._engines.pop(program, None)
            self._unkept.discard(program)
            self._rested.discard(program)
            self.state.forget_observed(program)

    def known(self, record: Record, pid: int) -> ProbeFinding:
        """Last finding about this very process, even by an earlier sidecar: a restart must not withdraw what serves."""
        before = self._before.get(record.program)
        same = before is not None and before.pid == pid
        if before is None or not same:
            return ProbeFinding(False, "")
        return ProbeFinding(before.ready, before.message, before.served, model_name=before.model_name)

    def see(self, look: ServiceView, records: Mapping[str, Record], leaving: bool) -> LastSeen:
        """Observe one service and keep the observation. `leaving`: the whole system stops."""
        record, row, pid = look.record, look.row, look.engine.pid
        before = self._before.get(record.program)
        if row is not None and row.state in LIVE and not pid and before is not None and before.pid in self.dead:
            return self._just_died(before)
        word = row.state.value if row else ""
        word = State.STOPPING.value if leaving and pid else word
        finding = self._finding(look, records)
        if look.note is not None and look.note.pid:
            self._engines[record.program] = look.note.pid
        died = before is not None and before.pid not in (0, pid) and self._was_engine(before)
        crashed = died and not _planned(record, before, word, leaving)
        if crashed:
            self.state.keep_crash_log(record.program)
        held = self.meter.held(look.engine.sampled) if pid else None
        held = sharing.share(record, held, records.values())
        last_exit = self._last_exit(record, before, died, word)
        ready = bool(pid) and finding.ready and word != State.STOPPING.value
        served, now = bool(pid) and finding.served, time.time()
        failing = "" if served else _failing(look, before, word)
        message = self._message(look, finding, word)
        if failing and word not in HELD and before is not None:
            message = exit_messages.without_next_start(before.message)
        unplanned, counted_start = _starts(look.note, before, crashed, now)
        published = self.published(record.key)
        told = message if message.startswith(sharing.UNREACHABLE) else published.problem
        withdrawn = record.withdraw if published.fronted else published.withdrawn
        busy, drained = self._drained(look, withdrawn)
        if rests(record):
            self._rested.add(record.program)
        observed = Observed(
            program=record.program,
            pid=pid,
            ready=ready,
            since=before.since if before and before.ready == ready else now,
            state=word,
            message="" if ready else message,
            withdrawn=withdrawn,
            busy=busy,
            drained=drained,
            restarts=(before.restarts if before else 0) + unplanned,
            counted_start=counted_start,
            exits=exit_messages.exits(before, exit_messages.manner(last_exit, crashed) if died else ""),
            wakes=self._wakes(before, record, served, now),
            served=served,
            hung=finding.hung if pid else "",
            model_name=finding.model_name if pid else "",
            acceleration=self._acceleration(before, record, pid if finding.served else 0),
            last_exit=last_exit,
            failing=failing,
            confined=self._confined(look, records),
            published=told,
            memory_bytes=_charged(pid, held, before),
        )
        if observed.served and word != State.STOPPING.value and not rests(record):
            self._rested.discard(record.program)
        self._count_start(row, before, observed, now)
        self._before[record.program] = observed
        news = _news(before, observed, record.reserved_bytes)
        return LastSeen(observed, held.rss_bytes if held else 0, crashed, kept=self.keep(observed, news))

    def keep(self, observed: Observed, news: bytes | None) -> bool:
        """Write an observation, and wake its readers; False if it cannot be written.

        `news`: the ring for the controller, None if it need not know.
        """
        changed, program = self.state.write_observed(observed), observed.program
        if changed is None:
            self._unkept.add(program)
            return False
        if changed:
            if news or program in self._unkept:
                ring(self.state.path, "controller", news or NOW)
            ring(self.state.path, "gateway")
        self._unkept.discard(program)
        return True

    def _just_died(self, before: Observed) -> LastSeen:
        """The outcome for an exit that supervisord has not reported yet: not ready, so that the endpoint is withdrawn.

        The exit status, the counters and the Event wait for supervisord's report.
        """
        observed = replace(before, pid=0, ready=False, served=False, hung="", message="the engine has ended")
        return LastSeen(observed, settled=False, kept=self.keep(observed, news=None))

    def _finding(self, look: ServiceView, records: Mapping[str, Record]) -> ProbeFinding:
        """The probe's finding; for a model on a shared daemon, combined with those of the daemon and the attacher."""
        record = look.record
        finding = self.prober.finding(record.program) or self.known(record, look.engine.pid)
        if not record.daemon:
            return finding
        ours = record.daemon in records and records[record.daemon].edition is not None
        daemon = self._before.get(record.daemon) if ours else None
        return sharing.judged(record, finding, look.engine.attachment, look.engine.pid, daemon)

    def _confined(self, look: ServiceView, records: Mapping[str, Record]) -> bool | None:
        """True if the process that holds the model runs confined; for a shared daemon's model, that is the daemon.

        None if that is not known: on a full disk the launcher cannot keep its note.
        """
        pid, note = look.engine.pid, look.note
        if look.record.daemon:
            running, daemon = records.get(look.record.daemon), self._before.get(look.record.daemon)
            if running is None or running.edition is None:
                return False  # the user's own
            return daemon.confined if pid and daemon is not None else None
        return note.confined if note is not None and pid and note.pid == pid and not note.restored else None

    def _message(self, look: ServiceView, finding: ProbeFinding, word: str) -> str:
        """Reason why the service is not ready; meaningless if it is."""
        note = look.note
        if note and note.refused not in ("", CRASH_LOOP) and not look.engine.pid:
            return note.refused_message
        if word in HELD:
            return exit_messages.why_down(self.state, look.record, note, self._exits.last(look.record.program))
        return finding.message

    def _drained(self, look: ServiceView, withdrawn: WithdrawalToken) -> tuple[bool, WithdrawalToken]:
        """(True if requests are in flight, token of the withdrawal after which none were left, "" if there is none).

        `withdrawn`: token of the withdrawal that the cluster shows.

        Only an idle engine whose endpoint is out is drained: before, new requests may come. If the withdrawal is not
        confirmed within UNCONFIRMED_S, as while the cluster is unreachable, requests in flight are waited for all the
        same.
        """
        record, pid = look.record, look.engine.pid
        overdue = bool(record.withdraw) and time.time() - requested_at(record.withdraw) > UNCONFIRMED_S
        carried_out = record.withdraw if withdrawn == record.withdraw or overdue else NO_WITHDRAWAL
        busy = self.prober.busy(record.program, carried_out, look.engine.target if pid else None)
        return bool(busy), carried_out if busy is False or not pid else NO_WITHDRAWAL

    def _wakes(self, before: Observed | None, record: Record, served: bool, now: float) -> dict[str, float]:
        """The latest loads for a request. A start of an engine that did not rest before is none, as after a crash."""
        known = before.wakes if before is not None else {}
        if not served or record.program not in self._rested or (before is not None and before.served):
            return known
        if record.idle_s is None or record.queued_at is None:
            return known
        return dict([*known.items(), (utc(record.queued_at), round(now - record.queued_at, 3))][-MOST_WAKES:])

    def _acceleration(self, before: Observed | None, record: Record, pid: int) -> dict[str, str | int]:
        """`status.acceleration` of a process that has served, read once. `pid`: 0 before."""
        if not pid or record.runtime != LLAMA:
            return {}
        if before is not None and before.served and before.pid == pid:
            return before.acceleration
        return acceleration(self.state.log_tail(record.program, LOAD_LINES, LOAD_BYTES))

    def _last_exit(self, record: Record, before: Observed | None, died: bool, word: str) -> str:
        """The last exit of its engine; read from supervisord's log only when it may have changed."""
        if before is None or died or not before.last_exit or word in HELD:
            return self._exits.last(record.program)
        return before.last_exit

    def _was_engine(self, before: Observed) -> bool:
        """True if the process was an engine, and not a launcher, which exits if it may not start the engine."""
        return before.served or self._engines.get(before.program) == before.pid

    def _count_start(self, row: ProgramState | None, before: Observed | None, observed: Observed, now: float) -> None:
        """Record the time that a process took until it served, once per process."""
        known = before is not None and before.pid == observed.pid and before.served
        if observed.served and not known and row is not None and row.pid == observed.pid:
            self._counters.started(observed.program, max(0.0, now - row.start))


def _failing(look: ServiceView, before: Observed | None, word: str) -> str:
    """`Observed.failing` of an engine that does not serve."""
    record, note = look.record, look.note
    if record.verdict.standing is not Standing.RUN:
        return ""
    request = record.asked or record.edition or ""
    refused = note is not None and note.refused not in ("", CRASH_LOOP)
    if word == State.FATAL.value and not refused:
        return request
    return request if before is not None and before.failing == request else ""


def _news(before: Observed | None, now: Observed, reserved_bytes: int) -> bytes | None:
    """The ring for the controller, None if it cannot decide otherwise. The launcher tells it of a start."""
    if before is None:
        return NOW if now.ready or now.withdrawn or now.state in HELD else None
    if before.to_decide_by(reserved_bytes) == now.to_decide_by(reserved_bytes):
        return None
    came_up = replace(before, ready=True, served=True, memory_bytes=now.memory_bytes)
    return SOON if came_up.to_decide_by(reserved_bytes) == now.to_decide_by(reserved_bytes) else NOW


def _starts(note: RunNote | None, before: Observed | None, crashed: bool, now: float) -> tuple[int, float]:
    """(unplanned starts since the last observation, Unix time of the latest start that is counted, 0 without one).

    The launcher notes the starts that followed a crash. A crash after a run so long that the launcher has forgotten its
    start is counted here.
    """
    known, starts = before.counted_start if before is not None else 0.0, note.starts if note is not None else ()
    # By their order where that is known, because the clock may have been set back since.
    new = starts[starts.index(known) + 1 :] if known in starts else [at for at in starts[1:] if at > known]
    forgotten = crashed and 0 < known < now - launch.FORGET_AFTER_S and not new
    return len(new) + int(forgotten), starts[-1] if starts else known


def _planned(record: Record, before: Observed | None, word: str, leaving: bool) -> bool:
    """True if the end of the process was planned: by the controller, by a human, or by a stop of the whole system.

    `before`: the last observation. By now the next process may be up, with nothing left of how the last one ended.
    """
    ours = bool(record.withdraw) or record.verdict.standing is not Standing.RUN or leaving
    ending = before is not None and (bool(before.withdrawn) or before.state == State.STOPPING.value)
    return ours or ending or record.stopped_by_hand or word in ("STOPPING", "STOPPED")


def _charged(pid: int, held: Held | None, before: Observed | None) -> int:
    """Bytes charged for the engine's footprint, 0 without a process. Small changes are ignored: each would rewrite
    the observation's file.
    """
    if not pid:
        return 0
    known = before.memory_bytes if before is not None and before.pid == pid else 0
    found = held.charged_bytes if held else known
    return known if known and abs(found - known) < max(known // 50, MEMORY_STEP_BYTES) else found
