"""Looks at a running system from outside: processes, the API's endpoints, chats that stream.

supervisord's table is only read once all is quiet: every RPC wakes its loop, and makes it faster than it is.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
import time
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from metal_supervisor.state.gateway_note import WORKERS
from tests.support.soak.soak_check import Answer, Checker, Engine, Sample, Violation, reserved_bytes
from tests.support.soak.soak_memory import Reservations

EVERY_S = 0.2
STALE_S = 0.8
CONFIRM_S = 0.03
CHAT_TIMEOUT_S = 40.0
OWN = ("run", "supervisord", "controller", "sidecar", "apiserver", "gateway", "gateway-holder")
"""Roles of our own processes; of each there is one once all is quiet."""
Processes = dict[int, tuple[float, list[str]]]


class ApiError(Exception):
    """The API did not do what it was asked for."""


class Api:
    """The embedded API with a short timeout, found anew for each request: a boot may move its port."""

    def __init__(self, kubeconfig: Path, timeout_s: float = 1.0) -> None:
        self._kubeconfig, self._timeout_s = kubeconfig, timeout_s

    def ask(self, method: str, path: str, body: Any = None, kind: str = "application/json") -> Any:
        """The answer. Raises ApiError."""
        try:
            server = json.loads(self._kubeconfig.read_text())["clusters"][0]["cluster"]["server"]
            parts = urllib.parse.urlsplit(server)
            connection = http.client.HTTPConnection(parts.netloc, timeout=self._timeout_s)
            with contextlib.closing(connection):
                text = None if body is None else json.dumps(body)
                connection.request(method, parts.path + path, text, {"Content-Type": kind})
                answer = connection.getresponse()
                data = answer.read()
            if answer.status >= 300:
                raise ApiError(f"{answer.status} {data[:200]!r}")
            return json.loads(data)
        except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
            raise ApiError(repr(error)) from None

    def apply(self, path: str, manifest: Mapping[str, Any]) -> None:
        """Server-side apply. Raises ApiError."""
        self.ask("PATCH", f"{path}?fieldManager=soak&force=true", manifest, "application/apply-patch+yaml")


class Scan:
    """The processes whose command line names the system; what is not one of them is asked only once."""

    def __init__(self, marks: tuple[str, ...]) -> None:
        self._marks = marks
        self._strangers: dict[int, float] = {}

    def processes(self) -> Processes:
        """pid -> (start, command line) of every live one."""
        found: Processes = {}
        strangers: dict[int, float] = {}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                started = process.create_time()
                if self._strangers.get(process.pid) == started:
                    strangers[process.pid] = started
                elif process.status() != psutil.STATUS_ZOMBIE:
                    command = process.cmdline()
                    if any(mark in part for part in command for mark in self._marks):
                        found[process.pid] = started, command
                    elif process.ppid() == 1 or not command:
                        continue  # an orphan on its way somewhere; look again
                    else:
                        strangers[process.pid] = started
        self._strangers = strangers
        return found


def is_launcher(command: list[str]) -> bool:
    """Whether a command line is that of our launcher: on its way to an engine, or standing in for one."""
    return any(part.endswith("/launch.py") for part in command)


def engines(processes: Processes) -> list[Engine]:
    """The engines among the processes."""
    found = []
    for pid, (started, command) in processes.items():
        if "--alias" in command and not is_launcher(command):
            with contextlib.suppress(ValueError, IndexError):
                alias, port = command[command.index("--alias") + 1], int(command[command.index("--port") + 1])
                found.append(Engine(pid, alias.partition(",")[0], port, started))
    return found


def role_of(command: list[str]) -> str:
    """Which of our own processes a command line is, "" if none."""
    if "metal_supervisor.supervisord.daemon" in command:
        return "supervisord"
    if "metal_supervisor" in command:
        after = command[command.index("metal_supervisor") + 1 :]
        role = "gateway" if after and after[0] in WORKERS else after[0] if after else ""
        return role if role in OWN else ""
    return ""


class Watcher:
    """Samples in threads of its own, and hands every sample to the checker."""

    def __init__(self, scan: Scan, api: Api, slices: str, port: int, checker: Checker, budget_bytes: int) -> None:
        self._scan, self._api, self._slices, self._port, self._checker = scan, api, slices, port, checker
        self._budget_bytes, self._reservations = budget_bytes, Reservations()
        self._told: tuple[float, frozenset[str] | None, bool] = (0.0, None, False)
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._held: dict[str, int] = {}
        self.violations: list[Violation] = []
        self.samples = 0
        self.latest: tuple[Engine, ...] = ()
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._ask, self._run)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(10)

    def hold(self, name: str, on: bool) -> None:
        """Notes that a fault of ours holds `sidecar` or `apiserver`, or lets go of it."""
        with self._lock:
            self._held[name] = self._held.get(name, 0) + (1 if on else -1)

    def engine(self, service: str) -> Engine | None:
        """The service's engine as last sampled."""
        return next((each for each in self.latest if each.service == service), None)

    def _ask(self) -> None:
        while not self._over.wait(EVERY_S / 2):
            at = time.monotonic()
            try:
                ready: frozenset[str] | None = ready_services(self._api.ask("GET", self._slices)["items"])
            except (ApiError, KeyError, TypeError, IndexError):
                ready = None
            self._told = at, ready, self._sidecar_answers()

    def _sidecar_answers(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=0.5)
        with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
            connection.request("GET", "/livez")
            return connection.getresponse().status == 200
        return False

    def _run(self) -> None:
        while not self._over.wait(EVERY_S):
            sample = self.sample()
            self.samples += 1
            self.latest = sample.engines
            self.violations += self._checker.see(sample)

    def sample(self) -> Sample:
        """What is there now."""
        told_at, ready, sidecar = self._told
        at = time.monotonic()
        found = [replace(each, reserved_bytes=self._reservations.of(each)) for each in engines(self._scan.processes())]
        if len({each.service for each in found}) < len(found) or reserved_bytes(found) > self._budget_bytes:
            # Between a fork and its exec a process bears its parent's command line, and reading all takes a while:
            # what both readings found was there all the time between them.
            time.sleep(CONFIRM_S)
            again = {each.pid for each in engines(self._scan.processes())}
            found = [each for each in found if each.pid in again]
        with self._lock:
            held = frozenset(name for name, count in self._held.items() if count > 0)
        return Sample(at, tuple(found), told_at, ready if at - told_at < STALE_S else None, sidecar, held)


