"""Report on one service for the cluster: phase, conditions, readiness, events.

The words are LLMKube's, because dashboards, routers and `kubectl wait` depend on them: the operator writes the same
phase, reasons and messages. `MetalReady` is a condition of this program's own, with the actual state of the engine.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field, replace

from metal_supervisor.spec.processes import Observed
from metal_supervisor.spec.record import Record
from metal_supervisor.spec.types import Json, Standing

WAITING = "Waiting for the host metal-agent to fetch the model and register Endpoints"
LONGEST_NOTE_BYTES = 1000
HELD = ("FATAL", "BACKOFF")
PORT_IN_USE = "PortInUse"
CLAIM_LOST = "ClaimLost"
HUNG = "Hung"
CRASH_LOOP = "CrashLoopBackOff"
NO_METAL = "MetalUnavailable"
EVICTED = "Evicted"
UNLOADED = "Unloaded"
WAKING = "Waking"
GOODBYE = "Creating", "Stopping", "metal-supervisor has stopped on this Mac; it serves again once that runs"
"""What is told last: it stays in the cluster while this Mac is away."""
MOVED = "AddressChanged"
"""Reason of the Event for a new address of this Mac."""
TROUBLE = frozenset(
    {
        HUNG,
        "Unresponsive",
        CRASH_LOOP,
        PORT_IN_USE,
        "PublishFailed",
        "EndpointNameConflict",
        "NoRoutableAddress",
        "InsufficientMemory",
        "MemoryCheckFailed",
        "MemoryPressure",
        EVICTED,
        NO_METAL,
    }
)
"""Reasons that get a Warning Event although they may be temporary."""


@dataclass(frozen=True)
class Condition:
    """One status condition, without its times."""

    type: str
    status: str
    reason: str
    message: str


@dataclass(frozen=True)
class Happening:
    """Content of a Kubernetes Event."""

    type: str
    """`Normal` or `Warning`."""
    reason: str
    note: str


@dataclass(frozen=True)
class Report:
    """State of one service, as the cluster should show it."""

    phase: str
    ready: bool
    """Its endpoint is: its engine, or the gateway that holds its requests until there is one."""
    engine_ready: bool
    port: int | None
    """Port at which clients reach it: the gateway's for an on-demand service, else the engine's."""
    ready_replicas: int
    replicas: int
    reason: str
    """Reason of MetalReady: the state in one word."""
    message: str
    scheduling: tuple[str, str] | None
    """(schedulingStatus, schedulingMessage); None clears both."""
    conditions: tuple[Condition, ...]
    wants_service: bool
    wants_slice: bool
    draining: bool
    acceleration: Json = field(default_factory=dict)
    """`status.acceleration`, {} if it is not known."""


def _creating(record: Record, observed: Observed | None, leaving: bool) -> tuple[str, str, str]:
    """(phase, reason, message) of a service that should run, but is not ready."""
    state = observed.state if observed else ""
    if record.stopped_by_hand:
        return "Stopped", "StoppedByHand", "stopped with supervisorctl; start it there, or change the spec"
    if record.warning and record.warning[0] == NO_METAL and not (observed and observed.pid):
        return "Failed", *record.warning
    failing = bool(observed and observed.failing)
    phase = "Failed" if failing or state == "FATAL" else "Creating"
    if observed and (state in HELD or (failing and not observed.hung)):
        if record.warning and record.warning[0] == PORT_IN_USE:
            return phase, *record.warning
        return phase, CRASH_LOOP, observed.message or "the engine does not stay up"
    if leaving:
        return GOODBYE
    if record.withdraw:
        return "Progressing", "Restarting", "the endpoint is withdrawn while the engine is replaced"
    if state == "STOPPING":
        return phase, "Stopping", "the engine is ending"
    if observed and observed.hung:
        return phase, HUNG, f"{observed.hung}; it is being restarted"
    if observed and observed.served:
        return "Creating", "Unresponsive", f"{observed.message}; it takes no new requests until it answers again"
    if observed is None or not (observed.pid or observed.message):
        return "Creating", "Loading", "its engine is about to start; `metal-supervisor explain` says more"
    return "Creating", "Loading", observed.message or "the engine is loading"


def _whole(record: Record, here: int) -> str:
    """`Ready` or `Progressing`, as the operator counts replicas."""
    return "Ready" if here + record.peers_ready >= record.replicas else "Progressing"


def _standing(record: Record, observed: Observed | None, leaving: bool = False) -> tuple[str, str, str]:
    """(phase, reason, message) of a service, in the operator's words where it has some."""
    verdict = record.verdict
    if verdict.standing in (Standing.STOPPED, Standing.SUSPENDED) and observed and observed.pid:
        return "Progressing", "Stopping", "the engine is ending"
    if verdict.standing is Standing.SUSPENDED:
        return "Suspended", "Suspended", "spec.suspend=true; workload scaled to zero; spec.replicas preserved"
    if verdict.standing is Standing.STOPPED:
        return "Stopped", "ManuallyScaledToZero", "spec.replicas=0; workload scaled to zero"
    if verdict.standing is Standing.FAILED:
        return "Failed", verdict.reason, verdict.message
    if rests(record) and leaving:
        return GOODBYE
    if rests(record):
        return _whole(record, 1), UNLOADED, f"{verdict.message}; the next request loads it"
    if verdict.standing is not Standing.RUN:
        return "Pending", verdict.reason, verdict.message
    if observed and observed.published:
        reason, colon, text = observed.published.partition(": ")
        named = colon and re.fullmatch(r"[A-Z][A-Za-z]+", reason)
        return ("Creating", reason, text) if named else ("Creating", "PublishFailed", observed.published)
    if observed and observed.ready and not record.withdraw and not leaving:
        port, phase = record.front_port or record.port, _whole(record, 1)
        text = f"{record.runtime} serves {record.name} on port {port}"
        if record.probe.names_itself and observed.model_name:
            text += f", under a model name of its own: requests have to use {observed.model_name}"
        elif record.probe.names_itself:
            text += ", under a model name of its own: requests have to use the one that its /v1/models lists"
        if not record.claimed:
            return phase, CLAIM_LOST, f"slot {record.slot} is another Mac's now; this one serves until that one does"
        count = f"{1 + record.peers_ready} of {record.replicas} replicas are ready"
        missing = f"{count}: each takes a Mac of its own, or see --replicas-per-mac"
        return phase, "Serving", text if phase == "Ready" else f"{text}; {missing}"
    return _creating(record, observed, leaving)


