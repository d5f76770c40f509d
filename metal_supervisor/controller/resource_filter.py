"""Reading of custom resources: services for this Mac, accepted or rejected with a reason, without those for others."""

from __future__ import annotations

import contextlib
import logging
import platform
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from metal_supervisor.controller.remembered import Remembered, nothing
from metal_supervisor.controller.snapshot import Snapshot
from metal_supervisor.host import chip, darwin_memory, machine
from metal_supervisor.placement import placement
from metal_supervisor.runtimes import RUNTIMES, VOCABULARIES, builds
from metal_supervisor.runtimes.setting_checks import offered
from metal_supervisor.settings.checks import listed
from metal_supervisor.settings.loader import Settings
from metal_supervisor.spec import grants, resources
from metal_supervisor.spec.fields import Bad
from metal_supervisor.spec.nearest import did_you_mean
from metal_supervisor.spec.on_demand import OnDemandPolicy
from metal_supervisor.spec.record import Record
from metal_supervisor.spec.types import Json, Key, Rejected, Service, Standing

LOOK_EVERY_S = 10.0
log = logging.getLogger("controller")


@dataclass(frozen=True)
class _Inputs:
    """All that an answer is made from."""

    services: Mapping[Key, Json]
    models: Mapping[Key, Json]
    kept: Mapping[Key, tuple[int, str]]
    """(generation, runtime) of the services that run."""
    owners: frozenset[Key]
    """The services that this Mac has a record of."""
    operator: bool | None
    policy: resources.Policy

    def changed_since(self, before: _Inputs) -> Collection[Key]:
        """The services that may be read otherwise than before."""
        others = self.models, self.operator, self.policy
        if others != (before.models, before.operator, before.policy):
            return self.services.keys()
        edited = {key for key, each in self.services.items() if each is not before.services.get(key)}
        ran = {key for key, _ in self.kept.items() ^ before.kept.items()}
        rivals = resources.rivals(self.services.keys() | before.services.keys())
        return (edited | ran | rivals | (self.owners ^ before.owners)) & self.services.keys()


class ResourceFilter:
    """Reads custom resources by what this Mac offers."""

    def __init__(self, settings: Settings, node: str) -> None:
        self._settings = settings
        label = chip.quick(darwin_memory.mac()).label
        self._labels = placement.node_labels(settings, node, platform.system(), platform.machine(), label)
        self._look_at = 0.0
        self._policy = policy_of(settings)
        self._read: Remembered[Service | Bad, Key, Json | None] = Remembered()
        self._judged: Remembered[Service | Rejected | None, Key, None] = Remembered()
        self._answer: tuple[_Inputs, dict[Key, Service | Rejected]] | None = None
        """What the latest answer was made from, and that answer."""

    def read(self, snapshot: Snapshot, records: Mapping[Key, Record]) -> dict[Key, Service | Rejected]:
        """Every InferenceService that is for this Mac, accepted or rejected; none while they are not known.

        The very same answer while nothing of what it depends on changes.
        """
        kept = {
            key: (record.generation, record.runtime)
            for key, record in records.items()
            if record.verdict.standing is Standing.RUN
        }
        owners = frozenset(record.owner for record in records.values())
        inputs = _Inputs(snapshot.services or {}, snapshot.models, kept, owners, snapshot.operator, self._offered())
        if self._answer is None or self._answer[0] != inputs:
            self._answer = inputs, self._read_anew(inputs)
        return self._answer[1]

    def _read_anew(self, inputs: _Inputs) -> dict[Key, Service | Rejected]:
        """The answer, made from the one before; a service that comes is the last."""
        services, kept = inputs.services, inputs.kept
        before, answer = self._answer or (None, {})
        changed = services.keys() if before is None else inputs.changed_since(before)
        result = {key: item for key, item in answer.items() if key in services}
        for remembered in (self._read, self._judged):
            remembered.forget_all_but(services.keys())
        written = {key: services[key] for key in changed}
        read = resources.interpret(written, inputs.models, inputs.policy, kept.keys(), kept, self._service_of)
        final = {key: self._final(key, item, inputs) for key, item in read.items()}
        # Those that come are in the order of `interpret`: of two that ask for one port, the older gets it.
        result |= {key: item for key, item in final.items() if item is not None}
        for key in changed:
            if final.get(key) is None:
                result.pop(key, None)
        return result

    def _final(self, key: Key, item: Service | Rejected, inputs: _Inputs) -> Service | Rejected | None:
        """What became of a service as it was read; None if it is for another Mac."""
        resource = inputs.services[key]
        if isinstance(item, Service):
            return self._judged.of(key, (item, resource), nothing, lambda _: self._judge(item, resource))
        if self._settings.embedded or not _unclaimed(item, inputs.owners, inputs.operator):
            return self._judge(_with_nearest(item, inputs.models), resource)
        return None

    def _judge(self, item: Service | Rejected, resource: Json) -> Service | Rejected | None:
        """An item within its limits, rejected if its runtime lacks what it asks for; None if it is for another Mac.

        With the embedded API there are no other Macs: theirs are rejected.
        """
        misfit = placement.unplaced(resource, self._labels)
        if misfit and self._settings.embedded:
            text = f"{misfit}, which this Mac does not have; change it, or set --node-labels"
            return resources.rejected(resource, "NodeSelectorMismatch", text)
        if misfit:
            return None
        try:
            found = grants.granted(item, self._settings.limits)
            problem = RUNTIMES[found.runtime].refuse(found) if isinstance(found, Service) else None
        except Exception as error:  # noqa: BLE001 - logged
            problem = _unreadable((item.namespace, item.name), error)
        return resources.rejected(resource, *problem) if problem else found

    def _service_of(
        self, resource: Json, model_of: Callable[[Key], Json | None], policy: resources.Policy, kept: str
    ) -> Service | Bad:
        """As `resources.read_service`, and anew only for a resource that changed, or whose Models did.

        One at which that fails is refused: it keeps no other from being read.
        """
        key = resource["metadata"]["namespace"], resource["metadata"]["name"]

        def read(look: Callable[[Key], Json | None]) -> Service | Bad:
            try:
                return resources.read_service(resource, look, policy, kept)
            except Exception as error:  # noqa: BLE001 - logged
                return Bad(*_unreadable(key, error))

        return self._read.of(key, (resource, policy, kept), model_of, read)

    def _offered(self) -> resources.Policy:
        """The policy with the runtimes that are installed now; looked up again every LOOK_EVERY_S."""
        if time.monotonic() >= self._look_at:
            self._policy = replace(self._policy, installed=_installed(self._settings, self._policy.runtimes))
            self._look_at = time.monotonic() + LOOK_EVERY_S
        return self._policy


