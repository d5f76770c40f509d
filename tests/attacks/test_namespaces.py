"""Attacks on what others have of this Mac: priority, protection, and ports of the cluster's nodes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.system import SERVICES, System, eventually, running, service
from tests.support.tight import room_for

LIMITS = (
    "--namespace-priority",
    "*=normal",
    "--namespace-protection",
    "team-b",
    "--service-types",
    "ClusterIP",
    "--preemption",
    "--ollama-url",
    "off",
)


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """One service of namespace `default`, on a Mac without memory for a second one."""
    base = tmp_path_factory.mktemp("namespaces")
    with running(base, *LIMITS, "--memory-fraction", room_for(1.5, base, 512)) as up:
        up.apply(up.tiny_model(), service("victim"))
        up.ready("victim")
        yield up


def test_a_capped_priority_stops_no_engine_of_the_same_rank(system: System) -> None:
    pid = system.pid("victim")
    system.apply(service("greedy", priority="critical"))
    try:
        eventually(
            lambda: system.condition("MetalReady", "greedy").get("reason") == "InsufficientMemory", 30, "a refusal"
        )
        assert system.pid("greedy") == 0
        assert system.pid("victim") == pid, "critical counts as normal, which displaces nobody of the same rank"
        assert system.status("greedy")["effectivePriority"] == 10_000
        system.delete("victim")
        system.ready("greedy")
    finally:
        system.delete("greedy")
        eventually(lambda: system.pid("greedy") == 0, 30, "it to end")
        system.apply(service("victim"))
        system.ready("victim")


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"priority": "critical"}, "PriorityCapped"),
        ({"evictionProtection": True}, "ProtectionIgnored"),
        ({"endpoint": {"type": "NodePort", "nodePort": 30123}}, "ServiceTypeIgnored"),
        ({"endpoint": {"type": "LoadBalancer"}}, "ServiceTypeIgnored"),
    ],
)
def test_what_a_namespace_may_not_have_is_named_and_not_granted(
    system: System, asked: dict[str, object], reason: str
) -> None:
    pid = system.pid("victim")
    system.apply(service("victim", **asked))
    try:
        eventually(lambda: system.condition("Degraded", "victim").get("reason") == reason, 30, reason)
        assert system.get(f"{SERVICES}/victim")["spec"]["type"] == "ClusterIP"
        assert system.status("victim")["effectivePriority"] == 10_000
        assert system.pid("victim") == pid, "its engine runs on"
    finally:
        system.apply(service("victim"))
        eventually(lambda: not system.condition("Degraded", "victim"), 30, "it to be over")
