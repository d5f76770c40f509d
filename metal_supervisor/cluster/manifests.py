"""Kubernetes objects for a report: status, Service, EndpointSlice, Event.

Each is the body of a server-side apply (an Event is created): this program's fields only, and all of them every time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import replace

from metal_supervisor.cluster.report import Condition, Happening, Report, rests
from metal_supervisor.spec.document import objects
from metal_supervisor.spec.hosts import in_url
from metal_supervisor.spec.instants import unix
from metal_supervisor.spec.record import Record
from metal_supervisor.spec.resources import GROUP, VERSION, rank_of
from metal_supervisor.spec.terminal_text import printable
from metal_supervisor.spec.types import Endpoint, Json, ModelFile, Standing

KIND = "InferenceService"
MANAGED_BY = "metal-supervisor"
NODES = "metal/"
METAL_READY = "MetalReady"
READY = "Ready"
OWN_CONDITIONS = frozenset({METAL_READY, "MemoryPressure"})
SHARED_CONDITIONS = frozenset({"Available", "Progressing", "Degraded", "GPUAvailable", "Suspended", "MemoryPressure"})
"""Conditions that LLMKube's operator or agent writes of the same things as this program does without them."""
SHARED_FIELDS = ("endpoint", "schedulingStatus", "schedulingMessage", "queuePosition", "waitingFor", "acceleration")
"""Fields of a status that are not always there, likewise."""
OUR_ZONE = "+00:00"
"""End of this program's `lastUpdated`; what is written in Go, as LLMKube's operator, ends in Z."""
HEARTBEAT = "llmkube.ai/agent-heartbeat"
HEARTBEAT_LIMIT_S = 180.0
"""Age at which LLMKube considers a heartbeat stale."""
LONGEST_MESSAGE = 32768
"""Characters of a condition's message that the API takes."""
"""Characters of a condition's message: the API refuses a status as a whole that has a longer one."""
RELAY_LABEL = "inference.llmkube.dev/metal-relay"
"""Label of the relay's pods, in the selector of the Service that LLMKube's operator has adopted."""
SLICE_MANAGER = "endpointslice.kubernetes.io/managed-by"
ACCELERATOR_LABEL = "llmkube.dev/accelerator"
OTHER_APIS = {"endpointslices": "discovery.k8s.io/v1", "leases": "coordination.k8s.io/v1"}
"""API, with its version, of the kinds that are not LLMKube's."""


def api_path(plural: str, namespace: str = "", name: str = "") -> str:
    """API path of an object; without `name`, of all in a namespace; without either, of all."""
    scope = f"/namespaces/{namespace}" if namespace else ""
    api = OTHER_APIS.get(plural, f"{GROUP}/{VERSION}")
    return f"/apis/{api}{scope}/{plural}" + (f"/{name}" if name else "")


def metal_ready(status: Json) -> Json:
    """The condition MetalReady in the status of an InferenceService, {} without it."""
    return next((each for each in objects(status, "conditions") if each.get("type") == METAL_READY), {})


def node_lease_name(node: str) -> str:
    """Name of a Mac's node Lease."""
    return f"metal-{node}"


def field_manager(node: str) -> str:
    """Field manager of a Mac's own fields; MANAGED_BY is that of what all Macs write alike."""
    return f"{NODES}{node}"


def url_of(namespace: str, endpoint: Endpoint) -> str:
    """URL for clients, as the operator writes it."""
    return f"http://{endpoint.service}.{namespace}.svc.cluster.local:{endpoint.port}{endpoint.path}"


def direct_url(address: str, port: int, path: str) -> str:
    """URL of an engine at the address that it listens on."""
    return f"http://{in_url(address)}:{port}{path}"


def owner(record: Record) -> Json:
    """ownerReference to the InferenceService, so that garbage collection works while this Mac is off."""
    return {"apiVersion": f"{GROUP}/{VERSION}", "kind": KIND, "name": record.name, "uid": record.uid}


def plain(text: str) -> str:
    """A message as it may leave for the API: engines, servers and model files have a say in most.

    Lines stay apart, as kubectl shows an Event's; every other control or direction mark becomes `?`.
    """
    return "\n".join(map(printable, text[:LONGEST_MESSAGE].split("\n")))


