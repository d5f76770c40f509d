"""Requests to a real API server, and to ones that behave like none: typed errors, and never a token in sight."""

from __future__ import annotations

import contextlib
import gzip
import json
import socketserver
import ssl
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from apiserver_support import CONFIG_MAPS, ISVCS, Client, config_map, isvc

from metal_supervisor.apiserver import ApiServer
from metal_supervisor.cluster import credentials
from metal_supervisor.cluster import kube as kube_module
from metal_supervisor.cluster.kube import BadKubeconfig, Kube, KubeError
from tests.support.system import free_ports

TOKEN = "s3cr3t-t0k3n"


def config(path: Path, server: str, user: dict[str, Any] | None = None) -> Path:
    path.write_text(
        json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "c",
                "clusters": [{"name": "c", "cluster": {"server": server}}],
                "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
                "users": [{"name": "u", "user": user or {}}],
            }
        )
    )
    return path


@pytest.fixture
def kube(api: ApiServer, tmp_path: Path) -> Iterator[Kube]:
    made = Kube(config(tmp_path / "kubeconfig", api.url))
    yield made
    made.close()


def fault(client: Client, **action: Any) -> None:
    assert client.post("/faults", [{"resource": "configmaps", "action": action}]).code == 200


def failure(kube: Kube, path: str = CONFIG_MAPS) -> KubeError:
    with pytest.raises(KubeError) as caught:
        kube.request("GET", path)
    return caught.value


Answering = Callable[[bytes], bytes]


