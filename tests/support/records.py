"""Records for tests: the fields that a test does not name have the values of an ordinary service."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from metal_supervisor.controller import reconcile
from metal_supervisor.controller.reconcile import Outlook
from metal_supervisor.spec.record import UNDECIDED, Record, Verdict
from metal_supervisor.spec.types import Endpoint, Rejected, Service, Standing

ADMITTED = Verdict(Standing.RUN, "Admitted", "", 1.0)


def a_record(name: str = "tiny", namespace: str = "default", **fields: Any) -> Record:
    """A record of a service of that name."""
    ordinary: dict[str, Any] = {
        "uid": "u",
        "generation": 1,
        "program": f"{namespace}.{name}",
        "model": "phi",
        "runtime": "llama-server",
        "replicas": 1,
        "mode": "chat",
        "priority": "normal",
        "verdict": ADMITTED,
        "endpoint": Endpoint(name, 8080, "/v1/chat/completions", "ClusterIP", None),
    }
    return Record(namespace=namespace, name=name, **{**ordinary, **fields})


def granted(proposal: Record, before: Record | None, now: float) -> Record:
    """The record of a proposal where there is memory for all."""
    if proposal.verdict is not UNDECIDED:
        return proposal
    admitted = reconcile.verdict(before.verdict if before else None, Standing.RUN, "Admitted", "", now)
    return replace(proposal, verdict=admitted)


def accept(
    service: Service, record: Record | None, outlook: Outlook, now: float, start_refused: bool = False, up: bool = True
) -> Record:
    """`reconcile.accept` where there is memory for all."""
    return granted(reconcile.accept(service, record, outlook, now, start_refused, up), record, now)


def refuse(
    rejected: Rejected, record: Record | None, now: float, start_refused: bool = False, up: bool = True
) -> Record:
    """`reconcile.refuse` where there is memory for all."""
    return granted(reconcile.refuse(rejected, record, now, start_refused, up), record, now)
