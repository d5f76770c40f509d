"""Fields of the resources that only a real llama-server can show to have had their effect."""

from __future__ import annotations

import contextlib
import functools
import http.client
import http.server
import json
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from metal_supervisor.cluster.kube import MERGE
from tests.support.engines import gone, reason, said
from tests.support.system import MODELS, System, eventually, model, running, service

OLD_KEY = "key-0f3a-old"
NEW_KEY = "key-77b1-new"
REF = "spec.speculativeDecoding.draftModelRef"


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with running(tmp_path_factory.mktemp("fields")) as up:
        up.apply(up.tiny_model())
        yield up


def message(system: System, name: str, why: str) -> str:
    """Waits until a service is reported with that reason; returns the message."""
    eventually(lambda: reason(system, name) == why, 20, f"{name}: {why}")
    return str(system.condition("MetalReady", name)["message"])


def test_a_draft_model_is_waited_for_loaded_and_asked(system: System) -> None:
    speculation = {"type": "draft-simple", "draftModelRef": "small", "nDraftMax": 4}
    system.apply(service("drafted", speculativeDecoding=speculation))
    assert f'{REF} names "small"' in message(system, "drafted", "DraftModelNotFound")
    file = system.base / "small.gguf"
    system.apply(model("small", str(file)))
    assert message(system, "drafted", "ModelFileMissing").startswith(f"{REF}: {file} does not exist")
    shutil.copy(system.tiny, file)
    system.ready("drafted")
    assert "hello world" in system.chat("drafted")
    eventually(lambda: "draft acceptance" in said(system, "drafted"), 10, "the engine's word of it")
    assert system.get(f"{MODELS}/small")["status"]["phase"] == "Ready"
    gone(system, "drafted")


@contextlib.contextmanager
def served(directory: Path) -> Iterator[str]:
    """A web server for the files of a directory; gives its URL."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(directory))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_draft_model_is_fetched_like_any_other_if_it_fits(system: System) -> None:
    with served(system.base) as url:
        system.apply(model("far", f"{url}/nowhere.gguf"))
        system.apply(service("fetching", speculativeDecoding={"type": "draft", "draftModelRef": "far"}))
        assert message(system, "fetching", "SourceNotFound").startswith(f"{REF}: {url}/nowhere.gguf answered 404")
        system.apply(model("far", f"{url}/{system.tiny.name}"))
        line = psutil.Process(system.ready("fetching")).cmdline()
    fetched = Path(line[line.index("--model-draft") + 1])
    assert fetched.is_relative_to(system.state / "models") and fetched.read_bytes() == system.tiny.read_bytes()
    gone(system, "fetching")


def test_what_is_looked_up_needs_no_model_and_what_a_build_lacks_is_named(system: System) -> None:
    system.apply(service("lookup", speculativeDecoding={"type": "ngram-simple"}))
    pid = system.ready("lookup")
    line = psutil.Process(pid).cmdline()
    assert line[line.index("--spec-type") + 1] == "ngram-simple"
    system.apply(service("lookup", extraArgs=["--threads", "1", "--no-such-flag"]))
    eventually(lambda: system.condition("Degraded", "lookup").get("reason") == "UnsupportedField", 20, "Degraded")
    assert "spec.extraArgs[2] '--no-such-flag'" in system.condition("Degraded", "lookup")["message"]
    assert system.pid("lookup") == pid, "a bad edit stops nothing"
    gone(system, "lookup")


def test_a_projector_that_is_missing_is_named(system: System) -> None:
    seeing = system.tiny_model("seeing")
    system.apply({**seeing, "spec": {**seeing["spec"], "mmproj": "eyes.gguf"}}, service("seer", "seeing"))
    found = message(system, "seer", "ModelFileMissing")
    assert found.startswith(f'Model "seeing": spec.mmproj: {system.base}/eyes.gguf does not exist')
    gone(system, "seer")


SECRETS = "/api/v1/namespaces/default/secrets"


def answered(system: System, key: str) -> int:
    """Status of a chat with that key."""
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2})
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", system.port("keyed"), timeout=20)) as connection:
        connection.request("POST", "/v1/chat/completions", body, headers)
        return connection.getresponse().status


def test_a_key_from_a_secret_is_waited_for_taken_renewed_and_never_shown(system: System) -> None:
    """The Secret is looked at every half a minute."""
    wanted = {"secretKeyRef": {"name": "keys", "key": "engine"}}
    system.apply(service("keyed", env=[{"name": "LLAMA_API_KEY", "valueFrom": wanted}]))
    assert message(system, "keyed", "SecretNotFound").startswith("spec.env[0].valueFrom.secretKeyRef: ")
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "keys"}, "stringData": {"engine": OLD_KEY}}
    system.kube.request("POST", SECRETS, None, secret)
    pid = system.ready("keyed")
    assert (answered(system, OLD_KEY), answered(system, NEW_KEY)) == (200, 401)
    system.kube.request("PATCH", f"{SECRETS}/keys", None, {"stringData": {"engine": NEW_KEY}}, MERGE)
    eventually(lambda: system.pid("keyed") not in (0, pid), 45, "an engine with the new key")
    pid = system.ready("keyed")
    assert (answered(system, OLD_KEY), answered(system, NEW_KEY)) == (401, 200)
    assert "keyed" in json.dumps(system.observe("keyed"))
    system.kube.request("DELETE", f"{SECRETS}/keys")
    eventually(lambda: system.condition("Degraded", "keyed").get("reason") == "SecretNotFound", 45, "Degraded")
    assert system.pid("keyed") == pid and answered(system, NEW_KEY) == 200, "what runs goes on"
    never_shown(system, OLD_KEY, NEW_KEY)
    gone(system, "keyed")


def never_shown(system: System, *keys: str) -> None:
    """A key is in the spec and the note of the start, which only their user can read, and nowhere else."""
    found = set()
    for path in system.state.rglob("*"):
        hidden = path.is_file() and "apiserver" not in path.relative_to(system.state).parts[0]
        if hidden and any(key.encode() in path.read_bytes() for key in keys):
            found.add(path)
    assert {path.parent.name for path in found} == {"specs", "runs"}, found
    assert {path.stat().st_mode & 0o077 for path in found} == {0}
    told = system.fetch("/status")[1] + system.fetch("/metrics")[1] + system.fetch("/")[1] + system.said()
    told += json.dumps(system.status("keyed")) + "".join(psutil.Process(system.pid("keyed")).cmdline())
    assert not any(key in told for key in keys)


def test_memory_is_locked_only_for_those_who_say_so_in_whatever_words(system: System) -> None:
    system.apply(service("plain"), service("locked", extraArgs=["--threads", "1", "--mlock"]))
    lines = {name: psutil.Process(system.ready(name)).cmdline() for name in ("plain", "locked")}
    assert not {"--mlock", "--load-mode"} & set(lines["plain"])
    assert lines["locked"][-2:] == ["--load-mode", "mmap+mlock"] or lines["locked"][-1] == "--mlock"
    if sys.platform == "linux":
        assert locked_bytes(system.pid("plain")) == 0 < locked_bytes(system.pid("locked"))
    gone(system, "plain", "locked")


def locked_bytes(pid: int) -> int:
    line = next(each for each in Path(f"/proc/{pid}/status").read_text().splitlines() if each.startswith("VmLck:"))
    return int(line.split()[1]) * 1024