def timed(conditions: Sequence[Condition], before: Sequence[Json], generation: int, now: str) -> list[Json]:
    """Conditions in the API's form; one whose status did not change keeps its transition time."""
    known = {item.get("type"): item for item in before}
    result = []
    for condition in conditions:
        old = known.get(condition.type, {})
        since = old.get("lastTransitionTime") if old.get("status") == condition.status else None
        result.append(
            {
                "type": condition.type,
                "status": condition.status,
                "reason": condition.reason,
                "message": plain(condition.message),
                "observedGeneration": generation,
                "lastTransitionTime": since or now,
            }
        )
    return result


def status(record: Record, told: Report, before: Json, now: str, direct: str = "") -> Json:
    """`status` of the InferenceService; equal to `before`, with its `lastUpdated`, if nothing changed.

    `direct`: the engine's own address if the cluster's names do not resolve, "" otherwise.
    """
    body: Json = {
        "phase": told.phase,
        "mode": record.mode,
        "modelReady": record.verdict.standing in (Standing.RUN, Standing.STOPPED, Standing.SUSPENDED)
        or record.queued_at is not None
        or rests(record),
        "readyReplicas": told.ready_replicas,
        "replicas": told.replicas,
        "desiredReplicas": told.replicas,
        "effectivePriority": rank_of(record.priority),
        "conditions": timed([*told.conditions, _ready(told)], before.get("conditions") or [], record.generation, now),
        "lastUpdated": _in_our_form(now),
    }
    if endpoint := _endpoint(record, told, before, direct):
        body["endpoint"] = endpoint
    if told.scheduling:
        body["schedulingStatus"], body["schedulingMessage"] = told.scheduling[0], plain(told.scheduling[1])
    if told.acceleration:
        body["acceleration"] = told.acceleration
    if record.queue_position:
        body["queuePosition"], body["waitingFor"] = record.queue_position, "memory"
    return _unless_same(body, before)


def _unless_same(body: Json, before: Json) -> Json:
    """A status, or the one before if only the time of the update differs."""
    return before if {**body, "lastUpdated": before.get("lastUpdated")} == before else body


def _in_our_form(now: str) -> str:
    """A time (RFC 3339, with Z) as this program writes `lastUpdated`."""
    return now.removesuffix("Z") + OUR_ZONE


def _ready(told: Report) -> Condition:
    """The condition that `kubectl wait --for=condition=Ready` looks for: MetalReady, summed over all Macs."""
    metal = next(each for each in told.conditions if each.type == METAL_READY)
    status = "True" if told.ready_replicas else "False"
    reason = metal.reason if status == metal.status else "Serving"
    return Condition(READY, status, reason, "see MetalReady")


def without_ready(body: Json) -> Json:
    """A status without the condition Ready, where that belongs to another field manager."""
    return {**body, "conditions": [each for each in body["conditions"] if each["type"] != READY]}


def _endpoint(record: Record, told: Report, before: Json, direct: str) -> str:
    """`status.endpoint`, "" for none; an engine's own address is published from its first Ready on."""
    if not record.endpoint:
        return ""
    if not direct:
        return url_of(record.namespace, record.endpoint)
    url = direct_url(direct, told.port, record.endpoint.path) if told.port else ""
    return url if told.ready_replicas or before.get("endpoint") == url else ""


def left_by_others(shown: Json, body: Json) -> Json:
    """Merge patch that removes from a status what LLMKube's operator or agent wrote, and this program does not write.

    {} if there is nothing to remove.

    `shown`: the status in the cluster; `body`: all of it that is this program's, which an apply has just written there.
    """
    ours = {each["type"] for each in objects(body, "conditions")}
    conditions = objects(shown, "conditions")
    kept = [each for each in conditions if each.get("type") not in SHARED_CONDITIONS - ours]
    gone: Json = {name: None for name in SHARED_FIELDS if name in shown and name not in body}
    return gone if len(kept) == len(conditions) else {**gone, "conditions": kept}


def own_part(before: Json) -> Json:
    """Part of a status that is this program's where LLMKube's operator writes the rest."""
    own = [each for each in before.get("conditions") or [] if each.get("type") in OWN_CONDITIONS]
    return {"conditions": own, **({"acceleration": before["acceleration"]} if before.get("acceleration") else {})}


