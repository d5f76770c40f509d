"""A stand-in for LLMKube's operator, as far as metal services meet it.

It does what its controller does with a metal InferenceService: looks at the EndpointSlices of the Service's
name, judges heartbeats, counts ready addresses, and replaces the whole status by an update, preserving
conditions that it does not know. It writes whenever anything of the object changed, ours included.

Of 0.10 it has, by the names of LLMKube's sources (internal/controller, read at 0.10.1):

| behaviour                                                                            | here       |
| ------------------------------------------------------------------------------------ | ---------- |
| a Model that attestation or a source policy rejects has phase Failed, Degraded       | `_judge`   |
| a fresh `<isvc>-agent` slice with a pin: relay Deployment, Service `<isvc>` adopted   | `_relay`   |
| else a fresh slice of `<isvc>`: the Deployment goes, the Service keeps its selector   | `_relay`   |
| else the Mac is offline: a relay stays                                               | `_relay`   |
| an adopted Service keeps clusterIP and uid, and gets selector, owner, label and port  | `_adopt`   |
| acceleration (`reconcileAccelerationStatus`) is of pods alone; a Mac's stays        | not at all |
| seven reasons in schedulingStatus stay, any other becomes WaitingForMetalAgent       | `KEPT`     |

and of Kubernetes the endpoints of the relay's pods (`_endpoints`), as kube-controller-manager maintains them.
"""

from __future__ import annotations

import contextlib
import copy
import threading
import time
from datetime import datetime, timezone
from typing import Any

from metal_supervisor.cluster.kube import Kube, KubeError, find

ISVC = "/apis/inference.llmkube.dev/v1alpha1/namespaces/default/inferenceservices"
MODELS = "/apis/inference.llmkube.dev/v1alpha1/namespaces/default/models"
SLICES = "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices"
WAITING = "Waiting for the host metal-agent to fetch the model and register Endpoints"


KEPT = frozenset(
    {
        "InsufficientMemory",
        "MemoryCheckFailed",
        "EndpointNameConflict",
        "ModelSourceNotAllowed",
        "ExtraArgsRejected",
        "ServiceNameTooLong",
        "ModelDigestMismatch",
    }
)
"""Words of an agent in schedulingStatus that the operator leaves alone."""
SERVICES = "/api/v1/namespaces/default/services"
DEPLOYMENTS = "/apis/apps/v1/namespaces/default/deployments"
RELAY_ADDRESS = "10.244.0.7"
RELAY_PORT = 8080
HEARTBEAT = "llmkube.ai/agent-heartbeat"
PIN = "llmkube.ai/agent-ingress-spki"


def _now() -> datetime:
    return datetime.now(timezone.utc)


def _stamp() -> str:
    return _now().strftime("%Y-%m-%dT%H:%M:%SZ")


def snapshot(slices: list[dict[str, Any]]) -> tuple[int, tuple[str, str] | None]:
    """(ready addresses, (schedulingStatus, message) if the heartbeat is stale) by the operator's rules."""
    ready, beats = 0, []
    for each in slices:
        beats.append((each["metadata"].get("annotations") or {}).get("llmkube.ai/agent-heartbeat"))
        for endpoint in each.get("endpoints") or []:
            if (endpoint.get("conditions") or {}).get("ready") in (True, None):
                ready += len(endpoint.get("addresses") or [])
    known = [beat for beat in beats if beat is not None]
    if not known:
        return ready, None  # nothing, or an agent of old
    parsed = []
    for beat in known:
        with contextlib.suppress(ValueError):
            parsed.append(datetime.fromisoformat(beat.replace("Z", "+00:00")))
    if not parsed:
        text = f'metal-agent heartbeat unparseable (value "{known[0]}"); host may be offline'
        return 0, ("AgentHeartbeatStale", text)
    if (_now() - max(parsed)).total_seconds() > 180:
        return 0, ("AgentHeartbeatStale", f"metal-agent heartbeat stale (last seen {known[0]}); host may be offline")
    return ready, None


def phase_of(spec: dict[str, Any], ready: int, stale: tuple[str, str] | None) -> tuple[str, tuple[str, str] | None]:
    """(phase, scheduling info or None for "leave what is there")."""
    desired = 0 if spec.get("suspend") else spec.get("replicas", 1)
    if spec.get("suspend"):
        return "Suspended", None
    if ready == desired > 0:
        return "Ready", None
    if ready > 0:
        return "Progressing", None
    if desired == 0:
        return "Stopped", None
    return "Creating", stale or ("WaitingForMetalAgent", WAITING)


