"""The real oMLX, shared: its models come and go beside each other, under one agent with a real llama-server."""

from __future__ import annotations

import contextlib
import http.client
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import mlx
from tests.support.mlx import mlx_model, mlx_service
from tests.support.runtimes import omlx
from tests.support.system import System, eventually, running, service

GGUF = "words"
ONE = "one"
TWO = "two"


def on_omlx(name: str, model: str, **spec: Any) -> dict[str, Any]:
    return mlx_service(name, model, runtime="omlx", **spec)


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """A GGUF service, and two models of one oMLX, Ready at once."""
    base = tmp_path_factory.mktemp("omlx")
    for name in (ONE, TWO):
        mlx.tiny(base / name, "--endless", "--context", "32768")
    with running(base, "--omlx", str(omlx()), "--drain-timeout", "60", "--ollama-url", "off") as up:
        up.apply(up.tiny_model(), service(GGUF))
        for name in (ONE, TWO):
            up.apply(mlx_model(name, base / name), on_omlx(name, name))
        for name in (GGUF, ONE, TWO):
            up.ready(name, within_s=90)
        yield up


class Stream:
    """One long streamed answer."""

    def __init__(self, system: System, name: str) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", system.port(name), timeout=60)
        body = {"model": name, "stream": True, "max_tokens": 20000, "messages": [{"role": "user", "content": "hi"}]}
        self._connection.request("POST", "/v1/chat/completions", json.dumps(body))
        self._answer = self._connection.getresponse()
        self.flows()

    def flows(self) -> None:
        """More of it comes."""
        for _ in range(20):
            assert self._answer.readline()

    def close(self) -> None:
        self._connection.close()


def stream(system: System, name: str) -> contextlib.closing[Stream]:
    return contextlib.closing(Stream(system, name))


def loaded(system: System) -> dict[str, bool]:
    _, listed = system.ask(ONE, "/metal-supervisor/models")
    return {each["id"]: each["loaded"] for each in listed["data"]}


def test_each_answers_under_its_own_name_and_one_daemon_serves_both(system: System) -> None:
    for name in (GGUF, ONE, TWO):
        status, answer = system.ask(name, model=name)
        assert status == 200 and answer["model"] in (name, "tiny")  # llama-server says the first of its names
    assert system.port(ONE) == system.port(TWO) != system.port(GGUF)
    assert loaded(system) == {ONE: True, TWO: True}
    shown = system.supervisorctl("status")
    for program in ("omlx", "default.one", "default.two", "default.words"):
        assert f"{program} " in shown and "RUNNING" in shown


def test_a_model_answers_to_its_models_name_and_its_directorys_and_the_older_service_keeps_them(
    system: System,
) -> None:
    path = mlx.tiny(system.state.parent / "Phi-4-Mini", "--endless", "--context", "32768")
    system.apply(mlx_model("phi", path), on_omlx("older", "phi"))
    system.ready("older", within_s=60)
    for name in ("older", "phi", "Phi-4-Mini"):
        status, answer = system.ask("older", model=name)
        assert (status, answer["model"]) == (200, "older"), name
    system.apply(on_omlx("newer", "phi"))
    system.ready("newer", within_s=60)
    assert system.ask("newer", model="newer")[0] == 200
    assert system.ask("newer", model="phi")[1]["model"] == "older"
    found = system.condition("Degraded", "newer")
    assert found["reason"] == "NameTaken" and "default/older has that name" in found["message"]
    pid = system.pid("newer")
    system.delete("older")
    for name in ("phi", "Phi-4-Mini"):
        eventually(lambda name=name: system.ask("newer", model=name)[1].get("model") == "newer", what=f"{name} to move")
    assert system.pid("newer") == pid, "no model is loaded for it"
    system.delete("newer")
    eventually(lambda: "newer" not in loaded(system), what="it to be unloaded")
    assert system.ask(ONE, model="phi")[0] == 404


def put(system: System, name: str, path: Path) -> int:
    """Status of telling the daemon itself to load a model, with its key."""
    key = (system.state / "omlx.key").read_text()
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", system.port(ONE), timeout=60)) as connection:
        body, url = json.dumps({"path": str(path), "settings": {}}), f"/metal-supervisor/models/{name}"
        connection.request("PUT", url, body, {"Authorization": f"Bearer {key}"})
        return connection.getresponse().status


def test_the_daemon_is_confined_to_the_models_of_its_services(system: System) -> None:
    for name in (ONE, TWO):
        eventually(lambda name=name: system.condition("Confined", name)["status"] == "True", what="it to be said")
    note = json.loads((system.state / "runs" / "omlx.json").read_text())
    assert note["confined"] is True
    late = mlx.tiny(system.state.parent / "late")
    assert put(system, "stolen", late) in (400, 500), "nothing was linked for it, and it lies outside"
    weights, blob = late / "model.safetensors", system.state.parent / "blob"
    weights.rename(blob)
    weights.symlink_to(blob)  # as in the Hub's cache
    system.apply(mlx_model("late", late), on_omlx("late", "late"))
    system.ready("late", within_s=60)  # though the daemon is older than the model
    assert json.loads((system.state / "runs" / "omlx.json").read_text())["pid"] == note["pid"]
    assert system.ask("late", model="late")[0] == 200
    system.delete("late")
    eventually(lambda: not (system.state / "served" / "omlx" / "models" / "late").exists(), what="its links to go")