def policy_of(settings: Settings) -> resources.Policy:
    """The rules that settings make for custom resources, with the runtimes that are installed now."""
    runtimes = {name: RUNTIMES[name].formats for name in offered(settings)}
    return resources.Policy(
        default_runtime=settings.runtime,
        runtimes=runtimes,
        allowlist=frozenset(listed(settings.inference_service_allowlist)),
        allowed_args=frozenset(listed(settings.allow_extra_args)),
        allowed_env=frozenset(listed(settings.allow_env)),
        vocabularies=VOCABULARIES,
        on_demand=OnDemandPolicy(settings.gateway_on, settings.on_demand, settings.idle_ttl),
        installed=_installed(settings, runtimes),
    )


def _installed(settings: Settings, runtimes: Collection[str]) -> frozenset[str]:
    """Those of the runtimes that have a program on this machine."""
    found = set()
    for name in runtimes:
        with contextlib.suppress(machine.NoBinary):
            builds.find(settings, RUNTIMES[name].executables)
            found.add(name)
    return frozenset(found)


def _unreadable(key: Key, error: Exception) -> tuple[str, str]:
    """(reason, message) of a service at which our own code fails; the error, which is being handled, is logged."""
    log.exception("a service cannot be read", extra={"service": ".".join(key)})
    return "InvalidSpec", f"it cannot be read: {type(error).__name__}; the controller's log says where"


def _with_nearest(item: Rejected, models: Mapping[Key, Json]) -> Rejected:
    """A service whose Model does not exist, with the most similar name of its namespace in the message."""
    if item.reason != resources.MODEL_NOT_FOUND:
        return item
    near = did_you_mean(item.model_name, [name for namespace, name in models if namespace == item.namespace])
    return replace(item, message=item.message + near)


def _unclaimed(item: Rejected, known: Collection[Key], operator: bool | None) -> bool:
    """True if a service is not known to be for any Mac: it is not metal, or has no Model and never ran here."""
    strange = item.key not in known and operator is not False
    return item.reason == "NotMetal" or (item.reason == resources.MODEL_NOT_FOUND and strange)
