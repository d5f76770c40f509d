"""The gateway's keys and certificate: who gets in, and files that change or break while it runs."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shlex
import ssl
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from metal_supervisor.cli.changes import commands_for
from metal_supervisor.gateway.access import PREFIX
from metal_supervisor.settings.schema import Settings
from tests.support.gateway import Gateway, with_gateway
from tests.support.system import System, eventually, free_ports, running, service
from tests.support.typed import typed

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


def key(*arguments: str, file: Path) -> str:
    """Runs `metal-supervisor key …`; returns what it printed."""
    done = typed("key", *arguments, "--file", str(file))
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def certificate(directory: Path, name: str) -> tuple[Path, Path]:
    """A fresh certificate for localhost, and its key."""
    cert, secret = directory / f"{name}.crt", directory / f"{name}.key"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={name}"]
    command += ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", str(secret), "-out", str(cert)]
    subprocess.run(command, capture_output=True, check=True, timeout=30)
    return cert, secret


class Secured:
    """A system whose gateway has keys and a certificate."""

    def __init__(self, system: System, port: int, base: Path) -> None:
        self.system, self.port, self.base = system, port, base
        self.file, self.cert, self.secret = base / "gateway.keys", base / "live.crt", base / "live.key"
        self.url = f"https://127.0.0.1:{port}"

    def ask(self, path: str, token: str = "", body: dict[str, Any] | None = None) -> tuple[int, Any]:
        """(status, answer) over TLS, trusting the certificate at hand."""
        context = ssl.create_default_context(cafile=str(self.cert))
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        connection = http.client.HTTPSConnection("127.0.0.1", self.port, timeout=30, context=context)
        with contextlib.closing(connection):
            connection.request("POST" if body else "GET", path, json.dumps(body) if body else None, headers)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())

    def shown(self) -> bytes:
        """The certificate that new connections get."""
        text = ssl.get_server_certificate(("127.0.0.1", self.port), timeout=10)
        return ssl.PEM_cert_to_DER_cert(text)

    def install(self, pair: tuple[Path, Path]) -> bytes:
        """Puts a pair where the gateway looks for it; returns the certificate."""
        self.secret.write_bytes(pair[1].read_bytes())
        self.cert.write_bytes(pair[0].read_bytes())
        return ssl.PEM_cert_to_DER_cert(self.cert.read_text())

    def problem(self) -> str:
        return str(json.loads((self.system.state / "gateway.json").read_text())["problem"])


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    base = tmp_path_factory.mktemp("secured")
    (port,) = free_ports(1)
    flags = [
        "--gateway",
        f"127.0.0.1:{port}",
        "--gateway-keys",
        str(base / "gateway.keys"),
        "--gateway-tls-cert",
        str(base / "live.crt"),
        "--gateway-tls-key",
        str(base / "live.key"),
    ]
    pair = certificate(base, "first")
    for source, name in zip(pair, ("live.crt", "live.key"), strict=True):
        (base / name).write_bytes(source.read_bytes())
    key("add", "laptop", file=base / "gateway.keys")
    with running(base, *flags) as system:
        up = Secured(system, port, base)
        system.apply(system.tiny_model(), service(), service("other"))
        system.ready("tiny"), system.ready("other")
        yield up


def test_a_key_opens_what_it_may(secured: Secured) -> None:
    token = key("add", "narrow", "--services", "default/tiny", file=secured.file)
    eventually(lambda: secured.ask("/v1/models", token)[0] == 200, what="the new key to be known")
    assert [row["id"] for row in secured.ask("/v1/models", token)[1]["data"]] == ["tiny"]
    eventually(lambda: secured.ask("/v1/chat/completions", token, {"model": "tiny", **CHAT})[0] == 200)
    assert secured.ask("/v1/chat/completions", token, {"model": "other", **CHAT})[0] == 404
    assert secured.ask("/services/default/other/v1/chat/completions", token, CHAT)[0] == 404
    assert "narrow services=default/tiny" in key("list", file=secured.file)
    assert token not in secured.file.read_text() and token not in secured.system.files.log_path("gateway").read_text()


@pytest.mark.parametrize("token", ["", "ms-wrong", "sha256:00"])
def test_without_a_key_nothing_opens(secured: Secured, token: str) -> None:
    for path, body in (("/v1/models", None), ("/v1/chat/completions", {"model": "tiny", **CHAT})):
        status, told = secured.ask(path, token, body)
        assert status == 401 and told["error"]["code"] == "invalid_api_key"
    assert secured.ask("/healthz")[0] == 200


def test_the_sdks_send_the_key_over_tls(secured: Secured, monkeypatch: pytest.MonkeyPatch) -> None:
    import anthropic
    import openai

    token = key("add", "sdk", file=secured.file)
    eventually(lambda: secured.ask("/v1/models", token)[0] == 200, what="the new key to be known")
    monkeypatch.setenv("SSL_CERT_FILE", str(secured.cert))
    with openai.OpenAI(base_url=f"{secured.url}/v1", api_key=token, max_retries=0) as client:
        assert client.models.retrieve("tiny").id == "tiny"
    with anthropic.Anthropic(base_url=secured.url, api_key=token, max_retries=0) as claude:
        question: list[anthropic.types.MessageParam] = [{"role": "user", "content": "hi"}]
        assert claude.messages.create(model="tiny", messages=question, max_tokens=4).content
    stranger = openai.OpenAI(base_url=f"{secured.url}/v1", api_key="wrong", max_retries=0)
    with stranger, pytest.raises(openai.AuthenticationError):
        stranger.models.list()


def test_a_limit_is_told_with_when_to_come_back(secured: Secured) -> None:
    token = key("add", "slow", "--per-minute", "2", file=secured.file)
    eventually(lambda: secured.ask("/v1/models", token)[0] == 200, what="the new key to be known")
    body = {"model": "tiny", **CHAT}
    assert [secured.ask("/v1/chat/completions", token, body)[0] for _ in range(3)] == [200, 200, 429]


def test_a_removed_key_lets_no_longer_in(secured: Secured) -> None:
    token = key("add", "leaver", file=secured.file)
    eventually(lambda: secured.ask("/v1/models", token)[0] == 200, what="the new key to be known")
    key("remove", "leaver", file=secured.file)
    eventually(lambda: secured.ask("/v1/models", token)[0] == 401, what="the key to be forgotten")


def test_a_broken_file_of_keys_leaves_the_last_good_one(secured: Secured) -> None:
    token, good = key("add", "steady", file=secured.file), secured.file.read_text()
    eventually(lambda: secured.ask("/v1/models", token)[0] == 200, what="the new key to be known")
    secured.file.write_text(good + "steady sha256:nonsense\n")
    told = eventually(secured.problem, what="the problem to be told")
    assert "gateway.keys" in told and "line " in told and secured.ask("/v1/models", token)[0] == 200
    secured.file.unlink()
    eventually(lambda: "cannot be read" in secured.problem(), what="the loss to be told")
    assert secured.ask("/v1/models", token)[0] == 200
    secured.file.write_text(good)
    eventually(lambda: not secured.problem(), what="the end of the problem")


def test_a_certificate_is_renewed_and_a_broken_one_is_not_taken(secured: Secured, tmp_path: Path) -> None:
    second, third = certificate(tmp_path, "second"), certificate(tmp_path, "third")
    context = ssl.create_default_context(cafile=str(secured.cert))
    old = http.client.HTTPSConnection("127.0.0.1", secured.port, timeout=30, context=context)
    with contextlib.closing(old):
        old.request("GET", "/healthz")
        old.getresponse().read()
        new = secured.install(second)
        eventually(lambda: secured.shown() == new, what="the new certificate")
        old.request("GET", "/healthz")
        assert old.getresponse().read(), "a connection from before the renewal stays"
    secured.cert.write_bytes(third[0].read_bytes())  # and the key of another
    told = eventually(secured.problem, what="the mismatch to be told")
    assert "live.crt" in told and [secured.shown() == new for _ in range(3)] == [True] * 3
    secured.secret.write_text("nonsense")
    eventually(lambda: secured.problem() != told, what="the broken key to be told")
    assert secured.shown() == new
    secured.install(third)
    eventually(lambda: not secured.problem() and secured.shown() != new, what="the third certificate")


def test_beyond_loopback_without_keys_it_does_not_listen(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    with running(tmp_path, "--gateway", f"0.0.0.0:{port}") as system:
        note = system.state / "gateway.json"
        told = eventually(lambda: json.loads(note.read_text())["problem"], what="the refusal")
        assert "--gateway-insecure" in told
        with pytest.raises(OSError):
            Gateway(system, port).ask("GET", "/healthz")

        def problem() -> str:
            return str(json.loads(system.fetch("/status")[1])["gateway"]["problem"])

        eventually(lambda: "--gateway-insecure" in problem(), 30, "/status to tell it")
        out = subprocess.run(
            [sys.executable, "-I", "-m", "metal_supervisor", "status", "--state-dir", str(system.state)],
            capture_output=True,
            text=True,
            timeout=60,
        ).stdout
        assert "--gateway-insecure" in " ".join(out.split())


def test_keys_come_from_a_secret(tmp_path: Path) -> None:
    with with_gateway(tmp_path, "--gateway-keys-secret", "default/gateway-keys") as gateway:
        system = gateway.system
        system.apply(system.tiny_model(), service())
        system.ready()
        assert gateway.chat("tiny", {"Authorization": "Bearer guessed"})[0] == 401, "there is no Secret yet"
        told = json.loads((system.state / "gateway.json").read_text())["problem"]
        assert "Secret default/gateway-keys has not been read yet" in told
        token = key("add", "laptop", file=tmp_path / "gateway.keys")
        system.kubectl("create", "secret", "generic", "gateway-keys", f"--from-file=keys={tmp_path}/gateway.keys")
        own = {"Authorization": f"Bearer {token}"}
        eventually(lambda: gateway.chat("tiny", own)[0] == 200, 30, "the key to be known")
        assert gateway.chat("tiny", {"Authorization": "Bearer guessed"})[0] == 401
        assert stat.S_IMODE((system.state / "secret-keys" / "default.gateway-keys").stat().st_mode) == 0o600
        # A Secret that is broken or gone leaves the last good keys; the note tells.
        system.kubectl("delete", "secret", "gateway-keys")
        eventually(lambda: "the gateway's keys cannot be had" in str(gateway.log_of("controller")), 60, "it to be told")
        assert gateway.chat("tiny", own)[0] == 200


def test_the_commands_that_are_printed_work_as_typed(tmp_path: Path) -> None:
    """Those of `run` at an engine with a key of its own, and those for the gateway with keys."""
    file, own = tmp_path / "gateway.keys", "sk-of-the-engine"
    key("add", "first", file=file)
    with with_gateway(tmp_path, "--gateway-keys", str(file)) as gateway:
        system = gateway.system
        system.apply(system.tiny_model(), service(env=[{"name": "LLAMA_API_KEY", "value": own}]))
        system.ready()
        eventually(lambda: "chat/completions" in system.said(), what="the commands to be printed")
        (at_engine,) = [line.strip() for line in system.said().splitlines() if "chat/completions" in line]
        settings = Settings(state_dir=str(system.state), gateway=f"127.0.0.1:{gateway.port}", gateway_keys=str(file))
        tool = shlex.quote(str(Path(sys.executable).parent / "metal-supervisor"))
        export, at_gateway, chat = commands_for(settings, "tiny", settings.gateway_url, "chat", tool)
        exported = shell(f'{export}; printf %s "$METAL_SUPERVISOR_KEY"', "")
        assert exported.startswith(PREFIX)
        assert "hello world" in shell(at_engine, "")
        eventually(lambda: "hello world" in shell(at_gateway, exported), what="the new key to be accepted")
        assert "hello world" in shell(f"echo hi | {chat}", exported)
        assert own not in system.said() and exported not in system.said()


def shell(command: str, exported: str) -> str:
    """Output of a command line of a shell. `exported`: METAL_SUPERVISOR_KEY, "" without one."""
    environment = {"PATH": os.environ["PATH"], **({"METAL_SUPERVISOR_KEY": exported} if exported else {})}
    done = subprocess.run(["sh", "-c", command], env=environment, capture_output=True, text=True, timeout=60)
    return done.stdout or done.stderr
