"""Engines that misbehave when they are asked to, beside real ones, on one running system.

The `llama-server` of such a system is a script that execs the real engine, or the stand-in for a service whose
`extraArgs` ask for a fault. The service `bystander` is always a real one, and nothing may ever touch it.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import urllib3

from metal_supervisor.cluster.kube import Kube, KubeError
from tests.support.faults import Figure
from tests.support.system import FAKE_ENGINE, SLICES, System, engine_path, eventually, running, service

EVENTS = "/apis/events.k8s.io/v1/namespaces/default/events"
BYSTANDER = "bystander"


def either(base: Path) -> Path:
    """An executable that is the real engine, or the stand-in if its arguments ask for a fault; its help names both.

    TEST_OPEN_FILES in a service's environment is the number of files and connections that its engine may have open.
    """
    path = base / "llama-server"
    stand_in, real = shlex.join([sys.executable, str(FAKE_ENGINE)]), shlex.quote(str(engine_path()))
    path.write_text(
        "#!/bin/sh\n"
        '[ -z "$TEST_OPEN_FILES" ] || ulimit -n "$TEST_OPEN_FILES"\n'
        f'for each; do case $each in --fake-*) exec {stand_in} "$@" ;; esac; done\n'
        f'[ "$1" != --help ] || {stand_in} --help | sed -n "s/^\\(--fake-[a-z-]*\\).*/\\1 X/p"\n'
        f'exec {real} "$@"\n'
    )
    path.chmod(0o755)
    return path


@contextlib.contextmanager
def beside_a_bystander(base: Path, *flags: str) -> Iterator[System]:
    """A system of such engines with a real one that serves."""
    with running(base, *flags, engine=either(base)) as up:
        # Long chats of several at once must not run out of context.
        up.apply(up.tiny_model(), service(BYSTANDER, parallelSlots=2, contextSize=65536))
        up.ready(BYSTANDER)
        yield up


@contextlib.contextmanager
def untouched(system: System) -> Iterator[None]:
    """Whatever is done to other services, the bystander keeps its process, its endpoint and its words."""
    before, since = system.pid(BYSTANDER), system.observe(BYSTANDER)["since"]
    yield
    assert system.pid(BYSTANDER) == before != 0
    assert system.observe(BYSTANDER)["since"] == since, "it was out of service in between"
    assert "hello world" in system.chat(BYSTANDER)


def stand_in(name: str, **faults: Any) -> dict[str, Any]:
    """An InferenceService whose engine is the stand-in, with these faults from its start."""
    given = {"tokens": 6, **faults}
    arguments = [part for fault, value in given.items() for part in (f"--fake-{fault.replace('_', '-')}", str(value))]
    return service(name, extraArgs=arguments)


def port(system: System, name: str) -> int:
    """The port of a service, published or not."""
    return int(json.loads((system.state / "records" / f"default.{name}.json").read_text())["port"])


def tell(system: System, name: str, **faults: Any) -> None:
    """Gives a running stand-in other faults."""

    def told() -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", port(system, name), timeout=10)
        with contextlib.closing(connection):
            connection.request("POST", "/fake", json.dumps(faults), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()
        return True

    eventually(told, 20, f"{name} to listen")


def said(system: System, name: str) -> str:
    """What an engine has written to its log."""
    path = system.state / "log" / f"default.{name}.log"
    return path.read_text(errors="replace") if path.exists() else ""


def events(system: System, name: str) -> dict[str, str]:
    """Reason -> latest note of the Events about a service."""
    found = [each for each in system.get(EVENTS)["items"] if each["regarding"]["name"] == name]
    return {each["reason"]: each["note"] for each in found}


def reason(system: System, name: str) -> str:
    """The one word for what goes on with a service."""
    return str(system.condition("MetalReady", name).get("reason", ""))


def withdrawn(system: System, name: str, within_s: float = 40.0) -> None:
    """Waits until the endpoint is out. It must stay out for a while: a first crash is a matter for a `timeline`."""
    eventually(lambda: system.slice_ready(name) is False, within_s, f"{name} to be withdrawn")


def restarted(system: System, name: str, before: int, within_s: float = 40.0) -> int:
    """Waits until another process runs for a service; returns its pid."""
    return eventually(lambda: (now := system.pid(name)) != before and now, within_s, f"another engine of {name}")


def is_gone(pid: int) -> bool:
    """Whether a process has ended, reaped or not."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def gone(system: System, *names: str) -> None:
    """Deletes services and waits until nothing of them is left."""
    for name in names:
        system.delete(name)
    programs = {f"default.{name}" for name in names}
    eventually(lambda: not programs & system.rpc.table().keys(), 40, f"{names} to be gone")


@dataclass(frozen=True)
class Moment:
    """What was seen of one service at one time."""

    at: float
    ready: bool | None
    """Its endpoint takes requests; None before its slice was seen, which may be after its process."""
    pid: int


