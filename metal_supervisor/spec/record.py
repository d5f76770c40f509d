"""The record of an engine, with a part for each that decides on it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from metal_supervisor.spec.types import Endpoint, Key, Probe, Standing, engine_key
from metal_supervisor.spec.withdrawal import NO_WITHDRAWAL, WithdrawalToken


@dataclass(frozen=True)
class Verdict:
    """The controller's decision about a service, and the time of it."""

    standing: Standing
    reason: str
    message: str
    since: float
    """Unix time of the last change of standing or reason."""


@dataclass(frozen=True, kw_only=True)
class Requested:
    """Part of a record that its InferenceService asks for."""

    namespace: str
    name: str
    uid: str
    generation: int
    program: str
    model: str
    """Name of the Model."""
    model_uid: str = ""
    runtime: str
    replicas: int
    mode: str
    priority: str
    endpoint: Endpoint | None
    drain_s: float | None = None
    """Seconds that the engine gets to finish running requests; None: this Mac's setting."""
    limit_bytes: int | None = None
    """Its Model's limit on its memory."""
    protected: bool = False
    """It is never stopped to make room, nor when memory is short."""
    aliases: tuple[str, ...] = ()
    """Further names for the gateway's clients."""
    lost_names: tuple[str, ...] = ()
    """Names of these and its own that another namespace has, or had when it was last edited (`name_claims`)."""
    daemon_names: tuple[str, ...] = ()
    """Further names under which its shared daemon serves its model (`name_claims`)."""
    idle_s: float | None = None
    """As `Service.idle_s`."""
    ordinal: int = 0
    """Number of the engine among this Mac's engines for the service."""

    # Kept, because a pass over many services asks for them many thousand times; see `values_of`.
    @cached_property
    def key(self) -> Key:
        """Key of the engine; of the service for the first one."""
        return engine_key(self.namespace, self.name, self.ordinal)

    @cached_property
    def is_daemon(self) -> bool:
        """True for the record of a shared daemon, which belongs to no InferenceService."""
        return not self.namespace

    @cached_property
    def owner(self) -> Key:
        """Key of the InferenceService."""
        return self.namespace, self.name


@dataclass(frozen=True, kw_only=True)
class Replica:
    """Part of a record that placement decides: the replica of the service that its engine is."""

    slot: int = 0
    """The replica this Mac runs; the holder of slot 0 speaks for all of them."""
    claimed: bool = True
    """False while another Mac takes the slot over: this one serves until that one does."""
    peers_ready: int = 0
    """Replicas that other engines serve, of other Macs and of this one."""


@dataclass(frozen=True, kw_only=True)
class EngineRun:
    """Part of a record that says how its engine runs, on this Mac and by its present rules."""

    port: int | None = None
    """The engine's port; chosen once, kept until the InferenceService is deleted."""
    front_port: int | None = None
    """Port at which the gateway answers for an on-demand service; its Service leads there."""
    host: str = ""
    """Address the engine listens on, "" if it is not known: then the one from the settings."""
    edition: str | None = None
    """Edition of the spec for its next start; None when nothing should run.

    An engine that runs from another edition is restarted for another request only (`is_run_by`), and so neither by an
    upgrade nor by a changed setting.
    """
    slot_context: int = 0
    """Tokens of a slot, chosen for its first start because its spec names no context; 0: none was chosen."""
    asked: str = ""
    """`Service.asked` of the request that its spec answers."""
    probe: Probe = field(default_factory=Probe)
    files: tuple[str, ...] = ()
    """Model files in use, absolute paths."""
    daemon: str = ""
    """Program of the shared daemon that serves its model, "" if its own process does."""
    unconfined: str = ""
    """Reason why the operating system will not confine its next start, "" if it will."""
    barred: str = ""
    """Reason why no engine of it may be started, "" if one may. One that already runs is left running."""


@dataclass(frozen=True, kw_only=True)
class Reservation:
    """Part of a record that says how much memory its engine takes; the estimate of its spec."""

    reserved_bytes: int = 0
    """Memory reserved for its engine while it may run, by estimate; 0 if there is none."""
    mapped_bytes: int = 0
    """Part of `reserved_bytes` that is mapped from files."""
    memory: str = ""
    """The arithmetic of the estimate, or the reason why there is none."""
    guessed: str = ""
    """Reason why the estimate is only a guess by the size of its file, "" if it is not."""
    advice: str = ""
    """Parts of the estimate and the context with which it would fit, if it can never fit as it is; "" if it can."""


@dataclass(frozen=True, kw_only=True)
class Admission:
    """Part of a record that admission and eviction keep: since when it has its memory, waits for it, or lost it."""

    queued_at: float | None = None
    """Unix time since which it has been queued for memory."""
    admitted_at: float = 0.0
    """Unix time at which it was admitted."""
    edit_queued_at: float | None = None
    """Unix time since which an edit that takes more memory waits for it."""
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


@dataclass(frozen=True, kw_only=True)
class Control:
    """Part of a record that the steps keep: what was done to its process, by the controller or with supervisorctl."""

    withdraw: WithdrawalToken = NO_WITHDRAWAL
    """Non-empty: the controller wants the endpoint withdrawn, and waits for this exact token."""
    stop_sent: bool = False
    """The controller itself stopped the process, and no other has run since."""
    stopped_by_hand: bool = False
    """Stopped with `supervisorctl stop`; honoured until the spec changes."""
    retry_at: float | None = None
    """Unix time of the next start when the program is held in a crash loop."""


UNDECIDED = Verdict(Standing.RUN, "", "", 0.0)
"""The very verdict of a proposed record whose engine may run if there is memory for it; no file has it."""


@dataclass(frozen=True, kw_only=True)
class Record(Control, Admission, Reservation, EngineRun, Replica, Requested):
    """Persistent state of one claimed InferenceService (`records/*.json`): a part for each that decides on it.

    Each pass proposes the next one: a copy that is `UNDECIDED` until memory is granted or refused.
    """

    verdict: Verdict
    warning: tuple[str, str] | None = None
    """(reason, message) of a problem that does not stop the service, e.g. a rejected edit."""

    @property
    def asks(self) -> bool:
        """True if it is proposed, and asks for memory or to keep what it has."""
        return self.edition is not None and self.verdict is UNDECIDED

    @cached_property
    def runs(self) -> bool:
        """True if supervisord is to keep an engine of it running."""
        return self.edition is not None and self.verdict.standing is Standing.RUN

    def is_run_by(self, edition: str, asked: str) -> bool:
        """True if an engine is not to be restarted that was started from this edition of its spec, for this request."""
        return edition == self.edition or same_request(asked, self.asked)


def same_request(before: str, now: str) -> bool:
    """True if no edit between two values of `Service.asked` changes how the engine runs.

    Either the editions of the resources are equal, or the digests of the fields that configure the engine.
    """
    old_editions, _, old_digest = before.partition("|")
    editions, _, digest = now.partition("|")
    return bool(before) and (old_editions == editions or old_digest == digest)


DERIVED = ("key", "is_daemon", "owner", "runs")


def values_of(each: Record) -> dict[str, Any]:
    """The fields of a record by name, without what was derived from them."""
    values = dict(vars(each))
    for name in DERIVED:
        values.pop(name, None)
    return values
