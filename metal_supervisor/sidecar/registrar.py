"""What goes to the cluster: Service, EndpointSlice, status, Events.

One thread writes, level-triggered: it is given what the cluster should show of every service and keeps at
it until it does. Bad news goes first, because a withdrawn endpoint saves requests and a new one can wait.
A write that would change nothing is not sent; an API that is down is tried again every second or so, and
nothing that happens here ever delays a probe.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone

from metal_supervisor import __version__
from metal_supervisor.boundary.kube import MERGE, Kube, KubeError
from metal_supervisor.core import manifests
from metal_supervisor.core.report import Happening, Report
from metal_supervisor.core.resources import GROUP, VERSION
from metal_supervisor.core.types import Json, Key, ModelFile, Record

HEARTBEAT_S = 60.0
RESYNC_S = 600.0
CONFLICT_RETRY_S = 30.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 1.5
MOST_EVENTS = 50
log = logging.getLogger("sidecar")


@dataclass(frozen=True)
class Wanted:
    """What the cluster should show of one service."""

    record: Record
    report: Report
    address: str
    """The advertised IP address."""
    address_problem: str
    """Why it cannot be advertised, "" if it can."""


@dataclass(frozen=True)
class WantedModel:
    """What the cluster should show of one Model."""

    uid: str
    generation: int
    source: str
    file: ModelFile


@dataclass
class _Done:
    """What the cluster was last made to show of one service, of this very uid. None: unknown."""

    uid: str = ""
    service: Json | None = None
    slice: Json | None = None
    slice_name: str = ""
    status: Json | None = None
    heartbeat_at: float = 0.0
    heartbeat: str = ""
    withdrawn: str = ""
    problem: str = ""
    blocked_until: float = 0.0
    """Monotonic time before which a conflict is not looked at again."""


@dataclass(frozen=True)
class Published:
    """What the rest of the sidecar wants to know of a service's publication."""

    withdrawn: str = ""
    """The withdraw token carried out."""
    problem: str = ""


@dataclass
class _Trouble:
    error: str = ""
    since: float = 0.0


def _now() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def _now_micro() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _custom(namespace: str, plural: str, name: str) -> str:
    return f"/apis/{GROUP}/{VERSION}/namespaces/{namespace}/{plural}/{name}"


def _slice_path(namespace: str, name: str) -> str:
    return f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices/{name}"