def own_status(record: Record, told: Report, before: Json, now: str, silence: str = "") -> Json:
    """`status` to apply beside LLMKube's operator: only this program's own conditions, and what the engine runs on.

    MetalReady's message also holds what has no other place: a rejected edit, because Degraded is the operator's, and
    `silence`, the reason why the operator may be gone.
    """
    rejected = ": ".join(record.warning) if record.warning and told.phase != "Failed" else ""
    further = "".join(f"; {text}" for text in (rejected, silence) if text)
    own = [
        replace(each, message=each.message + further) if each.type == METAL_READY else each
        for each in told.conditions
        if each.type in OWN_CONDITIONS
    ]
    conditions = timed(own, before.get("conditions") or [], record.generation, now)
    return {"conditions": conditions, **({"acceleration": told.acceleration} if told.acceleration else {})}


def left_by_agent(found: Json, name: str, now: float, own_addresses: Collection[str]) -> bool:
    """True if an object was left behind by LLMKube's agent: by that of this Mac, or by one that has been silent since.

    `name`: the InferenceService that it has to be of. That of `m` has the name of `m-agent`, where there is a relay.
    """
    labels = found["metadata"].get("labels") or {}
    if labels.get("llmkube.ai/managed-by") != "metal-agent" or labels.get(SLICE_MANAGER) == MANAGED_BY:
        return False
    if labels.get("llmkube.ai/inference-service", name) != name:
        return False
    return not fresh_elsewhere(found, now, own_addresses)


def agent_name(service: str) -> str:
    """Name of the Service and slice by which LLMKube's agent tells the operator's relay where its Mac is."""
    return f"{service}-agent"


def of_selector(service: str) -> str:
    """Label selector of the slices that Kubernetes makes for the selector of a Service."""
    return f"kubernetes.io/service-name={service},{SLICE_MANAGER}=endpointslice-controller.k8s.io"


def is_relayed(found: Json, record: Record) -> bool:
    """True if LLMKube's operator has adopted a Service of this InferenceService, with its relay's selector or without.

    Any other selector is of somebody who routes the Service elsewhere.
    """
    owners = objects(found["metadata"], "ownerReferences")
    selector = found.get("spec", {}).get("selector") or {}
    relays = {f"{record.name}-relay", f"{found['metadata']['name']}-relay"}
    known = not selector or (selector.keys() == {"app", RELAY_LABEL} and selector["app"] in relays)
    return known and any(each.get("controller") and each.get("uid") == record.uid for each in owners)


def fresh_elsewhere(found: Json, now: float, own_addresses: Collection[str]) -> bool:
    """True if a slice of LLMKube's agent has a fresh heartbeat, and an address that is not this Mac's."""
    beat = (found["metadata"].get("annotations") or {}).get(HEARTBEAT, "")
    try:
        fresh = abs(now - unix(beat)) < HEARTBEAT_LIMIT_S
    except ValueError:
        fresh = False
    addresses = {address for each in found.get("endpoints") or [] for address in each.get("addresses") or []}
    return fresh and not addresses <= set(own_addresses)


def _labels(record: Record) -> dict[str, str]:
    # A label value may have at most 63 characters; a longer name gets a hash at its end.
    name = (
        record.name
        if len(record.name) <= 63
        else record.name[:54] + hashlib.sha256(record.name.encode()).hexdigest()[:8]
    )
    return {
        "app": name,
        "app.kubernetes.io/managed-by": MANAGED_BY,
        "inference.llmkube.dev/service": name,
        "llmkube.ai/inference-service": name,
        "llmkube.ai/managed-by": "metal-agent",
    }


def service_object(record: Record, endpoint: Endpoint) -> Json:
    """The Service: the same from every Mac, without a selector, with the labels that LLMKube's tools look for."""
    port: Json = {"name": "http", "port": endpoint.port, "targetPort": "http", "protocol": "TCP", "appProtocol": "http"}
    if endpoint.node_port and endpoint.type != "ClusterIP":
        port["nodePort"] = endpoint.node_port
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            "name": endpoint.service,
            "namespace": record.namespace,
            "labels": _labels(record),
            "annotations": {"llmkube.ai/metal-accelerated": "true", "llmkube.ai/native-process": "true"},
            # A controller reference, so that the operator notices the Service of a dotted name too.
            "ownerReferences": [{**owner(record), "controller": True}],
        },
        "spec": {"type": endpoint.type, "ports": [port]},
    }


