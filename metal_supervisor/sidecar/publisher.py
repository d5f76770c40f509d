"""Writer of Services, EndpointSlices and Events.

Everything is server-side apply of our own fields. What was written is remembered per object and uid, so that a write
which would change nothing is not sent. A Service that another manager owns is never touched.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from metal_supervisor import __version__
from metal_supervisor.cluster import manifests
from metal_supervisor.cluster.answers import now_micro
from metal_supervisor.cluster.kube import MERGE, Kube, KubeError, find
from metal_supervisor.cluster.manifests import api_path
from metal_supervisor.cluster.report import Happening
from metal_supervisor.host import machine
from metal_supervisor.placement import leases
from metal_supervisor.sidecar.statuses import NEVER, Statuses, WantedStatus, now_seconds
from metal_supervisor.spec.record import Record
from metal_supervisor.spec.resources import service_name
from metal_supervisor.spec.types import Json, Key
from metal_supervisor.spec.withdrawal import NO_WITHDRAWAL, WithdrawalToken

HEARTBEAT_S = 60.0
SERVICE_S = 600.0
FIRST_RESYNC_S = 30.0
"""Leaves the controller time: without its records, what still runs looks like something that is not wanted."""
RESYNC_S = 1800.0
CONFLICT_RETRY_S = 30.0
RELAY_AGAIN_S = 1.0
"""Pause between two looks at a Service that still has the selector of LLMKube's relay."""
LONG_AGO = float("-inf")
"""Monotonic time of what was never done: 0 is when the Mac booted, perhaps a moment ago."""
log = logging.getLogger("sidecar")


@dataclass(frozen=True)
class Published:
    """Progress of a service's publication, for the rest of the sidecar."""

    withdrawn: WithdrawalToken = NO_WITHDRAWAL
    """Token of the withdrawal that was carried out."""
    problem: str = ""
    out: bool = False
    """The cluster has accepted that no traffic is to come here."""
    fronted: bool = False
    """What the cluster names is the gateway: there is nothing to withdraw before the engine ends."""


@dataclass
class _Done:
    """The objects last written for one service with this uid. None: unknown."""

    uid: str = ""
    want: WantedStatus | None = None
    """All of it is written as this wants it; None while something is not."""
    service: Json | None = None
    service_version: str = ""
    """resourceVersion of the Service as last written."""
    service_fails: bool = False
    """The latest write of the Service, or look at it, did not come to its end."""
    service_at: float = LONG_AGO
    """Monotonic time at which the Service was last written or looked at."""
    slice: Json | None = None
    """The slice as last accepted."""
    slice_fails: bool = False
    """The latest write of the slice did not come to its end; it may have taken effect all the same."""
    path: str = ""
    """API path of the slice, from the first attempt to write it until it is deleted."""
    there: bool = False
    """A slice was found, or accepted, and not deleted since."""
    gone: bool = False
    """The slice was deleted, or looked for in vain, and not written since."""
    legacy_gone: bool = False
    """Leftovers of LLMKube's agent under this name have been looked for."""
    heartbeat_at: float = LONG_AGO
    heartbeat: str = ""
    published: Published = Published()
    relay_at: float = NEVER
    """Monotonic time of the next look at a Service with the selector of LLMKube's relay, NEVER if it has none."""
    blocked_until: float = 0.0
    """Monotonic time before which a conflict is not checked again."""


