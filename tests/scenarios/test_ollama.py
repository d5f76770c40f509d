"""The real Ollama under one agent: one of ours, and one of the user's that is only used."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support import ollama, ollama_registry
from tests.support.system import ISVC, System, eventually, kill, model, running, service

GGUF = "words"
LOCAL = "local"
PULLED = "pulled"
LIBRARY = "https://ollama.com/library/tiny:1b"


def on_ollama(name: str, model: str, **spec: Any) -> dict[str, Any]:
    """An InferenceService manifest; what llama-server would be told of threads means nothing here."""
    return service(name, model, **{"extraArgs": [], "runtime": "ollama", **spec})


def runs(system: System, name: str) -> list[dict[str, Any]]:
    """What the daemon of a service runs."""
    rows: list[dict[str, Any]] = system.ask(name, "/api/ps")[1]["models"]
    return rows


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """A GGUF service on llama-server; on an Ollama of ours one of a file, and one of the library."""
    base = tmp_path_factory.mktemp("ollama")
    file = ollama.tiny(base / "file.gguf")
    with ollama_registry.registry() as registry:
        registry.publish("tiny", ollama.tiny(base / "library.gguf", n_layer=3), tag="1b")
        flags = "--ollama", str(ollama.program()), "--ollama-url", "off"
        with running(base, *flags, "--ollama-registry", f"http://127.0.0.1:{registry.port}") as up:
            up.apply(up.tiny_model(), service(GGUF))
            up.apply(model("file", str(file)), on_ollama(LOCAL, "file"))
            up.apply(model("library", LIBRARY), service(PULLED, "library", extraArgs=[]))
            for name in (GGUF, LOCAL, PULLED):
                up.ready(name, within_s=90)
            yield up


def test_each_answers_under_its_own_name_a_library_model_too(system: System) -> None:
    for name in (GGUF, LOCAL, PULLED):
        status, answer = system.ask(name, model=name)
        assert status == 200 and answer["model"] in (name, "tiny")  # llama-server says the first of its names
    rows = runs(system, LOCAL)
    assert len(rows) == 2 and {row["context_length"] for row in rows} == {512}
    assert all(int(row["expires_at"][:4]) > 2100 for row in rows), "it would unload them by itself"
    daemon = psutil.Process(system.own_pid("ollama"))
    assert daemon.environ()["OLLAMA_MODELS"].startswith(str(system.state))


def test_a_model_answers_to_its_models_name_until_a_service_has_that_name(system: System) -> None:
    for service_name, name in ((LOCAL, "file"), (PULLED, "library")):
        status, answer = system.ask(service_name, model=name)
        assert (status, answer["model"]) == (200, name)
    assert len(runs(system, LOCAL)) == 2, "a name is no model of its own"
    system.apply(on_ollama("file", "library"))
    system.ready("file", within_s=60)
    eventually(lambda: system.condition("Degraded", LOCAL).get("reason") == "NameTaken", what="the condition")
    assert system.ask("file", model="file")[0] == 200
    system.delete("file")
    eventually(lambda: system.ask(LOCAL, model="file")[0] == 200, what="the name to be its Model's again")


def test_two_services_of_one_file_have_a_context_each(system: System) -> None:
    system.apply(on_ollama("second", "file", contextSize=1024))
    system.ready("second", within_s=60)
    for name in ("second", LOCAL, "second"):
        assert system.ask(name, model=name)[0] == 200
    assert sorted(row["context_length"] for row in runs(system, LOCAL)) == [512, 512, 1024]
    system.delete("second")
    eventually(lambda: len(runs(system, LOCAL)) == 2, what="it to be unloaded")
    # While Ollama deletes a model, it may not find another one: 404 or 500 (19 of 8,382 requests beside 800 deletions).
    eventually(lambda: system.ask(LOCAL, model=LOCAL)[0] == 200, what="the other to be served")


def test_two_services_of_one_library_model_have_to_agree(system: System) -> None:
    system.apply(service("second", "library", extraArgs=[], contextSize=1024))
    eventually(lambda: "DaemonSettingsConflict" in system.told("second"), what="another context to be refused")
    system.apply(service("second", "library", extraArgs=[]))
    system.ready("second", within_s=60)
    system.delete("second")
    eventually(lambda: system.maybe(f"{ISVC}/second") is None, what="it to be gone")
    assert system.ask(PULLED, model=PULLED)[0] == 200
    assert sorted(row["name"] for row in runs(system, LOCAL)) == ["local:latest", "pulled:latest"]


def test_an_edit_reloads_that_model_only(system: System) -> None:
    others = {name: system.pid(name) for name in (GGUF, PULLED)}
    system.apply(on_ollama(LOCAL, "file", contextSize=1024))
    eventually(lambda: {row["context_length"] for row in runs(system, PULLED)} == {512, 1024}, 60, "the new context")
    eventually(lambda: system.slice_ready(LOCAL), what="it to be back")
    assert {name: system.pid(name) for name in (GGUF, PULLED)} == others


def test_a_daemon_that_is_killed_comes_back_with_its_models_and_leaves_no_runner(system: System) -> None:
    daemon = psutil.Process(system.own_pid("ollama"))
    runners = [each for each in daemon.children() if "runner" in each.cmdline()]
    assert len(runners) == 2
    kill(daemon.pid)
    for name in (LOCAL, PULLED):
        eventually(lambda name=name: system.slice_ready(name) is False, what=f"{name} to be withdrawn")
    for name in (LOCAL, PULLED):
        eventually(lambda name=name: system.slice_ready(name), 90, f"{name} to be back")
        assert system.ask(name, model=name)[0] == 200
    assert not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in runners)


def test_a_model_of_the_library_that_is_not_there_is_told(system: System) -> None:
    system.apply(model("none", "https://ollama.com/library/none"), service("none", "none", extraArgs=[]))
    eventually(lambda: "none:latest" in system.told("none"), what="it to be told that there is none")
    system.delete("none")


def test_stopped_it_is_unloaded_and_the_unused_daemon_ends(system: System) -> None:
    system.apply(on_ollama(LOCAL, "file", replicas=0))
    eventually(lambda: len(runs(system, PULLED)) == 1, what="it to be unloaded")
    system.delete(LOCAL)
    system.delete(PULLED)
    eventually(lambda: "ollama" not in system.rpc.table(), within_s=90, what="the daemon to be stopped")
    assert system.slice_ready(GGUF)


def test_the_users_own_is_used_and_never_stopped(tmp_path: Path) -> None:
    file = ollama.tiny(tmp_path / "file.gguf")
    with ollama.serving(tmp_path / "own") as own:
        assert own.process is not None
        with running(tmp_path, "--ollama-url", f"http://127.0.0.1:{own.port}") as up:
            up.apply(model("file", str(file)), on_ollama(LOCAL, "file"))
            up.ready(LOCAL, within_s=90)
            assert up.port(LOCAL) == own.port and up.ask(LOCAL, model=LOCAL)[0] == 200
            assert "ollama " not in up.supervisorctl("status")
            own.create("theirs", own.link(file))
            up.apply(on_ollama("theirs", "file"))
            eventually(lambda: "ollama rm theirs" in up.told("theirs"), what="a model of the user's to be left alone")
            up.delete("theirs")
            up.delete(LOCAL)
            eventually(lambda: own.loaded() == {}, what="the model to be unloaded")
            up.apply(on_ollama(LOCAL, "file"))
            up.ready(LOCAL, within_s=60)
        eventually(lambda: own.loaded() == {}, what="it to be unloaded at the end")
        assert own.process.poll() is None and own.ask("GET", "/")[0] == 200