def rests(record: Record) -> bool:
    """True if an on-demand service has no engine because nobody asks for it."""
    return record.idle_s is not None and record.verdict.standing is Standing.WAIT and record.verdict.reason == UNLOADED


def _held(record: Record, phase: str) -> bool:
    """True if the gateway holds the requests of an on-demand service until its engine is ready."""
    if phase in ("Failed", "Stopped"):  # also once supervisord has given up for a while; before, it tries again
        return False
    comes_back = bool(record.queue_position) or record.evicted_at is not None
    return record.verdict.standing is Standing.RUN or rests(record) or comes_back


def holds_requests(record: Record, observed: Observed | None) -> bool:
    """True if requests for an on-demand service are taken here, and wait for its engine."""
    if record.idle_s is None or record.front_port is None:
        return False
    return _held(record, _standing(record, observed)[0])


def confinement(record: Record, observed: Observed) -> tuple[bool | None, str, str]:
    """(confined, reason, message) of a running engine; None if that is not known."""
    if observed.confined is None:
        return None, "NotNoted", "the note of its start was lost or could not be kept; its next start makes another"
    if observed.confined:
        shared = record.daemon or record.is_daemon
        own = "daemon its services' models, its base path" if shared else "engine its model, its scratch directory"
        return True, "Confined", f"the operating system leaves the {own} and its port"
    if record.unconfined:
        return False, "Unconfined", record.unconfined
    return False, "NotYet", "it was started without; its next start is confined"


def _conditions(
    record: Record, observed: Observed | None, phase: str, count: tuple[int, int], reason: str, message: str
) -> tuple[Condition, ...]:
    """Conditions of a service, sorted by type. `count`: ready replicas (here, in total)."""
    here, ready = count
    suspended = record.verdict.standing is Standing.SUSPENDED
    serving = f"{ready}/{record.replicas} replicas ready"
    unready = Condition("Available", "False", "NoReadyReplicas", f"{serving}; service is not serving (phase {phase})")
    found = [
        Condition("Suspended", "True", "Suspended", "spec.suspend=true")
        if suspended
        else Condition("Suspended", "False", "NotSuspended", "spec.suspend is not set"),
        Condition("MetalReady", "True" if here else "False", reason, message),
    ]
    if phase == "Ready":
        found.append(
            Condition("Available", "True", "InferenceReady", "Inference service is ready and serving requests")
        )
    elif phase in ("Stopped", "Suspended"):
        found.append(Condition("Available", "False", reason, message))
    elif phase == "Failed":
        found += unready, Condition("Degraded", "True", "Failed", "see MetalReady")
    else:
        found.append(Condition("Available", "True", "InferenceReady", serving) if ready else unready)
        short = "Pending" if phase == "Pending" else "Creating"
        text = message if phase == "Pending" else f"Creating inference service ({serving})"
        found.append(Condition("Progressing", "True", short, text))
    if record.evicted_at is not None:
        found.append(Condition("MemoryPressure", "True", EVICTED, record.verdict.message))
    elif record.pressure:
        level, why = record.pressure
        found.append(Condition("MemoryPressure", "False" if level == "Normal" else "True", level, why))
    if observed and observed.pid:
        confined, word, text = confinement(record, observed)
        found.append(Condition("Confined", {True: "True", False: "False", None: "Unknown"}[confined], word, text))
    if record.warning and phase != "Failed":
        found.append(Condition("Degraded", "True", *record.warning))
    return tuple(sorted(found, key=lambda condition: condition.type))


