"""What a service gets of what it asks for, within the limits of its namespace; a condition names the rest."""

from __future__ import annotations

from dataclasses import replace

from metal_supervisor.spec.limits import ANY, Limits
from metal_supervisor.spec.record import Record
from metal_supervisor.spec.resources import rank_of
from metal_supervisor.spec.types import FIELD_IGNORED, Rejected, Service


def granted(item: Service | Rejected, limits: Limits) -> Service | Rejected:
    """The item within its namespace's limits; `Service.not_granted` names what was not granted."""
    refused = list(item.not_granted) if isinstance(item, Service) else []
    kind = item.endpoint.type if item.endpoint else ""
    if item.endpoint and kind != "ClusterIP" and kind not in limits.service_types:
        item = replace(item, endpoint=replace(item.endpoint, type="ClusterIP", node_port=None))
        text = f"spec.endpoint.type {kind} is not among this Mac's --service-types; the Service is of type ClusterIP"
        refused.append(("ServiceTypeIgnored", text))
    if isinstance(item, Rejected):
        return item
    highest = limits.priority.get(item.namespace, limits.priority.get(ANY))
    if highest is not None and rank_of(item.priority) > rank_of(highest):
        text = f"spec.priority {item.priority} counts as {highest}, the highest of namespace {item.namespace}"
        refused.append(("PriorityCapped", f"{text} (--namespace-priority)"))
        item = replace(item, priority=highest)
    if item.protected and not limits.protection & {item.namespace, ANY}:
        text = f"spec.evictionProtection does not count in namespace {item.namespace} (--namespace-protection)"
        refused.append(("ProtectionIgnored", text))
        item = replace(item, protected=False)
    return replace(item, not_granted=tuple(refused)) if refused else item


def warned(proposal: Record, service: Service) -> Record:
    """The proposal with a warning of what was not granted, unless it has one that matters more."""
    before = proposal.warning
    if not service.not_granted or not proposal.asks or (before is not None and before[0] != FIELD_IGNORED):
        return proposal
    told = [text for _, text in service.not_granted] + ([before[1]] if before else [])
    return replace(proposal, warning=(service.not_granted[0][0], "; ".join(told)))
