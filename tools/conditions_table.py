"""Every reason that a condition, an Event or a `schedulingStatus` of ours can have: when, and what helps.

The code that finds a reason has its message, with names and numbers; this is what can be said beforehand, for
docs/conditions.md. A test compares it with the code, word by word, and with what `report` makes of each.
"""

from __future__ import annotations

from dataclasses import dataclass

from metal_supervisor.cluster.report import CLAIM_LOST, TROUBLE

METAL = "MetalReady"
AVAILABLE = "Available"
PROGRESSING = "Progressing"
DEGRADED = "Degraded"
PRESSURE = "MemoryPressure"
SUSPENDED = "Suspended"
CONFINED = "Confined"
MODEL = "Model: "
"""Before the type of a condition that a Model has; the others are an InferenceService's."""
EVENT = "Event"
SCHEDULING = "schedulingStatus"
RECORD = "record"


@dataclass(frozen=True)
class Reason:
    """One word."""

    name: str
    when: str
    do: str
    """What a user does about it; "nothing" where it passes, or is as it should be."""


@dataclass(frozen=True)
class Group:
    """Reasons that are told in the same places."""

    title: str
    types: tuple[str, ...]
    """The types of the conditions that may have them, or `Event`, `schedulingStatus`, `record`."""
    phases: tuple[str, ...]
    """What `status.phase` is meanwhile, where they are MetalReady's; () if that does not say."""
    reasons: tuple[Reason, ...]
    note: str = ""


_WAIT = "nothing: it passes by itself"
_EDIT = "change the field that the message names"
_RUNS = "An engine that runs already runs on as it last could: then `Degraded` has the reason, and the phase stays."