def test_no_program_that_a_model_brings_is_run(system: System) -> None:
    """The mlx-lm of oMLX 0.7.0 runs what `model_file` names; the store refuses such a model before this does."""
    evil, mark = mlx.tiny(system.state / "served" / "omlx" / "models" / "evil"), system.state / "omlx" / "mark"
    assert put(system, "evil", evil) == 200, "without the program it is a model like any other"
    config = json.loads((evil / "config.json").read_text())
    (evil / "config.json").write_text(json.dumps({**config, "model_file": "evil.py"}))
    (evil / "evil.py").write_text(f"open({str(mark)!r}, 'w')\nfrom mlx_lm.models.llama import Model, ModelArgs\n")
    assert put(system, "worse", evil) in (400, 500)
    evil.rename(evil.with_name("worse"))
    assert put(system, "worse", evil) in (400, 500)
    assert not mark.exists()


def test_an_edit_reloads_that_model_only(system: System) -> None:
    before = {name: system.pid(name) for name in (ONE, TWO, GGUF)}
    daemon = system.own_pid("omlx")
    with stream(system, ONE) as answer:
        system.apply(on_omlx(TWO, TWO, contextSize=4096))
        eventually(lambda: system.pid(TWO) != before[TWO], what="the other to be attached anew")
        system.ready(TWO, within_s=60)
        answer.flows()
    assert system.own_pid("omlx") == daemon
    assert {name: system.pid(name) for name in (ONE, GGUF)} == {name: before[name] for name in (ONE, GGUF)}
    status, answer = system.ask(TWO, model=TWO, messages=[{"role": "user", "content": "hi " * 6000}])
    assert status == 400 and "4096" in str(answer), answer


def test_a_model_that_answers_is_drained_before_it_is_unloaded(system: System) -> None:
    with stream(system, TWO) as answer:
        system.apply(on_omlx(TWO, TWO, replicas=0))
        eventually(lambda: not system.slice_ready(TWO), what="the endpoint to be withdrawn")
        answer.flows()
        assert loaded(system)[TWO]
    eventually(lambda: TWO not in loaded(system), what="it to be unloaded once it has answered")
    system.apply(on_omlx(TWO, TWO))
    system.ready(TWO, within_s=60)


def test_stop_and_start_by_hand_unload_and_load(system: System) -> None:
    system.supervisorctl("stop", f"default.{TWO}")
    eventually(lambda: TWO not in loaded(system), what="it to be unloaded")
    eventually(lambda: system.condition("MetalReady", TWO)["reason"] == "StoppedByHand", what="it to be told")
    system.supervisorctl("start", f"default.{TWO}")
    system.ready(TWO, within_s=60)


def test_only_inference_is_for_everybody_and_the_rest_needs_the_key(system: System) -> None:
    for path in ("/admin/api/models", "/api/status", "/v1/models/one/unload"):
        assert system.ask(ONE, path)[0] in (401, 404, 405), path
    connection = http.client.HTTPConnection("127.0.0.1", system.port(ONE), timeout=20)
    asked = {"Content-Type": "application/json"}
    for method, path in (
        ("POST", "/v1/models/one/unload"),
        ("DELETE", "/metal-supervisor/models/one"),
        ("POST", "/admin/api/setup-api-key"),
    ):
        connection.request(method, path, json.dumps({"api_key": "mine", "api_key_confirm": "mine"}), asked)
        answer = connection.getresponse()
        answer.read()
        assert answer.status in (400, 401), (path, answer.status)
    assert loaded(system)[ONE]
    connection.close()
    key = (system.state / "omlx.key").read_text()
    assert (system.state / "omlx.key").stat().st_mode & 0o077 == 0
    status = subprocess.run(["ps", "-Ao", "args"], capture_output=True, text=True, check=True).stdout
    said_everywhere = status + system.said() + system.fetch("/status")[1] + system.kubectl("get", "isvc", "-o", "yaml")
    assert key not in said_everywhere


def test_what_omlx_cannot_do_is_refused_by_name_on_that_service_alone(system: System) -> None:
    system.apply(on_omlx("odd", ONE, extraArgs=["--max-concurrent-requests", "1"]))
    eventually(lambda: "spec.extraArgs" in system.told("odd"), what="extraArgs to be refused")
    system.apply(on_omlx("odd", "tiny"))
    eventually(lambda: "FormatMismatch" in system.told("odd"), what="a GGUF model to be refused")
    system.delete("odd")
    assert system.slice_ready(ONE)


def test_an_unused_daemon_is_stopped(system: System) -> None:
    for name in (ONE, TWO):
        system.delete(name)
    eventually(lambda: "omlx" not in system.rpc.table(), within_s=90, what="the daemon to be stopped")
    assert system.slice_ready(GGUF)
