"""Does to a running system what a sequence of faults says, and undoes it in time.

What is asked for is kept beside it: every edit first changes `wanted`, then tries the API once. An API that is down
at that moment is asked again at the checkpoint, as a user would ask again.
"""

from __future__ import annotations

import contextlib
import heapq
import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import psutil

from metal_supervisor.spec.processes import State
from metal_supervisor.supervisord.client import Refused, Unavailable
from tests.support.soak.soak_check import Checker, Excuses
from tests.support.soak.soak_memory import Sizes, Want, first_wants
from tests.support.soak.soak_plan import CALM, EXTRAS, PREY, Fault
from tests.support.soak.soak_watch import Api, ApiError, Scan, Watcher, engines, role_of
from tests.support.system import ISVC, MODELS, System, eventually, free_ports, model, service

CALM_RATE = 20
HOLDING = {"sidecar", "apiserver"}
"""While one of these is frozen by us, the clock of a dead endpoint stands."""
API_RULES: dict[str, list[dict[str, Any]]] = {
    "500": [{"action": {"status": 500}}],
    "409": [{"verb": "apply", "action": {"status": 409}}],
    "hang": [{"action": {"hang_s": 3}}],
    "drop-watches": [{"verb": "watch", "action": {"drop": True}, "close_watches": True}],
    "garbage": [{"verb": "list", "action": {"garbage": True}}],
    "expire": [{"verb": "watch", "action": {"expire": True}, "times": 3, "close_watches": True}],
    "latency": [{"action": {"latency_s": 0.4}}],
    "503-writes": [{"verb": verb, "action": {"status": 503}} for verb in ("apply", "create", "update", "delete")],
}
FOREIGN = {
    "no-header": b"command=/bin/true\n",
    "binary": b"\xff\xfe\x00[program:x]\n",
    "sneaky": b"[supervisord]\nlogfile=/dev/null\n",
}


@dataclass
class Outcome:
    """What became of the faults of one kind."""

    done: int = 0
    idle: int = 0
    """Found nothing to act upon."""
    worst_s: float = 0.0
    """Longest convergence of a round that had one."""


class Nothing(Exception):
    """The fault finds nothing to act upon."""


def order(port: int, faults: dict[str, Any]) -> None:
    """Gives an order to a stand-in. Raises OSError if it does not listen.

    One that listens may take the order though its answer does not come in time.
    """
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=1)) as connection:
        connection.connect()
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection.request("POST", "/fake", json.dumps(faults))
            connection.getresponse().read()


