"""The attacher: keeps one model attached to a shared daemon, as the program that supervisord runs for its service.

A daemon like oMLX or Ollama serves many models, and starts and stops on its own. One small process for each model makes
the model a program like any other: supervisorctl starts, stops and shows it, it has a log, it outlives the controller,
and it unloads the model when it is stopped. It keeps a note of its phase in `attached/`, for the sidecar.

It waits for a daemon that is away, and retries a model that is refused, with backoff. It ends by itself only where the
daemon has lost a model that may not be started again.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

from metal_supervisor.host.local_status import asked_at
from metal_supervisor.runtimes.daemon_client import Away, Daemon, DaemonRefused
from metal_supervisor.runtimes.ollama_models import OllamaModel
from metal_supervisor.runtimes.omlx_models import OmlxModel
from metal_supervisor.spec.attachment import JOB, Attachment, Phase
from metal_supervisor.spec.record import Record
from metal_supervisor.spec.types import Json
from metal_supervisor.state.directory import StateDir
from metal_supervisor.state.doorbell import ring

LOOPBACK = "127.0.0.1"
LOOK_EVERY_S = 2.0
STAYED_S = 60.0
"""A model that is lost sooner was put out for another one: to load it again at once would put out that one."""
LOAD_S = 3600.0
DETACH_S = 20.0
"""Below the 30 s after which supervisord kills the attacher."""
NEWS_EVERY_S = 10.0
"""Between two progress reports of a pull."""


AWAY_S = 0.2
LONGEST_AWAY_S = 2.0
REFUSED_S = 2.0
"""First pause for a daemon that does not answer or refuses the model; each is twice as long as the last."""
LONGEST_REFUSED_S = 60.0
"""Longest pause."""
KINDS: dict[str, type[OmlxModel | OllamaModel]] = {"omlx": OmlxModel, "ollama": OllamaModel}


class ModelAttacher:
    """Keeps one model attached until `end` is called."""

    def __init__(self, directory: StateDir, program: str, job: Json) -> None:
        self._state, self._program, self._job = directory, program, job
        self._model = KINDS[job["daemon"]](job)
        self._over, self._news = threading.Event(), threading.Event()
        self._names: tuple[str, ...] | None = None
        """Further names that the daemon serves the model under, None if they are not known."""
        self._told = Attachment("", 0, Phase.WAITING, "", 0.0, "")
        self._told_at = 0.0

    def end(self) -> None:
        """Make `run` unload the model and return. Called from another thread."""
        self._over.set()
        self._news.set()

    def run(self) -> None:
        """Attach the model, check every LOOK_EVERY_S that it still is, and attach it again if not."""
        away_s, again_s = AWAY_S, REFUSED_S
        since = 0.0  # monotonic time since which it has been attached, 0 while it is not
        while not self._over.is_set():
            try:
                if self._model.attached(self._daemon(keyed=False)):
                    self._name()
                    self._tell(Phase.ATTACHED, "")
                    away_s, since = AWAY_S, since or time.monotonic()
                    if time.monotonic() - since >= STAYED_S:
                        again_s = REFUSED_S
                    self._over.wait(LOOK_EVERY_S)
                    continue
                lost, since = since and time.monotonic() - since < STAYED_S, 0.0
                if why := self._refused_start():  # its own next start is refused for the same reason
                    say(f"the model is not loaded again: {why}")
                    break
                if lost:
                    raise DaemonRefused(200, "it unloaded the model soon after it had loaded it, for another one?")
                self._tell(Phase.ATTACHING, f"{self._job['daemon']} is told to load the model")
                self._names = ()
                self._attach()
                if not self._over.is_set() and not self._model.attached(self._daemon(keyed=False)):
                    raise DaemonRefused(200, "it has loaded the model, and does not have it now")
            except Away as error:
                since = 0.0
                self._tell(Phase.WAITING, f"{self._job['daemon']} is waited for: {error}")
                self._over.wait(away_s)
                away_s = min(2 * away_s, LONGEST_AWAY_S)
            except DaemonRefused as error:
                self._tell(Phase.REFUSED, f"{self._job['daemon']}: {error}; it is asked again in {again_s:g} s")
                self._over.wait(again_s)
                again_s = min(2 * again_s, LONGEST_REFUSED_S)
        self._detach()

    def _daemon(self, keyed: bool = True) -> Daemon:
        """The daemon at its current port. `keyed`: read its key, which plain queries do not need. Raises Away."""
        record = self._state.record_of(self._job["daemon"])
        if record is None or record.port is None:
            raise Away("it is being started")
        key = ""
        if keyed and self._job.get("key_file"):
            try:
                key = Path(self._job["key_file"]).read_text("utf-8").strip()
            except OSError as error:
                raise Away(f"its key cannot be read: {error.strerror}") from None
        spec = self._state.spec_of(record.program) if record.edition else {}
        # Its gate accepts changes on loopback alone, also where engines listen on another address.
        gated = str(next(iter(spec.get("argv") or ()), "")).endswith("/ollama-gate")
        host = LOOPBACK if gated else asked_at(record.host)
        return Daemon(host, record.port, key, ours=record.edition is not None)

    def _attach(self) -> None:
        """Attach in a thread, because `end` must not wait for a load. Raises Away, DaemonRefused."""
        daemon, failed = self._daemon(), list[Exception]()

        def work() -> None:
            try:
                self._model.attach(daemon, LOAD_S, self._progress)
            except OSError as error:  # its file has gone, and may come back
                failed.append(DaemonRefused(0, f"{error.filename}: {error.strerror}"))
            except Exception as error:  # noqa: BLE001 - raised again by the waiting thread
                failed.append(error)
            self._news.set()

        self._news.clear()
        if self._over.is_set():
            return
        threading.Thread(target=work, name="attach", daemon=True).start()
        self._news.wait()
        if failed and not self._over.is_set():
            raise failed[0]

    @property
    def _record(self) -> Record | None:
        return self._state.record_of(self._program)

    def _refused_start(self) -> str:
        """Reason why the controller lets no engine of its service start, "" if one may."""
        record = self._record
        return record.barred if record is not None else ""

    def _name(self) -> None:
        """Have the daemon serve the model under the further names of its record, by the next look at the latest."""
        record = self._record
        names = record.daemon_names if record is not None else ()
        if names == self._names:
            return
        try:
            self._model.rename(self._daemon(), names, self._names_of_others())
        except Away:  # without the daemon's key it serves under the names that it has
            return
        except DaemonRefused as error:  # it still answers to the service's name
            say(f"{self._job['daemon']} does not take the names {', '.join(names)}: {error}")
        self._names = names

    def _names_of_others(self) -> set[str]:
        """Names under which the daemon serves other services."""
        served = [each for each in self._state.records()[0].values() if each.daemon == self._job["daemon"]]
        others = [each for each in served if each.program != self._program]
        return {name for each in others for name in (each.name, *each.daemon_names)}

    def _detach(self) -> None:
        # Its claim goes before it looks for others: of two that end together, each would leave the file to the other.
        self._state.attached_path(self._program).unlink(missing_ok=True)
        try:
            self._model.detach(self._daemon(), DETACH_S, self._needed_by_another(), self._names_of_others())
        except (Away, DaemonRefused) as error:
            say(f"not unloaded: {error}")

    def _needed_by_another(self) -> bool:
        """True if another service uses the daemon's process for the same file."""
        uses = Phase.ATTACHING, Phase.ATTACHED
        others = [each for each in self._state.attachments() if each.file and each.phase in uses]
        return any(each.file == self._model.file and is_alive(each.pid) for each in others)

    def _progress(self, text: str) -> None:
        """Report progress: called before each step of attaching, and during long ones. Raises Away after `end`."""
        if self._over.is_set():
            raise Away("it is not wanted any more")
        if time.monotonic() - self._told_at >= NEWS_EVERY_S or self._told.phase is not Phase.ATTACHING:
            self._tell(Phase.ATTACHING, text)

    def _tell(self, phase: Phase, message: str) -> None:
        """Write the note, wake the sidecar and log, if phase or message has changed."""
        if (phase, message) == (self._told.phase, self._told.message) and self._told.pid:
            return
        self._told = Attachment(self._program, os.getpid(), phase, message, time.time(), self._model.file)
        self._told_at = time.monotonic()
        self._state.write_attached(self._told)
        ring(self._state.path, "sidecar")
        say(f"{phase.value}{': ' if message else ''}{message}")


def is_alive(pid: int) -> bool:
    """True if the process exists and belongs to this user."""
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return pid > 0


def say(text: str) -> None:
    """Write one line to the program's log; errors are ignored, as of a closed pipe."""
    try:
        os.write(2, f"metal-supervisor: {text}\n".encode("utf-8", "replace"))
    except OSError:
        return


def _heed(signals: set[signal.Signals], attacher: ModelAttacher) -> None:
    signal.sigwait(signals)
    attacher.end()


def main(arguments: list[str]) -> int:
    """Run the attacher: `PROGRAM STATE_DIRECTORY`, with the job in the environment. Returns after a signal."""
    program, home = arguments
    try:
        job = json.loads(os.environ[JOB])
        attacher = ModelAttacher(StateDir(Path(home)), program, job)
    except (KeyError, ValueError, TypeError) as error:
        say(f"cannot attend to {program}: {type(error).__name__}: {error}")
        return 78
    ends = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)  # a handler might need the very lock that the interrupted code holds
    threading.Thread(target=_heed, args=(ends, attacher), name="signals", daemon=True).start()
    attacher.run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
