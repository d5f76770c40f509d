"""Status of InferenceServices and Models, with or without LLMKube's operator.

Without the operator the whole status is ours. With it only our own condition is, which the operator leaves alone.
`schedulingStatus` belongs to both, so it is written, in words that the operator keeps, when our verdict changes, taken
back with it, cleared once after the service is ready or off, and never written again only because it was overwritten.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from metal_supervisor.cluster import manifests
from metal_supervisor.cluster.answers import KubeError, now_micro
from metal_supervisor.cluster.kube import MERGE, Kube, find
from metal_supervisor.cluster.manifests import api_path
from metal_supervisor.cluster.report import GOODBYE, Report
from metal_supervisor.cluster.status_mode import condition_of_others, field_of_others
from metal_supervisor.sidecar.status_writer import StatusWriter
from metal_supervisor.spec.document import mapping
from metal_supervisor.spec.instants import utc
from metal_supervisor.spec.record import Record
from metal_supervisor.spec.types import MODEL_REFUSED, Json, Key, ModelFile, Standing

NEVER = float("inf")
CLEAR_AFTER_S = (2.0, 60.0)
"""Seconds after a service is ready, or off, at which to look for a stale schedulingStatus: the operator may write late
once, and leaves what it finds then.
"""
NUDGE_AFTER_S = 1.0
"""Long enough for the operator's own copy of the slices to be current."""
PROGRESS_S = 1.0
"""Time for which a change of messages alone waits, after the last write and for changes that may follow."""
MESSAGES_PER_S = 20
"""Most of these writes a second: an engine that leaves the queue changes the messages of all behind it."""
NUDGE = "metal-supervisor.io/changed"
ARGUMENTS_REFUSED = "ExtraArgsRejected"
OPERATOR_WORDS = {
    "Evicted": "InsufficientMemory",
    "MemoryPressure": "InsufficientMemory",
    "ServiceConflict": "EndpointNameConflict",
    "SourceNotAllowed": MODEL_REFUSED,
    **{
        word: word
        for word in (
            "InsufficientMemory",
            "MemoryCheckFailed",
            "EndpointNameConflict",
            MODEL_REFUSED,
            ARGUMENTS_REFUSED,
            "ServiceNameTooLong",
            "ModelDigestMismatch",
        )
    },
}
"""Our reason -> the word for schedulingStatus. LLMKube's operator leaves these seven words alone since 0.10, and
overwrites any other with WaitingForMetalAgent: reasons without a word of these are left to MetalReady.
"""


@dataclass(frozen=True)
class WantedStatus:
    """Desired status and endpoint of one service."""

    record: Record
    report: Report
    address: str
    """The advertised IP address."""
    address_problem: str
    """Reason why it cannot be advertised, or ""."""
    direct: str = ""
    """Address of the engine, with the embedded API: no DNS resolves its cluster names. "" otherwise."""


@dataclass(frozen=True)
class WantedModel:
    """Desired status of one Model."""

    uid: str
    generation: int
    source: str
    file: ModelFile


@dataclass
class _Written:
    """A status as last written. None: unknown."""

    owner: Key
    uid: str = ""
    want: WantedStatus | None = None
    """What `body` says, where it is the whole status; nothing is due while it is wanted still."""
    body: Json | None = None
    scheduling: tuple[str, str] | None = None
    attempted: set[str] = field(default_factory=set)
    """Reasons whose write has failed since: each may have taken effect all the same."""
    clear_at: list[float] = field(default_factory=list)
    """Monotonic times at which to look for a stale schedulingStatus."""
    nudge_at: list[float] = field(default_factory=list)
    """Monotonic times at which to trigger the operator for a service whose slices it cannot map back."""
    at: float = 0.0
    """Monotonic time of the latest write."""
    changed_at: float = NEVER
    """Monotonic time at which something else was wanted first, NEVER since the latest write."""
    held_until: float = NEVER
    """Monotonic time until which further messages are held back, NEVER if there are none."""
    ready_replicas: int = 0
    settled: bool = False
    """It was ready or off: there is no reason to give."""
    beside: bool = False
    """Written with the operator present; until then we may own more fields than our condition."""
    leaving: bool = False
    """The service is no longer for any Mac: our fields of its status are to be removed."""


def _differ_in_words(before: WantedStatus, now: WantedStatus) -> bool:
    """True if two statuses of one edition of a service have the same phase for the same reason.

    The last message before this Mac stops is none to wait: no later pass writes it.
    """

    def kept(want: WantedStatus) -> tuple[object, ...]:
        record, told = want.record, want.report
        state = told.phase, told.reason, told.ready, told.ready_replicas, told.message == GOODBYE[2]
        return record.uid, record.generation, *state

    return kept(before) == kept(now)