_SERVING = Group(
    "It serves",
    (METAL, EVENT),
    ("Ready", "Progressing"),
    (
        Reason(
            "Serving",
            "its engine has answered a probe and a request; `Progressing` while other replicas are missing",
            "nothing; for missing replicas another Mac, or `--replicas-per-mac`",
        ),
        Reason("ClaimLost", "another Mac holds this replica now; this one serves until that one does", _WAIT),
    ),
)
_ON_DEMAND = Group(
    "It runs on demand, and requests wait for it",
    (METAL,),
    ("Ready", "Progressing"),
    (
        Reason(
            "Unloaded",
            "it has no engine: nobody has asked for it, or it made room for another; MetalReady is True",
            "nothing: the next request loads it, see docs/on-demand.md",
        ),
        Reason("Waking", "its engine loads, or waits for memory; the message says which; MetalReady is True", _WAIT),
    ),
)
_COMING = Group(
    "It comes, or goes",
    (METAL,),
    ("Creating", "Progressing"),
    (
        Reason("Loading", "the engine loads its model, or waits for its turn to start (`--parallel-starts`)", _WAIT),
        Reason("Restarting", "the endpoint is out while the engine is replaced", _WAIT),
        Reason(
            "Stopping",
            "the engine is ending; it finishes its answers first; or the whole system was stopped on this Mac",
            "nothing: it passes by itself; or start the system there again",
        ),
    ),
)
_WAITING = Group(
    "It waits for something",
    (METAL, DEGRADED),
    ("Pending",),
    (
        Reason("Downloading", "the model file is being fetched; the message has share, rate and time left", _WAIT),
        Reason("Checking", "the model file is being looked at, or hashed", _WAIT),
        Reason("Pending", "its turn to be fetched has not come (`--downloads`)", _WAIT),
        Reason(
            "WaitingForSecret",
            "a Secret that it names has not been read yet",
            "nothing; if it stays, see whether the API can be reached: `metal-supervisor doctor`",
        ),
        Reason("WaitingForConfigMap", "the same of a ConfigMap", "the same"),
    ),
    _RUNS,
)
_MEMORY = Group(
    "It waits for memory",
    (METAL, DEGRADED),
    ("Pending",),
    (
        Reason(
            "InsufficientMemory",
            "it does not fit now; or its Model's own limit, or this Mac, is too small for it",
            "stop something, or take a smaller quantization or context, or raise `--memory-fraction`",
        ),
        Reason(
            "MemoryCheckFailed",
            "nobody can say how much it needs: the message has why",
            "a model file whose header can be read; or `--memory-check-mode warn`",
        ),
        Reason(
            "MemoryPressure",
            "the machine is short of memory; nothing is started meanwhile",
            "nothing: it starts when that is over; or close what takes the memory",
        ),
        Reason(
            "Evicted",
            "it was stopped because memory was short; it comes back by itself",
            "nothing; or `spec.evictionProtection`, or a higher `spec.priority`",
        ),
    ),
    _RUNS,
)
_OFF = Group(
    "It is switched off",
    (METAL, AVAILABLE, EVENT),
    ("Stopped", "Suspended"),
    (
        Reason("ManuallyScaledToZero", "`spec.replicas` is 0", "`kubectl scale isvc NAME --replicas=1`"),
        Reason("Suspended", "`spec.suspend` is true", "set it to false"),
        Reason(
            "StoppedByHand",
            "it was stopped with supervisorctl",
            "`supervisorctl start NAMESPACE.NAME`, or change the spec",
        ),
    ),
)
_ENGINE = Group(
    "The engine is in trouble",
    (METAL,),
    ("Creating", "Failed"),
    (
        Reason(
            "CrashLoopBackOff",
            "it does not stay up; the message has how it ended, the line with the reason unless "
            "it was killed, the next attempt",
            "`metal-supervisor logs NAMESPACE/NAME --previous`; an edit is tried at once",
        ),
        Reason("Hung", "it answers nothing, and has done no work for `--hang-timeout`: it is restarted", _WAIT),
        Reason(
            "Unresponsive",
            "it served, and does not answer now: no new requests are sent there",
            "nothing; if it stays, `metal-supervisor logs`",
        ),
    ),
)
_MAC = Group(
    "This Mac is in the way",
    (METAL, DEGRADED),
    ("Creating", "Failed"),
    (
        Reason(
            "PortInUse",
            "somebody else listens on its port",
            "free it, or leave `spec.containerPort` out, and it gets another one",
        ),
        Reason(
            "MetalUnavailable",
            "the job's process sees no Metal device; nothing is started on the CPU instead",
            "`metal-supervisor doctor`; it is asked again every minute",
        ),
    ),
    _RUNS,
)
_UNREACHED = Group(
    "It serves, and nobody is sent there",
    (METAL,),
    ("Creating",),
    (
        Reason(
            "NoRoutableAddress",
            "this Mac's address is loopback, link-local or the like",
            "set `--host-ip` to one that pods reach",
        ),
        Reason(
            "EndpointNameConflict",
            "a Service or a slice of that name belongs to something else",
            "rename one of the two, or delete the other object",
        ),
        Reason(
            "PublishFailed",
            "the API refused the Service or its slice; the message has its words",
            "`metal-supervisor doctor` names the right that is missing",
        ),
        Reason(
            "DaemonUnreachable",
            "the shared daemon does not answer at the address that pods are told",
            "have it listen there; the message has how",
        ),
    ),
)
_FIELD = Group(
    "A field cannot be honoured",
    (METAL, DEGRADED, MODEL + DEGRADED),
    ("Failed",),
    (
        Reason("InvalidSpec", "a field has a value that it cannot have", _EDIT),
        Reason(
            "UnsupportedField", "a field that matters is set, and cannot be honoured here", "remove it: docs/fields.md"
        ),
    ),
    _RUNS,
)
_REFUSED = Group(
    "What was asked for cannot be done",
    (METAL, DEGRADED),
    ("Failed",),
    (
        Reason(
            "ModelNotFound", "`spec.modelRef` names no Model of the namespace", "apply the Model, or correct the name"
        ),
        Reason("DraftModelNotFound", "the same of the Model of speculative decoding", "apply it, or correct the name"),
        Reason(
            "NotMetal",
            "the Model's `spec.hardware.accelerator` is not `metal`; this one ends a running engine, because"
            " LLMKube then runs the model in a pod",
            "set it, if it is meant for a Mac",
        ),
        Reason(
            "NodeSelectorMismatch",
            "with the embedded API: `spec.nodeSelector` is not this Mac's",
            "change it, or `--node-labels`",
        ),
        Reason("UnsupportedRuntime", "the runtime that it names is unknown, or not offered here (`--runtimes`)", _EDIT),
        Reason("FormatMismatch", "its runtime does not serve its Model's `spec.format`", "change one of the two"),
        Reason("RuntimeBinaryMissing", "the engine is not installed", "install it; the message has the line"),
        Reason(
            "ConfinementUnavailable",
            "`--confinement` is required, and this engine cannot be confined here",
            "set it to `on`, or use another runtime; the message has the cause",
        ),
        Reason(
            "UnsafeEngineVersion",
            "this mlx-lm runs a file that a model's config.json names: a warning where the"
            " engine is confined, and no start where it is not",
            "upgrade mlx-lm; the message has the version",
        ),
        Reason("RuntimeBroken", "the engine's program does not run", "run it by hand; install it anew"),
        Reason("NoPort", "every port of `--ports` is taken", "widen the range"),
        Reason("ServiceConflict", "another InferenceService makes a Service of the same name", "rename one of them"),
        Reason("ServiceNameTooLong", "the name is longer than a Service's may be", "shorten it"),
        Reason("ServedNameConflict", "a shared daemon serves another model of that name", "rename one of the services"),
        Reason(
            "DaemonNotShared",
            "the shared daemon (oMLX, Ollama) of this Mac serves another namespace; one that"
            " it served before the setting changed stays",
            "use another Mac or runtime, or set `--shared-daemons`",
        ),
        Reason(
            "DaemonSettingsConflict", "another service said something else of the shared daemon", "make the two alike"
        ),
        Reason("Deleting", "it is being deleted, and finalizers are waited for", "see who holds the finalizer"),
        Reason("SecretNotFound", "a Secret that it names does not exist", "create it, or set `optional: true`"),
        Reason("SecretForbidden", "this Mac may not read it", "apply conf/rbac/secrets.yaml"),
        Reason("SecretKeyNotFound", "it has not the key", "add it, or set `optional: true`"),
        Reason("SecretNotText", "the key holds no plain text", "an environment takes text only: store text"),
        Reason("ConfigMapNotFound", "a ConfigMap that it names does not exist", "create it, or set `optional: true`"),
        Reason("ConfigMapForbidden", "this Mac may not read it", "apply conf/rbac/secrets.yaml"),
        Reason("ConfigMapKeyNotFound", "it has not the key", "add it, or set `optional: true`"),
        Reason("ConfigMapNotText", "the key holds no plain text", "an environment takes text only: store text"),
    ),
    _RUNS,
)
_FILE = Group(
    "The model file cannot be had",
    (METAL, DEGRADED, MODEL + DEGRADED),
    ("Failed",),
    (
        Reason("InvalidModel", "`spec.source` is no source, or the repository has no such model", "correct it"),
        Reason("UnsupportedSource", "its scheme, or that store, cannot be fetched from", "docs/models.md has what can"),
        Reason(
            "AmbiguousSource",
            "the repository has several models; the message lists them",
            "set `spec.files` or `spec.quantization`",
        ),
        Reason("SourceNotFound", "the server says that there is no such file", "correct `spec.source`"),
        Reason("SourceUnauthorized", "the server wants a key, or another one", "`spec.sourceSecretRef`"),
        Reason("GatedModel", "its terms have to be accepted first", "accept them on the page that the message names"),
        Reason(
            "SourceNotAllowed",
            "this Mac may not open that place",
            "`--allowed-roots`, `--allowed-hosts` or `--private-hosts`",
        ),
        Reason(
            "ModelSourceNotAllowed",
            "LLMKube's operator has rejected the Model: its attestation, or a source policy; a "
            "running engine is left running, and its next start is refused",
            "fix what the message names",
        ),
        Reason(
            "DownloadFailed", "no server, no answer, a line that is cut again and again", "nothing: it is tried again"
        ),
        Reason(
            "InvalidModelFile",
            "what came, or lies there, is no model: a login page, an LFS pointer, "
            "a file that is cut short, or not yet copied whole",
            "fetch it again, or correct `spec.source` or `spec.format`",
        ),
        Reason(
            "ModelDigestMismatch",
            "its sha256 is another one",
            "correct `spec.sha256` or `spec.fileSha256`, or `metal-supervisor models rm`",
        ),
        Reason("ModelFileMissing", "the file on this Mac does not exist", "put it there"),
        Reason(
            "ModelFileUnreadable",
            "it exists, and cannot be read",
            "the message has why: mostly its owner or mode, or a place that macOS keeps from launchd's jobs",
        ),
        Reason("InsufficientDisk", "it would not fit on the disk", "`metal-supervisor models gc`, or a larger disk"),
    ),
    _RUNS,
)
_RUNS_ON = Group(
    "It serves, and something is to be known",
    (DEGRADED,),
    (),
    (
        Reason(
            "DaemonSettingsWait",
            "the shared daemon runs as it was started, not as a service says now",
            "nothing; or `supervisorctl restart omlx`, which cuts off what it answers",
        ),
        Reason(
            "PortIgnored",
            "`spec.containerPort` is not within this Mac's `--ports`; the engine has a port of these",
            "remove it, or choose one of these",
        ),
        Reason(
            "ModelFailedInCluster",
            "LLMKube's operator reports the Model as Failed, because it cannot obtain the files itself; this Mac can",
            "nothing; or allow the operator that place",
        ),
        Reason(
            "ServiceTypeIgnored",
            "`spec.endpoint.type` is not among this Mac's `--service-types`: it is ClusterIP",
            "remove it, or have the administrator allow the type",
        ),
        Reason(
            "PriorityCapped",
            "`spec.priority` is above the namespace's highest (`--namespace-priority`), which counts",
            "lower it, or have the administrator raise the limit",
        ),
        Reason(
            "ProtectionIgnored",
            "`spec.evictionProtection` does not count in the namespace (`--namespace-protection`)",
            "remove it, or have the administrator add the namespace",
        ),
    ),
)
_STANDARD = (
    Group(
        "Available",
        (AVAILABLE,),
        (),
        (
            Reason("InferenceReady", "True: somewhere it serves", "nothing"),
            Reason("NoReadyReplicas", "False: nowhere it does", "read MetalReady"),
        ),
    ),
    Group(
        "Progressing",
        (PROGRESSING,),
        (),
        (
            Reason("Creating", "True: it is on its way", _WAIT),
            Reason("Pending", "True: it waits; the message is MetalReady's", "read MetalReady"),
        ),
    ),
    Group(
        "Degraded",
        (DEGRADED,),
        (),
        (
            Reason("Failed", "True: the phase is Failed; MetalReady has the message", "read MetalReady"),
            Reason(
                "NameTaken",
                "True: it runs; the gateway does not answer to one of its names, which an older service of "
                "another namespace has, or had when this one was last edited, or which has another namespace in it; or "
                "its shared daemon does not answer to its Model's name, which another service has",
                "use NAMESPACE/NAME, or other names; send a daemon the service's name",
            ),
            Reason(
                "OnDemandIgnored",
                "True: it stays loaded, because the gateway is off, which would load it",
                "set `--gateway`, or remove the annotation",
            ),
            Reason(
                "MissingAfterRestore",
                "the API's data went back, as after a restored backup, and lacks the service; "
                "its engine runs for ten minutes",
                "apply its manifest again",
            ),
            Reason(
                "FieldIgnored", "True: it runs; the message names what means nothing on a Mac", "remove these fields"
            ),
        ),
    ),
    Group(
        "Suspended",
        (SUSPENDED,),
        (),
        (
            Reason("Suspended", "True: `spec.suspend` is", "set it to false"),
            Reason("NotSuspended", "False", "nothing"),
        ),
    ),
    Group(
        "MemoryPressure",
        (PRESSURE,),
        (),
        (
            Reason("Normal", "False: memory is ample", "nothing"),
            Reason("Warning", "True: it gets short; nothing is started", "close what takes it"),
            Reason(
                "Critical", "True: it is short; with `--eviction-enabled` somebody has to go", "close what takes it"
            ),
            Reason("Evicted", "True: it was this one", "nothing: it comes back by itself"),
        ),
    ),
    Group(
        "Confined",
        (CONFINED,),
        (),
        (
            Reason(
                "Confined",
                "True: the operating system leaves the engine its model, its scratch directory and its port",
                "nothing",
            ),
            Reason(
                "NotNoted",
                "Unknown: the note of the engine's start was lost, or could not be kept",
                "restart it at leisure",
            ),
            Reason("NotYet", "False: the engine was started before confinement was on", "restart it at leisure"),
            Reason(
                "Unconfined",
                "False: `--confinement` is off, a trial failed here, or a shared daemon serves it",
                "the message has the cause; `metal-supervisor doctor`",
            ),
        ),
    ),
    Group(
        "Available of a Model",
        (MODEL + AVAILABLE,),
        (),
        (Reason("MetalAgentManaged", "True: the file is on this Mac", "nothing"),),
    ),
    Group(
        "Progressing of a Model",
        (MODEL + PROGRESSING,),
        (),
        (
            Reason("DownloadStarted", "True: the file is being fetched", _WAIT),
            Reason("Pending", "True: no service uses it, or its turn has not come", "nothing"),
        ),
    ),
)
_ELSEWHERE = (
    Group(
        "Events alone",
        (EVENT,),
        (),
        (
            Reason(
                "Crashed",
                "an engine that served ended; the note has how, and the cause in its log",
                "`metal-supervisor logs NAMESPACE/NAME --previous`",
            ),
            Reason(
                "ScratchLarge",
                "an engine fills its scratch directory: 256 MiB, 2,000 files, or what cannot be read",
                "look at what it writes there; nothing is stopped, and its next start empties it",
            ),
            Reason("AddressChanged", "on this Mac's Lease: another address is advertised now", "nothing"),
        ),
    ),
    Group(
        "`schedulingStatus` alone",
        (SCHEDULING,),
        (),
        (
            Reason("WaitingForMetalAgent", "while MetalReady says Loading: LLMKube's word for it", _WAIT),
            Reason("ModelSourceNotAllowed", "beside LLMKube's operator: its word for SourceNotAllowed", "see there"),
            Reason(
                "ExtraArgsRejected",
                "beside LLMKube's operator: its word for a refused item of `spec.extraArgs`",
                "see the message",
            ),
        ),
    ),
    Group(
        "Records, logs and `metal-supervisor explain` alone",
        (RECORD,),
        (),
        (
            Reason("Admitted", "it may run", "nothing"),
            Reason("Needed", "a shared daemon is", "nothing"),
            Reason("Unused", "a shared daemon is not needed any more, and stops", "nothing"),
            Reason("Deleted", "the InferenceService is gone; its engine ends", "nothing"),
            Reason("Moved", "another Mac runs it now", "nothing"),
            Reason("NotHere", "it is not for this Mac any more", "nothing"),
            Reason("NotRunning", "told by `status` and `explain` while no supervisord runs", "`metal-supervisor run`"),
        ),
    ),
)

OF_METAL_READY = (
    _SERVING,
    _ON_DEMAND,
    _COMING,
    _WAITING,
    _MEMORY,
    _OFF,
    _ENGINE,
    _MAC,
    _UNREACHED,
    _FIELD,
    _REFUSED,
    _FILE,
    _RUNS_ON,
)
GROUPS = (*OF_METAL_READY, *_STANDARD, *_ELSEWHERE)


def warns(reason: str, group: Group) -> bool:
    """Whether MetalReady's taking on this reason is a Warning among the Events."""
    return METAL in group.types and (reason in TROUBLE or reason == CLAIM_LOST or group.phases == ("Failed",))
