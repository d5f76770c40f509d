"""Tokens that open models go to the server that they are for, and show in nothing that is said, kept or started."""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass

import psutil
import pytest

from metal_supervisor.cluster.kube import MERGE
from tests.support.downloads import MIB, downloading, from_web, lean, padded, served
from tests.support.engines import Stopwatch, gone
from tests.support.faults import Figure, fault
from tests.support.hub import Content, Hub
from tests.support.own_logs import logged
from tests.support.system import System, eventually, model, running, tiny_gguf

OWN = "hf_OwnOfThisMac4711"
WRONG = "hf_WrongOneOfTheSecret"
RIGHT = "hf_RightOneOfTheSecret"
SECRETS = "/api/v1/namespaces/default/secrets"
REF = {"sourceSecretRef": {"name": "hub"}}
SOON_S = 10.0
KINDS = "inferenceservices,models,events,services,endpointslices"


@dataclass
class Place:
    """A system whose user has a token too, and the Hub."""

    system: System
    hub: Hub


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    base = tmp_path_factory.mktemp("secrets")
    tiny = base / "tiny.gguf"
    tiny_gguf.write_tiny_gguf(tiny, context=32768)
    repos: dict[str, dict[str, Content]] = {f"o/{name}": {"m.gguf": tiny} for name in ("own", "keyed", "lacking")}
    repos["o/slow"] = {"m.gguf": padded(base / "slow.gguf", tiny, 12 * MIB)}
    with Hub(repos) as hub, pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_TOKEN", OWN)
        patch.setenv("HF_ENDPOINT", hub.url)
        with running(base, "--log-level", "debug") as system:
            yield Place(system, hub)


def keep(system: System, name: str, **values: str) -> None:
    """Makes a Secret, or changes its values."""
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "stringData": values}
    if system.maybe(f"{SECRETS}/{name}") is None:
        system.kube.request("POST", SECRETS, None, secret)
    else:
        system.kube.request("PATCH", f"{SECRETS}/{name}", None, {"stringData": values}, MERGE)


def told(system: System, name: str, why: str) -> str:
    """Waits until a service is reported with that reason; returns the message."""
    eventually(lambda: system.condition("MetalReady", name).get("reason") == why, 20, f"{why}: {system.told(name)}")
    return str(system.condition("MetalReady", name)["message"])


def spellings(token: str) -> tuple[bytes, ...]:
    """A token as it is, and as Kubernetes writes it."""
    return token.encode(), base64.b64encode(token.encode())


def shown(system: System, *tokens: str) -> list[str]:
    """Where tokens can be seen, of all that anybody is shown, that is kept, or that was started."""
    marks = [each for token in tokens for each in spellings(token)]
    found = []
    for path in system.state.rglob("*"):
        # The embedded API is where the Secret itself is kept.
        own = path.relative_to(system.state).parts[0].startswith("apiserver")
        if path.is_file() and not path.is_symlink() and not own and any(each in path.read_bytes() for each in marks):
            found.append(str(path))
    told = {page: system.fetch(page)[1] for page in ("/", "/status", "/metrics", "/healthz")}
    told["kubectl"] = system.kubectl("get", KINDS, "-A", "-o", "yaml")
    commands = ("status",), ("models",), ("avail",), ("tail", "-100000", "controller"), ("tail", "-100000", "sidecar")
    told |= {" ".join(each): system.supervisorctl(*each) for each in commands}
    told["what run printed"] = system.said()
    for name in ("controller", "sidecar", "apiserver"):  # by their values, which are escaped in the files
        entries = logged(system.files.log_path(name))
        assert entries or name == "apiserver", f"{name} has logged nothing that could be read"
        told[f"entries of {name}"] = "\n".join(str(value) for entry in entries for value in entry.values())
    told |= {f"argv of {pid}": "\0".join(command) for pid, command in system.commands().items()}
    return found + [where for where, text in told.items() if any(each.decode() in text for each in marks)]


def environments(pids: list[int]) -> str:
    """All that these processes and their children were started with."""
    found = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):  # it may have ended meanwhile
            for each in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
                found.append(json.dumps(each.environ()))
    return "\n".join(found)


