"""The values that flow round the circle, and nothing else.

Every stage takes some of these and returns others, so a reader can follow a pass by types alone:
custom resources -> Service | Rejected -> Record + Program -> Step -> Observed -> Report.
All are frozen; a change is a new value.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeAlias

from metal_supervisor.spec.arguments import TEXT, ValueCheck
from metal_supervisor.spec.sources import NOTHING, Artifact
from metal_supervisor.spec.withdrawal import NO_WITHDRAWAL, WithdrawalToken

Json: TypeAlias = dict[str, Any]
Key: TypeAlias = tuple[str, str]
"""(namespace, name) of a custom resource."""


def engine_key(namespace: str, name: str, ordinal: int) -> Key:
    """Key of one of this Mac's engines for a service: the first bears the service's name, others a number with it."""
    return namespace, f"{name}@{ordinal}" if ordinal else name


DIRECTORY_FORMATS = frozenset({"mlx", "safetensors"})
"""`Model.spec.format`s that mean a directory, not one file."""
FIELD_IGNORED = "FieldIgnored"
"""Reason of a warning: fields without a meaning on a Mac were left out."""
RULES = 1
"""Edition of the rules for what a manifest may ask for. Raise it when they refuse what they used to accept."""


class Standing(str, Enum):
    """What the controller decided about one InferenceService."""

    RUN = "run"
    """Its program belongs in supervisord, and supervisord keeps it up."""
    WAIT = "wait"
    """It will run as soon as something arrives: the Model, its file, room."""
    STOPPED = "stopped"
    """`spec.replicas: 0`."""
    SUSPENDED = "suspended"
    """`spec.suspend: true`."""
    FAILED = "failed"
    """It cannot run until somebody changes the custom resources."""
    REMOVING = "removing"
    """The InferenceService is gone; its process is being stopped."""


@dataclass(frozen=True)
class ModelLimit:
    """What a Model says that it may take of the memory at most; one of the two, or neither."""

    bytes: int | None = None
    fraction: float | None = None
    """Of the machine's memory; counts only if `bytes` is not said."""

    def resolve(self, total_bytes: int) -> int | None:
        """In bytes on this machine, None if nothing was said."""
        if self.bytes is not None or self.fraction is None:
            return self.bytes
        return round(total_bytes * self.fraction)


@dataclass(frozen=True)
class Model:
    """What a Model says, as far as this Mac cares."""

    namespace: str
    name: str
    uid: str
    generation: int
    source: str
    """`spec.source` as written."""
    format: str
    """`spec.format`, `gguf` when unset."""
    accelerator: str
    """`spec.hardware.accelerator`, `cpu` when unset."""
    gpu_layers: int | None
    sha256: str | None
    limit: ModelLimit = field(default_factory=ModelLimit)
    """What it may take of the memory at most (`spec.hardware.memoryBudget`, `memoryFraction`)."""
    projector: str = ""
    """Source of the vision projector (`spec.mmproj`), "" without one."""
    artifact: Artifact = NOTHING
    """What `source` means."""


class Role(str, Enum):
    """What a further file is to an engine."""

    DRAFT = "draft"
    """A small model whose proposals the model only checks."""
    PROJECTOR = "projector"
    """What makes tokens of pictures."""
    ADAPTER = "adapter"
    """What changes the model's weights; there may be several."""


PartKey: TypeAlias = Role | str
"""What a companion is told apart by: its role, or the source of an adapter."""


@dataclass(frozen=True)
class Companion:
    """A further model file that an engine loads beside its model."""

    role: Role
    field: str
    """The field that names it, as a message has it."""
    source: str
    """As `Artifact.source`."""
    edition: str = ""
    """uid and generation of the Model that has it, "" if that is the service's own."""
    gpu_layers: int | None = None
    origin: Artifact | None = dataclasses.field(default=None, compare=False)
    """How it is come by, if there is more to it than `source`."""

    @property
    def artifact(self) -> Artifact:
        return self.origin or Artifact(self.source)

    @property
    def key(self) -> PartKey:
        return self.source if self.role is Role.ADAPTER else self.role


@dataclass(frozen=True)
class Reference:
    """A variable of an engine's environment whose value is kept elsewhere (`spec.env[].valueFrom`)."""

    variable: str
    kind: str
    """`secrets` or `configmaps`."""
    name: str
    key: str
    optional: bool
    """Without it the variable is left out."""
    path: str
    """The field that names it, as a message has it."""
    check: ValueCheck = TEXT
    """The values that the variable takes."""


@dataclass(frozen=True)
class Endpoint:
    """How the cluster reaches a service (`spec.endpoint`)."""

    service: str
    """Name of the Kubernetes Service: the CR's name with `.` replaced by `-`."""
    port: int
    path: str
    type: str
    node_port: int | None


