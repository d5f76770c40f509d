"""Secrets and ConfigMaps, read from an API server that may be away, forbid it, or change its mind."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from metal_supervisor.cluster import reference_reader as module
from metal_supervisor.cluster.kube import MERGE, Kube
from metal_supervisor.cluster.reference_reader import References
from metal_supervisor.spec.references import Holding, Source
from tests.support.macs import embedded_cluster
from tests.support.system import api_faults, eventually

SECRETS = "/api/v1/namespaces/default/secrets"
CONFIG_MAPS = "/api/v1/namespaces/default/configmaps"
KEYS: Source = ("default", "secrets", "keys")
WORDS: Source = ("default", "configmaps", "words")


@pytest.fixture(scope="module")
def kubeconfig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with embedded_cluster(tmp_path_factory.mktemp("references")) as path:
        yield path


@pytest.fixture
def kube(kubeconfig: Path) -> Iterator[Kube]:
    made = Kube(kubeconfig)
    yield made
    api_faults(made.server)
    for path in (SECRETS, CONFIG_MAPS):
        for each in made.request("GET", path)["items"]:
            made.request("DELETE", f"{path}/{each['metadata']['name']}")
    made.close()


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AGAIN_S", 0.1)
    monkeypatch.setattr(module, "FAILED_AGAIN_S", 0.1)
    monkeypatch.setattr(module, "LOOK_WAIT_S", 5.0)


@pytest.fixture
def told() -> threading.Event:
    return threading.Event()


@pytest.fixture
def reader(kube: Kube, told: threading.Event) -> Iterator[References]:
    made = References(kube, told.set)
    yield made
    made.want(())


def keep(kube: Kube, path: str, name: str, **content: Any) -> None:
    kind = "Secret" if path == SECRETS else "ConfigMap"
    body = {"apiVersion": "v1", "kind": kind, "metadata": {"name": name}, **content}
    kube.request("POST", path, None, body)


def test_values_are_there_as_soon_as_they_are_wanted(kube: Kube, reader: References) -> None:
    keep(kube, SECRETS, "keys", stringData={"engine": "s3cret ü"}, data={"raw": "//8=", "nul": "AA=="})
    keep(kube, CONFIG_MAPS, "words", data={"greeting": "hi"}, binaryData={"raw": "//8="})
    reader.want({KEYS, WORDS})
    assert reader.look(KEYS) == Holding(200, {"engine": "s3cret ü"}, frozenset({"raw", "nul"}))
    assert reader.look(WORDS) == Holding(200, {"greeting": "hi"})
    reader.want({WORDS})
    assert reader.look(KEYS) is None, "what nobody wants is forgotten"


def test_a_change_is_told_and_so_is_an_end(kube: Kube, reader: References, told: threading.Event) -> None:
    keep(kube, SECRETS, "keys", stringData={"engine": "one"})
    reader.want({KEYS})
    told.clear()
    kube.request("PATCH", f"{SECRETS}/keys", None, {"stringData": {"engine": "two"}}, MERGE)
    assert told.wait(30)
    assert reader.look(KEYS) == Holding(200, {"engine": "two"})
    told.clear()
    kube.request("DELETE", f"{SECRETS}/keys")
    assert told.wait(30)
    found = reader.look(KEYS)
    assert found is not None and found.code == 404


def test_what_is_made_later_is_found(kube: Kube, reader: References, told: threading.Event) -> None:
    reader.want({KEYS})
    found = reader.look(KEYS)
    assert found is not None and found.code == 404
    told.clear()
    keep(kube, SECRETS, "keys", stringData={"engine": "one"})
    assert told.wait(30) and reader.look(KEYS) == Holding(200, {"engine": "one"})


def test_what_is_being_put_right_is_looked_at_sooner(
    kube: Kube, reader: References, told: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "AGAIN_S", 1000.0)
    keep(kube, SECRETS, "keys", stringData={"engine": "wrong"})
    reader.want({KEYS})
    told.clear()
    reader.want({KEYS}, {KEYS})
    kube.request("PATCH", f"{SECRETS}/keys", None, {"stringData": {"engine": "right"}}, MERGE)
    assert told.wait(30) and reader.look(KEYS) == Holding(200, {"engine": "right"})
    told.clear()
    kube.request("PATCH", f"{SECRETS}/keys", None, {"stringData": {"engine": "renewed"}}, MERGE)
    assert told.wait(30) and reader.look(KEYS) == Holding(200, {"engine": "renewed"})


@pytest.mark.parametrize("action", [{"status": 503}, {"status": 500}, {"drop": True}])
def test_a_server_that_does_not_answer_takes_no_value_away(kube: Kube, reader: References, action: Any) -> None:
    keep(kube, SECRETS, "keys", stringData={"engine": "one"})
    reader.want({KEYS})
    asked = kube.requests
    api_faults(kube.server, {"resource": "secrets", "action": action})
    eventually(lambda: kube.requests > asked + 3, 10, "it to be asked in vain")
    assert reader.look(KEYS) == Holding(200, {"engine": "one"})
    reader.want(())
    reader.want({KEYS})
    found = reader.look(KEYS)
    assert found is not None and found.code == 0 and found.text and not found.values


def test_a_refusal_is_said_with_the_right_that_is_missing(kube: Kube, reader: References) -> None:
    api_faults(kube.server, {"resource": "secrets", "action": {"status": 403}})
    reader.want({KEYS})
    found = reader.look(KEYS)
    assert found is not None and found.code == 403
    assert 'cannot get secrets in namespace "default"' in found.text and 'grant the verb "get"' in found.text


def test_an_answer_that_no_api_gives_ends_no_reading(told: threading.Event) -> None:
    """A proxy that asks for a login answers 200, and with an object at times."""
    answers: list[Any] = [{"metadata": "login", "data": 1}, {"metadata": {"annotations": ["login"]}}]
    kube: Any = SimpleNamespace(request=lambda *_: answers.pop(0) if len(answers) > 1 else answers[0])
    reader = References(kube, told.set)
    reader.want([WORDS])
    eventually(lambda: reader.look(WORDS) == Holding(200), what="the answer")
    answers.append({"data": {"word": "once"}})
    answers.pop(0)
    eventually(lambda: reader.look(WORDS) == Holding(200, {"word": "once"}), what="the API to be back")
    reader.want(())


def test_a_thread_that_cannot_be_started_leaves_no_secret_unread(
    kube: Kube, reader: References, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As while other programs of this user have as many as the system allows."""

    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    keep(kube, SECRETS, "keys", stringData={"engine": "s3cret"})
    with monkeypatch.context() as patch, pytest.raises(RuntimeError):
        patch.setattr(threading.Thread, "start", refused)
        reader.want({KEYS})
    reader.want({KEYS})
    assert reader.look(KEYS) == Holding(200, {"engine": "s3cret"})