@dataclass
class Hand:
    """Commits faults, one at a time, from one thread."""

    system: System
    api: Api
    scan: Scan
    watcher: Watcher
    checker: Checker
    excuses: Excuses
    sizes: Sizes
    wanted: dict[str, Want] = field(default_factory=dict)
    foreign: list[str] = field(default_factory=list)
    nudged: set[str] = field(default_factory=set)
    """Services that somebody stopped by hand, and means to start again."""
    noteless: set[str] = field(default_factory=set)
    """Services whose launcher's note was damaged: the next start or boot mends it, and nothing before."""
    typed: list[subprocess.Popen[bytes]] = field(default_factory=list)
    loose: Path = Path()
    """The model file that comes and goes."""
    preemption: bool = False
    _undo: list[tuple[float, int, str, Callable[[], None]]] = field(default_factory=list)
    _late: list[Callable[[], None]] = field(default_factory=list)
    _number: count[int] = field(default_factory=count)
    _started_by_hand: dict[str, float] = field(default_factory=dict)
    """Service -> Unix time at which somebody last typed a start of it."""
    _frozen: set[int] = field(default_factory=set)

    # ── doing and undoing ────────────────────────────────────────────────────────────────────────

    def commit(self, fault: Fault) -> str:
        """Commits it; returns what was done. Raises Nothing."""
        if fault.kind.hurts:
            self.excuses.touch(time.monotonic(), fault.target)
        name = fault.kind.name.replace("-", "_")
        undo = getattr(self, f"_{name}")(fault)
        if fault.lasts_s > 1e6:
            self._late.append(undo)
        elif undo is not None:
            due = time.monotonic() + fault.lasts_s
            heapq.heappush(self._undo, (due, next(self._number), fault.target if fault.kind.hurts else "", undo))
        return str(fault)

    def undo_due(self, everything: bool = False) -> None:
        """Undoes what has lasted long enough."""
        while self._undo and (everything or self._undo[0][0] <= time.monotonic()):
            _, _, target, undo = heapq.heappop(self._undo)
            if target:
                self.excuses.touch(time.monotonic(), target)
            with contextlib.suppress(Nothing, ApiError, OSError, psutil.Error):
                undo()

    def undo_late(self) -> None:
        """Undoes what was to stay over a checkpoint."""
        for undo in self._late:
            undo()
        self._late.clear()

    def thaw(self) -> None:
        """Lets everything run that is still stopped."""
        for pid in self._frozen:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGCONT)

    def _role(self, role: str) -> int:
        pids = [pid for pid, (_, command) in self.scan.processes().items() if role_of(command) == role]
        if not pids:
            raise Nothing(f"no {role}")
        return max(pids)

    def _engine(self, name: str) -> int:
        found = [each.pid for each in engines(self.scan.processes()) if each.service == name]
        if not found:
            raise Nothing(f"{name} has no engine")
        return found[0]

    def _signal(self, pid: int, signum: int) -> None:
        try:
            os.kill(pid, signum)
        except ProcessLookupError:
            raise Nothing("it is gone") from None

    def _freeze_pid(self, pid: int, holds: str) -> Callable[[], None]:
        started = psutil.Process(pid).create_time()
        self._frozen.add(pid)
        self._signal(pid, signal.SIGSTOP)
        if holds:
            self.watcher.hold(holds, True)

        def thaw() -> None:
            if holds:
                self.watcher.hold(holds, False)
            self._frozen.discard(pid)
            if psutil.Process(pid).create_time() == started:
                self._signal(pid, signal.SIGCONT)

        return thaw

    # ── processes ────────────────────────────────────────────────────────────────────────────────

    def _kill(self, fault: Fault) -> None:
        self._signal(self._role(fault.target), signal.SIGKILL)

    def _term(self, fault: Fault) -> None:
        self._signal(self._role(fault.target), signal.SIGTERM)

    def _freeze(self, fault: Fault) -> Callable[[], None]:
        holds = fault.target if fault.target in HOLDING else ""
        return self._freeze_pid(self._role(fault.target), holds)

    def _kill_engine(self, fault: Fault) -> None:
        self._signal(self._engine(fault.target), signal.SIGKILL)

    def _freeze_engine(self, fault: Fault) -> Callable[[], None]:
        return self._freeze_pid(self._engine(fault.target), "")

    def _fake(self, name: str, faults: dict[str, Any]) -> None:
        port = next((each.port for each in engines(self.scan.processes()) if each.service == name), 0)
        try:
            order(port, faults)
        except OSError as error:
            raise Nothing(f"{name} cannot be told: {error!r}") from None

    def _exit_engine(self, fault: Fault) -> None:
        self._fake(fault.target, {"exit_after_s": 0.1})

    def _engine_fault(self, fault: Fault) -> Callable[[], None]:
        off: Any = 0.0 if fault.variant == "flood_lines_per_s" else False
        self._fake(fault.target, {fault.variant: 2000.0 if fault.variant == "flood_lines_per_s" else True})
        return lambda: self._fake(fault.target, {fault.variant: off})

    # ── the API ──────────────────────────────────────────────────────────────────────────────────

    def manifest(self, name: str) -> dict[str, Any]:
        """The service as it is wanted."""
        want = self.wanted[name]
        arguments = ["--threads", "1"]
        if name.startswith("fake"):
            arguments = ["--fake-tokens", str(want.tokens), "--fake-tokens-per-s", str(CALM_RATE)]
        if want.cache_mib is not None:
            arguments += ["--cache-ram", str(want.cache_mib)]
        more: dict[str, Any] = {"suspend": True} if want.suspended else {}
        if name in CALM:
            more["evictionProtection"] = True
        return service(
            name,
            "tiny" if name.endswith("-calm") or "-new-" in name else "loose",
            contextSize=want.context,
            parallelSlots=2,
            priority=want.priority,
            replicas=want.replicas,
            extraArgs=arguments,
            **more,
        )

    def ask_for(self, name: str, want: Want | None) -> None:
        """Changes what is wanted, and asks the API once. Raises ApiError."""
        if want is None or not want.runs:
            self._note_hand(name)
        if want is None:
            self.wanted.pop(name, None)
            self.checker.forget(name)
            self.api.ask("DELETE", f"{ISVC}/{name}")
        else:
            self.wanted[name] = want
            self.api.apply(f"{ISVC}/{name}", self.manifest(name))

    def end_api_faults(self) -> None:
        """Ends the API's faults. One that a boot has begun takes no orders, until it is told to. Raises ApiError."""
        try:
            self.api.ask("DELETE", "/faults")
        except ApiError as error:
            if not str(error).startswith("404 "):
                raise
            self.watcher.hold("apiserver", True)
            try:
                self.system.take_orders()
            finally:
                self.watcher.hold("apiserver", False)

    def ask_again(self) -> None:
        """Makes the API hold what is wanted, whatever it has missed. Raises ApiError."""
        for name, file in (("tiny", self.system.tiny), ("loose", self.loose)):
            self.api.apply(f"{MODELS}/{name}", model(name, str(file)))
        for name in self.wanted:
            self.api.apply(f"{ISVC}/{name}", self.manifest(name))
        for item in self.api.ask("GET", ISVC)["items"]:
            if item["metadata"]["name"] not in self.wanted:
                self.api.ask("DELETE", f"{ISVC}/{item['metadata']['name']}")

    def _edited(self, name: str, **changes: Any) -> None:
        if name not in self.wanted:
            raise Nothing(f"{name} is not there")
        self.ask_for(name, replace(self.wanted[name], **changes))

    def _apply(self, fault: Fault) -> None:
        if fault.target in self.wanted:
            raise Nothing(f"{fault.target} is there already")
        self.ask_for(fault.target, Want())

    def _delete(self, fault: Fault) -> None:
        if fault.target not in self.wanted:
            raise Nothing(f"{fault.target} is not there")
        self.ask_for(fault.target, None)

    def _recreate(self, fault: Fault) -> Callable[[], None]:
        want = self.wanted.get(fault.target)
        if want is None:
            raise Nothing(f"{fault.target} is not there")

        def back() -> None:
            if fault.target not in self.wanted:
                self.ask_for(fault.target, want)

        with contextlib.suppress(ApiError):  # it comes back either way
            self.ask_for(fault.target, None)
        return back

    def _edit_argv(self, fault: Fault) -> None:
        before = self.wanted.get(fault.target)
        if before is None:
            raise Nothing(f"{fault.target} is not there")
        self._edited(fault.target, context=4096 + (before.context + 256) % 4096)

    def _edit_size(self, fault: Fault) -> None:
        self._edited(fault.target, cache_mib=int(fault.variant))

    def _edit_priority(self, fault: Fault) -> None:
        self._edited(fault.target, priority=fault.variant)

    def _suspend(self, fault: Fault) -> Callable[[], None]:
        return self._switched(fault.target, {"suspended": True}, {"suspended": False})

    def _scale_to_zero(self, fault: Fault) -> Callable[[], None]:
        return self._switched(fault.target, {"replicas": 0}, {"replicas": 1})

    def _switched(self, name: str, off: dict[str, Any], on: dict[str, Any]) -> Callable[[], None]:
        with contextlib.suppress(ApiError):
            self._edited(name, **off)

        def back() -> None:
            self.excuses.touch(time.monotonic(), name)
            with contextlib.suppress(ApiError):
                self._edited(name, **on)

        return back

    def _api_fault(self, fault: Fault) -> Callable[[], None]:
        self.watcher.hold("apiserver", True)
        with contextlib.suppress(ApiError):
            self.api.ask("POST", "/faults", API_RULES[fault.variant])

        def heal() -> None:
            self.watcher.hold("apiserver", False)
            self.api.ask("DELETE", "/faults")

        return heal

    @contextlib.contextmanager
    def _api_stopped(self) -> Iterator[list[Path]]:
        """Stops the API; yields the files of its data, and starts it. Raises Nothing if supervisord does not answer."""
        rpc = self.system.rpc
        self.watcher.hold("apiserver", True)
        try:
            try:
                rpc.stop("apiserver")
                eventually(lambda: rpc.table()["apiserver"].state is State.STOPPED, what="the API to stop")
            except (Unavailable, Refused) as error:
                raise Nothing(str(error)) from None
            try:
                yield list(self.system.state.glob("apiserver.db*"))
            finally:
                rpc.start("apiserver")
                eventually(self._api_answers, what="the API to answer")
        finally:
            self.watcher.hold("apiserver", False)

    def _api_answers(self) -> bool:
        with contextlib.suppress(ApiError):
            return bool(self.api.ask("GET", "/version"))
        return False

    def _restore_api(self, _fault: Fault) -> Callable[[], None]:
        """Copies the API's data, and puts the copy back later: what was asked for meanwhile is lost until then."""
        older = self.system.base / f"older-{next(self._number)}"
        older.mkdir()
        with self._api_stopped() as files:
            for file in files:
                shutil.copy2(file, older)

        def back() -> None:
            with self._api_stopped() as files:
                for name in (*PREY, *EXTRAS):  # their specs go back as well
                    self.excuses.touch(time.monotonic(), name)
                for file in files:
                    file.unlink()
                for file in older.iterdir():
                    shutil.copy2(file, self.system.state)

        return back

    # ── by hand, and files ───────────────────────────────────────────────────────────────────────

    def type(self, *commands: str) -> None:
        """Types supervisorctl commands, one after another, in another terminal."""
        self.typing()
        tool = [str(Path(sys.executable).parent / "supervisorctl"), "-c", f"{self.system.state}/supervisord.conf"]
        line = "; ".join(" ".join([*tool, command]) for command in commands)
        self.typed.append(
            subprocess.Popen(
                ["/bin/sh", "-c", line],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        )

    def _start_by_hand(self, name: str, *commands: str) -> None:
        """Types commands that start a service, whether it is switched on or not."""
        self._started_by_hand[name] = time.time()
        if name not in self.wanted or not self.wanted[name].runs:
            self._note_hand(name)
        self.type(*commands)

    def _note_hand(self, name: str) -> None:
        """The service is switched off: an engine that starts because of what was typed is nobody's fault but ours."""
        if name in self._started_by_hand:
            self.excuses.by_hand.setdefault(name, self._started_by_hand[name])

    def forget_hands(self) -> None:
        """All is quiet: whatever was typed has had its effect."""
        self.nudged.clear()
        self._started_by_hand.clear()
        self.excuses.by_hand.clear()

    def _ctl_stop(self, fault: Fault) -> Callable[[], None]:
        self.nudged.add(fault.target)
        self.type(f"stop default.{fault.target}")
        return lambda: self._start_by_hand(fault.target, f"start default.{fault.target}")

    def _ctl_restart(self, fault: Fault) -> None:
        self.nudged.add(fault.target)
        self._start_by_hand(fault.target, f"restart default.{fault.target}")

    def _ctl_remove(self, fault: Fault) -> Callable[[], None]:
        self.nudged.add(fault.target)
        self.type(f"stop default.{fault.target}", f"remove default.{fault.target}")
        return lambda: self._start_by_hand(fault.target, f"start default.{fault.target}")

    def _ctl_update(self, _fault: Fault) -> None:
        self.type("update")

    def nudge(self) -> None:
        """Starts what was stopped by hand, where it still is. Raises Unavailable, Refused."""
        table = self.system.rpc.table()
        for name in self.nudged:
            row = table.get(f"default.{name}")
            if name in self.wanted and self.wanted[name].runs and row is not None and row.state is State.STOPPED:
                self.excuses.touch(time.monotonic(), name)
                self.system.rpc.start(f"default.{name}")

    def typing(self) -> bool:
        """Whether a command typed in another terminal is still under way."""
        self.typed = [each for each in self.typed if each.poll() is None]
        return bool(self.typed)

    def _hide_model(self, _fault: Fault) -> Callable[[], None]:
        aside = self.loose.with_suffix(".aside")
        if not self.loose.exists():
            raise Nothing("it is hidden already")
        self.loose.rename(aside)
        return lambda: None if self.loose.exists() else (aside.rename(self.loose), None)[1]

    def _file(self, fault: Fault) -> Path:
        directory, program = self.system.state / fault.variant, f"default.{fault.target}"
        pattern = {"models.d": f"{program}.conf", "specs": f"{program}.*.json"}.get(fault.variant, f"{program}.json")
        found = sorted(directory.glob(pattern))
        if not found:
            raise Nothing(f"there is no {fault.variant}/{pattern}")
        if fault.variant == "runs":
            # Without its note nobody knows whom a stand-in represents: the endpoint stays out until the next start.
            note = self.system.files.run_note(program)
            if note is not None and note.pid and note.pid != note.launcher_pid:
                raise Nothing(f"a launcher stands in for {fault.target}")
            self.noteless.add(fault.target)
        return found[0]

    def _lose(self, fault: Fault) -> None:
        self._file(fault).unlink(missing_ok=True)

    def _corrupt(self, fault: Fault) -> None:
        self._file(fault).write_bytes(b"{ half a f\xff\x00")

    def _start_copy(self, _fault: Fault) -> Callable[[], None]:
        """Start a second system from a copy of the state directory; without an engine's program it starts none."""
        base = Path(tempfile.mkdtemp(prefix="soak-copy-"))
        subprocess.run(["cp", "-a", self.system.state, base / "run"], check=False, stderr=subprocess.DEVNULL)
        http_port, engine_port = free_ports(2)
        flags = {
            "--state-dir": base / "run",
            "--port": http_port,
            "--ports": f"{engine_port}-{engine_port}",
            "--gateway": "off",
            "--llama-server": base / "none",
        }
        words = [str(word) for pair in flags.items() for word in pair]
        with (base / "run.log").open("wb") as log:
            copy = subprocess.Popen(
                [sys.executable, "-I", "-m", "metal_supervisor", "run", *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

        def end() -> None:
            copy.terminate()
            copy.wait(60)
            shutil.rmtree(base)

        return end

    def _foreign_file(self, fault: Fault) -> None:
        name = f"foreign-{next(self._number)}.conf"
        self.foreign.append(name)
        (self.system.state / "models.d" / name).write_bytes(FOREIGN[fault.variant])


def start(hand: Hand) -> None:
    """Asks for the first services."""
    hand.wanted.update(first_wants())
    hand.ask_again()