@contextlib.contextmanager
def answering(answer: Answering, tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """A server that answers each request, given whole, with the bytes it is told to; TLS tells who asks in X-Peer."""

    class Handler(socketserver.StreamRequestHandler):
        def setup(self) -> None:
            if tls is not None:  # the handshake must not keep others waiting
                self.request = tls.wrap_socket(self.request, server_side=True, do_handshake_on_connect=False)
            super().setup()

        def finish(self) -> None:
            super().finish()
            self.request.close()  # TLS has taken the socket from the server

        def handle(self) -> None:
            lines = []
            with contextlib.suppress(OSError):
                if tls is not None:
                    self.request.do_handshake()
                    lines = [f"X-Peer: {self.request.getpeercert()}\r\n".encode()]
                while (line := self.rfile.readline()) not in (b"\r\n", b""):
                    lines.append(line)
                if lines:
                    self.wfile.write(answer(b"".join(lines)))

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http{'s' if tls else ''}://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def http(body: bytes, status: str = "200 OK", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Connection: close", *headers]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + body


# ── in order ─────────────────────────────────────────────────────────────────────────────────────


def test_apply_creates_conflicts_and_is_forced(kube: Kube) -> None:
    path = f"{CONFIG_MAPS}/a"
    assert kube.apply(path, config_map("a", k="1"), "one")["data"] == {"k": "1"}
    with pytest.raises(KubeError) as caught:
        kube.apply(path, config_map("a", k="2"), "two")
    assert caught.value.conflict and caught.value.code == 409
    assert kube.apply(path, config_map("a", k="2"), "two", force=True)["data"] == {"k": "2"}
    assert kube.request("GET", CONFIG_MAPS, {"limit": 1})["items"][0]["metadata"]["name"] == "a"
    assert kube.requests == 4


def test_the_official_client_is_not_imported_for_the_embedded_api(api: ApiServer, tmp_path: Path) -> None:
    """It costs 0.25 s, in every process and every command."""
    asks = f"""
import sys
from pathlib import Path
from metal_supervisor.cluster.kube import Kube
kube = Kube(Path({str(config(tmp_path / "kubeconfig", api.url))!r}))
print(kube.request("GET", "/version")["major"], "kubernetes" in sys.modules)
kube.close()
"""
    assert subprocess.check_output([sys.executable, "-I", "-c", asks], text=True).split() == ["1", "False"]


def test_what_the_schema_refuses_is_said_by_field(kube: Kube) -> None:
    with pytest.raises(KubeError) as caught:
        kube.apply(f"{ISVCS}/a", isvc("a", replicas="many"), "one")
    assert (caught.value.code, "replicas" in str(caught.value)) in ((422, True), (500, True), (400, True))


def test_a_missing_object_is_404_notfound(kube: Kube) -> None:
    error = failure(kube, f"{CONFIG_MAPS}/none")
    assert (error.code, error.reason, error.conflict) == (404, "NotFound", False)


def test_many_threads_share_it(kube: Kube) -> None:
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(20):
                kube.request("GET", CONFIG_MAPS)
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


# ── errors ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("code", [401, 403, 409, 410, 422, 429, 500, 503])
def test_an_error_has_its_code(kube: Kube, client: Client, code: int) -> None:
    fault(client, status=code)
    error = failure(kube)
    assert (error.code, error.retry_after_s) == (code, 0.0)
    assert str(code) in str(error)
    client.delete("/faults")
    assert kube.request("GET", CONFIG_MAPS)["items"] == []


def test_too_many_requests_says_when_to_come_back(kube: Kube, client: Client) -> None:
    fault(client, status=429, retry_after_s=7)
    assert failure(kube).retry_after_s == 7.0


def test_garbage_is_a_bad_answer(kube: Kube, client: Client) -> None:
    fault(client, garbage=True)
    assert (failure(kube).code, failure(kube).reason) == (0, "BadAnswer")


def test_a_dropped_connection_is_unreachable_and_heals(kube: Kube, client: Client) -> None:
    fault(client, drop=True)
    assert (failure(kube).code, failure(kube).reason) == (0, "Unreachable")
    client.delete("/faults")
    assert kube.request("GET", CONFIG_MAPS)["items"] == []


def test_a_hanging_server_is_given_up(kube: Kube, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kube_module, "READ_S", 0.2)
    fault(client, hang_s=5)
    error = failure(kube)
    assert (error.code, error.reason, "ReadTimeoutError" in str(error)) == (0, "Unreachable", True)


def test_a_server_that_is_not_there_is_named_without_its_secret_path(tmp_path: Path) -> None:
    port = free_ports(1)[0]
    kube = Kube(config(tmp_path / "k", f"http://127.0.0.1:{port}/k-secret"))
    error = failure(kube)
    assert f"http://127.0.0.1:{port}: " in str(error) and "refused" in str(error)
    assert "k-secret" not in str(error)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"SSH-2.0-OpenSSH\r\n",
        http(b"[]"),
        http(b"null"),
        http(b""),
        http(b"\xff"),
        http(b"[" * 100_000),
        http(b"<html>", "500 Oops"),
        http(b"[1]", "500 Oops"),
        http(b"[" * 100_000, "500 Oops"),
        http(b"", "302 Found"),
        http(b"x" * 9, "503 No")[:-4],
        http(b"{}")[:-1],
        http(b"no", "200 OK", "Content-Encoding: gzip"),
        http(b"{}", "429 Slow", "Retry-After: Wed, 21 Oct 2026 07:28:00 GMT"),
        http(b"{}", "429 Slow", "Retry-After: \xb2"),
        http(b"{}", "429 Slow", "Retry-After: -1"),
        http(b'{"reason": 1, "message": {}}', "409 No"),
    ],
    ids=[
        "silence",
        "ssh",
        "list",
        "null",
        "empty",
        "bytes",
        "deep",
        "html-500",
        "list-500",
        "deep-500",
        "redirect",
        "cut-503",
        "cut",
        "not-gzip",
        "date",
        "superscript",
        "negative",
        "odd-status",
    ],
)
def test_whatever_comes_back_is_a_kube_error(tmp_path: Path, raw: bytes) -> None:
    with answering(lambda _: raw) as url:
        kube = Kube(config(tmp_path / "k", url))
        failure(kube)
        kube.close()


@pytest.mark.parametrize("status", ["200 OK", "503 No"])
@pytest.mark.parametrize("length", ["Content-Length", "Transfer-Encoding", "Content-Encoding"])
def test_an_answer_that_is_far_too_long_is_not_read_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: str, status: str
) -> None:
    monkeypatch.setattr(kube_module, "LONGEST_ANSWER_BYTES", 1 << 20)
    body = json.dumps({"message": "x" * (3 << 20)}).encode()
    long = http(body, status)
    if length == "Transfer-Encoding":
        head = f"HTTP/1.1 {status}\r\n{length}: chunked\r\n\r\n{len(body):x}\r\n".encode()
        long = head + body + b"\r\n0\r\n\r\n"
    elif length == "Content-Encoding":  # a bomb: 3 KiB
        long = http(gzip.compress(body), status, f"{length}: gzip")
    with answering(lambda _: long) as url:
        kube = Kube(config(tmp_path / "k", url))
        says = "an answer exceeds 1 MiB" if status == "200 OK" else "answered 503 without saying why"
        assert says in failure(kube).message
        kube.close()


