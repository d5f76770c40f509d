"""Scrapes the engines' own metrics, in a thread beside the sidecar's loop.

An engine's answer may be slow, huge or hostile, so one thread asks one engine at a time, each within a time limit, and
/metrics serves the latest answers. Only engines that serve are asked: one that loads, ends or hangs is busy with that,
and one that may unload its model when idle would be kept awake. The metrics of a process are dropped with the process.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

from metal_supervisor.host import local_status
from metal_supervisor.runtimes import RUNTIMES, engine_metrics, probing
from metal_supervisor.runtimes.engine_metrics import Block, Joined, Told, Unreadable
from metal_supervisor.sidecar import exposition
from metal_supervisor.sidecar.board import Row
from metal_supervisor.spec.processes import RunNote
from metal_supervisor.spec.types import Key

EVERY_S = 15.0
LONGEST_S = 120.0
"""Each consecutive timeout doubles the pause before an engine is asked again, up to this."""
JOIN_S = 1.0
"""Longest time that an answer waits for further answers: each merge rebuilds the whole page."""
HOLDS_S = 60.0
"""Age up to which an answer is served."""
SILENT = frozenset({"timeout", "unreachable"})
"""Reasons that do not invalidate the previous answer: a busy engine answers late."""


@dataclass(frozen=True)
class ScrapeTarget:
    """One engine process that can be asked."""

    key: Key
    program: str
    pid: int
    started: str
    """launch.start_time, which with the pid identifies the process; "" if it is not known."""
    host: str
    port: int
    path: str


@dataclass
class _LastScrape:
    """The latest scrape of a target, and its schedule."""

    serves: bool = False
    """The engine serves; otherwise it is not asked."""
    number: int = 0
    """Of the process, in the order of first answers; 0 before its own."""
    due_at: float = 0.0
    pause_s: float = EVERY_S
    taken: bool | None = None
    said_at: float = float("-inf")
    blocks: Sequence[Block] = field(default_factory=tuple)


def source_of(row: Row, note: RunNote | None, bind: str) -> ScrapeTarget | None:
    """Scrape target of a service's engine, None if it cannot be scraped. `bind`: default listen address of engines."""
    record, pid = row.record, row.observed.pid
    runtime = RUNTIMES.get(record.runtime)
    if not pid or runtime is None or not runtime.metrics_path or record.probe.asleep_path or record.port is None:
        return None
    started = note.started if note is not None and note.pid == pid else ""
    where = local_status.asked_at(record.host or bind)
    return ScrapeTarget(record.key, record.program, pid, started, where, record.port, runtime.metrics_path)


class EngineScraper(threading.Thread):
    """Scrapes until the process ends. Not started unless enabled; `told` is empty then."""

    def __init__(
        self,
        bind: str,
        key_of: Callable[[str], tuple[str, str]],
        clock: Callable[[], float] = time.monotonic,
        timeout_s: float = probing.TIMEOUT_S,
    ) -> None:
        """`key_of`: program -> result of `first_request.key_of` for its engine; called by this thread.

        `clock`: monotonic seconds; `timeout_s`: for the whole of one answer.
        """
        super().__init__(name="engine metrics", daemon=True)
        self._bind, self._key_of, self._clock, self._timeout_s = bind, key_of, clock, timeout_s
        self._numbers = itertools.count(1)
        self._followed: tuple[list[Row], dict[str, RunNote]] = [], {}
        self._lock = threading.Lock()
        self._known: dict[ScrapeTarget, _LastScrape] = {}
        """The running engines."""
        self._dropped: dict[Key, Counter[str]] = {}
        self._page: tuple[Joined, ...] = ()
        self._wake = threading.Event()

    def follow(self, rows: Iterable[Row], notes: Mapping[str, RunNote]) -> None:
        """Scrape exactly the engines of these rows from now on; drop the metrics of all others."""
        followed = list(rows), dict(notes)
        if followed == self._followed:
            return
        self._followed = followed
        services = {row.record.key for row in followed[0]}
        with self._lock:
            before, self._known = self._known, {}
            for row in followed[0]:
                if source := source_of(row, notes.get(row.record.program), self._bind):
                    known = self._known[source] = before.get(source) or _LastScrape()
                    known.serves = row.observed.ready and not row.observed.hung and not row.record.withdraw
            self._dropped = {key: found for key, found in self._dropped.items() if key in services}
        self._wake.set()

    def told(self) -> Told:
        """The metrics to serve now."""
        now = self._clock()
        with self._lock:
            live = frozenset(each.number for each in self._known.values() if now - each.said_at <= HOLDS_S)
            up = {
                source.key: each.taken for source, each in self._known.items() if each.taken is not None and each.serves
            }
            return Told(self._page, live, up, {key: dict(found) for key, found in self._dropped.items()})

    def run(self) -> None:
        while True:
            first = self._first()
            self._wake.wait(max(0.0, first[0] - self._clock()) if first is not None else None)
            self._wake.clear()
            self.turn()

    def turn(self) -> None:
        """Scrape due engines for JOIN_S and merge their answers; the next turn follows at once if more are due."""
        asked, until = list[ScrapeTarget](), self._clock() + JOIN_S
        while (first := self._first()) is not None and first[0] <= self._clock() < until:
            self._ask(first[1])
            asked.append(first[1])
        if asked:
            self._join(asked)

    def _first(self) -> tuple[float, ScrapeTarget] | None:
        """(monotonic time at which it is due, engine) of the one that is due first, None if none serves."""
        with self._lock:
            due = [(each.due_at, source) for source, each in self._known.items() if each.serves]
        return min(due, key=itemgetter(0), default=None)

    def _ask(self, source: ScrapeTarget) -> None:
        """Scrape one engine and keep its answer."""
        _, key = self._key_of(source.program)
        text, reason = probing.counted(source.host, source.port, source.path, key, self._timeout_s)
        found: tuple[Block, ...] = ()
        dropped = Counter[str]()
        if not reason:
            try:
                found, dropped = engine_metrics.blocks(exposition.read(text), source.key)
            except Unreadable as error:
                reason = error.reason
        with self._lock:
            known = self._known.get(source)
            if known is None:
                return  # it has ended meanwhile
            known.number = known.number or next(self._numbers)
            known.taken, now = not reason, self._clock()
            known.pause_s = min(2 * known.pause_s, LONGEST_S) if reason in SILENT else EVERY_S
            known.due_at = now + known.pause_s
            if reason not in SILENT:
                known.blocks, known.said_at = found, now
            dropped.update([reason] if reason else [])
            self._leave_out(source, dropped)

    def _join(self, asked: Iterable[ScrapeTarget]) -> None:
        """Merge all answers into one page. `asked`: the engines whose answers are new on it."""
        with self._lock:
            answers = sorted((each.number, each.blocks) for each in self._known.values() if each.number)
        page, conflicts = engine_metrics.merged(answers)
        with self._lock:
            self._page = page
            for source in asked:
                if source in self._known:
                    self._leave_out(source, conflicts.get(self._known[source].number, Counter()))

    def _leave_out(self, source: ScrapeTarget, dropped: Counter[str]) -> None:
        """Count what is dropped of an answer; the caller holds the lock."""
        if dropped:
            self._dropped.setdefault(source.key, Counter()).update(dropped)
