"""The shipped rights: as few as the agent needs, the same in both variants, and in step with what the code writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from metal_supervisor.cluster import manifests
from metal_supervisor.placement import leases
from metal_supervisor.spec import references

RBAC = Path(__file__).resolve().parents[2] / "conf" / "rbac"
Object = dict[str, Any]


def objects(name: str) -> dict[tuple[str, str], Object]:
    """The objects of a file by kind and name."""
    found = [each for each in yaml.safe_load_all((RBAC / name).read_text()) if each]
    return {(each["kind"], each["metadata"]["name"]): each for each in found}


def rights(rules: list[Object]) -> set[tuple[str, str, str]]:
    """(group, resource, verb) of each thing that may be done."""
    return {
        (group, resource, verb)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


ROLE = objects("namespace.yaml")["Role", "metal-supervisor"]


def test_the_role_lets_the_agent_do_its_work_and_nothing_else() -> None:
    wanted = {
        ("inference.llmkube.dev", "inferenceservices"): "get list watch",
        ("inference.llmkube.dev", "models"): "get list watch",
        ("inference.llmkube.dev", "inferenceservices/status"): "patch",
        ("inference.llmkube.dev", "models/status"): "patch",
        ("", "services"): "get create patch",
        ("discovery.k8s.io", "endpointslices"): "get list create patch delete",
        ("coordination.k8s.io", "leases"): "list watch create patch delete",
        ("events.k8s.io", "events"): "get create patch",
        ("", "endpoints"): "get delete",
    }
    assert rights(ROLE["rules"]) == {(*where, verb) for where, verbs in wanted.items() for verb in verbs.split()}


def test_the_cluster_wide_variant_grants_the_same() -> None:
    role = objects("cluster-wide.yaml")["ClusterRole", "metal-supervisor"]
    assert role["rules"] == ROLE["rules"]


@pytest.mark.parametrize("name", ["namespace.yaml", "mac.yaml", "cluster-wide.yaml", "secrets.yaml"])
def test_nothing_is_granted_by_a_wildcard(name: str) -> None:
    for each in objects(name).values():
        assert all("*" not in right for right in rights(each.get("rules", [])))


def test_every_binding_binds_what_is_shipped_to_the_account_of_one_mac() -> None:
    files = "namespace.yaml", "mac.yaml", "cluster-wide.yaml", "secrets.yaml"
    everything = {name: each for file in files for name, each in objects(file).items()}
    account = everything["ServiceAccount", "metal-mac-a"]
    bindings = [each for (kind, _), each in everything.items() if kind.endswith("RoleBinding")]
    assert len(bindings) == 4
    for each in bindings:
        assert (each["roleRef"]["kind"], each["roleRef"]["name"]) in everything
        (subject,) = each["subjects"]
        assert subject == {
            "kind": "ServiceAccount",
            "name": account["metadata"]["name"],
            "namespace": account["metadata"]["namespace"],
        }


def test_values_of_an_environment_are_got_one_by_one_and_only_by_those_who_ask_for_that_right() -> None:
    role = objects("secrets.yaml")["ClusterRole", "metal-supervisor-references"]
    assert rights(role["rules"]) == {("", "secrets", "get"), ("", "configmaps", "get")}
    assert not {"secrets", "configmaps"} & {resource for _, resource, _ in rights(ROLE["rules"])}
    assert references.RIGHTS == "conf/rbac/secrets.yaml"


def test_a_mac_may_renew_its_own_token_only() -> None:
    (rule,) = objects("mac.yaml")["Role", "metal-mac-a-token"]["rules"]
    assert rule == {
        "apiGroups": [""],
        "resources": ["serviceaccounts/token"],
        "resourceNames": ["metal-mac-a"],
        "verbs": ["create"],
    }


def test_the_account_is_called_as_the_macs_own_lease_is() -> None:
    assert ("ServiceAccount", leases.node_lease_name("mac-a")) in objects("mac.yaml")


def test_every_part_of_the_fence_is_enforced() -> None:
    found = objects("fence.yaml")
    policies = [name for kind, name in found if kind == "ValidatingAdmissionPolicy"]
    assert len(policies) == 6
    for name in policies:
        binding = found["ValidatingAdmissionPolicyBinding", name]["spec"]
        assert (binding["policyName"], binding["validationActions"]) == (name, ["Deny"])
        assert found["ValidatingAdmissionPolicy", name]["spec"]["failurePolicy"] == "Fail"


def test_the_fence_speaks_of_what_the_agent_writes() -> None:
    text = (RBAC / "fence.yaml").read_text()
    for name in (leases.NODE, manifests.SLICE_MANAGER, manifests.MANAGED_BY, "llmkube.ai/managed-by"):
        assert f"'{name}'" in text
    assert leases.claim_name("x", 0).startswith("isvc-") and "startsWith('isvc-')" in text
    assert len(leases.node_lease_name("")) == 6 and "substring(6)" in text