def slice_name(service: str, node: str, ordinal: int = 0) -> str:
    """Name of an EndpointSlice: one for each Mac, Service and replica, because a slice has one port, and its endpoints
    are an atomic list. A Mac called `agent` has a number always, because `<service>-agent` is of LLMKube's agent.
    """
    return f"{service}-{node}-{ordinal}" if ordinal or node == "agent" else f"{service}-{node}"


def slice_object(
    record: Record, endpoint: Endpoint, told: Report, node: str, address: str, heartbeat: str, version: str
) -> Json:
    """This Mac's EndpointSlice. All three conditions are always set: consumers disagree about missing ones."""
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": slice_name(endpoint.service, node, record.ordinal),
            "namespace": record.namespace,
            "labels": {
                **_labels(record),
                "kubernetes.io/service-name": endpoint.service,
                SLICE_MANAGER: MANAGED_BY,
                ACCELERATOR_LABEL: "metal",
                "metal-supervisor.io/node": node,
            },
            "annotations": {HEARTBEAT: heartbeat, "llmkube.ai/agent-version": version},
            "ownerReferences": [owner(record)],
        },
        "addressType": "IPv6" if ":" in address else "IPv4",
        "endpoints": [
            {
                "addresses": [address],
                "conditions": {
                    "ready": told.ready,
                    "serving": told.ready or told.draining,
                    "terminating": told.draining,
                },
            }
        ],
        "ports": [{"name": "http", "port": told.port, "protocol": "TCP", "appProtocol": "http"}],
    }


def human_size(size_bytes: int) -> str:
    """Format a size as LLMKube does: `4.4 GiB`."""
    size, unit = float(size_bytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"


def model_status(file: ModelFile, source: str, generation: int, before: Json, now: str) -> Json:
    """`status` of a Model. Unlike with the operator, Ready means that the file is on this Mac."""
    conditions = {
        "Ready": Condition("Available", "True", "MetalAgentManaged", "the model file is on this Mac"),
        "Downloading": Condition("Progressing", "True", "DownloadStarted", file.message or "downloading"),
        "Failed": Condition("Degraded", "True", file.reason or "DownloadFailed", file.message),
    }.get(file.phase, Condition("Progressing", "True", "Pending", file.message or "no InferenceService uses it"))
    body: Json = {
        "phase": file.phase if file.phase in ("Ready", "Downloading", "Failed") else "Pending",
        "acceleratorReady": True,
        "cacheKey": hashlib.sha256(source.encode("utf-8", "replace")).hexdigest()[:16],
        "conditions": timed([conditions], before.get("conditions") or [], generation, now),
        "lastUpdated": _in_our_form(now),
    }
    if file.phase == "Ready":
        body |= {"path": file.path, "size": human_size(file.size_bytes)}
        body |= {"gguf": file.gguf} if file.gguf else {}
    return _unless_same(body, before)


def event_object(about: Record | str, what: Happening, node: str, now_micro: str) -> Json:
    """Event (events.k8s.io/v1) on an InferenceService, or, if `about` is a namespace, on this Mac there.

    A Mac is represented in a namespace by its node Lease. The Event's name is a hash of its content, so that a
    repetition becomes a series.
    """
    if isinstance(about, str):
        lease = {"apiVersion": OTHER_APIS["leases"], "kind": "Lease", "name": node_lease_name(node)}
        regarding = {**lease, "namespace": about}
    else:
        regarding = {**owner(about), "namespace": about.namespace}
    note = plain(what.note)
    digest = hashlib.sha256(f"{regarding.get('uid', node)}|{what.reason}|{note}".encode()).hexdigest()[:16]
    return {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {"name": f"{regarding['name'][:200].rstrip('-.')}.{digest}", "namespace": regarding["namespace"]},
        "eventTime": now_micro,
        "reportingController": "metal-supervisor",
        "reportingInstance": node,
        "action": what.reason,
        "reason": what.reason,
        "type": what.type,
        "note": note,
        "regarding": regarding,
    }
