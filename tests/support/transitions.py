"""A record of every edition of some objects, as watches give them: nothing that lasts a moment only is missed.

An embedded API that was killed has forgotten its history, so the sidecar's log, which has each change, is read as well.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import urllib3

from metal_supervisor.cluster.kube import MERGE, Kube, KubeError
from metal_supervisor.spec.processes import State
from tests.support.system import ISVC, SLICES, System, eventually, kill

Object = dict[str, Any]
MARK = "test/mark"


class Transitions(threading.Thread):
    """Follows the objects of one path from now on, through restarts of the API. `told`: what matters of an object."""

    def __init__(self, system: System, path: str, told: Callable[[Object], str]) -> None:
        super().__init__(name=f"transitions {path}", daemon=True)
        self._path, self._told, self._over = path, told, threading.Event()
        self._kube = Kube(system.kubeconfig)
        own = getattr(system.kube, "own", None)  # in a cluster of several tests, each has a namespace
        self._url = own(path) if own else path
        self._system = system
        self.seen: dict[str, list[tuple[str, str]]] = {}
        """Name -> (resourceVersion, what matters) of each edition."""
        self.gaps = 0
        """How often editions may have been missed."""
        self._marks: dict[str, str] = {}
        self._list()
        self.start()

    def _list(self) -> None:
        listed = self._kube.request("GET", self._url)
        self._version = listed["metadata"]["resourceVersion"]
        for each in listed["items"]:
            self._note(each, self._told(each))

    def run(self) -> None:
        while not self._over.is_set():
            with contextlib.suppress(KubeError, OSError, ValueError, urllib3.exceptions.HTTPError):
                self._follow({"watch": "true", "resourceVersion": self._version, "timeoutSeconds": 60})
            self._over.wait(0.05)

    def _follow(self, query: Mapping[str, Any]) -> None:
        with contextlib.closing(self._kube.stream(self._url, query)) as answer:
            buffer = b""
            while chunk := answer.read1():
                *lines, buffer = (buffer + chunk).split(b"\n")
                for line in filter(None, lines):
                    self._heard(json.loads(line))

    def _heard(self, event: Object) -> None:
        item = event["object"]
        if event["type"] == "ERROR":
            self.gaps += 1
            self._list()
            return
        self._version = item["metadata"]["resourceVersion"]
        self._note(item, "gone" if event["type"] == "DELETED" else self._told(item))

    def _note(self, item: Object, told: str) -> None:
        meta = item["metadata"]
        self.seen.setdefault(meta["name"], []).append((meta["resourceVersion"], told))
        self._marks[meta["name"]] = (meta.get("annotations") or {}).get(MARK, "")

    def end(self) -> Mapping[str, list[tuple[str, str]]]:
        """What was seen of each object, up to this very moment: a mark of each is waited for."""
        mark = str(time.monotonic())
        for name in self.seen:
            body = {"metadata": {"annotations": {MARK: mark}}}
            self._system.kube.request("PATCH", f"{self._path}/{name}", {"fieldManager": "test"}, body, MERGE)
        eventually(lambda: all(self._marks.get(name) == mark for name in self.seen), 20, "the marks")
        self._over.set()
        self._kube.close()
        self.join(10)
        return self.seen


def readiness(item: Object) -> str:
    """What a slice tells of its endpoints."""
    return " ".join(str(each["conditions"]["ready"]) for each in item.get("endpoints") or [])


def phase(item: Object) -> str:
    """What an InferenceService tells of itself."""
    status = item.get("status") or {}
    found = [each for each in status.get("conditions") or [] if each["type"] == "MetalReady"]
    return " ".join([str(status.get("phase")), *(f"{each['status']} {each['reason']}" for each in found)])


@contextlib.contextmanager
def unmoved(system: System, gaps: bool = False) -> Iterator[None]:
    """Asserts that no edition of any slice or service, meanwhile, said anything else than Ready.

    `gaps`: whether the API may have forgotten some of its history.
    """
    log = system.state / "log" / "sidecar.log"
    before = log.stat().st_size
    slices, services = Transitions(system, SLICES, readiness), Transitions(system, ISVC, phase)
    yield
    for seen, good in ((slices.end(), "True"), (services.end(), "Ready True Serving")):
        assert seen and all(told == good for each in seen.values() for _, told in each), dict(seen)
    assert gaps or not slices.gaps + services.gaps
    lines = [json.loads(line) for line in log.read_bytes()[before:].splitlines()]
    reports = [line for line in lines if line["msg"] == "service"]
    assert reports and all(line["phase"] == "Ready" for line in reports), reports


def supervisord_killed(system: System, names: list[str], times: int = 3) -> None:
    """Kills supervisord with -9, again and again; each time everything is back before the next."""
    engines = {name: system.pid(name) for name in names}
    assert all(engines.values())
    for _ in range(times):
        old, sidecar = system.supervisord_pid(), system.own_pid("sidecar")
        kill(old)
        eventually(lambda before=old: system.supervisord_pid() not in (0, before) and system.rpc.answers(), 30, "it")
        eventually(lambda before=sidecar: system.own_pid("sidecar") not in (0, before), 30, "the sidecar")
        eventually(lambda: {name: system.pid(name) for name in names} == engines, 30, "the stand-ins")
        eventually(lambda: all(row.state is State.RUNNING for row in system.rpc.table().values()), 30, "all to run")
        eventually(lambda: all(system.observe(name).get("ready") for name in names), 30, "each to be found ready")
        eventually(lambda: system.health() == (200, {"status": "ok"}), 30, "health")
