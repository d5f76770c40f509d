"""The check of launchd: a real installation, under a label and in a directory of its own, changed while it answers.

Everything is what `metal-supervisor install` does, but for the label and the places of root's files: nothing is put
into /Library or /usr/local, so an installation that is there already is not touched and nothing starts at a boot.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from metal_supervisor.host.commands import Done, Feeder
from metal_supervisor.host.launchctl import NO_DOMAIN, Launchctl, LaunchdError
from metal_supervisor.host.launchd import STOPPING_S
from metal_supervisor.install import install, plan, uninstall
from metal_supervisor.install.steps import Machine
from metal_supervisor.state import own_processes
from tests.support.mac import mac_parse
from tests.support.mac.mac_chat import Stream
from tests.support.mac.mac_jobs import TRIAL
from tests.support.mac.mac_kit import HOW_ROOT, SUDO, Kit, need_readable, show_logs
from tests.support.mac.mac_report import Sheet, Skip

if TYPE_CHECKING:
    from tests.support.system import System

CONTEXT = 16384
MOST = 12000
MOST_HOSTED = 3000
PROBE = 200
"""Tokens: of the service, of the longest answer with a GPU and without, and of one that tells how fast that is."""
SPAN_S = 40.0
"""An answer has to last longer than a change takes."""
MODEL_MIB = 1024
"""Added to the model, so that a GPU does not finish the longest answer before a change is done."""
STOP_S = 60.0
LAUNCHD_DEFAULT_S = 5.0
"""stop_timeout after the change, and what launchd would wait if its ExitTimeOut were not heeded."""
READY_S = 180.0
BACK_S = 90.0
GONE_S = 30.0


class Trial:
    """One installation of the check's own."""

    def __init__(self, kit: Kit, agent: bool, machine: Callable[[Path, Path, Feeder], Machine] | None = None) -> None:
        """`machine`: (root, home, how commands are run) -> the Mac; another one for tests."""
        import tiny_gguf

        from tests.support.system import System

        self.kit, self.agent, base = kit, agent, kit.scratch
        # Root puts files only where nothing but root can change a name; a test's machine has no root.
        root, home = base / "root" if agent or machine else kit.roots_directory(), base / "home"
        home.mkdir()
        for name in ("", "Library", "Library/LaunchDaemons", "usr", "usr/local", "usr/local/bin"):
            if agent or machine:
                (root / name).mkdir()
            else:
                kit.make_roots(root / name)
        # The model of the tests, heavier: on a GPU its longest answer would be over too soon.
        tiny_gguf.write_tiny_gguf(base / "tiny.gguf", pad_mib=0 if kit.options.hosted else MODEL_MIB, context=CONTEXT)
        self.changes: list[str] = []
        self.said: list[str] = []
        self.machine = (machine or this_machine)(root, home, self._run)
        self.state = home / "state"
        self.system: System = System(base, state=self.state)
        flags = self.system.settings()
        self.values: dict[str, Any] = {name[2:].replace("-", "_"): value for name, value in flags.items()}
        whole = {name: int(str(self.values[name])) for name in ("port", "parallel_starts")}
        self.values |= {**whole, "caffeinate": ""}
        kit.cleanup("end what is left of the system", self._end)

    def _run(self, argv: Sequence[str], timeout_s: float, content: bytes = b"", /) -> Done:
        """Runs a command as the installer does, and remembers it if it changes something."""
        if "print" not in argv and list(argv[1:]) not in (["-n", "-v"], ["-v"]):
            self.changes.append(" ".join(argv))
        return self.kit.here(argv, timeout_s, content)

    @property
    def launchctl(self) -> Launchctl:
        """launchd's domain of this installation."""
        where = plan.places(self.machine, self.state, self.agent)
        prefix = (SUDO, "-n") if where.root else ()
        return Launchctl(self.machine.run, where.domain, prefix, self.machine.pause)

    def install(self, **values: Any) -> int:
        """Installs, or changes what is installed; how many commands changed something."""
        self.changes.clear()
        self.said.clear()
        values = {"state_dir": str(self.state), **self.values, **values}
        order = plan.InstallOrder(None, True, values, None, self.agent, False)
        found = plan.plan(order, self.machine)
        code = install.install(found, self.machine, self.said.append)
        assert code == 0, "; ".join(self.said)
        return len(self.changes)

    def stream(self, tokens: int) -> Stream:
        """An answer under way."""
        return Stream(self.system.port(), tokens).flowing()

    def lasting(self, seconds: float) -> int:
        """How many tokens take the engine about so long."""
        probe = self.stream(PROBE)
        assert probe.end(READY_S), f"an answer was not whole: {probe.told()}"
        rate = mac_parse.tokens_per_s(probe.arrivals_s)
        return min(MOST_HOSTED if self.kit.options.hosted else MOST, PROBE + round((rate or 1.0) * seconds))

    def _end(self) -> None:
        """Whatever became of the check: no job, no process."""
        domain = self.launchctl
        if domain.job(TRIAL) is not None:
            domain.unload(TRIAL, STOP_S + STOPPING_S)
        own_processes.end_all(own_processes.left_over(self.system.files))
        self.system.close()