def test_an_answer_that_comes_byte_by_byte_for_ever_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that waits for it renews the Lease."""
    monkeypatch.setattr(kube_module, "ANSWER_S", 0.2)
    given_up = threading.Event()

    class Trickle(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            while self.rfile.readline() not in (b"\r\n", b""):
                pass
            self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 300\r\n\r\n{}")
            for _ in range(298):
                if given_up.wait(0.02):
                    return
                self.wfile.write(b" ")

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Trickle) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        kube = Kube(config(tmp_path / "k", f"http://127.0.0.1:{server.server_address[1]}"))
        try:
            assert "did not end within 0.2 s" in failure(kube).message
        finally:
            given_up.set()
            kube.close()
            server.shutdown()
            thread.join()


def test_a_server_that_asks_for_a_day_of_patience_does_not_get_it(tmp_path: Path) -> None:
    with answering(lambda _: http(b"{}", "429 Slow", f"Retry-After: {10**12}")) as url:
        kube = Kube(config(tmp_path / "k", url))
        assert failure(kube).retry_after_s <= 600
        kube.close()


# ── secrets ──────────────────────────────────────────────────────────────────────────────────────


def everything(error: BaseException | None) -> str:
    """All that can be read off an exception, and off those that came with it, suppressed or not."""
    if error is None:
        return ""
    own = "".join(traceback.format_exception(error)) + repr(error) + str(error) + repr(vars(error)) + repr(error.args)
    return own + everything(error.__context__) + everything(error.__cause__)


@pytest.mark.parametrize("token", [TOKEN + "\nX: y", TOKEN + "\udcff", TOKEN + "ü€", TOKEN + "\0"])
def test_a_token_that_is_no_header_is_refused_and_not_printed(
    tmp_path: Path, token: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(BadKubeconfig, match=str(tmp_path)) as caught:
        Kube(config(tmp_path / "k", "http://127.0.0.1:1", {"token": token}))
    assert TOKEN not in everything(caught.value) + caplog.text


def test_a_header_error_of_the_library_is_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Should anything ever slip through, http.client says: Invalid header value b'Bearer s3cr3t…'.
    bad = credentials.ClusterAccess(authorization=f"Bearer {TOKEN}\nX: y")
    kube = Kube(config(tmp_path / "k", "http://127.0.0.1:1", {"token": "t"}))
    monkeypatch.setattr(credentials.Login, "current", lambda _: bad)
    with answering(lambda _: http(b"{}")) as kube.server:
        error = failure(kube)
    assert "ValueError" in str(error)
    assert TOKEN not in everything(error) + repr(kube) + repr(bad)
    kube.close()


@pytest.mark.parametrize("status", ["401 No", "403 No", "500 No", "200 OK"])
def test_an_answer_that_echoes_the_token_is_not_repeated(tmp_path: Path, status: str) -> None:
    seen: list[bytes] = []

    def echo(request: bytes) -> bytes:
        seen.append(request)
        return http(json.dumps(["x", request.decode()]).encode(), status)

    with answering(echo) as url:
        kube = Kube(config(tmp_path / "k", url, {"token": TOKEN}))
        assert TOKEN not in everything(failure(kube))
        kube.close()
    assert f"Bearer {TOKEN}".encode() in seen[0]


def test_a_401_that_quotes_the_token_in_its_message_is_not_repeated(tmp_path: Path) -> None:
    body = json.dumps({"reason": "Unauthorized", "message": f"token {TOKEN} expired"}).encode()
    with answering(lambda _: http(body, "401 Unauthorized")) as url:
        kube = Kube(config(tmp_path / "k", url, {"token": TOKEN}))
        error = failure(kube)
        assert TOKEN not in everything(error)
        assert "renew the token" in str(error)
        kube.close()


@pytest.mark.parametrize("status", ["403 Forbidden", "409 Conflict", "422 No", "500 Oops"])
def test_a_status_that_quotes_the_token_is_shown_without_it(tmp_path: Path, status: str) -> None:
    message = f"admission webhook denied the request: got {TOKEN} from you"
    body = json.dumps({"reason": f"R {TOKEN}", "message": message}).encode()
    with answering(lambda _: http(body, status)) as url:
        kube = Kube(config(tmp_path / "k", url, {"token": TOKEN}))
        error = failure(kube)
        assert TOKEN not in everything(error)
        assert "denied the request: got … from you" in str(error)
        kube.close()


def test_renewed_credentials_are_used_after_a_401(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kube_module, "RELOAD_EVERY_S", 0.0)

    def check(request: bytes) -> bytes:
        return http(b"{}") if b"Bearer new" in request else http(b"{}", "401 No")

    with answering(check) as url:
        path = config(tmp_path / "k", url, {"token": "old"})
        kube = Kube(path)
        path.write_text("{")
        assert failure(kube).code == 401
        config(path, url, {"token": "new"})
        assert kube.request("GET", "/x") == {}
        assert kube.requests == 3  # the second refusal was made good at once
        kube.close()


def test_a_server_that_moved_is_followed_once_the_kubeconfig_says_so(tmp_path: Path) -> None:
    with answering(lambda _: http(b"{}")) as first:
        path = config(tmp_path / "k", first)
        kube = Kube(path)
        assert kube.request("GET", "/x") == {}
    with answering(lambda _: http(b"{}")) as second:
        assert failure(kube).code == 0
        path.write_text("{")  # as in the midst of an edit
        assert failure(kube).code == 0
        config(path, second)
        assert failure(kube).code == 0, "this one still went to where it was"
        assert kube.request("GET", "/x") == {}
        config(path, first)
        assert kube.request("GET", "/x") == {}, "while it answers, nothing is read"
        kube.close()


# ── kubeconfigs ──────────────────────────────────────────────────────────────────────────────────

GOOD = {
    "apiVersion": "v1",
    "kind": "Config",
    "current-context": "c",
    "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:1"}}],
    "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
    "users": [{"name": "u", "user": {"token": TOKEN}}],
}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "7",
        TOKEN,
        f"- {TOKEN}: [",
        f"a: {TOKEN}\n\tb: c",
        f"\x00{TOKEN}",
        "[" * 5000,
        json.dumps({**GOOD, "current-context": ""}),
        json.dumps({**GOOD, "current-context": "other"}),
        json.dumps({**GOOD, "clusters": []}),
        json.dumps({**GOOD, "users": TOKEN}),
        json.dumps({**GOOD, "clusters": [{"name": "c", "cluster": {"server": 7}}]}),
        json.dumps({**GOOD, "clusters": [{"name": "c", "cluster": {}}]}),
        json.dumps(
            {
                **GOOD,
                "clusters": [{"name": "c", "cluster": {"server": "https://h", "insecure-skip-tls-verify": "false"}}],
            }
        ),
        json.dumps(
            {**GOOD, "clusters": [{"name": "c", "cluster": {"server": "https://h", "proxy-url": f"gopher://{TOKEN}"}}]}
        ),
        json.dumps(
            {
                **GOOD,
                "clusters": [
                    {"name": "c", "cluster": {"server": "https://h", "certificate-authority-data": f"{TOKEN}!"}}
                ],
            }
        ),
        json.dumps({**GOOD, "users": [{"name": "u", "user": {"client-certificate": "/no/c", "client-key": "/no/k"}}]}),
    ],
)
def test_a_bad_kubeconfig_is_refused_by_name_without_its_content(tmp_path: Path, text: str) -> None:
    path = tmp_path / "kubeconfig"
    path.write_text(text)
    with pytest.raises(BadKubeconfig) as caught:
        Kube(path)
    assert str(path) in str(caught.value)
    assert TOKEN not in everything(caught.value)


def test_a_kubeconfig_that_is_missing_binary_or_a_directory_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x80")
    for name in ("missing", "", "binary"):
        with pytest.raises(BadKubeconfig, match=str(tmp_path)):
            Kube(tmp_path / name)


def test_an_unknown_context_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadKubeconfig, match="other"):
        Kube(config(tmp_path / "k", "http://127.0.0.1:1"), "other")


def test_a_colon_in_the_path_of_a_kubeconfig_is_only_a_colon(kube: Kube, tmp_path: Path) -> None:
    # The official client would read it as two paths.
    other = Kube(config(tmp_path / "a:b", kube.server))
    assert other.request("GET", CONFIG_MAPS)["items"] == []
    other.close()


@pytest.mark.parametrize("server", ["http://[bad", "nonsense", "ftp://127.0.0.1", "http://127.0.0.1:99999", "http://"])
def test_a_server_that_is_no_url_is_an_error_of_the_cluster(tmp_path: Path, server: str) -> None:
    try:
        kube = Kube(config(tmp_path / "k", server))
    except BadKubeconfig:
        return
    failure(kube)