def report(
    record: Record,
    observed: Observed | None,
    fronts: Collection[int] | None = None,
    leaving: bool = False,
) -> Report:
    """Build the report on one service.

    `fronts`: ports at which the gateway listens for on-demand services, None to rely on it.
    `leaving`: True if the whole system stops: it gets no requests.
    """
    phase, reason, message = _standing(record, observed, leaving)
    if record.peers_ready and phase in ("Creating", "Pending", "Failed"):
        phase = "Progressing"  # other Macs serve it
    standing = record.verdict.standing
    serves = bool(observed and observed.ready) and not leaving
    engine_ready = standing is Standing.RUN and serves and not record.withdraw
    front = record.front_port if record.idle_s is not None else None
    front = front if fronts is None or front in fronts else None
    held = front is not None and not engine_ready and not leaving and _held(record, phase)
    if held and not rests(record):
        phase, reason, message = _whole(record, 1), WAKING, f"{message}; requests wait for it"
    ready = engine_ready or held
    counted = ready and not (observed and observed.published)
    serving = int(counted) + record.peers_ready
    scheduling = None
    if phase == "Pending" or (phase == "Failed" and reason != "Loading"):
        scheduling = reason, message
    elif phase in ("Creating", "Progressing") and not counted:
        scheduling = ("WaitingForMetalAgent", WAITING) if reason == "Loading" else (reason, message)
    stopped = standing in (Standing.STOPPED, Standing.SUSPENDED)
    claimed = record.endpoint is not None and record.port is not None
    leaving = bool(observed and observed.pid and record.withdraw)
    return Report(
        phase=phase,
        ready=ready,
        engine_ready=engine_ready,
        port=record.port if front is None else front,
        ready_replicas=serving,
        replicas=0 if stopped else record.replicas,
        reason=reason,
        message=message,
        scheduling=scheduling,
        conditions=_conditions(record, observed, phase, (int(counted), serving), reason, message),
        wants_service=claimed and standing is not Standing.REMOVING,
        wants_slice=claimed and (standing is Standing.RUN or leaving or held) and standing is not Standing.REMOVING,
        draining=leaving,
        acceleration=observed.acceleration if observed else {},
    )


def last_known(record: Record, observed: Observed | None) -> Report:
    """The report on one service of a system that does not run: only an engine that outlived it can serve."""
    told = report(record, observed)
    if (observed and observed.pid) or not (told.phase == "Ready" or told.reason == "Loading"):
        return told
    return replace(
        told, phase="Stopped", ready=False, engine_ready=False, reason="NotRunning", message="no supervisord runs here"
    )


def _fitting(text: str) -> str:
    """Shorten a text to an Event's limit: keep its first line and its end, where the last log lines are."""
    raw = text.encode("utf-8", "replace")
    if len(raw) <= LONGEST_NOTE_BYTES:
        return text
    head = raw.partition(b"\n")[0][:300]
    tail = raw[-(LONGEST_NOTE_BYTES - len(head) - 5) :]
    return f"{head.decode('utf-8', 'ignore')}\n…\n{tail.decode('utf-8', 'ignore')}"


def happening(before: Report | None, after: Report, exit_text: str) -> Happening | None:
    """Event for a change of the report, None if it needs none.

    `exit_text`: how the process ended, and the cause in its log; "" if it did not end.
    """
    if before is not None and (before.phase, before.reason) == (after.phase, after.reason):
        return None
    if after.reason == CLAIM_LOST:
        return Happening("Warning", after.reason, after.message)
    if after.reason in (UNLOADED, WAKING):
        return None  # each wake would be two Events
    if after.phase == "Ready" and (before is None or before.reason != WAKING):
        return Happening("Normal", "Serving", after.message)
    if before is not None and (before.ready or before.reason == HUNG) and exit_text:
        return Happening("Warning", "Crashed", _fitting(exit_text))
    if after.phase == "Failed" or after.reason in TROUBLE:
        return Happening("Warning", after.reason, _fitting(after.message))
    if after.phase in ("Stopped", "Suspended"):
        return Happening("Normal", after.reason, after.message)
    return None