@dataclass(frozen=True)
class Service:
    """One InferenceService that this Mac is to run, interpreted and validated."""

    namespace: str
    name: str
    uid: str
    generation: int
    model: Model
    runtime: str
    """Key into the runtimes table, e.g. `llama-server`."""
    replicas: int
    suspended: bool
    endpoint: Endpoint
    mode: str
    """`chat`, `embedding` or `rerank`."""
    priority: str
    container_port: int | None
    """`spec.containerPort`: the engine's port, if the user insists on one."""
    options: Mapping[str, Any]
    """The engine options of the spec by their CRD names, and `idleTtlS`, validated; absent means unset."""
    extra_args: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    drain_s: float | None = None
    """How long its engine may finish what it answers (`spec.rolloutPolicy`), None for this Mac's own setting."""
    ordinal: int = 0
    """Which of this Mac's engines for it is meant."""
    protected: bool = False
    """`spec.evictionProtection`: never stopped to make room, nor when memory is short."""
    allowed_args: frozenset[str] = frozenset()
    """Flags that this Mac allows in `extra_args` though they reach beyond the engine."""
    ignored: tuple[str, ...] = ()
    """Fields that mean nothing on a Mac and were left out, with their values' names."""
    companions: tuple[Companion, ...] = ()
    """Files that its engine needs besides the model."""
    references: tuple[Reference, ...] = ()
    """Values of its environment that are kept elsewhere; until they are filled in, `env` has them empty."""
    values_digest: str = ""
    """Of these values, once they are filled in."""
    awaits: tuple[Standing, str, str] | None = None
    """(standing, reason, message) of the value that it cannot have yet."""
    not_granted: tuple[tuple[str, str], ...] = ()
    """(reason, message) of what it asks for and this Mac does not grant."""

    @property
    def asked(self) -> str:
        """What was asked for, to be compared by `decide.same_request`: the editions, and a digest of what they say."""
        said = [self.uid, self.runtime, self.mode, self.container_port, dict(self.options), self.extra_args, self.env]
        # Without uid and generation: a Model that was deleted and applied again asks for the same engine.
        model: list[Any] = [dataclasses.replace(self.model, uid="", generation=0)]
        model += [[each.role.value, each.artifact, each.gpu_layers] for each in self.companions]
        digest = hashlib.sha256(json.dumps([*said, *model], sort_keys=True, default=str).encode()).hexdigest()[:16]
        idle = f"/{self.options['idleTtlS']}" if "idleTtlS" in self.options else ""  # annotations have no generation
        drafts = "".join(f"/{each.edition}" for each in self.companions if each.edition)
        more = f"{idle}{drafts}" + (f"/{self.values_digest}" if self.values_digest else "")  # nor have values
        return f"{self.uid}/{self.generation}/{self.model.uid}/{self.model.generation}{more}|{digest}"

    @property
    def key(self) -> Key:
        return engine_key(self.namespace, self.name, self.ordinal)


@dataclass(frozen=True)
class Rejected:
    """An InferenceService that cannot run as it is written, and why."""

    namespace: str
    name: str
    uid: str
    generation: int
    model_name: str
    reason: str
    """CamelCase, fit for a condition's reason."""
    message: str
    """Names the field and says what to do."""
    replicas: int = 1
    keeps_running: bool = True
    """An engine that already runs keeps its last valid spec: a bad edit must not cut anybody off."""
    endpoint: Endpoint | None = None
    suspended: bool = False
    ordinal: int = 0

    @property
    def key(self) -> Key:
        return engine_key(self.namespace, self.name, self.ordinal)


@dataclass(frozen=True)
class Verdict:
    """What the controller decided, and since when."""

    standing: Standing
    reason: str
    message: str
    since: float
    """Unix time of the last change of standing or reason."""


@dataclass(frozen=True)
class Probe:
    """How to ask an engine whether it serves: HTTP requests on loopback, described as data."""

    path: str = "/health"
    """Answers 200 when the engine can serve, 503 while it loads."""
    expects: str = ""
    """What that answer has in it; a page of some other server has not."""
    identity_path: str = "/v1/models"
    """Lists the served models; one id must equal `identity`."""
    identity: str = ""
    """The model name that proves that our process answers, not a stranger on the port."""
    busy_path: str = "/slots"
    """Lists what the engine is working on, each with `is_processing`; "" if it cannot be asked."""
    asleep_path: str = ""
    """Tells `is_sleeping` without waking it (`busy_path` would); "" for an engine that never unloads its model."""
    names_itself: bool = False
    """The engine cannot be given the service's name: requests have to use one of its own."""
    shared: bool = False
    """What answers is a daemon that serves other models too, and not the process that supervisord knows."""
    first_path: str = ""
    """Where the smallest request of its mode is sent once per start, before it counts as ready; "" for none."""
    first_body: str = ""
    """That request, JSON; one that `names_itself` still lacks its `model`, which `identity_path` tells."""