def this_machine(root: Path, home: Path, run: Feeder) -> Machine:
    """This Mac, with directories of the check's own for root's files and for the home."""
    return Machine(root, home, getpass.getuser(), "staff", os.getuid(), run, label=TRIAL)


def daemon(kit: Kit, sheet: Sheet) -> None:
    """As a LaunchDaemon."""
    kit.need_root("a LaunchDaemon's file and launchd's commands are root's")
    need_readable()
    attempt(Trial(kit, agent=False), sheet)


def agent(kit: Kit, sheet: Sheet) -> None:
    """As a LaunchAgent."""
    need_readable()
    try:
        attempt(Trial(kit, agent=True), sheet)
    except LaunchdError as error:
        if str(NO_DOMAIN) not in str(error):
            raise
        raise Skip("no user is logged in at the screen; run it there") from None


def attempt(trial: Trial, sheet: Sheet) -> None:
    """The whole story; what the system said last is kept if it ends badly."""
    try:
        exercise(trial, sheet)
    except Exception:
        show_logs(trial.state, sheet)
        raise


def exercise(trial: Trial, sheet: Sheet) -> None:
    """The whole story, each step on what the one before it left."""
    from tests.support.system import service

    system = trial.system
    trial.install()
    sheet.claim(True, "a first install comes up")
    # A virtual machine has a GPU by name only, which engines may stumble over.
    args = ["--threads", "2", "--device", "none"] if trial.kit.options.hosted else []
    system.apply(system.tiny_model(), service(contextSize=CONTEXT, extraArgs=args))
    engine = serving(system)
    job = trial.launchctl.job(TRIAL)
    assert job is not None, "launchd does not tell of the job"
    sheet.show("launchctl print", {"spawn type": job.spawn_type, "exit timeout": job.exit_timeout_s, "runs": job.runs})
    sheet.claim("interactive" in job.spawn_type, "launchd treats the job as interactive")
    supervisord = system.supervisord_pid()
    changes = trial.install()
    sheet.show("second install", trial.said[:])
    sheet.claim(changes == 0 and system.supervisord_pid() == supervisord, "a second install does nothing")
    controller = system.own_pid("controller")
    trial.install(memory_fraction=0.5)
    until_reachable(system)
    kept = system.supervisord_pid() == supervisord and system.pid() == engine
    sheet.claim(kept and system.own_pid("controller") != controller, "a setting starts only our own programs anew")
    exchange(trial, sheet, engine)
    killed(trial, sheet, engine)
    terminated(trial, sheet)
    leave(trial, sheet)


def serving(system: System) -> int:
    """Waits until the model is served; pid of its engine. Raises Skip where Metal is missing."""

    def settled() -> bool:
        reason = system.condition("MetalReady").get("reason")
        return system.status().get("phase") == "Ready" or reason == "MetalUnavailable"

    until_reachable(system)
    eventually(settled, READY_S, f"the model to be served; {system.told('tiny')}")
    if system.status().get("phase") != "Ready":
        raise Skip(f"launchd's job sees no Metal device here: {system.told('tiny')}")
    return system.pid()


def until_reachable(system: System) -> None:
    """Waits for the embedded API, which has another address after each start of supervisord."""
    system.forget()
    eventually(lambda: system.get("/version"), BACK_S, "the API to answer")


def eventually(look: Callable[[], object], within_s: float, what: str) -> float:
    """Waits as the tests do, whatever is down meanwhile; how many seconds that took. Raises AssertionError."""
    from tests.support import system

    return timed(lambda: system.eventually(look, within_s, what))


def exchange(trial: Trial, sheet: Sheet, engine: int) -> None:
    """A changed property list: the job is exchanged while an answer streams."""
    system, supervisord = trial.system, trial.system.supervisord_pid()
    wanted = trial.lasting(SPAN_S)
    stream = trial.stream(wanted)
    took = timed(lambda: trial.install(stop_timeout=STOP_S))
    during = stream.alive
    job = trial.launchctl.job(TRIAL)
    sheet.show("what the exchange ran", [" ".join(each.split()) for each in trial.changes])
    sheet.figure("exchange of the job", "s", took)
    sheet.claim(job and job.exit_timeout_s == int(STOP_S) + STOPPING_S, "launchd has the new ExitTimeOut")
    sheet.claim(system.supervisord_pid() != supervisord, "another supervisord runs")
    until_reachable(system)
    adopted(system, sheet, engine, "after the exchange")
    streamed(stream, sheet, "through the exchange", wanted, during)


