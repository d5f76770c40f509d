"""Reading of custom resources: services for this Mac, accepted or rejected with a reason, without those for others."""

from __future__ import annotations

import contextlib
import platform
import time
from collections.abc import Collection, Mapping
from dataclasses import replace

from metal_supervisor.controller.controller_status import ControllerStatus
from metal_supervisor.host import chip, darwin_memory, machine
from metal_supervisor.placement import placement
from metal_supervisor.runtimes import RUNTIMES, VOCABULARIES, builds
from metal_supervisor.runtimes.setting_checks import offered
from metal_supervisor.settings.loader import Settings
from metal_supervisor.spec import limits, resources
from metal_supervisor.spec.types import Json, Key, Record, Rejected, Service, Standing

LOOK_EVERY_S = 10.0


class ResourceFilter:
    """Reads custom resources by what this Mac offers."""

    def __init__(self, settings: Settings, node: str, controller_status: ControllerStatus) -> None:
        self._settings, self._controller_status = settings, controller_status
        label = chip.quick(darwin_memory.mac()).label
        self._labels = placement.node_labels(settings, node, platform.system(), platform.machine(), label)
        self._look_at = 0.0
        self._policy = resources.Policy(
            default_runtime=settings.runtime,
            runtimes={name: RUNTIMES[name].formats for name in offered(settings)},
            allowlist=settings.allowlist,
            allowed_args=settings.allowed_args,
            allowed_env=settings.allowed_env,
            vocabularies=VOCABULARIES,
        )

    def read(
        self, services: Mapping[Key, Json], models: Mapping[Key, Json], records: Mapping[Key, Record]
    ) -> dict[Key, Service | Rejected]:
        """Every InferenceService that is for this Mac, accepted or rejected."""
        running = {key: record for key, record in records.items() if record.verdict.standing is Standing.RUN}
        kept = {key: (record.generation, record.runtime) for key, record in running.items()}
        read = resources.interpret(services, models, self._offered(), running.keys(), kept)
        read = {key: limits.granted(item, self._settings.limits) for key, item in read.items()}
        owners = {record.owner for record in records.values()}
        return self._for_this_mac(_refused_by_runtime(read, services), services, owners)

    def _offered(self) -> resources.Policy:
        """The policy with the runtimes that are installed now; looked up again every LOOK_EVERY_S."""
        if time.monotonic() >= self._look_at:
            found = set()
            for name in self._policy.runtimes:
                with contextlib.suppress(machine.NoBinary):
                    builds.find(self._settings, RUNTIMES[name].executables)
                    found.add(name)
            self._policy = replace(self._policy, installed=frozenset(found))
            self._look_at = time.monotonic() + LOOK_EVERY_S
        return self._policy

    def _for_this_mac(
        self, found: Mapping[Key, Service | Rejected], written: Mapping[Key, Json], known: Collection[Key]
    ) -> dict[Key, Service | Rejected]:
        """`found` without services for other Macs. With the embedded API there are no others: they are rejected."""
        result = {}
        for key, item in found.items():
            misfit = placement.unplaced(written[key], self._labels)
            if not self._settings.embedded:
                if not misfit and not self._unclaimed(item, known):
                    result[key] = item
            elif misfit:
                text = f"{misfit}, which this Mac does not have; change it, or set --node-labels"
                result[key] = resources.rejected(written[key], "NodeSelectorMismatch", text)
            else:
                result[key] = item
        return result

    def _unclaimed(self, item: Service | Rejected, known: Collection[Key]) -> bool:
        """True if a service is not known to be for any Mac: it is not metal, or has no Model and never ran here."""
        if not isinstance(item, Rejected):
            return False
        strange = item.key not in known and self._controller_status.operator is not False
        return item.reason == "NotMetal" or (item.reason == "ModelNotFound" and strange)


def _refused_by_runtime(
    found: Mapping[Key, Service | Rejected], written: Mapping[Key, Json]
) -> dict[Key, Service | Rejected]:
    """`found` with services rejected whose runtime does not support what they ask for."""
    result = dict(found)
    for key, item in found.items():
        problem = RUNTIMES[item.runtime].refuse(item) if isinstance(item, Service) else None
        if problem:
            result[key] = resources.rejected(written[key], *problem)
    return result
