"""The models of this Mac: the path of each one's files, which are fetched if necessary.

The controller only reads the state; one thread for each artifact looks at the disk (a network mount may hang) and
fetches, once for all services that want it. An artifact that is no longer wanted is stopped at once, and its partial
files stay for the next time. Nothing is deleted here but a partial file that turned out to be another file.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from metal_supervisor.models.download_job import DownloadJob
from metal_supervisor.models.headers import state_of
from metal_supervisor.models.listing import Listing, Retry, Unusable
from metal_supervisor.models.metadata import Reading
from metal_supervisor.models.remote.web import Client, Stopped
from metal_supervisor.models.store_context import StoreContext, Terms
from metal_supervisor.spec.progress import duration
from metal_supervisor.spec.sources import Artifact, Keys, shown
from metal_supervisor.spec.types import ModelFile

FIRST_RETRY_S = 5.0
LONGEST_RETRY_S = 300.0
FIRST_AGAIN_S = 1.0
"""First delay after a cut connection."""
LONGEST_AGAIN_S = 60.0
"""Longest delay after a cut connection."""
PATIENT_TRIES = 4
"""Number of fruitless tries in a row before a cut connection is reported as a failure."""
LOOK_WAIT_S = 0.1
LOOK_AT_NOTE_S = 2.0
LOOK_AT_STORE_S = 15.0
MOST_OF_NAMESPACE = 500
"""Artifacts that are looked after for one namespace, with a thread each and another one while a server is asked: macOS
gives a process a few thousand threads, and without another one no pass of the controller comes to its end.
"""


@dataclass
class _Task:
    """State of one artifact and its thread."""

    job: DownloadJob
    state: ModelFile = field(default_factory=lambda: ModelFile("Checking"))
    first_look: threading.Event = field(default_factory=threading.Event)
    again: threading.Event = field(default_factory=threading.Event)
    waited_for: bool = True
    """True while `want` still waits for the first check, so that `on_change` need not be called."""
    asks: bool = False
    """True if it is not here, and waits for permission to be fetched."""
    leave: threading.Event = field(default_factory=threading.Event)
    reading: Reading | None = None
    """Header of a model that is not here, None until it has been read."""
    final: bool = False
    """True if it has failed until its resource is edited."""
    fruitless: int = 0
    """Number of tries in a row that got no new bytes."""

    def drop(self) -> None:
        """Stop it, whatever it waits for."""
        self.job.stop()
        self.again.set()
        self.leave.set()


class Store:
    """The models of this Mac. Use it from one thread; `on_change` is called from others."""

    def __init__(
        self,
        directory: Path,
        on_change: Callable[[], None],
        terms: Terms | None = None,
        read: Callable[[Listing, Client], Reading] | None = None,
    ) -> None:
        """`read`: reads the header of a model on a server, without fetching the model."""
        self._shelf, self._on_change, self._read = StoreContext(directory, terms or Terms()), on_change, read
        self._tasks: dict[Artifact, _Task] = {}
        self._beyond: set[Artifact] = set()
        """Wanted artifacts that wait until fewer of their namespaces are looked after."""

    # ── asked by the controller ──────────────────────────────────────────────────────────────────

    def want(
        self, wanted: Mapping[Artifact, Keys], namespaces: Mapping[Artifact, frozenset[str]] | None = None
    ) -> None:
        """Keep exactly these artifacts from now on; drop all others, and stop their fetches.

        `namespaces`: namespaces of the services that want an artifact. Raises RuntimeError if the
        system lets no thread be started; those that are missing then are started by the next call.
        """
        for artifact in self._tasks.keys() - wanted.keys():
            task = self._tasks.pop(artifact)
            task.drop()
        started: list[_Task] = []
        counts = Counter(name for artifact in self._tasks for name in (namespaces or {}).get(artifact, ()))
        self._beyond = set()
        try:
            for artifact, keys in wanted.items():
                wanted_in = (namespaces or {}).get(artifact, frozenset())
                known = self._tasks.get(artifact)
                if known is None and wanted_in and min(counts[name] for name in wanted_in) >= MOST_OF_NAMESPACE:
                    self._beyond.add(artifact)
                    continue
                if known is None:
                    started.append(self._start(artifact, keys, wanted_in))
                    counts.update(wanted_in)
                    continue
                known.job.namespaces = wanted_in
                if known.job.keys != keys:
                    known.job.keys = keys
                    known.again.set()
        finally:
            # A local file is looked at within milliseconds, 0.1 s if its header is large: a short wait saves a pass.
            until = time.monotonic() + LOOK_WAIT_S
            for task in started:
                task.first_look.wait(max(0.0, until - time.monotonic()))
                task.waited_for = False

    def slots(self) -> list[str]:
        """Names of the slots of wanted artifacts, also of those that wait: `models gc` and `rm` leave them alone."""
        return sorted({artifact.slot for artifact in (*self._tasks, *self._beyond) if not artifact.local})

    def look_again(self, artifacts: Iterable[Artifact]) -> None:
        """Retry those of some artifacts that failed now, e.g. after an edit; not those that failed for good."""
        for artifact in artifacts:
            task = self._tasks.get(artifact)
            if task is not None and task.state.phase == "Failed" and not task.final:
                task.again.set()

    def state(self, artifact: Artifact) -> ModelFile:
        """State of a wanted artifact; phase Checking if it is not wanted."""
        if artifact in self._beyond:
            text = f"{MOST_OF_NAMESPACE} other files of its namespace are looked after, which is the most; remove some"
            return ModelFile("Pending", message=text)  # Checking is over in a moment: requests are held meanwhile
        task = self._tasks.get(artifact)
        return task.state if task else ModelFile("Checking")

    def wants(self, artifact: Artifact) -> bool:
        """True if an artifact is wanted."""
        return artifact in self._tasks

    def asks_leave(self, artifact: Artifact) -> bool:
        """True if an artifact is not here, and waits for permission to be fetched."""
        task = self._tasks.get(artifact)
        return task is not None and task.asks

    def reading(self, artifact: Artifact) -> Reading | None:
        """Header of a model that waits for permission to be fetched; None if it has not been read."""
        task = self._tasks.get(artifact)
        return task.reading if task else None

    def give_leave(self, artifact: Artifact) -> None:
        """Permit an artifact to be fetched."""
        if task := self._tasks.get(artifact):
            task.asks = False
            task.leave.set()

    def refuse(self, artifact: Artifact, state: ModelFile) -> None:
        """Set the state of an artifact that is not permitted to be fetched; it says why."""
        if task := self._tasks.get(artifact):
            task.state = state

    def has(self, path: str) -> bool:
        """True if a file is a wanted artifact's."""
        return any(task.state.path == path for task in self._tasks.values())

    def may_open(self, path: str) -> bool:
        """True if a manifest may name a file. For any thread but the controller's: a disk may hang."""
        with contextlib.suppress(Unusable):
            self._shelf.terms.places.check(Path(path))
            return True
        return False

    def here(self, artifact: Artifact) -> Path | None:
        """Path of an artifact on this Mac, whether or not it is wanted; None if it is not here, or not allowed.

        For any thread but the controller's: a disk may hang.
        """
        try:
            if artifact.local:
                path = Path(artifact.source)
                self._shelf.terms.places.check(path)  # first of all: whether a file exists is a secret too
                return path if path.exists() else None
            return self._shelf.slot(artifact).model_path()
        except (OSError, ValueError, Unusable):
            return None

    # ── one thread each ──────────────────────────────────────────────────────────────────────────

    def _start(self, artifact: Artifact, keys: Keys, namespaces: frozenset[str]) -> _Task:
        job = DownloadJob(artifact, self._shelf, lambda state: self._say(task, state), lambda *at: self._ask(task, *at))
        job.keys, job.namespaces = keys, namespaces
        task = _Task(job)
        threading.Thread(target=self._look_after, args=(task,), name="store", daemon=True).start()
        self._tasks[artifact] = task
        return task

    def _say(self, task: _Task, state: ModelFile) -> None:
        changed, task.state = task.state != state, state
        task.first_look.set()
        if changed and not task.waited_for and not task.job.stopped.is_set():
            self._on_change()

    def _ask(self, task: _Task, listing: Listing, client: Client) -> None:
        """Wait for permission to fetch, with the header read: the model may not fit this Mac. Raises Stopped."""
        if task.leave.is_set():
            return
        if self._read is not None and task.reading is None:
            task.reading = self._read(listing, client)
        task.asks = True
        self._say(task, ModelFile("Pending", message="whether it fits is being looked at"))
        task.leave.wait()
        task.job.check()

    def _look_after(self, task: _Task) -> None:
        """Run one artifact's thread: try until the model is ready, watch it, and retry; until it is dropped."""
        job, pause_s, again_s, most_bytes = task.job, FIRST_RETRY_S, FIRST_AGAIN_S, 0
        while not job.stopped.is_set():
            trouble, judged = None, state_of(job.artifact.source) if job.artifact.local else None
            try:
                self._say(task, job.ready())
            except Stopped:
                return
            except Exception as error:  # noqa: BLE001 - whatever a URL or a server makes a library raise
                trouble = _trouble(job, error)
            finally:
                job.client.close()
            if trouble is None:
                self._stay(task, judged)
                continue
            # A try that got no farther than an earlier one, on a server that cannot resume, is fruitless.
            soon, moved = trouble.retry is Retry.SOON, job.meter.got_bytes > most_bytes
            most_bytes = max(most_bytes, job.meter.got_bytes)
            task.fruitless = 0 if moved else task.fruitless + 1
            again_s = FIRST_AGAIN_S if moved or not soon else again_s
            pause_s = FIRST_RETRY_S if moved else pause_s
            wait_s = max(again_s if soon else pause_s, trouble.after_s)
            self._failed(task, trouble, wait_s)
            self._wait(task, wait_s)
            if soon:
                again_s = min(LONGEST_AGAIN_S, again_s * 2)
            elif not job.artifact.local:
                pause_s = min(LONGEST_RETRY_S, pause_s * 2)

    def _stay(self, task: _Task, judged: object) -> None:
        """Wait until a model is gone from the disk, its link leads elsewhere, a local file changed, or `again` is set.

        `judged`: the state of a local file before it was looked at, None for others. It runs in this thread, not in a
        controller's pass, because a disk may hang.
        """
        artifact, files = task.job.artifact, list(map(state_of, task.state.real))
        while not task.again.wait(LOOK_AT_STORE_S) and task.state.real[:1] == _real(task.state.path):
            if artifact.local and (state_of(artifact.source), list(map(state_of, task.state.real))) != (judged, files):
                break
            if not artifact.local and not task.job.is_whole(Path(task.state.path)):
                break
        if task.job.stopped.is_set() and not artifact.local:
            task.job.slot.touch()
        task.again.clear()

    def _failed(self, task: _Task, trouble: Unusable, wait_s: float) -> None:
        """Report a failed try. A connection that is cut now and then is not a failure of the model."""
        meter, text = task.job.meter, str(trouble)
        task.final = trouble.retry is Retry.NEVER
        if trouble.retry is Retry.SOON:
            text = f"{text}; tried again in {duration(wait_s)}"
        if trouble.retry is Retry.RUNG:
            state = ModelFile("Pending", reason=trouble.reason, message=text)
        elif trouble.retry is not Retry.SOON or not meter.got_bytes or task.fruitless >= PATIENT_TRIES:
            state = ModelFile("Failed", reason=trouble.reason, message=text)
        else:
            got, total = meter.got_bytes, meter.total_bytes
            state = ModelFile("Downloading", message=f"{meter}; {text}", got_bytes=got, total_bytes=total)
        self._say(task, state)

    def _wait(self, task: _Task, wait_s: float) -> None:
        """Wait for the next try. After a final failure, wait until `again` is set or the slot's note is removed."""
        slot = task.job.slot
        noted = slot.note()
        while not task.again.wait(LOOK_AT_NOTE_S if task.final else wait_s) and task.final:
            if noted is not None and slot.note() is None:
                break  # the slot was removed
        task.again.clear()


def _real(path: str) -> tuple[str, ...]:
    """(real path,) of a file that exists, () otherwise."""
    try:
        return (os.path.realpath(path, strict=True),)
    except OSError:
        return ()


def _trouble(job: DownloadJob, error: Exception) -> Unusable:
    """Unusable for any error of a try."""
    if isinstance(error, Unusable):
        return error
    if isinstance(error, OSError):
        return Unusable("DownloadFailed", f"{job.slot.path}: {error.strerror or type(error).__name__}")
    text = f"{shown(job.artifact.source)} cannot be used: {type(error).__name__}; check spec.source"
    return Unusable("InvalidModel", text)