def _in_their_words(told: Report) -> tuple[str, str] | None:
    """(schedulingStatus, schedulingMessage) next to the operator; None for a reason that it has no word for."""
    reason, message = told.scheduling or ("", "")
    if reason in ("InvalidSpec", "UnsupportedField") and message.startswith("spec.extraArgs"):
        return ARGUMENTS_REFUSED, message
    return (OPERATOR_WORDS[reason], message) if reason in OPERATOR_WORDS else None


def _is_off(want: WantedStatus) -> bool:
    """True if nothing is to run by the spec, and nothing does. The operator counts one that was stopped by hand."""
    return want.report.replicas == 0 and want.report.phase in ("Stopped", "Suspended")


def now_seconds(kube: Kube) -> str:
    """Current time by the API server's clock, in RFC 3339 with whole seconds."""
    return utc(time.time() + kube.clock_offset_s)


class Statuses:
    """Writes statuses. All methods may raise KubeError, and are idempotent."""

    def __init__(self, kube: Kube) -> None:
        self._kube, self._writer = kube, StatusWriter(kube)
        self.operator: bool | None = None
        """True if LLMKube's operator writes statuses here; None while unknown: nothing is written then."""
        self.silence = ""
        """Text that MetalReady adds while the operator seems to be gone, else ""."""
        self._services: dict[Key, _Written] = {}
        self._models: dict[tuple[str, str, str], tuple[Json, bool]] = {}
        """(Namespace, name, uid) of a Model -> its status as last written, True if `gguf` in it is the operator's."""

    def look_anew(self) -> None:
        """Forget what was written, so that all of it is compared with the cluster again."""
        for written in self._services.values():
            written.body = None
        self._models.clear()

    def due_at(self) -> float:
        """Monotonic time of the next write that is due without any change."""
        times = (at for each in self._services.values() for at in (*each.clear_at, *each.nudge_at))
        return min(times, default=NEVER)

    def held_until(self) -> float:
        """Monotonic time at which the first message is to be written that `rests` held back; NEVER if there is none."""
        return min((each.held_until for each in self._services.values()), default=NEVER)

    def rests(self, want: WantedStatus) -> bool:
        """True if `service` would find nothing to do for this very object, or only a message, which more may follow."""
        written = self._services.get(want.record.key)
        if written is None:
            return False
        written.held_until = NEVER
        if self.operator is not False or written.body is None or written.want is None:
            return False
        if written.want is want:
            return True
        written.changed_at = min(written.changed_at, time.monotonic())
        pause_s = PROGRESS_S * max(1.0, len(self._services) / MESSAGES_PER_S)
        until = max(written.at + pause_s, written.changed_at + PROGRESS_S)
        if time.monotonic() < until and _differ_in_words(written.want, want):
            written.held_until = until
            return True
        return False

    def service(self, want: WantedStatus) -> None:
        """Write the status of one InferenceService, if this Mac holds its first replica."""
        record = want.record
        written = self._services.get(record.key)
        if written is None or written.uid != record.uid:
            written = self._services[record.key] = _Written(record.owner, record.uid)
        if record.verdict.standing is Standing.REMOVING or not self.operator or record.slot or not record.claimed:
            written.clear_at, written.nudge_at = [], []  # only with the operator, and for the first replica
        if record.verdict.standing is Standing.REMOVING:
            written.leaving = record.verdict.reason == "NotHere" and record.slot == 0
            written.body = None  # the next holder of its slot writes it, and this Mac may be that again
            return
        if record.slot != 0 or not record.claimed or self.operator is None:
            written.body = None
            return
        if written.body is None:
            written.body = self._kube.request("GET", api_path("inferenceservices", *record.owner)).get("status") or {}
        now = now_seconds(self._kube)
        if not self.operator:
            written.beside = False
            body = manifests.status(record, want.report, written.body, now, want.direct)
            if body != written.body:
                written.body = None  # until it is written: one that fails may have taken effect all the same
                self._whole(record.owner, body)
                written.body, written.at = body, time.monotonic()
            written.want, written.changed_at = want, NEVER
            return
        body = manifests.own_status(record, want.report, written.body, now, self.silence)
        before = manifests.own_part(written.body)
        if not written.beside or body != before:
            written.body = None
            # The operator writes what pods run on, and leaves it when the service moves to a Mac.
            self._writer.apply("InferenceService", record.owner, body, force="acceleration" in body)
            if "acceleration" in before and "acceleration" not in body:
                self._writer.merge(api_path("inferenceservices", *record.owner), {"acceleration": None})
            written.body, written.beside = body, True
        self._scheduling(want, written)

    def _whole(self, owner: Key, body: Json) -> None:
        """Write a whole status; its condition Ready only if no other field manager owns that one.

        Ready is a common type, and two writers of it would overwrite each other for ever. Everything else is taken over
        by force, also from an operator that is gone.
        """
        try:
            found = self._writer.apply("InferenceService", owner, body)
        except KubeError as error:
            if not error.conflict:
                raise
            metadata = self._kube.request("GET", api_path("inferenceservices", *owner))["metadata"]
            if condition_of_others(metadata.get("managedFields"), manifests.READY):
                body = manifests.without_ready(body)
            found = self._writer.apply("InferenceService", owner, body, force=True)
        self._writer.tidy(api_path("inferenceservices", *owner), found, body)

    def _scheduling(self, want: WantedStatus, written: _Written) -> None:
        """Write or clear the two scheduling fields, which the operator writes as well."""
        path, now = api_path("inferenceservices", *want.record.owner), time.monotonic()
        settled = want.report.ready or _is_off(want)
        if settled and not written.settled:
            written.clear_at = [now + after_s for after_s in CLEAR_AFTER_S]
        elif not settled:
            written.clear_at = []
        written.settled = settled
        if want.report.ready_replicas != written.ready_replicas and "." in want.record.name:
            written.nudge_at = [now + NUDGE_AFTER_S]
        written.ready_replicas = want.report.ready_replicas
        verdict, before = _in_their_words(want.report), written.scheduling
        if verdict is not None and (verdict != before or written.attempted):
            written.attempted.add(verdict[0])
            told = {"schedulingStatus": verdict[0], "schedulingMessage": manifests.plain(verdict[1])}
            self._writer.merge(path, told)
        elif verdict is None and (ours := {*written.attempted, *(before or ())[:1]}):
            self._clear(path, ours)
        written.scheduling, written.attempted = verdict, set()
        if written.clear_at and now >= written.clear_at[0]:
            self._clear(path)
            written.clear_at.pop(0)
        if written.nudge_at and now >= written.nudge_at[0]:
            if want.record.endpoint:
                self._nudge(want.record, want.record.endpoint.service)
            written.nudge_at.pop(0)

    def _clear(self, path: str, only: Collection[str] = ()) -> None:
        """Clear the two scheduling fields, if they say anything. `only`: the reasons to clear, () for any."""
        said = (self._kube.request("GET", path).get("status") or {}).get("schedulingStatus")
        if said and (not only or said in only):
            self._writer.merge(path, {"schedulingStatus": None, "schedulingMessage": None})

    def _nudge(self, record: Record, service: str) -> None:
        """Touch an annotation of the Service, to trigger the operator, if it is there and of this InferenceService.

        The operator maps a Service to its owner, but looks for slices under a name with dashes.
        """
        path = f"/api/v1/namespaces/{record.namespace}/services/{service}"
        owners = mapping(find(self._kube, path) or {}, "metadata").get("ownerReferences") or []
        if any(each.get("uid") == record.uid for each in owners):
            body = {"metadata": {"annotations": {NUDGE: now_micro()}}}
            self._kube.request("PATCH", path, {"fieldManager": manifests.MANAGED_BY}, body, MERGE)

    def model(self, key: Key, model: WantedModel) -> None:
        """Write the status of a Model; not called where LLMKube's operator writes it."""
        known = self._models.pop((*key, model.uid), None)
        if known is None:
            found = self._kube.request("GET", api_path("models", *key))
            theirs = field_of_others(found["metadata"].get("managedFields"), "gguf")
            known = found.get("status") or {}, theirs
        before, theirs = known
        # What the operator has read of a header is as good as ours, and stays.
        file = replace(model.file, gguf={}) if theirs else model.file
        body = manifests.model_status(file, model.source, model.generation, before, now_seconds(self._kube))
        if body != before:
            self._writer.tidy(api_path("models", *key), self._writer.apply("Model", key, body, force=True), body)
        self._models[(*key, model.uid)] = body, theirs

    def forget(self, key: Key) -> None:
        """Forget a service; if this Mac wrote its status and no Mac serves it now, remove our fields."""
        written = self._services.get(key)
        if written is not None and written.leaving:
            try:
                self._writer.apply("InferenceService", written.owner, {})
            except KubeError as error:
                if error.code in (400, 404, 409, 422):  # trying again would not help; after any other it is due still
                    del self._services[key]
                raise
        self._services.pop(key, None)

    def forget_models_but(self, models: Mapping[Key, WantedModel]) -> None:
        """Forget all other Models."""
        current = {(*key, model.uid) for key, model in models.items()}
        self._models = {key: known for key, known in self._models.items() if key in current}