@dataclass(frozen=True)
class Engine:
    """What a runtime makes of a Service: enough to exec it and to probe it."""

    argv: tuple[str, ...]
    env: tuple[tuple[str, str], ...]
    cwd: str
    """Working directory of a shared daemon or an attendant; any other engine gets an empty one of its own."""
    probe: Probe
    daemon: str = ""
    """Program of the shared daemon that serves the model: the process is its attendant. "" for one that serves."""


@dataclass(frozen=True)
class Program:
    """One supervisord program and the immutable spec it runs."""

    name: str
    spec_file: str
    """File name under `specs/`, digest included."""
    spec: str
    """Content of the spec file (JSON)."""


@dataclass(frozen=True)
class Record:
    """What must be remembered of one claimed InferenceService (`records/*.json`)."""

    namespace: str
    name: str
    uid: str
    generation: int
    program: str
    model: str
    """Name of the Model."""
    runtime: str
    replicas: int
    mode: str
    priority: str
    verdict: Verdict
    endpoint: Endpoint | None
    port: int | None = None
    """The engine's port; chosen once, kept until the InferenceService is deleted."""
    host: str = ""
    """Address the engine listens on, "" if that is not known: then the one of the settings."""
    model_uid: str = ""
    spec_file: str | None = None
    """The spec that supervisord should run; None when nothing should."""
    asked: str = ""
    """`Service.asked` of the request that `spec_file` answers."""
    next_spec: str = ""
    """What this Mac would start it from today, "" if that is `spec_file`: an upgrade or a setting interrupts nobody."""
    drain_s: float | None = None
    """How long the engine may finish what it answers, None for this Mac's own setting."""
    probe: Probe = field(default_factory=Probe)
    files: tuple[str, ...] = ()
    """Model files in use, absolute paths."""
    withdraw: WithdrawalToken = NO_WITHDRAWAL
    """Non-empty: the controller wants the endpoint withdrawn, and waits for this very token."""
    stop_sent: bool = False
    """The controller itself stopped the process, and no other has run since."""
    stopped_by_hand: bool = False
    """Somebody typed `supervisorctl stop`; honoured until the spec changes."""
    retry_at: float | None = None
    """Unix time of the next start when the program is held in a crash loop."""
    warning: tuple[str, str] | None = None
    """(reason, message) of something wrong that does not stop the service, e.g. a rejected edit."""
    slot: int = 0
    """The replica this Mac runs; the holder of slot 0 speaks for all of them."""
    claimed: bool = True
    """False while another Mac takes the slot over: this one serves until that one does."""
    peers_ready: int = 0
    """Replicas that other engines serve, of other Macs and of this one."""
    ordinal: int = 0
    """Which of this Mac's engines for the service it is."""
    reserved_bytes: int = 0
    """What its engine was estimated to take of the memory, 0 if nobody can tell; kept for it while it may run."""
    mapped_bytes: int = 0
    """Of these, mapped from files."""
    memory: str = ""
    """The arithmetic of that, or why it is not known."""
    guessed: str = ""
    """Why that is only a guess by the size of its file, "" if it is not."""
    limit_bytes: int | None = None
    """What its Model allows it at most."""
    protected: bool = False
    """It is never stopped to make room, nor when memory is short."""
    queued_at: float | None = None
    """Unix time since which it wants memory."""
    admitted_at: float = 0.0
    """Unix time at which it got it."""
    edit_queued_at: float | None = None
    """Unix time since which an edit that takes more memory waits for it."""
    next_bytes: int = 0
    """What `next_spec` would take."""
    queue_position: int = 0
    """In the queue for memory, from 1; 0 if it is not in it."""
    displaced_by: str = ""
    """For whom it was stopped, "" if it was not."""
    evicted_at: float | None = None
    """Unix time at which it was stopped because memory was short; None once it may come back."""
    evicted_why: str = ""
    """The reading that made it so, and why it was this one."""
    evictions: int = 0
    """How often that was so."""
    pressure: tuple[str, str] | None = None
    """(level, why) of the machine's shortage of memory, once there was one."""
    daemon: str = ""
    """Program of the shared daemon that serves its model, "" if its own process does."""
    unconfined: str = ""
    """Why its next start is not confined by the operating system, "" if it is."""
    rules: int = 0
    """Edition of the rules under which its spec was accepted, see `RULES`; 0 for one of a release without them."""
    revoked: str = ""
    """Why its spec, of an older release, must not be started again while its engine may finish; "" if it may."""

    @property
    def key(self) -> Key:
        """Key of the engine; of the service for the first one."""
        return engine_key(self.namespace, self.name, self.ordinal)

    @property
    def is_daemon(self) -> bool:
        """Whether it is that of a shared daemon, which belongs to no InferenceService."""
        return not self.namespace

    @property
    def runs(self) -> bool:
        """Whether supervisord is to keep an engine of it up."""
        return self.spec_file is not None and self.verdict.standing is Standing.RUN

    @property
    def room_bytes(self) -> int:
        """What is kept for it: for what it runs, and for what it would be started from next."""
        return max(self.reserved_bytes, self.next_bytes)

    @property
    def owner(self) -> Key:
        """Key of the InferenceService."""
        return self.namespace, self.name