def test_the_token_of_the_macs_user_opens_the_hub_and_reaches_no_engine(place: Place) -> None:
    system, hub = place.system, place.hub
    hub.token = OWN
    system.apply(*from_web("own", "hf://o/own/m.gguf"))
    served(system, "own")
    assert {each.authorization for each in hub.log if each.host == "127.0.0.1"} == {f"Bearer {OWN}"}
    assert {each.authorization for each in hub.log if each.host == "localhost"} == {""}, "the CDN's"
    engine = environments([system.pid("own")])
    assert engine and "METAL_SUPERVISOR_ENGINE" in engine
    assert OWN not in engine and "HF_TOKEN" not in engine
    assert not shown(system, OWN)
    gone(system, "own")


@fault(
    "G128",
    "a token is in the Secret of spec.sourceSecretRef; it is missing first, then wrong, then right",
    happens="the Hub gets it and nobody else, the CDN neither; the model comes without another edit",
    sees="SecretNotFound, SourceUnauthorized with the field; never the token",
    bound="10 s after the Secret is right",
)
def test_a_token_of_a_secret_goes_to_the_hub_alone(place: Place, figure: Figure) -> None:
    system, hub = place.system, place.hub
    hub.token, before = RIGHT, len(hub.log)
    system.apply(*from_web("keyed", "hf://o/keyed/m.gguf", **REF))
    message = told(system, "keyed", "SecretNotFound")
    said = 'spec.sourceSecretRef: the Secret "hub" of namespace "default" does not exist; create it'
    assert message == f'Model "keyed": {said}'
    assert len(hub.log) == before, "nobody is asked without it"
    keep(system, "hub", HF_TOKEN=WRONG)
    message = told(system, "keyed", "SourceUnauthorized")
    assert "to the token of spec.sourceSecretRef (key HF_TOKEN)" in message and WRONG not in message
    generation = system.get("/apis/inference.llmkube.dev/v1alpha1/namespaces/default/models/keyed")["metadata"]
    watch = Stopwatch(figure)
    keep(system, "hub", HF_TOKEN=RIGHT)
    watch.when(
        "Secret put right to Ready",
        lambda: eventually(lambda: system.status("keyed").get("phase") == "Ready", SOON_S, "it to come by itself"),
    )
    served(system, "keyed")
    now = system.get("/apis/inference.llmkube.dev/v1alpha1/namespaces/default/models/keyed")["metadata"]
    assert now["generation"] == generation["generation"]
    said = [(each.host, each.authorization) for each in hub.log[before:]]
    assert {token for host, token in said if host == "127.0.0.1"} == {f"Bearer {WRONG}", f"Bearer {RIGHT}"}
    assert {token for host, token in said if host == "localhost"} == {""}, "the CDN's"
    places = shown(system, WRONG, RIGHT)
    figure.add("places where it can be seen", len(places), "")
    assert not places
    everything = environments([each.pid for each in system.processes()])
    assert WRONG not in everything and RIGHT not in everything and "METAL_SUPERVISOR_ENGINE" in everything
    gone(system, "keyed")


def test_a_secret_without_a_token_says_what_is_missing_and_is_not_shown_while_it_is_fetched(place: Place) -> None:
    system, hub = place.system, place.hub
    hub.token = RIGHT
    keep(system, "empty", OTHER="nothing of use")
    system.apply(model("lacking", "hf://o/lacking/m.gguf", sourceSecretRef={"name": "empty"}), lean("lacking"))
    before = len(hub.log)
    assert 'spec.sourceSecretRef: the Secret "empty"' in told(system, "lacking", "SecretKeyNotFound")
    assert len(hub.log) == before, "nor is it asked with the token of the Mac's user"
    gone(system, "lacking")
    keep(system, "hub", HF_TOKEN=RIGHT)
    hub.bytes_per_s = 1.5 * MIB
    try:
        system.apply(*from_web("slow", "hf://o/slow/m.gguf", **REF))
        downloading(system, "slow")
        assert not shown(system, RIGHT)
    finally:
        hub.bytes_per_s = 0.0
    gone(system, "slow")
