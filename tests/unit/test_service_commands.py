"""`list`, `stop`, `start` and `rm` against a stand-in for the API client, which answers from a dictionary."""

from __future__ import annotations

import fcntl
import io
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from metal_supervisor.cli import chat, main, services
from metal_supervisor.cli.services import ServiceClient
from metal_supervisor.cli.terminal import CommandError
from metal_supervisor.cluster.kube import KubeError
from metal_supervisor.settings.loader import Settings
from metal_supervisor.spec.types import Json
from metal_supervisor.state.directory import StateDir

PREFIX = "/apis/inference.llmkube.dev/v1alpha1"


class StandInKube:
    """Stand-in for Kube: keeps services, and what was asked of it beside lists."""

    services: ClassVar[Mapping[str, Json]] = {}
    reason: ClassVar[str] = ""
    failure: ClassVar[KubeError | None] = None
    asked: ClassVar[list[tuple[str, str]]] = []

    def __init__(self, *_: Any) -> None:
        pass

    def request(self, method: str, path: str, *_: Any) -> Json:
        if self.failure is not None:
            raise self.failure
        if method == "GET":
            said = [{"type": "MetalReady", "reason": self.reason}]
            return {
                "items": [
                    {"metadata": {"namespace": "default", "name": name}, "spec": spec, "status": {"conditions": said}}
                    for name, spec in self.services.items()
                ]
            }
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
        ("DELETE", "/namespaces/default/inferenceservices/large"),
        ("DELETE", "/namespaces/default/models/big"),
    ]


def test_what_was_stopped_with_supervisorctl_is_started_there(kube: type[StandInKube]) -> None:
    kube.services = {"tiny": {"modelRef": "m", "replicas": 1}}
    assert client().scale("tiny", 1) == "default/tiny has 1 replica already"
    kube.reason = "StoppedByHand"
    with pytest.raises(CommandError, match=r"start it there with: supervisorctl start default\.tiny$"):
        client().scale("tiny", 1)


