"""The reaper as it is shipped: one file to apply, made of the script and its manifest, with as few rights as it needs.

`python tests/unit/test_reaper_manifest.py` puts the script into the manifest anew.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Any

import yaml

REAPER = Path(__file__).resolve().parents[2] / "conf" / "reaper"
SCRIPT = REAPER / "reaper.py"
MANIFEST = REAPER / "reaper.yaml"
BEGIN = "  reaper.py: |\n"


def rendered() -> str:
    """The manifest with the script as it is now."""
    head = MANIFEST.read_text().partition(BEGIN)[0]
    lines = (f"    {line}".rstrip() for line in SCRIPT.read_text().splitlines())
    return head + BEGIN + "\n".join(lines) + "\n"


def objects() -> dict[str, Any]:
    return {each["kind"]: each for each in yaml.safe_load_all(MANIFEST.read_text())}


def test_the_manifest_holds_the_script() -> None:
    assert MANIFEST.read_text() == rendered(), "run: python tests/unit/test_reaper_manifest.py"
    assert objects()["ConfigMap"]["data"] == {"reaper.py": SCRIPT.read_text()}


def test_the_script_needs_nothing_but_python() -> None:
    text = SCRIPT.read_text()
    imported = {
        name.split(".")[0]
        for node in ast.walk(ast.parse(text, feature_version=(3, 9)))
        for name in (
            [each.name for each in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert imported <= sys.stdlib_module_names


def test_it_may_do_no_more_than_it_does() -> None:
    rules = {
        (group, resource, verb, tuple(rule.get("resourceNames", ())))
        for rule in objects()["Role"]["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    leases, slices = ("coordination.k8s.io", "leases"), ("discovery.k8s.io", "endpointslices")
    assert rules == {
        (*leases, "get", ()),
        (*leases, "list", ()),
        (*leases, "create", ()),
        (*leases, "patch", ("metal-reaper",)),
        (*slices, "get", ()),
        (*slices, "list", ()),
        (*slices, "patch", ()),
    }


def test_it_runs_small_and_without_privileges() -> None:
    found = objects()
    spec = found["Deployment"]["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    assert spec["replicas"] == 1
    assert pod["serviceAccountName"] == found["ServiceAccount"]["metadata"]["name"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert container["resources"]["requests"] == {"cpu": "10m", "memory": "32Mi"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert "/" not in container["image"], "any plain Python image will do, from wherever the cluster gets its images"
    (volume,) = pod["volumes"]
    assert volume["configMap"]["name"] == found["ConfigMap"]["metadata"]["name"]
    assert spec["selector"]["matchLabels"].items() <= spec["template"]["metadata"]["labels"].items()


def test_everything_is_in_one_namespace_and_bound_together() -> None:
    found = objects()
    assert {each["metadata"]["namespace"] for each in found.values()} == {"llm"}
    binding = found["RoleBinding"]
    assert binding["roleRef"]["name"] == found["Role"]["metadata"]["name"]
    account = found["ServiceAccount"]["metadata"]
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": account["name"], "namespace": "llm"}]


if __name__ == "__main__":
    MANIFEST.write_text(rendered())
