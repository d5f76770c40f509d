"""Trial of confinement on this machine: an engine must serve under its policy, and the policy must hold.

A tenant's crash must not decide that, and a profile that is wrong for one release of macOS must not stop every model of
a Mac. So each build of an engine is started once with a shipped model, by the real launcher, under the policy that its
services would get; the outcome is kept for this build, this system and this release of metal-supervisor.
"""

from __future__ import annotations

import atexit
import contextlib
import http.client
import json
import logging
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from metal_supervisor import __version__, launch
from metal_supervisor.confinement.access import Access
from metal_supervisor.confinement.policy import policy
from metal_supervisor.spec.types import Probe
from metal_supervisor.state.kept_files import write_atomic
from metal_supervisor.state.reports import read_object

MODELS = Path(__file__).parent / "models"
GGUF = MODELS / "probe.gguf"
MLX = MODELS / "mlx"
FILE = "confinement.json"
KEPT = 64
SERVE_S = 30.0
ASK_S = 10.0
LOOK_S = 0.05
CANARY = """import os, socket, sys
def refused(attempt, *arguments):
    try:
        attempt(*arguments)
    except OSError:
        return True
    return False
port = int(sys.argv[2])
held = {
    "reads a foreign file": refused(open, sys.argv[1]),
    "listens on a foreign port": not port or refused(socket.create_server, ("127.0.0.1", port)),
    "signals a foreign process": refused(os.kill, int(sys.argv[3]), 0),
}
print(", ".join(what for what, ok in held.items() if not ok))
"""
log = logging.getLogger("controller")


@dataclass(frozen=True)
class TrialVerdict:
    """Outcome of a trial."""

    works: bool
    why: str = ""
    """Reason of the failure, "" if it works."""
    passing: bool = False
    """True if the trial timed out or could not be made: another may end otherwise, so it is not kept over a restart."""


@dataclass(frozen=True)
class LoadRequest:
    """The request by which a daemon is given the model."""

    method: str
    path: str
    body: str
    key: str = ""


@dataclass(frozen=True)
class Trial:
    """An engine as it would be started for a service, with a shipped model."""

    argv: tuple[str, ...]
    env: tuple[tuple[str, str], ...]
    probe: Probe
    access: Access
    port: int
    attach: LoadRequest | None = None
    """For a daemon, which loads no model by itself."""


def free_port() -> int:
    """A TCP port of loopback that nothing listens on at the moment."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def key_of(build: str) -> str:
    """Key of the outcome for a build."""
    return "|".join((build, platform.system(), platform.release(), platform.version(), __version__))


class Trials:
    """Outcomes for the engines of this machine; each trial runs in a thread, and its outcome wakes the controller."""

    def __init__(self, state: Path, launcher: Path, on_change: Callable[[], None]) -> None:
        self._state, self._file, self._launcher, self._on_change = state, state / FILE, launcher, on_change
        end_left(state)
        self._verdicts = self._read()
        """None for a trial that is under way."""
        self._lock = threading.Lock()

    def look(self, build: str, trial: Callable[[Path, int], Trial]) -> TrialVerdict | None:
        """The outcome for a build, None while it is being tried.

        `trial`: (scratch directory, port) -> the engine to start.
        """
        key = key_of(build)
        with self._lock:
            if key not in self._verdicts:
                threading.Thread(target=self._run, args=(key, trial), name="confinement", daemon=True).start()
                self._verdicts[key] = None
            return self._verdicts[key]

    def _run(self, key: str, trial: Callable[[Path, int], Trial]) -> None:
        try:
            verdict = try_out(trial, self._launcher, self._state)
        except Exception as error:
            log.exception("confinement could not be tried")
            verdict = TrialVerdict(False, f"it could not be tried: {error!r:.200}", passing=True)
        if verdict.works:
            log.info("confinement works", extra={"engine": key})
        else:
            log.error("confinement does not work", extra={"engine": key, "why": verdict.why})
        with self._lock:
            self._verdicts[key] = verdict
            self._keep()
        self._on_change()

    def _read(self) -> dict[str, TrialVerdict | None]:
        found = read_object(self._file)
        try:
            return {key: TrialVerdict(bool(said["works"]), str(said["why"])) for key, said in found.items()}
        except (LookupError, TypeError):
            return {}

    def _keep(self) -> None:
        known = [(key, each) for key, each in self._verdicts.items() if each is not None and not each.passing]
        told = {key: {"works": each.works, "why": each.why} for key, each in known[-KEPT:]}
        with contextlib.suppress(OSError):  # it is tried again after the next start
            write_atomic(self._file, json.dumps(told), durable=False)


def end_left(state: Path) -> None:
    """End the engines of trials during which a controller was killed."""
    for note in state.glob("trial-*.json"):
        told = read_object(note)
        pid, started = told.get("pid"), told.get("started")
        if isinstance(pid, int) and isinstance(started, str) and told.get("directory") == launch.identity(str(state)):
            launch.kill_engine(pid, started)
        note.unlink(missing_ok=True)


@contextlib.contextmanager
def _ending(engine: subprocess.Popen[bytes], state: Path | None) -> Iterator[None]:
    """Have a trial's engine ended at the end of the block or of this process, or else by the next controller."""
    note = state and state / f"trial-{engine.pid}.json"

    def end() -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(engine.pid, signal.SIGKILL)
        if note:
            note.unlink(missing_ok=True)

    atexit.register(end)
    try:
        if note:
            known = {"pid": engine.pid, "started": launch.start_time(engine.pid)}
            text = json.dumps({**known, "directory": launch.identity(str(state))})
            with contextlib.suppress(OSError):  # a full disk
                write_atomic(note, text, durable=False)
        yield
    finally:
        end()
        atexit.unregister(end)
        engine.wait()


