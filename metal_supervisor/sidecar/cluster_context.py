"""This Mac's cluster context and the annotations of its node Lease, mostly from the controller's report.

Another program, perhaps of another release, writes the report: malformed parts are ignored.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from metal_supervisor import __version__
from metal_supervisor.host import machine
from metal_supervisor.placement.leases import PREFIX, UNSCHEDULABLE
from metal_supervisor.sidecar.board import Row
from metal_supervisor.sidecar.inventory import Inventory, noted
from metal_supervisor.sidecar.statuses import WantedModel
from metal_supervisor.spec.document import UnreadableRecord, items, mapping
from metal_supervisor.spec.types import Json, Key
from metal_supervisor.state.programs import built


@dataclass(frozen=True)
class ClusterContext:
    """The cluster context of this Mac."""

    operator: bool | None = False
    """True if LLMKube's operator writes status here; None while that is unknown."""
    namespaces: frozenset[str] = frozenset()
    """Namespaces in which this Mac renews a Lease."""
    silent: tuple[tuple[str, str], ...] = ()
    """(namespace, node) of the Macs whose endpoints their peers withdraw."""
    notes: tuple[tuple[str, str], ...] = ()
    """Annotations of the node Lease."""
    cloned: str = ""
    """Non-empty if another Mac uses this one's name: nothing may be written then."""
    silence: str = ""
    """Text about LLMKube's operator if it is assumed to be present, but may be gone, else ""."""
    restored_at: float = 0.0
    """Unix time at which the API's data went back, as after a restored backup; 0 for never."""


ALONE = ClusterContext()
"""That of a Mac with the embedded API, which no other Mac shares."""


def cluster_context(watched: str, rows: Iterable[Row], told: Json, notes: Mapping[str, str]) -> ClusterContext:
    """The cluster context of this Mac. `watched`: the namespace, "" for all; `told`: the controller's report; `notes`:
    annotations of the node Lease.
    """
    cluster = mapping(told, "cluster")
    asked = {each for each in items(told, "namespaces") if isinstance(each, str)}
    where = {watched} if watched else {row.record.namespace for row in rows} | asked
    silent = [each for each in items(told, "silent") if isinstance(each, list) and len(each) == 2]
    operator, restored_at = cluster.get("operator"), cluster.get("restoredAt")
    return ClusterContext(
        operator if isinstance(operator, bool) else None,
        frozenset(where),
        tuple((str(namespace), str(node)) for namespace, node in silent),
        tuple(sorted(notes.items())),
        str(cluster.get("cloned") or ""),
        str(cluster.get("operatorSilence") or ""),
        float(restored_at) if isinstance(restored_at, (int, float)) else 0.0,
    )


def node_notes(inventory: Inventory, address: str, told: Json, cordoned: str) -> dict[str, str]:
    """Annotations of the node Lease. `cordoned`: why this Mac accepts no new services, "" if it does."""
    memory = mapping(told, "memory")
    notes = {
        **{PREFIX + name: text for name, text in machine.capabilities(inventory.chip).items()},
        **noted(inventory.offers),
        PREFIX + "version": __version__,
        PREFIX + "address": address,
        **{f"{PREFIX}memory-{name}": str(memory[name]) for name in ("budget", "left") if name in memory},
    }
    return {**notes, UNSCHEDULABLE: cordoned} if cordoned else notes


def models_of(found: Json) -> dict[Key, WantedModel]:
    """The Models in the controller's report."""
    models = {}
    for name in found:
        namespace, _, short = name.partition("/")
        with contextlib.suppress(UnreadableRecord):  # written by another version
            models[namespace, short] = built(WantedModel, mapping(found, name), "model")
    return models