def killed(trial: Trial, sheet: Sheet, engine: int) -> None:
    """kill -9 of supervisord while an answer streams."""
    system, supervisord = trial.system, trial.system.supervisord_pid()
    wanted = trial.lasting(SPAN_S)
    stream = trial.stream(wanted)
    os.kill(supervisord, signal.SIGKILL)
    took = eventually(lambda: supervisord_of(system) not in (0, supervisord), BACK_S, "launchd to start it again")
    sheet.figure("from kill -9 to another supervisord", "s", took)
    sheet.claim(True, "KeepAlive starts a killed supervisord again")
    during = stream.alive
    until_reachable(system)
    adopted(system, sheet, engine, "after kill -9")
    streamed(stream, sheet, "through kill -9 of supervisord", wanted, during)


def supervisord_of(system: System) -> int:
    """Pid of the supervisord that answers, 0 if none does."""
    with contextlib.suppress(OSError, ValueError):
        return system.supervisord_pid() if system.rpc.answers() else 0
    return 0


def adopted(system: System, sheet: Sheet, engine: int, when: str) -> None:
    """The engine goes on under the next supervisord."""
    eventually(lambda: system.pid() == engine, BACK_S, f"the engine to be stood in for {when}")
    sheet.claim(system.pid() == engine and system.engines() == [engine], f"the same engine, and no second one: {when}")


def streamed(stream: Stream, sheet: Sheet, when: str, wanted: int, during: bool) -> None:
    """No token of the answer was lost."""
    whole = stream.end(600.0)
    sheet.figure(f"tokens streamed {when}", "tokens", len(stream.arrivals_s))
    sheet.figure(f"longest wait between two tokens {when}", "ms", 1e3 * mac_parse.longest_gap_s(stream.arrivals_s))
    sheet.claim(whole and len(stream.arrivals_s) >= wanted - 1, f"0 tokens lost {when}: {stream.told()} of {wanted}")
    if not during:
        sheet.omit(f"the answer was over before this was done: {when}; see MODEL_MIB in mac_install.py")


def terminated(trial: Trial, sheet: Sheet) -> None:
    """`launchctl kill SIGTERM`: the restart in order that we recommend, and whether ThrottleInterval delays it."""
    system, domain = trial.system, trial.launchctl
    supervisord = system.supervisord_pid()
    domain.kill(TRIAL, "SIGTERM")
    stopped = eventually(lambda: supervisord_of(system) != supervisord, STOP_S + STOPPING_S, "supervisord to end")
    took = eventually(lambda: supervisord_of(system) not in (0, supervisord), BACK_S, "launchd to start it again")
    sheet.figure("from SIGTERM to the end", "s", stopped)
    sheet.figure("from the end to the next start (ThrottleInterval is 15 s)", "s", took)
    serving(system)
    sheet.claim(True, "launchctl kill SIGTERM restarts it in order")


def leave(trial: Trial, sheet: Sheet) -> None:
    """bootout lets an answer end that takes longer than launchd's default wait; then nothing is left."""
    system = trial.system
    stream = trial.stream(trial.lasting(3 * LAUNCHD_DEFAULT_S))
    found = uninstall.find(trial.machine, trial.state)
    took = timed(lambda: uninstall.uninstall(found, trial.machine, True, trial.said.append))
    sheet.figure("uninstalling with an answer under way", "s", took)
    whole = stream.end(1.0)
    lasted = stream.arrivals_s[-1] - stream.asked_at
    sheet.figure("that answer", "s", lasted)
    sheet.claim(whole, f"ExitTimeOut is honoured: the answer under way was ended first; {stream.told()}")
    if lasted <= LAUNCHD_DEFAULT_S:
        sheet.omit(f"the answer took no longer than launchd's default of {LAUNCHD_DEFAULT_S:g} s; use a larger model")
    sheet.claim(trial.launchctl.job(TRIAL) is None, "launchd has no such job any more")
    eventually(lambda: not system.processes(), GONE_S, "every process to be gone")
    left = sorted(path.name for path in trial.state.iterdir()) if trial.state.exists() else []
    sheet.claim(not left, f"nothing is left: {', '.join(left) or 'no process, no file'}")
    if trial.agent and trial.kit.options.sudo is False:
        sheet.omit(f"the same as a LaunchDaemon: {HOW_ROOT}")


def timed(call: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    began = time.monotonic()
    call()
    return time.monotonic() - began
