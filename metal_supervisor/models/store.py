"""The models of this Mac: where each one's files are, fetched if they have to be.

The controller only asks; a worker looks at disks (a network mount may hang) and fetches, one thread for each artifact,
one fetch for many services. What is no longer wanted stops at once, in the middle of a byte if need be, and what came
of it stays for the next time. Nothing is ever deleted here but the beginning of a file that turned out to be another.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from metal_supervisor.models.download_job import DownloadJob, StoreContext, Terms
from metal_supervisor.models.listing import Listing, Retry, Unusable
from metal_supervisor.models.metadata import Reading
from metal_supervisor.models.model_directory import Contents
from metal_supervisor.models.web import Client, Stopped
from metal_supervisor.spec.progress import duration
from metal_supervisor.spec.sources import Artifact, Keys, shown
from metal_supervisor.spec.types import ModelFile

FIRST_RETRY_S, LONGEST_RETRY_S = 5.0, 300.0
FIRST_AGAIN_S, LONGEST_AGAIN_S = 1.0, 60.0
"""After the line was cut."""
PATIENT_TRIES = 4
"""How often in a row a cut line is no news."""
LOOK_WAIT_S, LOOK_AT_NOTE_S, LOOK_AT_STORE_S = 0.1, 2.0, 15.0


@dataclass
class _Task:
    """One artifact, and the thread that looks after it."""

    job: DownloadJob
    state: ModelFile = field(default_factory=lambda: ModelFile("Checking"))
    first_look: threading.Event = field(default_factory=threading.Event)
    again: threading.Event = field(default_factory=threading.Event)
    waited_for: bool = True
    """Whoever wanted it still waits for the first look, so nobody has to be told of it."""
    asks: bool = False
    """It is not here, and waits for leave to be fetched."""
    leave: threading.Event = field(default_factory=threading.Event)
    reading: Reading | None = None
    """What the header of a model that is not here says, once it was read."""
    final: bool = False
    """It failed for as long as nobody edits the resource."""
    fruitless: int = 0
    """How many tries in a row brought nothing."""

    def drop(self) -> None:
        """Ends it, whatever it waits for."""
        self.job.stop()
        self.again.set()
        self.leave.set()


class Store:
    """The models of this Mac. Safe to ask from one thread; `on_change` is called from others."""

    def __init__(
        self,
        directory: Path,
        on_change: Callable[[], None],
        terms: Terms | None = None,
        read: Callable[[Listing, Client], Reading] | None = None,
    ) -> None:
        """`read`: tells what a model on a server says of itself, without fetching it."""
        self._shelf, self._on_change, self._read = StoreContext(directory, terms or Terms()), on_change, read
        self._tasks: dict[Artifact, _Task] = {}

    # ── asked by the controller ──────────────────────────────────────────────────────────────────

    def want(
        self, wanted: Mapping[Artifact, Keys], namespaces: Mapping[Artifact, frozenset[str]] | None = None
    ) -> None:
        """Looks after exactly these from now on; others are dropped, their fetches stopped.

        `namespaces`: whose services want an artifact, for the limits of namespaces.
        """
        for artifact in self._tasks.keys() - wanted.keys():
            task = self._tasks.pop(artifact)
            task.drop()
            if task.state.phase == "Ready" and not artifact.local:
                task.job.slot.touch()
        started = []
        for artifact, keys in wanted.items():
            known = self._tasks.get(artifact)
            if known is not None:
                known.job.namespaces = (namespaces or {}).get(artifact, frozenset())
                if known.job.keys != keys:
                    known.job.keys = keys
                    known.again.set()
                continue
            started.append(self._start(artifact, keys, (namespaces or {}).get(artifact, frozenset())))
        # A local file is known within a millisecond: worth a moment, so that it needs no second pass.
        until = time.monotonic() + LOOK_WAIT_S
        for task in started:
            task.first_look.wait(max(0.0, until - time.monotonic()))
            task.waited_for = False

    def slots(self) -> list[str]:
        """Names of the slots that are wanted."""
        return sorted({artifact.slot for artifact in self._tasks if not artifact.local})

    def look_again(self) -> None:
        """Checks what failed again now, e.g. because somebody edited a resource."""
        for task in self._tasks.values():
            if task.state.phase == "Failed" and not task.final:
                task.again.set()

    def state(self, artifact: Artifact) -> ModelFile:
        """Where a wanted artifact stands."""
        task = self._tasks.get(artifact)
        return task.state if task else ModelFile("Checking")

    def wants(self, artifact: Artifact) -> bool:
        """Whether an artifact is looked after."""
        return artifact in self._tasks

    def asks_leave(self, artifact: Artifact) -> bool:
        """Whether an artifact is not here, and waits for leave to be fetched."""
        task = self._tasks.get(artifact)
        return task is not None and task.asks

    def reading(self, artifact: Artifact) -> Reading | None:
        """What a model that waits for leave says of itself."""
        task = self._tasks.get(artifact)
        return task.reading if task else None

    def give_leave(self, artifact: Artifact) -> None:
        """Lets an artifact be fetched: nothing that is known of it speaks against it."""
        if task := self._tasks.get(artifact):
            task.asks = False
            task.leave.set()

    def refuse(self, artifact: Artifact, state: ModelFile) -> None:
        """Says of an artifact that waits for leave why it gets none."""
        if task := self._tasks.get(artifact):
            task.state = state

    def may_open(self, path: Path) -> bool:
        """Whether a file is one of a wanted artifact, or in a place that a manifest may name."""
        if any(task.state.path == str(path) for task in self._tasks.values()):
            return True
        with contextlib.suppress(Unusable):
            self._shelf.terms.places.check(path)
            return True
        return False

    def near(self, artifact: Artifact) -> bool | None:
        """Whether an artifact is on this Mac already; None if it is a local path that is not there."""
        return self.here(artifact) is not None or (None if artifact.local else False)

    def here(self, artifact: Artifact) -> Path | None:
        """Where an artifact is on this Mac, whether or not it is wanted; None if it is not there."""
        try:
            if artifact.local:
                path = Path(artifact.source)
                self._shelf.terms.places.check(path)  # before the file is looked for: that it exists says something
                return path if path.exists() else None
            return self._shelf.slot(artifact).model_path()
        except (OSError, ValueError, Unusable):
            return None

    # ── one thread each ──────────────────────────────────────────────────────────────────────────

    def _start(self, artifact: Artifact, keys: Keys, namespaces: frozenset[str]) -> _Task:
        job = DownloadJob(artifact, self._shelf, lambda state: self._say(task, state), lambda *at: self._ask(task, *at))
        job.keys, job.namespaces = keys, namespaces
        task = self._tasks[artifact] = _Task(job)
        threading.Thread(target=self._look_after, args=(task,), name="store", daemon=True).start()
        return task

    def _say(self, task: _Task, state: ModelFile) -> None:
        changed, task.state = task.state != state, state
        task.first_look.set()
        if changed and not task.waited_for and not task.job.stopped.is_set():
            self._on_change()

    def _ask(self, task: _Task, listing: Listing, client: Client) -> None:
        """A model may be too large for this Mac, which its first bytes tell. Raises Stopped."""
        if task.leave.is_set():
            return
        if self._read is not None and task.reading is None:
            task.reading = self._read(listing, client)
        task.asks = True
        self._say(task, ModelFile("Pending", message="whether it fits is being looked at"))
        task.leave.wait()
        task.job.check()

    def _look_after(self, task: _Task) -> None:
        """Until it is ready, or nobody wants it any more."""
        job, pause_s, again_s, most_bytes = task.job, FIRST_RETRY_S, FIRST_AGAIN_S, 0
        while not job.stopped.is_set():
            trouble = None
            try:
                self._say(task, job.ready())
            except Stopped:
                return
            except Exception as error:  # noqa: BLE001 - whatever a URL or a server makes a library raise
                trouble = _trouble(job, error)
            finally:
                job.client.close()
            if trouble is None:
                if job.artifact.local and task.state.real[:1] == (task.state.path,):
                    return
                self._stay(task)
                continue
            # A try that got no farther than one before it, on a server that cannot resume, brought nothing.
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

    def _stay(self, task: _Task) -> None:
        """Until a model is gone from the store, or its link leads elsewhere, or it is not wanted any more.

        Not done in a pass, where a disk might hang.
        """
        while not task.again.wait(LOOK_AT_STORE_S) and task.state.real[:1] == _real(task.state.path):
            pass
        task.again.clear()

    def _failed(self, task: _Task, trouble: Unusable, wait_s: float) -> None:
        """Says why a try failed. That a line is cut now and then is no failure of the model."""
        meter, text = task.job.meter, str(trouble)
        task.final = trouble.retry is Retry.NEVER
        if trouble.retry is Retry.RUNG:
            return self._say(task, ModelFile("Pending", reason=trouble.reason, message=text))
        if trouble.retry is not Retry.SOON:
            return self._say(task, ModelFile("Failed", reason=trouble.reason, message=text))
        text = f"{text}; tried again in {duration(wait_s)}"
        if not meter.got_bytes or task.fruitless >= PATIENT_TRIES:
            return self._say(task, ModelFile("Failed", reason=trouble.reason, message=text))
        counted = meter.got_bytes, meter.total_bytes
        state = ModelFile("Downloading", message=f"{meter}; {text}", got_bytes=counted[0], total_bytes=counted[1])
        return self._say(task, state)

    def _wait(self, task: _Task, wait_s: float) -> None:
        """For the next try; one in vain is not made, whoever asks for it, until what spoke against it is removed."""
        noted = _note(task.job)
        while not task.again.wait(LOOK_AT_NOTE_S if task.final else wait_s) and task.final:
            if noted is not None and _note(task.job) is None:
                break  # somebody removed it
        task.again.clear()


def _real(path: str) -> tuple[str, ...]:
    """The real path of what is there, nothing for what is not."""
    try:
        return (os.path.realpath(path, strict=True),)
    except OSError:
        return ()


def _note(job: DownloadJob) -> Contents | None:
    try:
        return job.slot.read()
    except (Unusable, OSError):
        return None


def _trouble(job: DownloadJob, error: Exception) -> Unusable:
    """What an error of a try comes to."""
    if isinstance(error, Unusable):
        return error
    if isinstance(error, OSError):
        return Unusable("DownloadFailed", f"{job.slot.path}: {error.strerror or type(error).__name__}")
    text = f"{shown(job.artifact.source)} cannot be used: {type(error).__name__}; check spec.source"
    return Unusable("InvalidModel", text)