class Operator(threading.Thread):
    """Reconciles until told to end."""

    def __init__(self, kube: Kube, manager: str = "manager") -> None:
        """`manager`: its name as a writer, which is that of its binary."""
        super().__init__(name="operator", daemon=True)
        self._kube, self._manager = kube, manager
        self._over = threading.Event()
        self._seen: dict[str, tuple[str, str]] = {}
        self.writes = 0
        self.others: list[dict[str, Any]] = []
        """Statuses as somebody else had made them."""
        self.relays = False
        """It makes relays for agents with an ingress, which takes an API with Deployments."""
        self.alive: set[str] = set()
        """InferenceServices whose agent's ingress answers, so that the relay's pods are ready."""
        self.failures: dict[str, tuple[str, str] | None] = {}
        """Model -> (reason, message) with which it is reported as Failed, None for Ready; others are left alone."""

    def end(self) -> None:
        self._over.set()
        self.join(10)

    def run(self) -> None:
        while not self._over.wait(0.05):
            with contextlib.suppress(KubeError):
                for name, failure in self.failures.copy().items():
                    self._judge(name, failure)
                slices = self._kube.request("GET", SLICES)["items"]
                for item in self._kube.request("GET", ISVC)["items"]:
                    if self.relays:
                        self._relay(item, slices)
                    self._reconcile(item, slices)

    def _relay(self, item: dict[str, Any], slices: list[dict[str, Any]]) -> None:
        name = item["metadata"]["name"]

        def fresh(service: str, *annotations: str) -> bool:
            of = [each for each in slices if each["metadata"]["labels"].get("kubernetes.io/service-name") == service]
            return any(
                each["metadata"]["labels"].get("llmkube.ai/managed-by") == "metal-agent"
                and set(annotations) <= each["metadata"]["annotations"].keys()
                and not snapshot([each])[1]
                for each in of
            )

        deployment = f"{DEPLOYMENTS}/{name}-relay"
        there = find(self._kube, deployment)
        if fresh(f"{name}-agent", PIN):
            if there is None:
                labels = {"app": f"{name}-relay", "inference.llmkube.dev/metal-relay": "true"}
                container = {"name": "relay", "image": "router-proxy"}
                template = {"metadata": {"labels": labels}, "spec": {"containers": [container]}}
                body = {"metadata": {"name": f"{name}-relay"}, "spec": {"selector": {"matchLabels": labels}}}
                body["spec"]["template"] = template
                self._kube.request("POST", DEPLOYMENTS, None, body)
            self._adopt(item)
        elif fresh(name) and there is not None:
            self._kube.request("DELETE", deployment)
        self._endpoints(name, there is not None)

    def _adopt(self, item: dict[str, Any]) -> None:
        name, uid = item["metadata"]["name"], item["metadata"]["uid"]
        found = find(self._kube, f"{SERVICES}/{name}")
        body = copy.deepcopy(found) or {"metadata": {"name": name}, "spec": {}}
        labels = {**(body["metadata"].get("labels") or {}), "llmkube.ai/managed-by": "llmkube-controller"}
        owner = {"apiVersion": "inference.llmkube.dev/v1alpha1", "kind": "InferenceService", "name": name, "uid": uid}
        body["metadata"].update(
            labels=labels, ownerReferences=[{**owner, "controller": True, "blockOwnerDeletion": True}]
        )
        port = (item["spec"].get("endpoint") or {}).get("port", 8080)
        body["spec"] |= {
            "selector": {"app": f"{name}-relay", "inference.llmkube.dev/metal-relay": "true"},
            "ports": [{"name": "http", "port": port, "targetPort": RELAY_PORT, "protocol": "TCP"}],
        }
        if found is None:
            self._kube.request("POST", SERVICES, None, body)
        elif found["spec"].get("selector") != body["spec"]["selector"] or found["metadata"]["labels"] != labels:
            self._kube.request("PUT", f"{SERVICES}/{name}", {"fieldManager": self._manager}, body)

    def _endpoints(self, name: str, pods: bool) -> None:
        service, path = find(self._kube, f"{SERVICES}/{name}"), f"{SLICES}/{name}-relay0"
        if service is None or not service["spec"].get("selector"):
            return  # kube-controller-manager leaves what it has made
        conditions = {"ready": name in self.alive}
        body: dict[str, Any] = {
            "metadata": {
                "name": f"{name}-relay0",
                "labels": {
                    "kubernetes.io/service-name": name,
                    "endpointslice.kubernetes.io/managed-by": "endpointslice-controller.k8s.io",
                },
            },
            "addressType": "IPv4",
            "ports": [{"name": "http", "port": RELAY_PORT, "protocol": "TCP"}],
            "endpoints": [{"addresses": [RELAY_ADDRESS], "conditions": conditions}] if pods else [],
        }
        found = find(self._kube, path)
        if found is None:
            self._kube.request("POST", SLICES, None, body)
        elif (found.get("endpoints") or []) != body["endpoints"]:
            self._kube.request("PUT", path, None, {**found, "endpoints": body["endpoints"]})

    def _judge(self, name: str, failure: tuple[str, str] | None) -> None:
        item = self._kube.request("GET", f"{MODELS}/{name}")
        status = item.get("status") or {}
        reason, message = failure or ("RuntimeResolved", "the runtime fetches it")
        kind, phase = ("Degraded", "Failed") if failure else ("Available", "Ready")
        condition = {"type": kind, "status": "True", "reason": reason, "message": message}
        known = [{name: each.get(name) for name in condition} for each in status.get("conditions") or []]
        if (status.get("phase"), known) == (phase, [condition]):
            return
        condition["lastTransitionTime"] = _stamp()
        item["status"] = {"phase": phase, "conditions": [condition], "lastUpdated": _stamp()}
        self._kube.request("PUT", f"{MODELS}/{name}/status", {"fieldManager": self._manager}, item)

    def _reconcile(self, item: dict[str, Any], slices: list[dict[str, Any]]) -> None:
        name = item["metadata"]["name"]
        service = name.replace(".", "-")
        mine = [
            each for each in slices if each["metadata"].get("labels", {}).get("kubernetes.io/service-name") == service
        ]
        seen = item["metadata"]["resourceVersion"], str(sorted(each["metadata"]["resourceVersion"] for each in mine))
        if self._seen.get(name) == seen:
            return
        self.others.append({"at": time.monotonic(), "name": name, **(item.get("status") or {})})
        ready, stale = snapshot(mine)
        phase, info = phase_of(item["spec"], ready, stale)
        status = dict(item.get("status") or {})
        conditions = {each["type"]: each for each in status.get("conditions") or []}

        def condition(kind: str, value: str, reason: str, message: str) -> None:
            old = conditions.get(kind, {})
            since = old["lastTransitionTime"] if old.get("status") == value else _stamp()
            conditions[kind] = {
                "type": kind,
                "status": value,
                "reason": reason,
                "message": message,
                "observedGeneration": item["metadata"]["generation"],
                "lastTransitionTime": since,
            }

        desired = 0 if item["spec"].get("suspend") else item["spec"].get("replicas", 1)
        suspended = bool(item["spec"].get("suspend"))
        word = "Suspended" if suspended else "NotSuspended"
        condition("Suspended", str(suspended), word, f"spec.suspend={suspended}")
        if phase in ("Ready", "Stopped", "Suspended"):
            conditions.pop("Progressing", None)
            conditions.pop("Degraded", None)
        if phase == "Ready":
            condition("Available", "True", "InferenceReady", "Inference service is ready and serving requests")
        elif phase == "Stopped":
            condition("Available", "False", "ManuallyScaledToZero", "spec.replicas=0; workload scaled to zero")
        elif phase == "Suspended":
            text = "spec.suspend=true; workload scaled to zero; spec.replicas preserved"
            condition("Available", "False", "Suspended", text)
        else:
            text = f"{ready}/{desired} replicas ready"
            condition("Progressing", "True", "Creating", f"Creating inference service ({text})")
            if not ready:
                condition("Available", "False", "NoReadyReplicas", f"{text}; service is not serving (phase {phase})")
        port = (item["spec"].get("endpoint") or {}).get("port", 8080)
        status.update(
            phase=phase,
            readyReplicas=ready,
            replicas=desired,
            desiredReplicas=desired,
            modelReady=True,
            endpoint=f"http://{service}.default.svc.cluster.local:{port}/v1/chat/completions",
            lastUpdated=_stamp(),
            conditions=sorted(conditions.values(), key=lambda each: each["type"]),
        )
        if info is not None and not (info[0] == "WaitingForMetalAgent" and status.get("schedulingStatus") in KEPT):
            status["schedulingStatus"], status["schedulingMessage"] = info
        body = {**item, "status": status}
        try:
            done = self._kube.request("PUT", f"{ISVC}/{name}/status", {"fieldManager": self._manager}, body)
        except KubeError as error:
            if not error.conflict:
                raise
            return  # computed anew at the next look
        self.writes += 1
        self._seen[name] = done["metadata"]["resourceVersion"], seen[1]
