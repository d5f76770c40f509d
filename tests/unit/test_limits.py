"""Limits per namespace: how they are written, and what becomes of a service that asks for more."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from metal_supervisor.controller import reconcile
from metal_supervisor.settings.loader import Settings
from metal_supervisor.spec import grants, limits
from metal_supervisor.spec.limits import Limits
from metal_supervisor.spec.resources import Policy, interpret
from metal_supervisor.spec.types import Rejected, Service
from tests.unit.test_report import record

POLICY = Policy("llama-server", {"llama-server": frozenset({"gguf"})})


def service(namespace: str = "team-a", **spec: Any) -> Service | Rejected:
    """An InferenceService of a namespace, as the controller reads it."""
    model = {
        "metadata": {"name": "phi", "namespace": namespace, "uid": "m"},
        "spec": {"source": "/models/phi.gguf", "hardware": {"accelerator": "metal"}},
    }
    written = {
        "metadata": {"name": "chat", "namespace": namespace, "uid": "s", "generation": 1},
        "spec": {"modelRef": "phi", **spec},
    }
    key = (namespace, "chat")
    return interpret({key: written}, {(namespace, "phi"): model}, POLICY)[key]


def understood(item: Service | Rejected) -> Service:
    assert isinstance(item, Service), item
    return item


# ── how they are written ─────────────────────────────────────────────────────────────────────────


def test_priorities_are_read_by_namespace() -> None:
    found = limits.priorities("default=high, team-a=low,*=batch")
    assert found == {"default": "high", "team-a": "low", "*": "batch"}


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("namespace_priority", "team-a", "NAMESPACE=PRIORITY"),
        ("namespace_priority", "=low", "NAMESPACE=PRIORITY"),
        ("namespace_priority", "Team=low", "NAMESPACE=PRIORITY"),
        ("namespace_priority", "a=low,a=high", "not give a two values"),
        ("namespace_priority", "a=urgent", "of critical"),
        ("namespace_protection", "a b", "name namespaces"),
        ("service_types", "ExternalName", "some of ClusterIP"),
    ],
)
def test_a_limit_that_cannot_be_read_is_refused_with_what_is_wrong(name: str, text: str, said: str) -> None:
    check = next(each for each in Settings.__dataclass_fields__.values() if each.name == name).metadata["check"]
    assert said in (check(text) or "")
    assert check(Settings.__dataclass_fields__[name].default) is None


def test_without_settings_nothing_is_limited() -> None:
    assert Settings().limits == Limits()
    asked = service(priority="critical", evictionProtection=True, endpoint={"type": "NodePort", "nodePort": 30001})
    assert grants.granted(asked, Limits()) is asked


# ── what becomes of a service ────────────────────────────────────────────────────────────────────


def test_a_priority_counts_up_to_the_highest_of_its_namespace() -> None:
    held = Limits(priority={"team-a": "normal", "*": "batch"})
    capped = understood(grants.granted(service(priority="critical"), held))
    assert capped.priority == "normal"
    text = "spec.priority critical counts as normal, the highest of namespace team-a (--namespace-priority)"
    assert capped.not_granted == (("PriorityCapped", text),)
    assert understood(grants.granted(service("team-b"), held)).priority == "batch", "the usual one is capped as well"
    low, high = service(priority="low"), service(priority="critical")
    assert grants.granted(low, held) is low
    assert grants.granted(high, Limits(priority={"team-b": "batch"})) is high, "of another namespace"


def test_protection_counts_in_the_namespaces_that_have_it() -> None:
    held = Limits(protection=frozenset({"team-b"}))
    refused = understood(grants.granted(service(evictionProtection=True), held))
    assert not refused.protected and refused.not_granted[0][0] == "ProtectionIgnored"
    assert understood(grants.granted(service("team-b", evictionProtection=True), held)).protected


def test_a_service_type_that_is_not_allowed_is_a_cluster_ip() -> None:
    held = Limits(service_types=frozenset({"LoadBalancer"}))
    found = understood(grants.granted(service(endpoint={"type": "NodePort", "nodePort": 30001}), held))
    assert (found.endpoint.type, found.endpoint.node_port) == ("ClusterIP", None)
    assert found.not_granted[0][0] == "ServiceTypeIgnored" and "--service-types" in found.not_granted[0][1]
    kept = service(endpoint={"type": "LoadBalancer"})
    assert grants.granted(kept, held) is kept
    broken = service(endpoint={"type": "NodePort"}, replicas=-1)
    assert isinstance(broken, Rejected) and broken.endpoint is not None and broken.endpoint.type == "NodePort"
    cut = grants.granted(broken, held)
    assert cut.endpoint is not None and cut.endpoint.type == "ClusterIP", "its engine may run on, and be published"


def test_what_is_not_granted_is_named_beside_an_engine_that_runs() -> None:
    held = Limits(priority={"*": "low"}, protection=frozenset())
    item = understood(grants.granted(service(evictionProtection=True), held))
    runs = reconcile.unchanged(record(edition="x.json"))
    told = grants.warned(runs, item).warning
    assert told is not None and told[0] == "PriorityCapped"
    assert "spec.priority normal counts as low" in told[1] and "spec.evictionProtection" in told[1]
    serious = replace(runs, warning=("InvalidSpec", "x"))
    assert grants.warned(serious, item) is serious
    trifle = replace(runs, warning=("FieldIgnored", "y"))
    assert grants.warned(trifle, item).warning == (told[0], f"{told[1]}; y")
    assert grants.warned(runs, replace(item, not_granted=())) is runs


def test_a_limit_changes_nothing_that_an_engine_is_started_from() -> None:
    asked = understood(service(priority="critical", evictionProtection=True, endpoint={"type": "NodePort"}))
    held = Limits(priority={"*": "low"}, protection=frozenset(), service_types=frozenset())
    assert understood(grants.granted(asked, held)).asked == asked.asked