LOOK_EVERY_S = 0.2
"""Of a timeline at the engines' pids: each look costs a process, and its bounds are of many seconds."""


class Timeline:
    """Watches the endpoints and engines of all services, so that several faults can take their time at once.

    Endpoints are watched, not looked at: one that is withdrawn for 0.3 s would be missed. `at` is monotonic.
    """

    def __init__(self, system: System) -> None:
        self._system, self._kube = system, Kube(system.kubeconfig)
        self._seen: dict[str, list[Moment]] = {}
        self._noting = threading.Lock()
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=self._repeat, args=(each,), name=f"timeline {each.__name__}", daemon=True)
            for each in (self._watch, self._look)
        ]
        for each in self._threads:
            each.start()

    def _repeat(self, observe: Callable[[], None]) -> None:
        while not self._over.wait(LOOK_EVERY_S):
            with contextlib.suppress(
                KubeError, OSError, http.client.HTTPException, urllib3.exceptions.HTTPError, ValueError
            ):
                observe()

    def _watch(self) -> None:
        """Notes each change of a slice until the watch ends."""
        listed = self._kube.request("GET", SLICES)
        for each in listed["items"]:
            self._note_slice("MODIFIED", each)
        version = listed["metadata"]["resourceVersion"]
        with contextlib.closing(self._kube.stream(SLICES, {"watch": "1", "resourceVersion": version})) as answer:
            for line in answer:
                event = json.loads(line)
                self._note_slice(event["type"], event["object"])

    def _note_slice(self, kind: str, it: dict[str, Any]) -> None:
        endpoints = it.get("endpoints") or []
        ready = kind != "DELETED" and any(each["conditions"]["ready"] for each in endpoints)
        if kind != "BOOKMARK":
            self._note(it["metadata"]["labels"]["kubernetes.io/service-name"], ready=ready)

    def _look(self) -> None:
        for row in json.loads(self._system.fetch("/status")[1])["services"]:
            self._note(row["name"], pid=row["pid"])

    def _note(self, name: str, **found: Any) -> None:
        with self._noting:
            seen = self._seen.setdefault(name, [])
            last = seen[-1] if seen else Moment(0.0, None, 0)
            now = replace(last, at=time.monotonic(), **found)
            if not seen or (last.ready, last.pid) != (now.ready, now.pid):
                seen.append(now)

    def after_s(self, name: str, since: float, wanted: Callable[[Moment], bool], within_s: float, what: str) -> float:
        """Seconds from `since` (monotonic) to the first moment that was wanted; waits for it."""

        def found() -> float | None:
            seen = [each.at for each in list(self._seen.get(name, ())) if each.at >= since and wanted(each)]
            return seen[0] - since if seen else None

        return eventually(found, max(1.0, since + within_s - time.monotonic()), f"{name} {what}")

    def withdrawn_s(self, name: str, since: float, within_s: float) -> float:
        """Seconds until the endpoint was out."""
        return self.after_s(name, since, lambda seen: seen.ready is False, within_s, "to be withdrawn")

    def serves_s(self, name: str, since: float, before: int, within_s: float) -> float:
        """Seconds until another process than `before` took requests."""
        gone = 0, before
        return self.after_s(
            name, since, lambda seen: seen.ready is True and seen.pid not in gone, within_s, "to be back"
        )

    def back_s(self, name: str, since: float, within_s: float) -> float:
        """Seconds until the endpoint took requests."""
        return self.after_s(name, since, lambda seen: seen.ready is True, within_s, "to be back")

    def restarted_s(self, name: str, since: float, before: int, within_s: float) -> float:
        """Seconds until another process than `before` ran."""
        return self.after_s(name, since, lambda seen: seen.pid not in (0, before), within_s, "to be restarted")

    def pids(self, name: str) -> list[int]:
        """Every process that was seen of a service, in order."""
        return list(dict.fromkeys(each.pid for each in self._seen.get(name, ()) if each.pid))

    def end(self) -> None:
        self._over.set()
        self._kube.close()
        for each in self._threads:
            each.join(10)


@contextlib.contextmanager
def timeline(system: System, *names: str) -> Iterator[Timeline]:
    """A timeline that has seen the services serve, and so misses nothing from now on."""
    begun, found = time.monotonic(), Timeline(system)
    try:
        for name in names:
            found.back_s(name, begun, 20)
        yield found
    finally:
        found.end()


class Stopwatch:
    """Seconds since something was done, each taken as a figure."""

    def __init__(self, figure: Figure) -> None:
        self._figure, self.since = figure, time.monotonic()

    def when(self, name: str, look: Callable[[], object]) -> Any:
        """Waits for something; how long it took since the start is the figure of that name."""
        found = look()
        self._figure.add(name, time.monotonic() - self.since)
        return found
