"""The values that flow round the circle, and nothing else.

Every stage takes some of these and returns others, so a reader can follow a pass by types alone:
custom resources -> Service | Rejected -> Record + Program -> Step -> Observed -> Report.
All are frozen; a change is a new value.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any, TypeAlias

from metal_supervisor.spec import document
from metal_supervisor.spec.arguments import TEXT, ValueCheck
from metal_supervisor.spec.sources import NOTHING, Artifact

Json: TypeAlias = document.Json
Key: TypeAlias = tuple[str, str]
"""(namespace, name) of a custom resource."""


def engine_key(namespace: str, name: str, ordinal: int) -> Key:
    """Key of one of this Mac's engines for a service: the first bears the service's name, others a number with it."""
    return namespace, f"{name}@{ordinal}" if ordinal else name


def shown_to(reader: str, key: Key) -> str:
    """Name of an engine in what users of the namespace `reader` read: of other namespaces they learn no names."""
    return "/".join(key) if key[0] == reader else "a service of another namespace"


DIRECTORY_FORMATS = frozenset({"mlx", "safetensors"})
"""`Model.spec.format`s that mean a directory, not one file."""
MODEL_REFUSED = "ModelSourceNotAllowed"
"""Reason of a refusal: LLMKube's operator has rejected the Model. Its own agent uses the same word."""
MODEL_FAILED = "ModelFailedInCluster"
"""Reason of a warning: LLMKube's operator cannot obtain the Model's files, and this Mac can."""
FIELD_IGNORED = "FieldIgnored"
"""Reason of a warning: fields without a meaning on a Mac were left out."""


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
    gpu_layers: int | None
    sha256: str | None
    limit: ModelLimit = field(default_factory=ModelLimit)
    """Limit on its memory (`spec.hardware.memoryBudget`, `memoryFraction`)."""
    projector: str = ""
    """Source of the vision projector (`spec.mmproj`), "" without one."""
    artifact: Artifact = NOTHING
    """The artifact that `source` names."""
    failed: str = ""
    """Reason and message with which LLMKube's operator reports that it cannot obtain the files, "" if it does not."""


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
    artifact: Artifact
    edition: str = ""
    """uid and generation of the Model that has it, "" if that is the service's own."""
    gpu_layers: int | None = None

    @property
    def key(self) -> PartKey:
        return self.artifact.source if self.role is Role.ADAPTER else self.role


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
    aliases: tuple[str, ...] = ()
    """Further names for the gateway's clients (annotation); they change nothing about its engine."""
    lost_names: tuple[str, ...] = ()
    """As `Record.lost_names`."""
    daemon_names: tuple[str, ...] = ()
    """As `Record.daemon_names`."""
    idle_s: float | None = None
    """On demand: seconds without a request until its engine is unloaded, 0 for only to make room. None: always on."""
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
    created: str = ""
    """creationTimestamp of the InferenceService."""

    @cached_property
    def asked(self) -> str:
        """Fingerprint of the request, for `same_request`: editions, then a digest of their content."""
        said: list[Any] = [self.uid, self.runtime, self.mode, self.container_port]
        said += [dict(self.options), self.extra_args, self.env]
        # Without uid and generation: a Model that was deleted and applied again asks for the same engine. Field by
        # field: one that a release adds must not make an edit of what is as it was.
        model, limit = self.model, self.model.limit
        said += [model.name, model.source, model.format, model.gpu_layers, model.sha256, limit.bytes, limit.fraction]
        files = ((each.artifact, each.role.value, each.gpu_layers) for each in self.companions)
        said += [list(model.artifact.digests)] if model.artifact.digests else []
        said += [model.artifact.slot, *([artifact.slot, artifact.sha256, *more] for artifact, *more in files)]
        digest = hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:16]
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
    created: str = ""
    """creationTimestamp of the InferenceService."""

    @property
    def key(self) -> Key:
        return engine_key(self.namespace, self.name, self.ordinal)

    @property
    def bars_start(self) -> bool:
        """True if an engine that already runs must not be started again, not even from its last valid spec."""
        return self.reason == MODEL_REFUSED


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
    """One supervisord program and the spec that it starts from."""

    name: str
    edition: str
    """Digest of what reaches the engine."""
    spec: str
    """Content of the spec file (JSON)."""


@dataclass(frozen=True)
class ModelFile:
    """State of a Model's file, or directory, on this Mac."""

    phase: str
    """`Ready`, `Downloading`, `Pending`, `Failed`, or `Checking`, which is over in a moment."""
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
    gguf: dict[str, str | int] = field(default_factory=dict, hash=False)
    """What its header says, for the status of its Model."""
