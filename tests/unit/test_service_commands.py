"""`list`, `stop`, `start` and `rm` against a stand-in for the API client, which answers from a dictionary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

from metal_supervisor.cli import services
from metal_supervisor.cli.services import ServiceClient
from metal_supervisor.cluster.kube import KubeError
from metal_supervisor.settings.loader import Settings
from metal_supervisor.spec.types import Json

PREFIX = "/apis/inference.llmkube.dev/v1alpha1"


class StandInKube:
    """Stand-in for Kube: keeps services, and what was asked of it beside lists."""

    services: ClassVar[Mapping[str, Json]] = {}
    failure: ClassVar[KubeError | None] = None
    asked: ClassVar[list[tuple[str, str]]] = []

    def __init__(self, *_: Any) -> None:
        pass

    def request(self, method: str, path: str, *_: Any) -> Json:
        if self.failure is not None:
            raise self.failure
        if method == "GET":
            return {"items": [{"metadata": {"namespace": "default", "name": name}, "spec": spec}
                              for name, spec in self.services.items()]}  # fmt: skip
        self.asked.append((method, path.removeprefix(PREFIX)))
        return {}

    def close(self) -> None:
        pass


@pytest.fixture
def kube(monkeypatch: pytest.MonkeyPatch) -> type[StandInKube]:
    fresh = type("Fresh", (StandInKube,), {"asked": []})
    monkeypatch.setattr(services, "Kube", fresh)
    return fresh


def client() -> ServiceClient:
    return ServiceClient(Settings(kubeconfig="/k"))


def test_a_model_that_another_service_drafts_with_stays(kube: type[StandInKube]) -> None:
    kube.services = {
        "small": {"modelRef": "tiny"},
        "large": {"modelRef": "big", "speculativeDecoding": {"type": "draft-simple", "draftModelRef": "tiny"}},
    }
    assert "its Model tiny stays, as default/large uses it" in client().remove("small")
    assert kube.asked == [("DELETE", "/namespaces/default/inferenceservices/small")]
    assert "and its Model" in client().remove("large"), "the draft is not its own to remove"
    assert kube.asked[1:] == [
        ("DELETE", "/namespaces/default/inferenceservices/large"), ("DELETE", "/namespaces/default/models/big"),
    ]  # fmt: skip