def ready_services(slices: list[Any]) -> frozenset[str]:
    """Names of the services that have a ready endpoint."""
    return frozenset(
        item["metadata"]["labels"]["kubernetes.io/service-name"]
        for item in slices
        if any(endpoint["conditions"].get("ready") for endpoint in item.get("endpoints") or [])
    )


class Chat(threading.Thread):
    """Streams answers from one service's engine, one after another, straight from the engine's port."""

    def __init__(self, service: str, find: Callable[[str], Engine | None], tokens: int, pause_s: float) -> None:
        super().__init__(daemon=True)
        self._service, self._find, self._tokens, self._pause_s = service, find, tokens, pause_s
        self._last = threading.Event()
        self.answers: list[Answer] = []
        self.tokens = 0

    def last(self) -> None:
        """Lets the answer under way be the last."""
        self._last.set()

    def run(self) -> None:
        while not self._last.wait(self._pause_s):
            engine = self._find(self._service)
            if engine is not None and psutil.pid_exists(engine.pid):
                self.answers.append(self._one(engine.port))

    def _one(self, port: int) -> Answer:
        began, got, error, last = time.monotonic(), 0, "", b""
        body = {
            "messages": [{"role": "user", "content": "hi"}],
            "stream": True,
            "ignore_eos": True,
            "max_tokens": self._tokens,
        }
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=CHAT_TIMEOUT_S)
        try:
            connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            if answer.status != 200:
                error = f"status {answer.status}"
            for line in answer:
                if line.startswith(b"data:"):
                    got, last = got + 1, line.strip()
        except (OSError, http.client.HTTPException) as problem:
            error = repr(problem)
        finally:
            connection.close()
        self.tokens += got
        if not error and (last != b"data: [DONE]" or got < self._tokens):
            error = f"it ended with {last[:60]!r}"
        return Answer(self._service, began, time.monotonic(), self._tokens, got, error)