class Publisher:
    """Writes the desired objects to the cluster. All methods may raise KubeError, and are idempotent."""

    def __init__(
        self, kube: Kube, node: str, on_change: Callable[[], None], beside_others: bool = True, namespace: str = ""
    ) -> None:
        """`beside_others`: other Macs, and LLMKube's own agent, may have objects here.

        `namespace`: the only one, if set.
        """
        self._namespace = namespace
        self._kube, self._node, self._on_change = kube, node, on_change
        self._manager = manifests.field_manager(node)
        self._beside_others = beside_others
        self._done: dict[Key, _Done] = {}
        self.statuses = Statuses(kube)
        self.resync_at = float("inf")
        """Monotonic time of the next resync; infinite until it is known what is wanted."""
        self._resynced = False
        """At least one resync has been made."""

    def published(self, key: Key) -> Published:
        """Progress of the publication of a service."""
        done = self._done.get(key)
        return done.published if done else Published()

    def due_at(self) -> float:
        """Monotonic time of the next write that is due without any change."""
        now, due = time.monotonic(), [self.resync_at, self.statuses.due_at()]
        heartbeat_s, service_s = self._heartbeat_every_s(), self._service_every_s()
        for done in self._done.values():
            if done.blocked_until > now:  # its heartbeat waits, too
                due.append(done.blocked_until)
            elif done.slice:
                due += done.heartbeat_at + heartbeat_s, done.relay_at
                if not self._beside_others:  # else each heartbeat is in time for the look at its Service
                    due.append(done.service_at + service_s)
        return min(due)

    def begin(self) -> bool:
        """Schedule the first resync, now that it is known what is wanted; False if that was done before."""
        if self.resync_at < float("inf"):
            return False
        self.resync_at = time.monotonic() + FIRST_RESYNC_S
        return True

    def refused(self, key: Key, text: str, pause_s: float) -> None:
        """Record that the cluster rejects a service's objects; they are not written again for `pause_s`."""
        done = self._done[key]
        done.blocked_until = time.monotonic() + pause_s
        self._tell(done, replace(done.published, problem=text))

    def forbidden(self, key: Key, text: str) -> None:
        """Record that a service's objects may not be written; what the cluster has already is still announced."""
        done = self._done[key]
        if done.service is None or done.slice is None:
            self._tell(done, replace(done.published, problem=text))

    def unwanted(self, wanted: Mapping[Key, WantedStatus]) -> set[Key]:
        """Published services that are no longer wanted."""
        return self._done.keys() - wanted.keys()

    def _done_of(self, record: Record) -> _Done:
        """Record of the writes for this uid: an object that was deleted and created again starts from nothing."""
        done = self._done.get(record.key)
        if done is None or done.uid != record.uid:
            done = self._done[record.key] = _Done(uid=record.uid)
        return done

    def rests(self, want: WantedStatus) -> bool:
        """True if `endpoints` would find nothing to do for this very object."""
        done = self._done.get(want.record.key)
        return done is not None and done.want is want and not self._is_due(done)

    def endpoints(self, want: WantedStatus) -> None:
        """Reconcile the Service and the EndpointSlice of a service; withdraw its endpoint if its record says so."""
        done, record = self._done_of(want.record), want.record
        done.want = None
        self._take_out(want, done)
        if time.monotonic() < done.blocked_until and done.published.problem:
            if done.slice is not None and want.address and done.slice["endpoints"][0]["addresses"] != [want.address]:
                self._drop_slice(record, done)  # nothing is reached where it points, and no better one is accepted
            self._tell(done, replace(done.published, withdrawn=record.withdraw))
            return
        problem = want.address_problem if want.report.wants_slice else ""
        if want.report.wants_service and not problem:
            done.service_fails = True
            problem = self._service(want, done)
            done.service_fails = False
        if want.report.wants_slice and not problem:
            problem = self._slice(want, done)
        else:
            self._drop_slice(record, done)
        self._tell(done, replace(done.published, problem=problem, withdrawn=record.withdraw))
        done.want = want if done.slice is not None and not problem else None

    def _is_due(self, done: _Done) -> bool:
        """True if the heartbeat of a slice is due, or a look at its Service."""
        now = time.monotonic()
        if now - done.heartbeat_at >= self._heartbeat_every_s() or now >= done.relay_at:
            return True
        return now - done.service_at >= self._service_every_s()

    def _service_every_s(self) -> float:
        """It may have been deleted, or changed: one look a minute, or one at each of many Services in ten."""
        return min(SERVICE_S, HEARTBEAT_S * len(self._done))

    def _heartbeat_every_s(self) -> float:
        """Seconds between heartbeats. On the embedded API they have no reader, and only restore deleted slices."""
        return HEARTBEAT_S if self._beside_others else self._service_every_s()

    def _take_out(self, want: WantedStatus, done: _Done) -> None:
        """Withdraw the endpoint if nothing serves, before and regardless of the write of the Service."""
        if not want.report.wants_slice:
            self._drop_slice(want.record, done)
            return
        if want.report.ready or want.address_problem:
            return
        if done.service_fails and not (done.path or done.gone):  # none was written yet; an earlier sidecar may have
            found = find(self._kube, self._slice_path(want.record))
            done.there = found is not None and not self._other_owner(found, want.record)
            if not done.there:
                done.gone, done.published = True, replace(done.published, out=True)
        blocked = not done.there and time.monotonic() < done.blocked_until  # none was ever accepted
        if (done.path or done.there) and not blocked:
            self._slice(want, done)

    def _tell(self, done: _Done, published: Published) -> None:
        """Replace what is told of a publication; notify of a change."""
        if published != done.published:
            done.published = published
            self._on_change()

    def _service(self, want: WantedStatus, done: _Done) -> str:
        """Write the Service. Returns the reason why it cannot be written, e.g. a name conflict, or ""."""
        endpoint = want.record.endpoint
        assert endpoint is not None
        body = manifests.service_object(want.record, endpoint)
        due = time.monotonic() - done.service_at >= self._service_every_s()
        if body == done.service and not due:
            return ""
        path = f"/api/v1/namespaces/{want.record.namespace}/services/{endpoint.service}"
        look = due or done.service is None or done.service["spec"]["ports"] != body["spec"]["ports"]
        found = find(self._kube, path) if look else None
        if found and (foreign := self._foreign(found, want.record, want.address)):
            done.blocked_until = time.monotonic() + CONFLICT_RETRY_S
            return foreign
        done.relay_at = NEVER
        if found and found["spec"].get("selector"):
            if done.slice is None or self._relay_serves(want.record.namespace, endpoint.service):
                done.service, done.relay_at = None, time.monotonic() + RELAY_AGAIN_S
                return ""
            found = self._leave_relay(path, found)
        if found is None or body != done.service or found["metadata"].get("resourceVersion") != done.service_version:
            done.service = None  # until it is written: a write that fails may have taken effect
            if found:
                self._free_port_name(path, found, body)
            found = self._kube.apply(path, body, manifests.MANAGED_BY, force=True)
        done.service, done.service_at = body, time.monotonic()
        done.service_version = found["metadata"].get("resourceVersion", "")
        return ""

    def _free_port_name(self, path: str, found: Json, body: Json) -> None:
        """Remove another writer's port of the same name: an apply would keep it, and names of ports must be unique.

        LLMKube's agent made its Services with port 8080, whatever the InferenceService says.
        """
        (ours,) = body["spec"]["ports"]
        others = [each for each in found.get("spec", {}).get("ports") or [] if each["port"] != ours["port"]]
        kept = [each for each in others if each.get("name") != ours["name"]]
        if kept != others:
            change = {**body, "metadata": {**body["metadata"], "resourceVersion": found["metadata"]["resourceVersion"]}}
            change["spec"] = {**body["spec"], "ports": [ours, *kept]}
            self._kube.request("PATCH", path, {"fieldManager": manifests.MANAGED_BY}, change, MERGE)

    def _foreign(self, found: Json, record: Record, address: str) -> str:
        """Reason why an existing Service of the name must not be touched, or "" if it is ours."""
        labels = found["metadata"].get("labels") or {}
        ours = labels.get("app.kubernetes.io/managed-by") == manifests.MANAGED_BY
        theirs = labels.get("llmkube.ai/managed-by") == "metal-agent"
        name, owner = found["metadata"]["name"], labels.get("llmkube.ai/inference-service", record.name)
        if manifests.is_relayed(found, record):
            return self._agent_serves(record, name, address) if found["spec"].get("selector") else ""
        alike = (ours or theirs) and not found.get("spec", {}).get("selector")
        # `a.b` and `a-b` need the same one: it is left to the other as long as a Mac serves that.
        if alike and (owner == record.name or (ours and not self._is_served(record.namespace, name, owner))):
            return ""
        text = f'Service "{name}" exists and is not ours; rename the InferenceService, or delete the Service'
        return f"EndpointNameConflict: {text}"

    def _agent_serves(self, record: Record, service: str, address: str) -> str:
        """Reason why LLMKube's relay must be left in place: an agent on another Mac is behind it; "" if none is."""
        found = find(self._kube, api_path("endpointslices", record.namespace, manifests.agent_name(service)))
        now = time.time() + self._kube.clock_offset_s
        if found is None or not manifests.fresh_elsewhere(found, now, machine.own_addresses(address)):
            return ""
        text = f'LLMKube\'s agent on another Mac serves Service "{service}" through the relay; stop that agent'
        return f"EndpointNameConflict: {text}, or keep this Mac from serving it with spec.nodeSelector"

    def _relay_serves(self, namespace: str, service: str) -> bool:
        """True if the relay's pods are ready. The operator removes them once it has seen this Mac's heartbeat."""
        items = self._slices_in(namespace, manifests.of_selector(service))
        conditions = [each.get("conditions") or {} for item in items for each in item.get("endpoints") or []]
        return any(each.get("ready") is not False for each in conditions)

    def _leave_relay(self, path: str, found: Json) -> Json:
        """Clear the selector of a Service that LLMKube's operator adopted for its relay, and return the Service.

        Kubernetes maintains nothing of a Service without a selector, so what it made for the relay is deleted.
        """
        change = {"metadata": {"resourceVersion": found["metadata"]["resourceVersion"]}, "spec": {"selector": None}}
        cleared = self._kube.request("PATCH", path, {"fieldManager": manifests.MANAGED_BY}, change, MERGE)
        namespace, name = found["metadata"]["namespace"], found["metadata"]["name"]
        slices = [item["metadata"]["name"] for item in self._slices_in(namespace, manifests.of_selector(name))]
        left = [f"/api/v1/namespaces/{namespace}/endpoints/{name}"]
        for each in (*left, *(api_path("endpointslices", namespace, each) for each in slices)):
            try:
                self._delete(each)
            except KubeError as error:
                if error.code != 403:
                    raise
                log.warning("what another agent may have left stays", extra={"error": str(error)})
        log.info("the Service of a relay leads to this Mac", extra={"object": path})
        return cleared

    def _is_served(self, namespace: str, service: str, owner: str) -> bool:
        """True if an InferenceService has an EndpointSlice, of any Mac, for a Service."""
        selector = f"kubernetes.io/service-name={service},llmkube.ai/inference-service={owner}"
        return bool(self._slices_in(namespace, selector))

    def _slice(self, want: WantedStatus, done: _Done) -> str:
        """Write the slice. Returns the reason why it cannot be written, or ""."""
        endpoint = want.record.endpoint
        assert endpoint is not None
        now = time.monotonic()
        due = now - done.heartbeat_at >= self._heartbeat_every_s()
        heartbeat = now_seconds(self._kube) if due else done.heartbeat
        body = manifests.slice_object(
            want.record, endpoint, want.report, self._node, want.address, heartbeat, __version__
        )
        before, out, fronted = done.published, not want.report.ready, want.report.port != want.record.port
        if body == done.slice and not done.slice_fails:
            return ""
        path = api_path("endpointslices", want.record.namespace, body["metadata"]["name"])
        if not done.path and self._beside_others:
            found = find(self._kube, path)
            if other := self._other_owner(found, want.record):
                done.blocked_until, done.published = now + CONFLICT_RETRY_S, replace(before, out=True)
                name = body["metadata"]["name"]
                return f'EndpointNameConflict: EndpointSlice "{name}" is that of {other}; rename one of the two'
            done.there = found is not None
        done.gone, done.published = False, replace(before, out=before.out and out, fronted=before.fronted and fronted)
        done.path, done.slice_fails = path, True
        self._apply_slice(path, body)
        done.slice_fails = False
        done.slice, done.there, done.published = body, True, replace(before, out=out, fronted=fronted)
        if self._beside_others and not done.legacy_gone:
            self._reap_legacy(want.record, endpoint.service, want.address)
            done.legacy_gone = True
        if due:
            done.heartbeat_at, done.heartbeat = now, heartbeat
        return ""

    def _other_owner(self, found: Json | None, record: Record) -> str:
        """The Mac or InferenceService that has the EndpointSlice of our name, "" if it is ours or there is none.

        Names may meet: of the second replica on `mini` and the first on `mini-1`, and of `a.b` and `a-b`.
        """
        labels = (found or {"metadata": {}})["metadata"].get("labels") or {}
        node, name = labels.get(leases.NODE, self._node), labels.get("llmkube.ai/inference-service", record.name)
        if node != self._node:
            return f"the Mac {node} (--node-name)"
        return "" if name == record.name else f"InferenceService {name}"

    def _apply_slice(self, path: str, body: Json) -> None:
        """Write the slice; delete and recreate it if the address type changes, which is immutable."""
        try:
            self._kube.apply(path, body, self._manager, force=True)
        except KubeError as error:
            found = find(self._kube, path) if error.code == 422 else None
            if found is None or found.get("addressType", body["addressType"]) == body["addressType"]:
                raise
            self._delete(path)
            self._kube.apply(path, body, self._manager, force=True)

    def _reap_legacy(self, record: Record, service: str, told: str) -> None:
        """Remove what LLMKube's agent left of a service: mirrored or not, it would keep a dead address in use."""
        endpoints = f"/api/v1/namespaces/{record.namespace}/endpoints/{service}"
        names = service, manifests.agent_name(service)
        for path in (endpoints, *(api_path("endpointslices", record.namespace, name) for name in names)):
            try:
                found = self._kube.request("GET", path)
                now = time.time() + self._kube.clock_offset_s
                if manifests.left_by_agent(found, record.name, now, machine.own_addresses(told)):
                    uid = found["metadata"]["uid"]
                    self._kube.request("DELETE", path, None, {"preconditions": {"uid": uid}})
                    log.info("removed what another agent left", extra={"object": path})
            except KubeError as error:
                if error.code == 403:  # publishing must not wait for a cleanup
                    log.warning("what another agent may have left stays", extra={"error": str(error)})
                elif error.code not in (404, 409):
                    raise

    def forget_slices(self) -> None:
        """Have every slice written again: peers may have withdrawn them during a gap."""
        for done in self._done.values():
            if done.slice is not None:
                done.heartbeat_at, done.slice, done.want = LONG_AGO, None, None

    def _drop_slice(self, record: Record, done: _Done) -> None:
        """Delete this Mac's slice unless that is done; the Service stays, and keeps its cluster IP."""
        if done.gone:
            return
        if done.path:
            self._delete(done.path, done)
        else:  # one of an earlier sidecar; also of a service that has no endpoint by now
            path = self._slice_path(record)
            found = find(self._kube, path)
            if found is not None and not self._other_owner(found, record):
                self._delete(path)
        done.slice, done.path, done.there, done.gone, done.heartbeat_at = None, "", False, True, LONG_AGO
        done.published = replace(done.published, out=True)

    def _slice_path(self, record: Record) -> str:
        """API path of this Mac's slice of a service."""
        name = manifests.slice_name(service_name(record.name), self._node, record.ordinal)
        return api_path("endpointslices", record.namespace, name)

    def _delete(self, path: str, done: _Done | None = None) -> None:
        """Delete a slice. `done`: whose it is, if that is known; it is written again if it is wanted again."""
        if done is not None:
            done.slice = done.want = None  # also if the deletion fails: it may have taken effect all the same
        try:
            self._kube.request("DELETE", path)
        except KubeError as error:
            if error.code != 404:
                raise

    def forget(self, key: Key) -> None:
        """Delete a service's slice and withdraw what was written into its status."""
        done = self._done[key]
        if done.path:
            self._delete(done.path, done)
        self.statuses.forget(key)
        del self._done[key]

    def event(self, about: Record | str, what: Happening) -> None:
        """Post an Event as of `manifests.event_object`; a repeated one increments its series count."""
        body = manifests.event_object(about, what, self._node, now_micro())
        path = f"/apis/events.k8s.io/v1/namespaces/{body['metadata']['namespace']}/events"
        try:
            self._kube.request("POST", path, None, body)
        except KubeError as error:
            if not error.conflict:
                raise
            named = f"{path}/{body['metadata']['name']}"
            count = (self._kube.request("GET", named).get("series") or {}).get("count", 1)
            series = {"series": {"count": count + 1, "lastObservedTime": now_micro()}}
            self._kube.request("PATCH", named, None, series, MERGE)

    def _own_slices(self, wanted: Mapping[Key, WantedStatus]) -> list[Json]:
        """This Mac's slices in all namespaces, or in those that are wanted where its rights end there."""
        own = f"{leases.NODE}={self._node}"
        try:
            return self._slices_in(self._namespace, own)
        except KubeError as error:
            if error.code != 403:
                raise
        namespaces = sorted({want.record.namespace for want in wanted.values()})
        return [item for namespace in namespaces for item in self._slices_in(namespace, own)]

    def _slices_in(self, namespace: str, selector: str) -> list[Json]:
        found = self._kube.request("GET", api_path("endpointslices", namespace), {"labelSelector": selector})
        items: list[Json] = found.get("items", [])
        return items

    def resync(self, wanted: Mapping[Key, WantedStatus]) -> None:
        """Delete this Mac's slices that are no longer wanted, and have all else looked at again.

        A slice that is wanted is written whole with each heartbeat.
        """
        names = {
            (each.namespace, manifests.slice_name(each.endpoint.service, self._node, each.ordinal))
            for want in wanted.values()
            if want.report.wants_slice and (each := want.record).endpoint
        }
        written = {done.path: done for done in self._done.values()}
        for item in self._own_slices(wanted):
            key = item["metadata"]["namespace"], item["metadata"]["name"]
            if key not in names:
                path = api_path("endpointslices", *key)
                self._delete(path, written.get(path))
        if self._resynced:  # at first all else has just been looked at
            for done in self._done.values():
                done.service_at, done.gone = LONG_AGO, False
            self.statuses.look_anew()
        self._resynced = True
        self.resync_at = time.monotonic() + RESYNC_S * random.uniform(0.9, 1.1)
