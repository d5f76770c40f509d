"""Tokens that rotate and plugins that misbehave: had in time, or refused by name, and never a secret in sight."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import psutil
import pytest
from test_kube import TOKEN, answering, config, everything, failure, http

from metal_supervisor.cluster import exec_plugin as plugin_module
from metal_supervisor.cluster import kube as kube_module
from metal_supervisor.cluster.exec_plugin import Plugin, PluginFailed, scrub
from metal_supervisor.cluster.kube import BadKubeconfig, Kube, KubeError
from tests.support.system import eventually

V1 = "client.authentication.k8s.io/v1"
NOWHERE = "http://127.0.0.1:1"
ALWAYS = "cat reply.json"


def reply(directory: Path, expires: float | None = None, **status: Any) -> None:
    """What the plugin of a directory prints from now on."""
    if expires is not None:
        status["expirationTimestamp"] = datetime.fromtimestamp(expires, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    fresh = directory / "reply.new"
    fresh.write_text(json.dumps({"apiVersion": V1, "kind": "ExecCredential", "status": status}))
    fresh.replace(directory / "reply.json")


def script(directory: Path, body: str = ALWAYS, name: str = "plug") -> dict[str, Any]:
    """The exec entry of a plugin that notes its runs and then does something."""
    path = directory / name
    path.write_text(f"#!/bin/sh\necho run >> {directory}/runs\n{body}\n")
    path.chmod(0o755)
    return {"apiVersion": V1, "command": f"./{name}", "interactiveMode": "Never"}


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def runs(directory: Path) -> int:
    noted = directory / "runs"
    return len(noted.read_text().split()) if noted.exists() else 0


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 1_900_000_000.0

    def __call__(self) -> float:
        return self.now


class Server:
    """Notes each Authorization header; refuses those it does not accept."""

    def __init__(self) -> None:
        self.accepts: set[str] = set()
        self.seen: list[str] = []

    def __call__(self, request: bytes) -> bytes:
        lines = [line for line in request.splitlines() if line.lower().startswith(b"authorization: ")]
        self.seen.append(lines[0][15:].decode() if lines else "")
        return http(b"{}", "200 OK" if not self.accepts or self.seen[-1] in self.accepts else "401 Unauthorized")


@pytest.fixture
def server() -> Iterator[tuple[Server, str]]:
    made = Server()
    with answering(made) as url:
        yield made, url


def replace(path: Path, text: str) -> None:
    """As a token is renewed: another file in its place."""
    fresh = path.with_suffix(".new")
    fresh.write_text(text)
    fresh.replace(path)


# ── tokens ───────────────────────────────────────────────────────────────────────────────────────


def test_a_token_file_is_read_again_when_it_was_replaced_or_rewritten(
    tmp_path: Path, server: tuple[Server, str]
) -> None:
    noted, url = server
    (tmp_path / "token").write_text("one\n")
    kube = Kube(config(tmp_path / "k", url, {"tokenFile": "token"}))  # relative to the kubeconfig
    kube.request("GET", "/x")
    replace(tmp_path / "token", "two\n")
    kube.request("GET", "/x")
    (tmp_path / "token").write_text("three \n\n")
    os.utime(tmp_path / "token", ns=(1, 1))
    kube.request("GET", "/x")
    assert noted.seen == ["Bearer one", "Bearer two", "Bearer three"]  # and no refusal was needed for it
    kube.close()


@pytest.mark.parametrize("bad", ["", "\n", f"{TOKEN}\nX: y", f"{TOKEN} ü"])
def test_a_token_file_that_is_just_being_written_or_spoilt_leaves_the_token_of_before(
    tmp_path: Path, server: tuple[Server, str], caplog: pytest.LogCaptureFixture, bad: str
) -> None:
    noted, url = server
    (tmp_path / "token").write_text("one")
    kube = Kube(config(tmp_path / "k", url, {"tokenFile": "token"}))
    replace(tmp_path / "token", bad)
    kube.request("GET", "/x")
    (tmp_path / "token").unlink()
    kube.request("GET", "/x")
    replace(tmp_path / "token", "two")
    kube.request("GET", "/x")
    assert noted.seen == ["Bearer one", "Bearer one", "Bearer two"]
    assert TOKEN not in caplog.text + str([vars(each) for each in caplog.records])
    kube.close()


def test_a_token_file_goes_before_a_token_and_basic_credentials_are_sent(
    tmp_path: Path, server: tuple[Server, str]
) -> None:
    noted, url = server
    (tmp_path / "token").write_text("file")
    for user in ({"token": "static", "tokenFile": "token"}, {"username": "me", "password": "pass"}):
        kube = Kube(config(tmp_path / "k", url, user))
        kube.request("GET", "/x")
        kube.close()
    assert noted.seen == ["Bearer file", "Basic bWU6cGFzcw=="]


def test_after_a_refusal_the_kubeconfig_is_read_once_and_not_again_for_a_while(
    tmp_path: Path, server: tuple[Server, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    noted, url = server
    noted.accepts = {"Bearer new"}
    path = config(tmp_path / "k", url, {"token": "old"})
    kube = Kube(path)
    error = failure(kube)
    config(path, url, {"token": "new"})
    assert failure(kube).code == error.code == 401
    assert noted.seen == ["Bearer old"] * 2
    assert "renew the token" in str(error)
    assert "read again every 30 s, and until then the old ones are used" in str(error)
    monkeypatch.setattr(kube_module, "RELOAD_EVERY_S", 0.0)
    assert kube.request("GET", "/x") == {}
    kube.close()


# ── nobody, by accident ──────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("user", "says"),
    [
        ({"token": ""}, "no credential"),
        ({"token": "  "}, "no header can hold"),
        ({"tokenFile": ""}, "no credential"),
        ({"exec": {}}, "no credential"),
        ({"exec": None}, "no credential"),
        ({"username": ""}, "no credential"),
        ({"password": "p"}, "no credential"),
        ({"tokenFile": "none"}, "does not exist"),
        ({"tokenFile": "."}, "does not exist"),
        ({"tokenFile": "a" * 300}, "does not exist"),
        ({"client-certificate": "a" * 300}, "does not exist"),
        ({"username": "\ud800"}, "no header can hold"),
        ({"tokenFile": "empty"}, "holds no token"),
        ({"tokenFile": "binary"}, "holds no token"),
        ({"exec": "x"}, "no command"),
        ({"exec": {"command": ""}}, "no command"),
        ({"exec": {"command": "x", "apiVersion": "client.authentication.k8s.io/v1alpha1"}}, "must speak"),
        ({"exec": {"command": "x", "apiVersion": V1, "interactiveMode": "Always"}}, "wants a terminal"),
        ({"exec": {"command": "x", "apiVersion": V1, "env": "x"}}, "args or env"),
        ({"exec": {"command": "x", "apiVersion": V1, "args": 7}}, "args or env"),
        ({"client-certificate-data": "!!"}, "not PEM in base64"),
        ({"client-key-data": "aGk="}, "not PEM in base64"),
        ({"client-certificate": "pem"}, "only one of"),
        ({"client-certificate": "empty"}, "not PEM"),
        ({"client-certificate": "pem", "client-key": "pem"}, "http server cannot be shown"),
        ({"auth-provider": {"name": "oidc"}}, "auth-provider"),
        ({"auth-provider": {}, "token": TOKEN}, "auth-provider"),
        ({"token": TOKEN, "as": "root"}, "act as another"),
        ({"token": TOKEN, "as-groups": ["a"]}, "act as another"),
    ],
)
def test_a_credential_that_is_named_and_not_to_be_had_is_refused(tmp_path: Path, user: Any, says: str) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "binary").write_bytes(b"\xff\x00")
    (tmp_path / "pem").write_text("-----BEGIN CERTIFICATE-----")
    with pytest.raises(BadKubeconfig, match=says) as caught:
        Kube(config(tmp_path / "k", NOWHERE, user))
    assert str(tmp_path / "k") in str(caught.value)
    assert TOKEN not in everything(caught.value)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (f"a: b\n\tuser: {TOKEN}\n".encode(), r"it is no YAML \(ScannerError in line 2\)"),
        (f'a: 1\nb: {{"token": "{TOKEN}"\n'.encode(), r"it is no YAML \(ParserError in line 3\)"),
        (TOKEN.encode("utf-16"), r"it is no YAML \(UnicodeDecodeError\)"),
        (b"", "it holds no settings"),
    ],
)
def test_a_file_that_is_no_kubeconfig_is_told_with_its_line_and_without_secrets(
    tmp_path: Path, content: bytes, says: str
) -> None:
    (tmp_path / "k").write_bytes(content)
    with pytest.raises(BadKubeconfig, match=f"{tmp_path / 'k'} cannot be used: {says}$") as caught:
        Kube(tmp_path / "k")
    assert TOKEN not in everything(caught.value)


def test_a_kubeconfig_that_may_not_be_looked_at_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadKubeconfig, match="does not exist"):
        Kube(tmp_path / ("a" * 300))


@pytest.mark.parametrize(
    "server", ["https://127.0.0.1:1", "http://192.0.2.1", "https://example.test", "http://127.evil.test"]
)
def test_nobody_is_only_who_talks_to_this_machine_without_tls(tmp_path: Path, server: str) -> None:
    with pytest.raises(BadKubeconfig, match="no credential"):
        Kube(config(tmp_path / "k", server))
    for loopback in ("http://127.0.0.1:1", "http://localhost:1", "http://[::1]:1"):
        Kube(config(tmp_path / "k", loopback))


def test_a_user_who_is_not_there_is_not_nobody(tmp_path: Path) -> None:
    path = config(tmp_path / "k", NOWHERE)
    path.write_text(path.read_text().replace('"users": [{"name": "u"', '"users": [{"name": "other"'))
    with pytest.raises(BadKubeconfig, match='names user "u", which does not exist'):
        Kube(path)


# ── plugins in order ─────────────────────────────────────────────────────────────────────────────


def test_a_plugin_is_run_as_kubectl_would(tmp_path: Path, server: tuple[Server, str]) -> None:
    noted, url = server
    reply(tmp_path, token="from-plugin")
    body = 'cat; echo "$KUBERNETES_EXEC_INFO" > info; echo "$1 $EXTRA $HOME" > given; cat reply.json'
    spec = {**script(tmp_path, body), "args": ["one"], "env": [{"name": "EXTRA", "value": "two"}]}
    spec["provideClusterInfo"] = True
    path = config(tmp_path / "k", url, {"exec": spec})
    content = json.loads(path.read_text())
    content["clusters"][0]["cluster"]["extensions"] = [
        {"name": "client.authentication.k8s.io/exec", "extension": {"audience": "me"}},
        {"name": "other"},
    ]
    path.write_text(json.dumps(content).replace('"me"', "2026-01-02"))  # to YAML, a date
    kube = Kube(path)
    kube.request("GET", "/x")
    kube.request("GET", "/x")
    kube.close()
    assert (noted.seen, runs(tmp_path)) == (["Bearer from-plugin"] * 2, 1)
    assert (tmp_path / "given").read_text().split() == ["one", "two", os.environ["HOME"]]
    info = json.loads((tmp_path / "info").read_text())
    assert (info["apiVersion"], info["kind"], info["spec"]["interactive"]) == (V1, "ExecCredential", False)
    assert info["spec"]["cluster"] == {"server": url, "config": {"audience": "2026-01-02"}}


def test_a_plugin_that_does_not_ask_for_the_cluster_is_not_told(tmp_path: Path) -> None:
    reply(tmp_path, token="t")
    Plugin(script(tmp_path, 'echo "$KUBERNETES_EXEC_INFO" > info; cat reply.json'), tmp_path, None).start()
    assert json.loads((tmp_path / "info").read_text())["spec"] == {"interactive": False}


def test_a_bare_name_is_looked_for_on_path_and_where_homebrew_installs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    brew, other = tmp_path / "brew", tmp_path / "other"
    for each in (brew, other):
        each.mkdir()
    reply(tmp_path, token="t")
    bare = {**script(brew, "cat reply.json", "plug-for-test"), "command": "plug-for-test"}
    plugin = Plugin(bare, tmp_path, None)
    with pytest.raises(PluginFailed, match="plug-for-test is neither on PATH nor where Homebrew installs; install it"):
        plugin.start()
    monkeypatch.setattr(plugin_module, "HOMEBREW", (str(brew),))
    plugin.start()
    assert plugin.current().token == "t"
    monkeypatch.setattr(plugin_module, "HOMEBREW", ())
    monkeypatch.setenv("PATH", f"{brew}{os.pathsep}{os.environ['PATH']}")
    plugin.start()
    with pytest.raises(PluginFailed, match=r"other/plug is not an executable file; brew install plug"):
        Plugin({**bare, "command": "other/plug", "installHint": "brew install plug\n"}, tmp_path, None).start()
    (other / "plug").mkdir()
    with pytest.raises(PluginFailed, match="not an executable file"):
        Plugin({**bare, "command": "other/plug"}, tmp_path, None).start()


NOISE = "\n".join(f"debug: step {each} of many steps that take long" for each in range(20))
STACK = '  File "x.py", line 3, in fail_on_error\n    raise TokenError(message)\n'


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        (
            "print credential failed: no active account is selected.\nPlease run:\n  $ example auth login\n"
            "to obtain new credentials.\n)",
            "print credential failed: no active account is selected. Please run: $ example auth login",
        ),
        (f"{NOISE}\nFATAL: session has expired\nrun: login\n)\n", ": FATAL: session has expired run: login"),
        (f"error: no such profile\n{NOISE}", ": error: no such profile debug: step 0"),
        (
            f"Traceback (most recent call last):\n{STACK * 9}botocore.SSOError: the session has expired\n",
            ": botocore.SSOError: the session has expired",
        ),
        (f"{NOISE}\nthe last line", ": the last line"),
        ("\x1b[31mno\x1b[0m login\x07", ": no login?"),
        ("}\n)\n", ": no output"),
        ("", ": no output"),
    ],
)
def test_of_a_plugin_that_fails_the_lines_with_the_reason_are_shown(tmp_path: Path, output: str, reason: str) -> None:
    (tmp_path / "said").write_text(output)
    plugin = script(tmp_path, "cat said >&2; exit 1")
    with pytest.raises(BadKubeconfig) as caught:
        Kube(config(tmp_path / "k", NOWHERE, {"exec": plugin}))
    assert f"./plug failed (1){reason if reason[0] == ':' else f': {reason}'}" in str(caught.value)
    assert len(str(caught.value)) < 400


def test_a_plugin_that_leaves_a_child_behind_is_not_waited_for(tmp_path: Path) -> None:
    reply(tmp_path, token="t")
    plugin = Plugin(script(tmp_path, "sleep 20 & echo $! > child; cat reply.json"), tmp_path, None)
    plugin.start()
    assert plugin.current().token == "t"
    child = psutil.Process(int((tmp_path / "child").read_text()))
    assert child.is_running()  # a helper of its own, and nobody's business
    child.kill()


# ── how long a credential is used ────────────────────────────────────────────────────────────────


@pytest.fixture
def aged(tmp_path: Path) -> tuple[Plugin, Clock]:
    """A plugin whose credential `one` lasts 1000 s, and the clock that it goes by."""
    clock = Clock()
    reply(tmp_path, clock.now + 1000, token="one")
    body = "while [ -e hold ]; do sleep 0.02; done\n[ ! -e broken ] || exit 3\ncat reply.json"
    plugin = Plugin(script(tmp_path, body), tmp_path, None, clock)
    plugin.start()
    return plugin, clock


def test_a_credential_is_used_until_most_of_its_life_is_over_and_then_renewed_beside_the_requests(
    aged: tuple[Plugin, Clock], tmp_path: Path
) -> None:
    plugin, clock = aged
    clock.now += 799
    assert (plugin.current().token, runs(tmp_path)) == ("one", 1)
    clock.now += 2
    reply(tmp_path, clock.now + 1000, token="two")
    (tmp_path / "hold").touch()
    for _ in range(20):  # while it hangs, nobody waits
        assert plugin.current().token == "one"
    eventually(lambda: runs(tmp_path) == 2, what="the run beside")
    (tmp_path / "hold").unlink()
    eventually(lambda: plugin.current().token == "two", what="the new credential")
    assert runs(tmp_path) == 2


def test_eight_threads_that_need_a_new_credential_run_the_plugin_once(
    aged: tuple[Plugin, Clock], tmp_path: Path
) -> None:
    plugin, clock = aged
    clock.now += 1001
    reply(tmp_path, clock.now + 1000, token="two")
    start, found = threading.Barrier(8), []

    def ask() -> None:
        start.wait(30)
        found.append(plugin.current().token)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert (found, runs(tmp_path)) == (["two"] * 8, 2)


def test_a_plugin_that_fails_later_is_asked_less_and_less_and_the_old_credential_stays(
    aged: tuple[Plugin, Clock], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plugin, clock = aged
    (tmp_path / "broken").touch()
    clock.now += 1001
    pauses = []
    for run in range(2, 9):
        assert (plugin.current().token, runs(tmp_path)) == ("one", run)
        before = clock.now
        while runs(tmp_path) == run and clock.now - before < 1000:
            assert plugin.current().token == "one"
            clock.now += 30
            plugin.current()
        pauses.append(clock.now - before)
        if run == 7:
            break
    assert pauses == [30, 60, 120, 240, 300, 300]
    assert len([each for each in caplog.records if each.levelname == "WARNING"]) == 1
    (tmp_path / "broken").unlink()
    reply(tmp_path, token="two")
    clock.now += 300
    assert plugin.current().token == "two"


def test_a_clock_that_is_set_back_does_not_keep_a_plugin_from_being_asked(
    aged: tuple[Plugin, Clock], tmp_path: Path
) -> None:
    plugin, clock = aged
    clock.now += 3 * 3600  # wrongly, and what it needs for a credential is wrong then too
    (tmp_path / "reply.json").write_text("no")
    plugin.renew()
    clock.now -= 3 * 3600
    reply(tmp_path, clock.now + 1000, token="two")
    plugin.renew()
    assert plugin.current().token == "two"


def test_a_plugin_that_hangs_later_costs_one_wait_and_then_none(aged: tuple[Plugin, Clock], tmp_path: Path) -> None:
    plugin, clock = aged
    plugin.TIMEOUT_S = 0.2
    (tmp_path / "hold").touch()
    clock.now += 1001
    for _ in range(50):
        assert plugin.current().token == "one"
    assert runs(tmp_path) == 2


def test_a_short_life_or_one_that_was_over_at_birth_does_not_run_the_plugin_for_every_request(tmp_path: Path) -> None:
    clock = Clock()
    for lasts in (60, 0, -3600):  # the official client runs it for each request below five minutes
        directory = tmp_path / str(lasts)
        directory.mkdir()
        reply(directory, clock.now + lasts, token="t")
        plugin = Plugin(script(directory), directory, None, clock)
        plugin.start()
        assert {plugin.current().token for _ in range(10)} == {"t"}
        assert runs(directory) == 1


def test_one_without_an_end_is_used_until_it_is_refused(
    tmp_path: Path, server: tuple[Server, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    noted, url = server
    reply(tmp_path, token="one")
    kube = Kube(config(tmp_path / "k", url, {"exec": script(tmp_path)}))
    kube.request("GET", "/x")
    reply(tmp_path, token="two")
    noted.accepts = {"Bearer two"}
    assert kube.request("GET", "/x") == {}
    assert runs(tmp_path) == 2
    noted.accepts = {"Bearer three"}
    reply(tmp_path, token="three")
    for _ in range(5):  # refused again within 30 s: not run again
        error = failure(kube)
    assert "the credentials of ./plug are refused; log in again with it; it is run again every 30 s" in str(error)
    assert (runs(tmp_path), noted.seen[-1]) == (2, "Bearer two")
    monkeypatch.setattr(kube_module, "RELOAD_EVERY_S", 0.0)
    (tmp_path / "plug").chmod(0o600)
    assert failure(kube).code == 401
    assert noted.seen[-1] == "Bearer two"  # never as nobody
    kube.close()


def test_eight_threads_that_are_refused_run_the_plugin_once(tmp_path: Path, server: tuple[Server, str]) -> None:
    noted, url = server
    reply(tmp_path, token="one")
    kube = Kube(config(tmp_path / "k", url, {"exec": script(tmp_path, "sleep 0.2; cat reply.json")}))
    reply(tmp_path, token="two")
    noted.accepts = {"Bearer two"}
    errors: list[KubeError] = []

    def ask() -> None:
        try:
            kube.request("GET", "/x")
        except KubeError as error:
            errors.append(error)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert (errors, runs(tmp_path)) == ([], 2)
    kube.close()


# ── plugins out of order, and what is said of them ───────────────────────────────────────────────

JWT = "eyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiJtZSJ9.c2lnbmF0dXJl"
DOCUMENT = f'{{"apiVersion": "{V1}", "kind": "ExecCredential", "status": {{"token": "{TOKEN}"%s}}}}'


def printing(text: str, more: str = "") -> str:
    return f"printf '%s' '{text}'; {more}"


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("echo 'first line' >&2; echo 'please log in' >&2; exit 3", r"\./plug failed \(3\): first line please log in"),
        ("exit 1", r"failed \(1\): no output"),
        ("kill -9 $$", r"failed \(-9\)"),
        (f"echo 'cannot renew token={TOKEN}' >&2; exit 1", "cannot renew token=…"),
        (f"echo 'sent Authorization: Bearer {TOKEN}, refused' >&2; exit 1", "refused"),
        (f"echo 'token {TOKEN} has expired' >&2; exit 1", "token … has expired"),
        (f"echo 'the {JWT} has expired' >&2; exit 1", "the … has expired"),
        (f"echo '{'x1' * 40} is used up' >&2; exit 1", "… is used up"),
        (printing(DOCUMENT % "", f"echo 'not {TOKEN} again' >&2; exit 1"), "not … again"),
        (printing((DOCUMENT % "")[:-5], f"echo '{TOKEN}' >&2"), "no ExecCredential"),
        (printing(TOKEN), "no ExecCredential"),
        (printing("[" * 9000), "no ExecCredential"),
        ("true", "no ExecCred"),
        (printing(f'"{TOKEN}"'), "no ExecCredential"),
        (printing(f'{{"status": "{TOKEN}"}}'), "no ExecCredential"),
        (printing((DOCUMENT % "").replace("/v1", "/v1beta1")), "no ExecCredential of client.*/v1 with"),
        (printing((DOCUMENT % "").replace(TOKEN, "")), "neither a token nor"),
        (printing((DOCUMENT % "").replace(TOKEN, TOKEN + "\\nX: y")), "no header can hold"),
        (printing((DOCUMENT % "").replace(TOKEN, TOKEN + "ü")), "no header can hold"),
        (printing(DOCUMENT % ', "clientCertificateData": "x"'), "only one of"),
        (printing(DOCUMENT % ', "clientCertificateData": "\\ud800", "clientKeyData": "x"'), "no PEM"),
        (printing(DOCUMENT % f', "expirationTimestamp": "{TOKEN}"'), "not a time"),
        (printing(DOCUMENT % ', "expirationTimestamp": "2026-99-01T00:00:00Z"'), "not a time"),
        (f"yes {TOKEN}", "printed far too much"),
        (f"echo {TOKEN}; echo {TOKEN} >&2; sleep 30", "did not finish within"),
        ("exec >&- 2>&-; sleep 30", "did not finish within"),
    ],
)
def test_a_plugin_that_fails_at_the_start_is_named_with_its_last_words_and_without_secrets(
    tmp_path: Path, body: str, says: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Plugin, "TIMEOUT_S", 5.0 if "finish" not in says else 0.3)
    with pytest.raises(BadKubeconfig, match=says) as caught:
        Kube(config(tmp_path / "k", NOWHERE, {"exec": script(tmp_path, body)}))
    text = str(caught.value)
    assert "./plug" in text and len(text) < len(str(tmp_path)) + 300
    shown = everything(caught.value) + caplog.text + str([vars(each) for each in caplog.records])
    for secret in (TOKEN, JWT, "x1x1x1"):
        assert secret not in shown


@pytest.mark.parametrize("body", [f"echo 'cannot renew token={TOKEN}' >&2; exit 1", printing((DOCUMENT % "")[:-5])])
def test_a_plugin_that_fails_later_is_logged_without_secrets(
    tmp_path: Path,
    body: str,
    server: tuple[Server, str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    noted, url = server
    reply(tmp_path, token=TOKEN)
    kube = Kube(config(tmp_path / "k", url, {"exec": script(tmp_path)}))
    script(tmp_path, body)
    noted.accepts = {"nothing"}
    error = failure(kube)
    assert "no new credential; the old one stays until it is refused" in caplog.text
    assert noted.seen == [f"Bearer {TOKEN}"]
    logged = caplog.text + str([vars(each) for each in caplog.records])
    assert TOKEN not in everything(error) + logged + repr(vars(kube))
    kube.close()


def test_what_runs_too_long_is_ended_with_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Plugin, "TIMEOUT_S", 0.5)
    plugin = Plugin(script(tmp_path, "trap '' TERM; echo $$ > pid; sleep 60 & echo $! > child; wait"), tmp_path, None)
    with pytest.raises(PluginFailed, match=r"\./plug did not finish within 0.5 s; it was ended with its children"):
        plugin.start()
    for name in ("pid", "child"):
        eventually(lambda name=name: not alive(int((tmp_path / name).read_text())), what=f"the end of {name}")


def test_a_plugin_that_cannot_be_read_for_want_of_files_has_failed_and_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(*_: object, **__: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(plugin_module.subprocess.Popen, "communicate", none_left)
    plugin = Plugin(script(tmp_path, "echo $$ > pid; exec sleep 60"), tmp_path, None)
    with pytest.raises(PluginFailed, match=r"\./plug cannot be read: Too many open files"):
        plugin.start()
    plugin.renew()  # nor does it end the thread that asks
    assert plugin.current().token == ""


def test_the_environment_of_a_plugin_is_not_quoted(tmp_path: Path) -> None:
    spec = {
        **script(tmp_path, 'echo "have $CLIENT_SECRET" >&2; exit 1'),
        "env": [{"name": "CLIENT_SECRET", "value": TOKEN}],
    }
    with pytest.raises(PluginFailed, match="have …") as caught:
        Plugin(spec, tmp_path, None).start()
    assert TOKEN not in everything(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "the token has expired; run: aws sso login --profile prod",
        "open /Users/me/Library/Application2/abc/def/ghi/jkl.json",
        "dial sts.eu-west-1.amazonaws.com: no such host",
        "key not found",
        "interactive-login-is-required-for-this-account",
    ],
)
def test_words_that_help_are_left_alone(text: str) -> None:
    assert scrub(text) == text


def test_a_long_rule_takes_no_longer_than_its_length() -> None:
    """In a process of its own: a search at each place of it would take hours, and keep the interpreter."""
    lines = (
        "from metal_supervisor.cluster.exec_plugin import scrub",
        "assert scrub('=' * 1_000_000) == '=' * 1_000_000",
        "assert scrub('=' * 1_000_000 + 'a1') == '…'",
    )
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True, timeout=60)


def test_certificates_of_a_plugin_come_in_pairs_and_pem(tmp_path: Path) -> None:
    reply(tmp_path, clientCertificateData="-----BEGIN CERTIFICATE-----\n", clientKeyData="-----BEGIN KEY-----\n")
    plugin = Plugin(script(tmp_path), tmp_path, None)
    plugin.start()
    assert plugin.current().certificate.startswith(b"-----BEGIN CERT")
    assert "BEGIN" not in repr(plugin.current())
