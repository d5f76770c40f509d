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
    """The controller's decision about one InferenceService."""

    RUN = "run"
    """It has a program in supervisord, which keeps it running."""
    WAIT = "wait"
    """It will run as soon as something is available: the Model, its file, memory."""
    STOPPED = "stopped"
    """`spec.replicas: 0`."""
    SUSPENDED = "suspended"
    """`spec.suspend: true`."""
    FAILED = "failed"
    """It cannot run until the custom resources change."""
    REMOVING = "removing"
    """The InferenceService is gone; its process is being stopped."""


@dataclass(frozen=True)
class ModelLimit:
    """A Model's limit on its own memory, as bytes or as a fraction; both None without a limit."""

    bytes: int | None = None
    fraction: float | None = None
    """Share of the machine's memory; counts only if `bytes` is None."""

    def resolve(self, total_bytes: int) -> int | None:
        """The limit in bytes on a machine with so much memory, None without a limit."""
        if self.bytes is not None or self.fraction is None:
            return self.bytes
        return round(total_bytes * self.fraction)


@dataclass(frozen=True)
class Model:
    """The fields of a Model that this Mac uses."""

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
    """Limit on its memory (`spec.hardware.memoryBudget`, `memoryFraction`)."""
    projector: str = ""
    """Source of the vision projector (`spec.mmproj`), "" without one."""
    artifact: Artifact = NOTHING
    """The artifact that `source` names."""


class Role(str, Enum):
    """Purpose of a further file of an engine."""

    DRAFT = "draft"
    """A small model whose proposals the model only checks."""
    PROJECTOR = "projector"
    """A file that turns images into tokens."""
    ADAPTER = "adapter"
    """A file that changes the model's weights; there may be several."""


PartKey: TypeAlias = Role | str
"""Key of a companion: its role, or the source of an adapter."""


@dataclass(frozen=True)
class Companion:
    """A further model file that an engine loads beside its model."""

    role: Role
    field: str
    """The field that names it, as a message has it."""
    source: str
    """Source of the file, as in `Artifact.source`."""
    edition: str = ""
    """uid and generation of the Model that has it, "" if that is the service's own."""
    gpu_layers: int | None = None
    origin: Artifact | None = dataclasses.field(default=None, compare=False)
    """The artifact to fetch, if `source` does not say it all."""

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
    """Address of a service in the cluster (`spec.endpoint`)."""

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
    """`spec.containerPort`: the engine's port, if the user sets one."""
    options: Mapping[str, Any]
    """The engine options of the spec by their CRD names, and `idleTtlS`, validated; absent means unset."""
    extra_args: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    drain_s: float | None = None
    """Seconds that its engine gets to finish running requests (`spec.rolloutPolicy`); None: this Mac's setting."""
    ordinal: int = 0
    """Number of the engine among this Mac's engines for the service."""
    protected: bool = False
    """`spec.evictionProtection`: never stopped to make room, nor when memory is short."""
    allowed_args: frozenset[str] = frozenset()
    """Flags that this Mac allows in `extra_args` though they reach beyond the engine."""
    ignored: tuple[str, ...] = ()
    """Fields that have no meaning on a Mac and were left out, with their values' names."""
    companions: tuple[Companion, ...] = ()
    """Files that its engine needs besides the model."""
    references: tuple[Reference, ...] = ()
    """Values of its environment that are kept elsewhere; until they are filled in, `env` has them empty."""
    values_digest: str = ""
    """Digest of these values, once they are filled in."""
    awaits: tuple[Standing, str, str] | None = None
    """(standing, reason, message) of the value that is not available yet."""
    not_granted: tuple[tuple[str, str], ...] = ()
    """(reason, message) of what it asks for and this Mac does not grant."""

    @property
    def asked(self) -> str:
        """Fingerprint of the request, for `reconcile.same_request`: editions, then a digest of their content."""
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
    """An engine that already runs keeps its last valid spec: a bad edit must not interrupt clients."""
    endpoint: Endpoint | None = None
    suspended: bool = False
    ordinal: int = 0

    @property
    def key(self) -> Key:
        return engine_key(self.namespace, self.name, self.ordinal)