def test_an_unknown_name_and_a_stopped_system_have_exit_codes_of_their_own(
    kube: type[StandInKube], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = ["--state-dir", str(tmp_path)]
    commands = (["list"], ["stop", "x"], ["start", "x"], ["rm", "x"], ["chat", "x", "hi"])
    for words in commands:
        assert main.main([*words, *state]) == 3
        assert f"no system has run in {tmp_path}" in capsys.readouterr().err
    assert main.main(["upgrade", *state]) == 3
    assert f"no supervisord runs on {tmp_path}" in capsys.readouterr().err
    (tmp_path / "kubeconfig").write_text("")
    for words in commands[1:]:
        assert main.main([*words, *state]) == 4
        assert "there is no service x; there are: none" in capsys.readouterr().err
    assert main.main(["stop", "team/x", *state]) == 4
    assert "this Mac serves the namespace default only" in capsys.readouterr().err
    kube.failure = KubeError(0, "Unreachable", "Connection refused")
    for words in commands:
        assert main.main([*words, *state]) == 3
        said = capsys.readouterr().err
        assert f"the system in {tmp_path} (--state-dir) does not answer: Connection refused; start it with" in said
    with pytest.raises(CommandError) as refused:
        client().all()
    assert refused.value.code == 1, "a cluster's API server is not what metal-supervisor run starts"


class StandInSupervisord:
    """Stand-in for the client of supervisord: answers after as many calls as `silent` says."""

    silent: ClassVar[int] = 0

    def __init__(self, *_: Any) -> None:
        pass

    def answers(self) -> bool:
        StandInSupervisord.silent -= 1
        return self.silent < 0


@pytest.fixture
def starting(kube: type[StandInKube], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The command `list` for a system whose supervisord is up, and whose API is not."""
    monkeypatch.setattr(StandInSupervisord, "silent", 0)
    monkeypatch.setattr(services, "Supervisord", StandInSupervisord)
    monkeypatch.setattr(services, "LOOK_EVERY_S", 0.0)
    (tmp_path / "kubeconfig").write_text("")
    kube.failure = KubeError(0, "Unreachable", "Connection refused")
    return ["list", "--state-dir", str(tmp_path)]


def test_an_api_that_is_coming_up_is_waited_for(
    kube: type[StandInKube], starting: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(services.time, "sleep", lambda _: setattr(kube, "failure", None))
    assert main.main(starting) == 0 and "no services" in capsys.readouterr().out


def test_an_api_that_does_not_come_up_is_not_to_be_started_by_the_user(
    starting: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(services, "START_WAIT_S", 0.0)
    assert main.main(starting) == 3
    said = capsys.readouterr().err
    assert said.endswith("Connection refused; see metal-supervisor logs apiserver\n")


def test_a_supervisord_is_waited_for_where_a_run_is_about_to_start_it(starting: list[str], tmp_path: Path) -> None:
    StandInSupervisord.silent = 1
    assert not services.is_up(StateDir(tmp_path))
    with (tmp_path / "run.lock").open("w") as lock:
        lock.write(str(os.getpid()))
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        StandInSupervisord.silent = 1
        assert services.is_up(StateDir(tmp_path))
    StandInSupervisord.silent = 1
    assert not services.is_up(StateDir(tmp_path)), "that run has ended"


def event(text: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"delta": {"content": text}}]}).encode() + b"\n"


@pytest.mark.parametrize(
    ("lines", "code", "told"),
    [
        ([event("hello"), b"\n", b"data: [DONE]\n"], 0, ""),
        ([event("hello")], 1, "the answer broke off"),
        ([event("hello"), b'data: {"choices": [{"del'], 1, "the answer broke off"),
        ([event("hello"), b'data: {"choices": "\xff"}\n', b"data: [DONE]\n"], 1, "the answer broke off"),
        ([event("hello"), b'data: {"error": {"message": "out \\u001b[2J of memory"}}\n'], 1, "out ?[2J of memory"),
    ],
)
def test_an_answer_that_is_not_whole_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], lines: list[bytes], code: int, told: str
) -> None:
    monkeypatch.setattr(chat, "partner_of", lambda *_: chat.Partner("http://127.0.0.1:1/v1", "m"))
    monkeypatch.setattr(chat, "_streamed", lambda *_: chat._pieces(lines))
    assert main.main(["chat", "m", "hi"]) == code
    said = capsys.readouterr()
    assert said.out == "hello\n" and told in said.err and said.err.count("\n") == bool(told)


def test_an_answer_keeps_every_space_and_joiner_and_loses_what_moves_a_cursor(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = "10\u202fGB\u00a0\u3000你好 می\u200cخواهم 👩\u200d💻\n\t"
    monkeypatch.setattr(chat, "_streamed", lambda *_: [kept, "\x1b[2J\r\u202e\u2028"])
    chat.Conversation(chat.Partner("http://127.0.0.1:1/v1", "m")).answer("hi", sys.stdout)
    assert capsys.readouterr().out == f"{kept}?[2J???\n"


@pytest.mark.parametrize("key", ["kéy", "a\nb", "\x1b[2J"])
def test_a_key_that_no_header_can_hold_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], key: str
) -> None:
    monkeypatch.setattr(chat, "partner_of", lambda *_: chat.Partner("http://127.0.0.1:1/v1", "m"))
    monkeypatch.setenv(chat.KEY_VARIABLE, key)
    assert main.main(["chat", "m", "hi"]) == 1
    said = capsys.readouterr().err
    assert f"{chat.KEY_VARIABLE} holds no key" in said and said.count("\n") == 1


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The questions that a model is asked, which answers each with what ASCII lacks."""
    found: list[str] = []

    def streamed(_: chat.Partner, said: list[Json]) -> list[str]:
        found.append(said[-1]["content"])
        return ["d’accord"]

    monkeypatch.setattr(chat, "partner_of", lambda *_: chat.Partner("http://127.0.0.1:1/v1", "m"))
    monkeypatch.setattr(chat, "_streamed", streamed)
    return found


def test_what_a_stream_cannot_encode_or_decode_ends_no_answer(
    monkeypatch: pytest.MonkeyPatch, asked: list[str]
) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9"), "utf-8"))
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, "ascii"))
    assert main.main(["chat", "m"]) == 0
    assert asked == ["caf\N{REPLACEMENT CHARACTER}"] and written.getvalue() == b"d\\u2019accord\n"


def test_a_command_needs_no_stream_but_stdout(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, asked: list[str]
) -> None:
    for name in ("stdin", "stderr"):
        monkeypatch.setattr(sys, name, None)
    assert main.main(["list", "--state-dir", str(tmp_path)]) == 3, "the exit code of what is not running"
    assert main.main(["chat", "m"]) == 0 and asked == [""]
    for stream in (sys.stdin, sys.stderr):
        stream.close()