class State(str, Enum):
    """supervisord's process states, by their own names."""

    STOPPED = "STOPPED"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    BACKOFF = "BACKOFF"
    STOPPING = "STOPPING"
    EXITED = "EXITED"
    FATAL = "FATAL"
    UNKNOWN = "UNKNOWN"


LIVE = frozenset({State.STARTING, State.RUNNING, State.STOPPING})
"""States in which supervisord has a process."""


@dataclass(frozen=True)
class ProgramState:
    """One row of supervisord's process table."""

    name: str
    state: State
    pid: int
    """0 when there is no process."""
    start: float
    """Unix time of the last spawn, 0 if never."""
    stop: float
    now: float
    """supervisord's clock at the time of the answer."""
    description: str


@dataclass(frozen=True)
class Diff:
    """What `reloadConfig` says of the files against the active groups."""

    added: frozenset[str] = frozenset()
    changed: frozenset[str] = frozenset()
    removed: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.added or self.changed or self.removed)


@dataclass(frozen=True)
class RunNote:
    """The launcher's note of a program's latest start (`runs/*.json`)."""

    pid: int
    """The engine itself, which a stand-in only represents."""
    launcher_pid: int
    """What supervisord calls the program's pid; differs from `pid` for a stand-in."""
    started: str
    """Identity of the process start, comparable only for equality."""
    spec_file: str
    starts: tuple[float, ...]
    """Unix times of the recent starts that count towards a crash loop."""
    not_before: float
    """Unix time before which the launcher refuses to start, 0 if it does not."""
    refused: str
    """Why the last attempt was not made, "" if it was; e.g. `PortInUse`."""
    refused_message: str
    confined: bool = False
    """The operating system holds it to its policy."""


@dataclass(frozen=True)
class Observed:
    """What the sidecar saw of one program (`observed/*.json`)."""

    program: str
    pid: int
    ready: bool
    since: float
    """Unix time of the last change of `ready`."""
    state: str
    """supervisord's word for it."""
    message: str = ""
    withdrawn: WithdrawalToken = NO_WITHDRAWAL
    """The withdraw token that has been carried out."""
    restarts: int = 0
    """Unplanned starts, one after the first of each row that the launcher notes."""
    counted_start: float = 0.0
    """Unix time of the latest start that `restarts` knows of."""
    last_exit: str = ""
    """E.g. `exit status 1`, `terminated by SIGKILL`."""
    published: str = ""
    """Last failure to publish in the cluster, "" when in order."""
    busy: bool = False
    """Whether it still answers somebody, asked once it is to be withdrawn."""
    drained: WithdrawalToken = NO_WITHDRAWAL
    """The withdraw token after which it was seen idle."""
    served: bool = False
    """This very process has been ready before."""
    hung: str = ""
    """Why this very process should be restarted, "" if it should not."""
    memory_bytes: int = 0
    """What it was measured to hold of the memory, with its children; 0 if that is not known."""
    confined: bool = False
    """The operating system holds this very process to its policy."""
    exits: dict[str, int] = field(default_factory=dict)
    """How often its engine has ended, by reason: `stopped` where it was to, else `exit_1`, `SIGKILL` …"""


@dataclass(frozen=True)
class ModelFile:
    """Where a Model's file, or its directory, stands on this Mac."""

    phase: str
    """`Ready`, `Downloading`, `Failed` or `Checking`."""
    path: str = ""
    """Of a directory the real one: MLX engines fail to make out a model behind a symbolic link."""
    size_bytes: int = 0
    reason: str = ""
    message: str = ""
    directory: bool = False
    real: tuple[str, ...] = ()
    """Real paths of its files as they were judged, that of `path` first: a confined engine may read no others."""
    got_bytes: int = 0
    """How much of it is here while it comes."""
    total_bytes: int = 0
    """How much there is, 0 if nobody said."""