@dataclass(frozen=True)
class Verdict:
    """The controller's decision about a service, and the time of it."""

    standing: Standing
    reason: str
    message: str
    since: float
    """Unix time of the last change of standing or reason."""


@dataclass(frozen=True)
class Probe:
    """The HTTP requests on loopback that show whether an engine serves, described as data."""

    path: str = "/health"
    """Answers 200 when the engine can serve, 503 while it loads."""
    expects: str = ""
    """Text that this answer contains, and the page of another server does not; "" for none."""
    identity_path: str = "/v1/models"
    """Lists the served models; one id must equal `identity`."""
    identity: str = ""
    """The model name that proves that our process answers, not another on the port."""
    busy_path: str = "/slots"
    """Lists what the engine is working on, each with `is_processing`; "" if it cannot be asked."""
    asleep_path: str = ""
    """Tells `is_sleeping` without waking it (`busy_path` would); "" for an engine that never unloads its model."""
    names_itself: bool = False
    """The engine cannot be given the service's name: requests have to use one of its own."""
    shared: bool = False
    """A daemon that serves other models too answers, not the process that supervisord started."""
    first_path: str = ""
    """Where the smallest request of its mode is sent once per start, before it counts as ready; "" for none."""
    first_body: str = ""
    """That request, JSON; one that `names_itself` still lacks its `model`, which `identity_path` tells."""


@dataclass(frozen=True)
class Engine:
    """The engine of a Service, from its runtime: all that is needed to exec it and to probe it."""

    argv: tuple[str, ...]
    env: tuple[tuple[str, str], ...]
    cwd: str
    """Working directory of a shared daemon or an attacher; any other engine gets an empty one of its own."""
    probe: Probe
    daemon: str = ""
    """Program of the shared daemon that serves the model: the process is its attacher. "" for one that serves."""


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
    """Persistent state of one claimed InferenceService (`records/*.json`)."""

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
    """Address the engine listens on, "" if it is not known: then the one from the settings."""
    model_uid: str = ""
    spec_file: str | None = None
    """The spec that supervisord should run; None when nothing should."""
    asked: str = ""
    """`Service.asked` of the request that `spec_file` answers."""
    next_spec: str = ""
    """Spec for its next start, "" if that is `spec_file`: an upgrade or a changed setting restarts no engine."""
    drain_s: float | None = None
    """Seconds that the engine gets to finish running requests; None: this Mac's setting."""
    probe: Probe = field(default_factory=Probe)
    files: tuple[str, ...] = ()
    """Model files in use, absolute paths."""
    withdraw: WithdrawalToken = NO_WITHDRAWAL
    """Non-empty: the controller wants the endpoint withdrawn, and waits for this exact token."""
    stop_sent: bool = False
    """The controller itself stopped the process, and no other has run since."""
    stopped_by_hand: bool = False
    """Stopped with `supervisorctl stop`; honoured until the spec changes."""
    retry_at: float | None = None
    """Unix time of the next start when the program is held in a crash loop."""
    warning: tuple[str, str] | None = None
    """(reason, message) of a problem that does not stop the service, e.g. a rejected edit."""
    slot: int = 0
    """The replica this Mac runs; the holder of slot 0 speaks for all of them."""
    claimed: bool = True
    """False while another Mac takes the slot over: this one serves until that one does."""
    peers_ready: int = 0
    """Replicas that other engines serve, of other Macs and of this one."""
    ordinal: int = 0
    """Number of the engine among this Mac's engines for the service."""
    reserved_bytes: int = 0
    """Memory reserved for its engine while it may run, by estimate; 0 if there is none."""
    mapped_bytes: int = 0
    """Part of `reserved_bytes` that is mapped from files."""
    memory: str = ""
    """The arithmetic of the estimate, or the reason why there is none."""
    guessed: str = ""
    """Reason why the estimate is only a guess by the size of its file, "" if it is not."""
    limit_bytes: int | None = None
    """Its Model's limit on its memory."""
    protected: bool = False
    """It is never stopped to make room, nor when memory is short."""
    queued_at: float | None = None
    """Unix time since which it has been queued for memory."""
    admitted_at: float = 0.0
    """Unix time at which it was admitted."""
    edit_queued_at: float | None = None
    """Unix time since which an edit that takes more memory waits for it."""
    next_bytes: int = 0
    """Estimated memory of `next_spec`."""
    queue_position: int = 0
    """In the queue for memory, from 1; 0 if it is not in it."""
    displaced_by: str = ""
    """The service that it was stopped for, "" if it was not."""
    evicted_at: float | None = None
    """Unix time at which it was stopped because memory was short; None once it may come back."""
    evicted_why: str = ""
    """The memory reading that caused it, and why this engine was chosen."""
    evictions: int = 0
    """Number of times it was evicted."""
    pressure: tuple[str, str] | None = None
    """(level, why) of the machine's memory pressure, once there was any."""
    daemon: str = ""
    """Program of the shared daemon that serves its model, "" if its own process does."""
    unconfined: str = ""
    """Reason why the operating system will not confine its next start, "" if it will."""
    rules: int = 0
    """Edition of the rules under which its spec was accepted, see `RULES`; 0 for one of a release without them."""
    revoked: str = ""
    """Reason why its spec, of an older release, must not start again while its engine may finish; "" if it may."""

    @property
    def key(self) -> Key:
        """Key of the engine; of the service for the first one."""
        return engine_key(self.namespace, self.name, self.ordinal)

    @property
    def is_daemon(self) -> bool:
        """True for the record of a shared daemon, which belongs to no InferenceService."""
        return not self.namespace

    @property
    def runs(self) -> bool:
        """True if supervisord is to keep an engine of it running."""
        return self.spec_file is not None and self.verdict.standing is Standing.RUN

    @property
    def room_bytes(self) -> int:
        """Memory to keep for it: enough for the spec it runs, and for the one it would start from next."""
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
    """Result of `reloadConfig`: the differences between the files and the active groups."""

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
    """The program's pid according to supervisord; differs from `pid` for a stand-in."""
    started: str
    """Identity of the process start, comparable only for equality."""
    spec_file: str
    starts: tuple[float, ...]
    """Unix times of the recent starts that count towards a crash loop."""
    not_before: float
    """Unix time before which the launcher refuses to start, 0 if it does not."""
    refused: str
    """Reason why the last attempt to start was refused, e.g. `PortInUse`; "" if it was not."""
    refused_message: str
    confined: bool = False
    """The operating system confines it to its policy."""


