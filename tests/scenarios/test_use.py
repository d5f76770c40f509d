"""The commands for using models, as somebody types them who has never written a manifest."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import own_command
from tests.support.hub import Hub
from tests.support.system import System, eventually, free_ports, model, running, service

COMMAND = sys.executable, "-I", "-m", "metal_supervisor"


def typed(system: System, *words: str, given: str | None = None) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of a command about this system; `given` on the standard input of a process."""
    words = *words, "--state-dir", str(system.state)
    if given is None:
        return own_command.typed(*words)
    done = subprocess.run([*COMMAND, *words], capture_output=True, text=True, timeout=60, input=given)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    base = tmp_path_factory.mktemp("hub")
    tiny = System(base).tiny.read_bytes()
    with Hub({"o/r": {"m-Q4_K_M.gguf": tiny, "m-Q8_0.gguf": tiny}, "o/one": {"only.gguf": tiny}}) as up:
        yield up


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory, hub: Hub) -> Iterator[System]:
    (port,) = free_ports(1)
    base = tmp_path_factory.mktemp("use")
    with running(base, "--gateway", f"127.0.0.1:{port}", "--hf-endpoint", hub.url) as up:
        yield up


def test_serve_is_the_system_if_none_runs(tmp_path: Path) -> None:
    made = System(tmp_path, "--gateway", f"127.0.0.1:{free_ports(1)[0]}")
    with made.log.open("wb") as log:
        made.process = subprocess.Popen(
            [*COMMAND, "serve", str(made.tiny), "--name", "mine", "--ctx", "2048", *made.flags],
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    try:
        eventually(lambda: "default.mine             Ready" in made.said(), 60, "the model to be Ready")
        code, answer, _ = typed(made, "chat", "mine", "hi")
        assert code == 0 and "hello world" in answer
        eventually(lambda: "chat mine" in made.said() and "serve OWNER/REPO" in made.said(), what="what to type next")
        assert "The system stays in this terminal: Ctrl-C stops everything." in made.said()
        assert made.stop(signal.SIGINT) == 0 and "nothing is left running" in made.said()
    finally:
        made.close()


def test_serve_takes_a_repository_of_the_hub(system: System) -> None:
    code, out, err = typed(system, "serve", "o/r", "--name", "chosen")
    assert code == 0, err
    assert "m-Q4_K_M.gguf is taken" in out and "chat chosen" in out and "curl http://127.0.0.1:" in out
    assert system.get("/apis/inference.llmkube.dev/v1alpha1/namespaces/default/models/chosen")["spec"]["source"] == (
        "hf://o/r/m-Q4_K_M.gguf"
    )
    assert typed(system, "serve", "o/r:Q8_0", "--print")[1].count("hf://o/r/m-Q8_0.gguf") == 1
    assert typed(system, "serve", "hf://o/one", "--print")[1].count("hf://o/one/only.gguf") == 1
    code, _, err = typed(system, "serve", "o/r:Q9_9")
    assert code == 2 and "m-Q4_K_M.gguf" in err and "m-Q8_0.gguf" in err
    assert typed(system, "serve", "o/nothing")[0] == 2
    assert typed(system, "rm", "chosen")[0] == 0


def test_a_model_that_cannot_run_leaves_no_service_and_no_change_in_one_from_before(system: System, hub: Hub) -> None:
    hub.gated = True
    try:
        code, _, err = typed(system, "serve", "hf://o/r/m-Q8_0.gguf", "--name", "gated")
        assert code == 1 and err.count("\n") == 1 and "the service is removed again" in err, err
        assert "no services" in typed(system, "list")[1]
        assert system.kube.request("GET", "/apis/inference.llmkube.dev/v1alpha1/models")["items"] == []
        system.apply(model("gated", "hf://o/r/m-Q8_0.gguf"), service("gated", "gated"))
        code, _, err = typed(system, "serve", "hf://o/r/m-Q8_0.gguf", "--name", "gated")
        assert code == 1 and "metal-supervisor rm gated" in err and "default/gated" in typed(system, "list")[1]
    finally:
        hub.gated = False
        typed(system, "rm", "gated")


def test_what_is_printed_can_be_applied_and_a_detached_serve_waits_for_nothing(system: System) -> None:
    code, printed, err = typed(system, "serve", "o/one", "--name", "typed", "--print")
    assert code == 0, err
    assert "typed created" in system.kubectl("apply", "--dry-run=server", "-f", "-", stdin=printed)
    assert "serve changes no setting" not in err
    code, out, err = typed(system, "serve", "o/one", "--name", "typed", "--detach", "--idle-ttl", "77", "--port", "1")
    assert "--port, --idle-ttl: serve changes no setting of a system that runs already" in err
    assert (code, err.count("\n")) == (0, 1) and "metal-supervisor status" in out and "Ready" not in out
    system.ready("typed")
    row = next(line for line in typed(system, "list")[1].splitlines() if "/typed" in line)
    assert "MiB" in row, row
    assert typed(system, "rm", "typed")[0] == 0


def test_a_shipped_example_is_printed_as_it_is_there(system: System) -> None:
    code, printed, err = typed(system, "serve", "phi-4-mini", "--print")
    assert code == 0, err
    assert "parallelSlots: 2" in printed and "Phi-4-mini-instruct-Q4_K_M.gguf" in printed
    assert system.kubectl("apply", "--dry-run=server", "-f", "-", stdin=printed).count("created") == 2


def test_a_model_that_does_not_fit_is_not_applied(system: System) -> None:
    flags = "--name", "large", "--ctx", "2000000", "--memory-fraction", "0.1"
    code, _, err = typed(system, "serve", str(system.tiny), *flags)
    assert code == 1 and "fit" in err
    assert "large" not in typed(system, "list")[1]


def test_the_name_of_another_model_is_not_taken(system: System) -> None:
    system.apply(model("other", f"file://{system.tiny}"), service("other", "other"))
    code, _, err = typed(system, "serve", "o/one", "--name", "other")
    assert code == 1 and "already" in err and "--name" in err
    assert system.get("/apis/inference.llmkube.dev/v1alpha1/namespaces/default/models/other")["spec"]["source"] == (
        f"file://{system.tiny}"
    )
    assert typed(system, "rm", "other")[0] == 0


def test_a_context_that_is_none_is_refused(system: System) -> None:
    code, _, err = typed(system, "serve", str(system.tiny), "--ctx", "-5", "--print")
    assert code == 2 and "--ctx must be from 128" in err


def test_list_stop_start_and_rm(system: System) -> None:
    assert "serve SOURCE" in typed(system, "list")[1]
    system.apply(model("shared", f"file://{system.tiny}"), service("one", "shared"), service("two", "shared"))
    system.ready("one")
    assert "default/one" in typed(system, "list")[1]
    rows = {each["metadata"]["name"]: each["state"] for each in json.loads(typed(system, "list", "--json")[1])}
    assert rows["one"] == "Ready"
    (url,) = [line.split()[-1] for line in typed(system, "list")[1].splitlines() if "default/one " in line]
    assert url == f"http://127.0.0.1:{system.port('one')}/v1", "what docs/troubleshooting.md has one append /models to"
    assert "spec.replicas is 0" in typed(system, "stop", "one")[1]
    eventually(lambda: system.status("one")["phase"] == "Stopped" and not system.pid("one"), 30, "it to stop")
    assert "already" in typed(system, "stop", "default/one")[1]
    code, _, err = typed(system, "chat", "one", "hi")
    assert code == 1 and "Stopped" in err
    assert "spec.replicas is 1" in typed(system, "start", "one")[1]
    system.ready("one")
    assert typed(system, "chat", "one", given="from a pipe")[1].strip()
    assert "shared stays, as default/two uses it" in typed(system, "rm", "one")[1]
    assert "and its Model" in typed(system, "rm", "two")[1]
    assert system.kube.request("GET", "/apis/inference.llmkube.dev/v1alpha1/models")["items"] == []


@pytest.mark.parametrize("words", [("stop", "nope"), ("start", "nope"), ("rm", "nope"), ("chat", "nope", "hi")])
def test_a_name_that_is_none_is_told(system: System, words: tuple[str, ...]) -> None:
    code, _, err = typed(system, *words)
    assert code == 4 and "there is no service nope" in err


def test_without_a_system_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for words in (("list",), ("stop", "x"), ("chat", "x", "hi")):
        code, _, err = own_command.typed(*words, "--state-dir", str(tmp_path))
        assert code == 3 and "metal-supervisor serve SOURCE starts one" in err, err