class Registrar(threading.Thread):
    """Keeps the cluster's objects in line with what it is given."""

    def __init__(self, kube: Kube, node: str, on_change: Callable[[], None]) -> None:
        super().__init__(name="registrar", daemon=True)
        self._kube, self._node, self._on_change = kube, node, on_change
        self._manager = f"metal/{node}"
        self._wake = threading.Event()
        self._lock = threading.Lock()
        self._wanted: Mapping[Key, Wanted] = {}
        self._models: Mapping[Key, WantedModel] = {}
        self._events: list[tuple[Record, Happening]] = []
        self._done: dict[Key, _Done] = {}
        self._model_done: dict[tuple[str, str, str], Json] = {}
        self._resync_at = 0.0
        self._settled = threading.Event()
        self._trouble = _Trouble()
        self._pass_failed = False

    # ── what the sidecar says and asks ───────────────────────────────────────────────────────────

    def want(self, wanted: Mapping[Key, Wanted], models: Mapping[Key, WantedModel]) -> None:
        """What the cluster should show from now on."""
        with self._lock:
            if wanted == self._wanted and models == self._models:
                return
            self._wanted, self._models = wanted, models
            self._settled.clear()
        self._wake.set()

    def tell(self, record: Record, what: Happening) -> None:
        """Posts an Event, unless too many are waiting for an API that is down."""
        with self._lock:
            if len(self._events) < MOST_EVENTS:
                self._events.append((record, what))
        self._wake.set()

    def published(self, key: Key) -> Published:
        """How far the publication of a service has come."""
        done = self._done.get(key)
        return Published(done.withdrawn, done.problem) if done else Published()

    @property
    def trouble(self) -> tuple[str, float]:
        """(why the cluster cannot be written to, Unix time since when); ("", 0) when it can."""
        return self._trouble.error, self._trouble.since

    def flush(self, timeout_s: float) -> bool:
        """Waits until everything wanted is shown; False if that took too long."""
        return self._settled.wait(timeout_s)

    # ── the thread ───────────────────────────────────────────────────────────────────────────────

    def run(self) -> None:
        failures = 0
        while True:
            self._wake.clear()
            self._one_pass()
            failures = failures + 1 if self._pass_failed else 0
            if failures:
                pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(failures, 8)) * random.uniform(0.5, 1.0)
                time.sleep(pause_s)  # a wake must not turn an outage into a hot loop
            else:
                self._wake.wait(self._pause_s())

    def _pause_s(self) -> float:
        now = time.monotonic()
        due = [self._resync_at, *(done.heartbeat_at + HEARTBEAT_S for done in self._done.values() if done.slice)]
        due += [done.blocked_until for done in self._done.values() if done.blocked_until > now]
        return max(0.05, min(due) - now)

    def _one_pass(self) -> None:
        with self._lock:
            wanted, models = self._wanted, self._models
            events, self._events = self._events, []
        self._pass_failed = False
        if time.monotonic() >= self._resync_at:
            self._attempt(None, lambda: self._resync(wanted))
        # Withdrawals before announcements, everything that carries traffic before what is only looked at.
        for key, want in sorted(wanted.items(), key=lambda item: item[1].report.ready):
            self._attempt(key, lambda want=want: self._endpoints(want))  # type: ignore[misc]
        for key in self._done.keys() - wanted.keys():
            self._attempt(key, lambda key=key: self._forget(key))  # type: ignore[misc]
        for key, want in wanted.items():
            self._attempt(None, lambda key=key, want=want: self._status(key, want))  # type: ignore[misc]
        for key, model in models.items():
            self._attempt(None, lambda key=key, model=model: self._model(key, model))  # type: ignore[misc]
        current = {(*key, model.uid) for key, model in models.items()}
        self._model_done = {key: body for key, body in self._model_done.items() if key in current}
        for record, what in events:
            if not self._attempt(None, lambda record=record, what=what: self._event(record, what)):  # type: ignore[misc]
                self.tell(record, what)
        if not self._pass_failed:
            self._clear_trouble()
            with self._lock:
                if wanted is self._wanted:
                    self._settled.set()

    def _attempt(self, key: Key | None, action: Callable[[], None]) -> bool:
        """Runs one write; False if it has to be tried again because the API could not be had."""
        if self._pass_failed:
            return False
        try:
            action()
        except KubeError as error:
            if error.code in (400, 409, 422):
                self._problem(key, str(error))
                return True
            if error.code == 404:
                return True  # the object is gone, or its namespace is; the next list says what else is
            self._pass_failed = True
            if error.code in (401, 403):
                log.warning("the cluster refuses a write", extra={"error": str(error)})
            if self._trouble.error != str(error):
                self._trouble = _Trouble(str(error), self._trouble.since or time.time())
                self._on_change()
            return False
        return True

    def _problem(self, key: Key | None, text: str) -> None:
        log.warning("the cluster does not accept an object", extra={"service": ".".join(key or ()), "error": text})
        if key is not None:
            done = self._done.setdefault(key, _Done())
            done.blocked_until = time.monotonic() + CONFLICT_RETRY_S
            if done.problem != text:
                done.problem = text
                self._on_change()

    def _clear_trouble(self) -> None:
        if self._trouble.error:
            self._trouble = _Trouble()
            self._on_change()

    # ── one service ──────────────────────────────────────────────────────────────────────────────

    def _done_of(self, record: Record) -> _Done:
        """What was done for this very object: one that was deleted and made again starts from nothing."""
        done = self._done.get(record.key)
        if done is None or done.uid != record.uid:
            done = self._done[record.key] = _Done(uid=record.uid)
        return done

    def _endpoints(self, want: Wanted) -> None:
        done, token, record = self._done_of(want.record), want.record.withdraw, want.record
        if time.monotonic() < done.blocked_until and done.problem:
            self._withdrawn(done, token)
            return
        problem = want.address_problem if want.report.wants_slice else ""
        if want.report.wants_service and not problem:
            problem = self._service(want, done)
        if want.report.wants_slice and not problem:
            self._slice(want, done)
        elif done.slice is not None or not done.slice_name:
            self._drop_slice(record, done)
        if problem != done.problem:
            done.problem = problem
            self._on_change()
        self._withdrawn(done, token)

    def _withdrawn(self, done: _Done, token: str) -> None:
        if token != done.withdrawn:
            done.withdrawn = token
            self._on_change()

    def _service(self, want: Wanted, done: _Done) -> str:
        """Writes the Service; returns what is in the way, e.g. somebody else's of the same name."""
        endpoint = want.record.endpoint
        assert endpoint is not None
        body = manifests.service_object(want.record, endpoint)
        if body == done.service:
            return ""
        path = f"/api/v1/namespaces/{want.record.namespace}/services"
        if done.service is None and (foreign := self._foreign(f"{path}/{endpoint.service}", want.record)):
            done.blocked_until = time.monotonic() + CONFLICT_RETRY_S
            return foreign
        self._kube.apply(f"{path}/{endpoint.service}", body, manifests.MANAGED_BY, force=True)
        done.service = body
        return ""

    def _foreign(self, path: str, record: Record) -> str:
        """Why an existing Service of the name must not be touched, "" if it is ours or absent."""
        try:
            found = self._kube.request("GET", path)
        except KubeError as error:
            if error.code == 404:
                return ""
            raise
        labels = found["metadata"].get("labels") or {}
        ours = labels.get("app.kubernetes.io/managed-by") == manifests.MANAGED_BY
        theirs = labels.get("llmkube.ai/managed-by") == "metal-agent"
        name, owner = found["metadata"]["name"], labels.get("llmkube.ai/inference-service", record.name)
        if (ours or theirs) and not found.get("spec", {}).get("selector") and owner == record.name[: len(owner)]:
            return ""
        return f'Service "{name}" exists and is not ours; rename the InferenceService, or delete the Service'

    def _slice(self, want: Wanted, done: _Done) -> None:
        endpoint = want.record.endpoint
        assert endpoint is not None
        now = time.monotonic()
        due = now - done.heartbeat_at >= HEARTBEAT_S
        heartbeat = _now() if due else done.heartbeat
        body = manifests.slice_object(
            want.record, endpoint, want.report, self._node, want.address, heartbeat, __version__
        )
        if body == done.slice:
            return
        name = body["metadata"]["name"]
        if done.slice is not None and done.slice["addressType"] != body["addressType"]:
            self._delete(_slice_path(want.record.namespace, name))  # the address type of a slice cannot change
        self._kube.apply(_slice_path(want.record.namespace, name), body, self._manager, force=True)
        done.slice, done.slice_name = body, name
        if due:
            done.heartbeat_at, done.heartbeat = now, heartbeat

    def _drop_slice(self, record: Record, done: _Done) -> None:
        """Takes this Mac's slice out; the Service stays, and with it its address."""
        if record.endpoint is None:
            return
        name = manifests.slice_name(record.endpoint.service, self._node)
        self._delete(_slice_path(record.namespace, name))
        done.slice, done.slice_name, done.heartbeat_at = None, name, 0.0

    def _delete(self, path: str) -> None:
        try:
            self._kube.request("DELETE", path)
        except KubeError as error:
            if error.code != 404:
                raise

    def _forget(self, key: Key) -> None:
        done = self._done[key]
        if done.slice is not None:
            self._delete(_slice_path(key[0], done.slice_name))
        del self._done[key]

    def _status(self, key: Key, want: Wanted) -> None:
        if want.record.verdict.standing.value == "removing":
            return
        done = self._done_of(want.record)
        path = _custom(*_split(key, "inferenceservices"))
        if done.status is None:
            done.status = self._kube.request("GET", path).get("status") or {}
        body = manifests.status(want.record, want.report, done.status, _now())
        if body != done.status:
            self._apply_status(path, "InferenceService", key, body)
            done.status = body

    def _model(self, key: Key, model: WantedModel) -> None:
        path = _custom(*_split(key, "models"))
        before = self._model_done.get((*key, model.uid))
        if before is None:
            before = self._kube.request("GET", path).get("status") or {}
        body = manifests.model_status(model.file, model.source, model.generation, before, _now())
        if body != before:
            self._apply_status(path, "Model", key, body)
        self._model_done[(*key, model.uid)] = body

    def _apply_status(self, path: str, kind: str, key: Key, body: Json) -> None:
        whole = {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": kind,
            "metadata": {"namespace": key[0], "name": key[1]},
            "status": body,
        }
        self._kube.apply(path + "/status", whole, self._manager)

    def _event(self, record: Record, what: Happening) -> None:
        body = manifests.event_object(record, what, self._node, _now_micro())
        path = f"/apis/events.k8s.io/v1/namespaces/{record.namespace}/events"
        try:
            self._kube.request("POST", path, None, body)
        except KubeError as error:
            if not error.conflict:
                raise
            named = f"{path}/{body['metadata']['name']}"
            count = (self._kube.request("GET", named).get("series") or {}).get("count", 1)
            series = {"series": {"count": count + 1, "lastObservedTime": _now_micro()}}
            self._kube.request("PATCH", named, None, series, MERGE)

    # ── now and then ─────────────────────────────────────────────────────────────────────────────

    def _resync(self, wanted: Mapping[Key, Wanted]) -> None:
        """Finds slices of ours that nobody wants any more, and looks at everything anew."""
        names = {
            (want.record.namespace, manifests.slice_name(want.record.endpoint.service, self._node))
            for want in wanted.values()
            if want.report.wants_slice and want.record.endpoint
        }
        for namespace in _namespaces(wanted):
            path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
            found = self._kube.request("GET", path, {"labelSelector": f"metal-supervisor.io/node={self._node}"})
            for item in found.get("items", []):
                if (namespace, item["metadata"]["name"]) not in names:
                    self._delete(_slice_path(namespace, item["metadata"]["name"]))
        for done in self._done.values():
            done.service = done.slice = done.status = None
        self._model_done.clear()
        self._resync_at = time.monotonic() + RESYNC_S * random.uniform(0.9, 1.1)


def _split(key: Key, plural: str) -> tuple[str, str, str]:
    return key[0], plural, key[1]


def _namespaces(wanted: Mapping[Key, Wanted]) -> Iterable[str]:
    return sorted({want.record.namespace for want in wanted.values()})