@dataclass(frozen=True)
class Observed:
    """Observed state of one program, written by the sidecar (`observed/*.json`)."""

    program: str
    pid: int
    ready: bool
    since: float
    """Unix time of the last change of `ready`."""
    state: str
    """State of the process according to supervisord."""
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
    """It still has requests running; asked once it is to be withdrawn."""
    drained: WithdrawalToken = NO_WITHDRAWAL
    """The withdraw token after which it was seen idle."""
    served: bool = False
    """This process has been ready before."""
    hung: str = ""
    """Reason why this process should be restarted, "" if it should not."""
    memory_bytes: int = 0
    """Measured memory footprint, with its children; 0 if it is not known."""
    confined: bool = False
    """The operating system confines this process to its policy."""
    exits: dict[str, int] = field(default_factory=dict)
    """Exits of its engine, counted by reason: `stopped` if it was to stop, else `exit_1`, `SIGKILL` …"""


@dataclass(frozen=True)
class ModelFile:
    """State of a Model's file, or directory, on this Mac."""

    phase: str
    """`Ready`, `Downloading`, `Failed` or `Checking`."""
    path: str = ""
    """The real path for a directory: MLX engines do not recognize a model behind a symbolic link."""
    size_bytes: int = 0
    reason: str = ""
    message: str = ""
    directory: bool = False
    real: tuple[str, ...] = ()
    """Real paths of its files as they were judged, that of `path` first: a confined engine may read no others."""
    got_bytes: int = 0
    """Bytes downloaded so far, while it is being fetched."""
    total_bytes: int = 0
    """Size of all of it, 0 if it is not known."""