def try_out(make: Callable[[Path, int], Trial], launcher: Path, state: Path | None = None) -> TrialVerdict:
    """Test the policy itself with a program that tries to break it; then start the engine under it and query it.

    `state`: directory for a note by which the next controller ends that engine, if this one is killed meanwhile.
    """
    with tempfile.TemporaryDirectory(prefix="metal-supervisor-") as made:
        base = Path(made).resolve()
        for name in ("specs", "runs", "scratch"):
            (base / name).mkdir(mode=0o700)
        (base / "canary").write_text("must not be read")
        trial = make(base / "scratch", free_port())
        if leak := _leak(base, launcher, trial.access):
            return TrialVerdict(False, f"under it a program still {leak}")
        return _serves(base, launcher, trial, state)


def launcher_command(
    base: Path, launcher: Path, argv: Sequence[str], env: Mapping[str, str], access: Access, confined: bool = True
) -> list[str]:
    """Launcher command line for a spec that is written to `base`. `confined`: False for a comparison."""
    spec: dict[str, Any] = {
        "format": 1,
        "program": "probe",
        "argv": list(argv),
        "env": dict(env),
        "cwd": str(base / "scratch"),
        "host": "127.0.0.1",
        "port": access.bind[0],
        "supervisor_log": str(base / "none"),
        "shared": True,
        "confinement": policy(access, sys.platform, os.path.realpath(Path.home())) if confined else False,
    }
    path = base / "specs" / "probe.000000000000.json"
    path.write_text(json.dumps(spec))
    return [sys.executable, "-I", "-S", str(launcher), str(path)]


def _leak(base: Path, launcher: Path, access: Access) -> str:
    """Violations that a Python program achieves under the policy, or its failure to start; "" if the policy holds."""
    real = Path(os.path.realpath(sys.executable))
    own = Access(
        execute=(sys.executable, str(real)),
        libraries=(sys.prefix, str(real.parent.parent)),
        write=access.write,
        bind=access.bind,
        python=True,
        pulls=access.pulls,
    )
    # The port of the trial was let go again, and may be the next free one.
    port = 0 if access.pulls else next(each for each in iter(free_port, None) if each not in access.bind)
    argv = (sys.executable, "-I", "-c", CANARY, str(base / "canary"), str(port), str(os.getpid()))
    done = subprocess.run(
        launcher_command(base, launcher, argv, {}, own), capture_output=True, text=True, timeout=SERVE_S, check=False
    )
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or f"exit status {done.returncode}").splitlines()[-1]
        return f"does not start ({said:.300})"
    return done.stdout.strip()


def _serves(base: Path, launcher: Path, trial: Trial, state: Path | None) -> TrialVerdict:
    log_file = base / "engine.log"
    command = launcher_command(base, launcher, trial.argv, dict(trial.env), trial.access)
    with log_file.open("wb") as output:
        engine = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    with _ending(engine, state):
        until = time.monotonic() + SERVE_S
        while time.monotonic() < until and engine.poll() is None:
            if _answers(trial):
                return TrialVerdict(True)
            time.sleep(LOOK_S)
        ended = engine.poll()
        how = f"ended with {ended}" if ended is not None else f"did not serve within {SERVE_S:g} s"
        lines = log_file.read_text("utf-8", "replace").strip().splitlines()
        why = f"the engine {how}: {lines[-1] if lines else 'it printed nothing'}"[:400]
        return TrialVerdict(False, why, passing=ended is None)


def _answers(trial: Trial) -> bool:
    """True if the engine is healthy, loads the model if one is attached, and answers its mode's smallest request."""
    try:
        if _ask(trial.port, "GET", trial.probe.path, "") != 200:
            return False
        attach = trial.attach
        if attach and _ask(trial.port, attach.method, attach.path, attach.body, attach.key) != 200:
            return False
        body = trial.probe.first_body
        return not trial.probe.first_path or _ask(trial.port, "POST", trial.probe.first_path, body) == 200
    except (OSError, http.client.HTTPException):
        return False


def _ask(port: int, method: str, path: str, body: str, key: str = "") -> int:
    headers = {"Content-Type": "application/json"} if body else {}
    headers |= {"Authorization": f"Bearer {key}"} if key else {}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ASK_S)
    try:
        connection.request(method, path, body or None, headers)
        answer = connection.getresponse()
        answer.read()
        return answer.status
    finally:
        connection.close()
