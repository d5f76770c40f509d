"""Requests for models against loopback servers: where they may go, what goes with them, and how they are ended."""

from __future__ import annotations

import contextlib
import socket
import ssl
import subprocess
import threading
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import urllib3
from range_server import Quiet, QuietPage

from metal_supervisor.host import authorities
from metal_supervisor.models.listing import Retry, Unusable
from metal_supervisor.models.remote import s3
from metal_supervisor.models.remote import web as web_module
from metal_supervisor.models.remote.origins import locate
from metal_supervisor.models.remote.source_policy import SourcePolicy
from metal_supervisor.models.remote.web import Client, Stopped, body
from metal_supervisor.spec.sources import Artifact
from tests.support.hub import COMMIT, Hub
from tests.support.pace import patience
from tests.support.system import free_ports

SECRET = {"Authorization": "Bearer hunter2"}
NEAR = SourcePolicy(private=("127.0.0.0/8", "::1/128"))
REFUSED = ("no public address", "--private-hosts")


class Web(Quiet):
    """Answers by path: `/to/URL` redirects there, `/hold` says nothing, `/drip` stalls, any other is `ok`."""

    def __init__(self, context: ssl.SSLContext | None = None) -> None:
        super().__init__(Page)
        self.asked: list[tuple[str, str, str]] = []
        """(Host without port, path, Authorization)."""
        self.reached = threading.Event()
        self.port = self.server_address[1]
        if context:
            self.socket = context.wrap_socket(self.socket, server_side=True)
            self.url = f"https://localhost:{self.port}"


class Page(QuietPage):
    """One answer."""

    server: Web

    def do_GET(self) -> None:
        host = self.headers["Host"].rpartition(":")[0]
        self.server.asked.append((host, self.path, self.headers.get("Authorization", "")))
        if self.path.startswith("/to/"):
            self.send_response(302)
            self.send_header("Location", urllib.parse.unquote(self.path).removeprefix("/to/"))
            self.send_header("Content-Length", "0")
            self.end_headers()
        elif self.path.startswith("/odd"):
            self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nno header\r\n\r\nok")
            self.close_connection = True
        elif self.path == "/bytes":
            self.wfile.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            self.wfile.write(b"1\r\nx\r\n" * 200 + b"200\r\n" + b"y" * 512 + b"\r\n0\r\n\r\n")
        elif self.path == "/hold":
            self.server.reached.set()
            self.server.hold.wait(30)
        else:
            self.send_response(200)
            if self.path == "/unsized":
                self.send_header("Connection", "close")
            else:
                self.send_header("Content-Length", "2" if self.path != "/drip" else "1000")
            self.end_headers()
            self.wfile.write(b"ok")
            if self.path in ("/drip", "/unsized"):
                self.server.reached.set()
                self.server.hold.wait(30)
            self.close_connection = self.path in ("/drip", "/unsized")


def running(server: Web) -> Iterator[Web]:
    with server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.hold.set()
        server.shutdown()
        thread.join()


@pytest.fixture
def web() -> Iterator[Web]:
    yield from running(Web())


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate of `localhost` that nobody signed, with its key."""
    path = tmp_path_factory.mktemp("tls") / "both.pem"
    words = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -keyout - -out -"
    made = subprocess.run([*words.split(), "-addext", "subjectAltName=DNS:localhost"], capture_output=True, check=True)
    path.write_bytes(made.stdout)
    return path


@pytest.fixture
def tls(certificate: Path) -> Iterator[Web]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    yield from running(Web(context))


@pytest.fixture
def trusted(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has clients trust that certificate."""
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))


def read(client: Client, url: str, secret: dict[str, str] | None = None) -> bytes:
    """The body of an answer. Raises Unusable, Stopped."""
    answer = client.get(url, secret=secret)
    assert answer.status == 200
    return b"".join(body(client, url, answer, 1 << 16))


def refused(client: Client, url: str, reason: str, *texts: str) -> Unusable:
    """Whatever is sent, nothing of it shows."""
    with pytest.raises(Unusable) as caught:
        read(client, url, dict(SECRET))
    error = caught.value
    assert error.reason == reason
    assert all(text in str(error) for text in texts), str(error)
    assert "hunter2" not in f"{error} {error!r} {error.__cause__!r} {client!r}"
    return error


# ── redirects ────────────────────────────────────────────────────────────────────────────────────


def test_redirects_are_followed_as_far_as_is_reasonable(web: Web) -> None:
    five, six = "/to/" * 5 + "/x", "/to/" * 6 + "/x"
    assert read(Client(NEAR), web.url + five) == b"ok"
    refused(Client(NEAR), web.url + six, "DownloadFailed", "more than 5 other addresses")


@pytest.mark.parametrize(
    "where", ["file:///etc/passwd", "ftp://127.0.0.1/x", "gopher://127.0.0.1/", "data:,GGUF", "FILE:///x", "x:y"]
)
def test_a_redirect_to_another_kind_of_address_is_not_followed(web: Web, where: str) -> None:
    refused(Client(NEAR), f"{web.url}/to/{where}", "SourceNotAllowed", "which is not followed")


@pytest.mark.parametrize("where", ["http://[", "http://h:99999/", "http://a b/"])
def test_a_redirect_to_nowhere_is_an_error_like_any_other(web: Web, where: str) -> None:
    with pytest.raises(Unusable):
        read(Client(NEAR), f"{web.url}/to/{where}")


def test_no_redirect_leads_from_https_to_http(web: Web, tls: Web, trusted: None) -> None:
    assert read(Client(NEAR), f"{tls.url}/x") == b"ok"
    refused(Client(NEAR), f"{tls.url}/to/{web.url}/x", "SourceNotAllowed", "leads to a 'http' address")
    assert web.asked == []
    assert read(Client(NEAR), f"{web.url}/to/{tls.url}/x") == b"ok"


def test_a_certificate_that_nobody_signed_is_named(tls: Web) -> None:
    refused(Client(NEAR), f"{tls.url}/x", "DownloadFailed", "its certificate is not one that this Mac trusts")
    assert tls.asked == []


def test_where_openssl_has_no_authorities_those_that_a_mac_keeps_count(
    tls: Web, certificate: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with python.org's Python, whose file of them is not there and whose directory of them is empty."""
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "cert.pem"))
    monkeypatch.setenv("SSL_CERT_DIR", str(tmp_path))
    monkeypatch.setattr(authorities, "OF_THE_SYSTEM", tmp_path / "none")
    refused(Client(NEAR), f"{tls.url}/x", "DownloadFailed", "its certificate is not one that this Mac trusts")
    monkeypatch.setattr(authorities, "OF_THE_SYSTEM", certificate)
    assert read(Client(NEAR), f"{tls.url}/x") == b"ok"
    (tmp_path / "0a1b2c3d.0").touch()
    refused(Client(NEAR), f"{tls.url}/x", "DownloadFailed", "its certificate is not one that this Mac trusts")


def test_a_redirect_to_a_host_that_is_not_allowed_is_not_followed(web: Web) -> None:
    client = Client(SourcePolicy(hosts=("127.0.0.1",), private=("127.0.0.0/8",)))
    refused(client, f"{web.url}/to/http://localhost:{web.port}/x", "SourceNotAllowed", "not one of --allowed-hosts")
    refused(client, f"http://localhost:{web.port}/x?sig=hunter2", "SourceNotAllowed", "localhost is not one of")
    assert [host for host, *_ in web.asked] == ["127.0.0.1"]


def test_a_redirect_to_a_private_address_needs_leave_of_its_own(web: Web) -> None:
    client = Client(SourcePolicy(private=("localhost",)))
    refused(client, f"http://localhost:{web.port}/to/{web.url}/x", "SourceNotAllowed", *REFUSED)
    assert [path for _, path, _ in web.asked] == [f"/to/{web.url}/x"]


@pytest.mark.parametrize("trick", ["http://localhost:{}\\@127.0.0.1:{}/x", "http://localhost:{}#@127.0.0.1:{}/x"])
def test_a_url_that_is_read_in_two_ways_gets_past_nothing(web: Web, trick: str) -> None:
    client = Client(SourcePolicy(hosts=("127.0.0.1",), private=("127.0.0.0/8",)))
    refused(client, f"{web.url}/to/{trick.format(web.port, web.port)}", "SourceNotAllowed", "--allowed-hosts")
    assert [host for host, *_ in web.asked] == ["127.0.0.1"]


# ── secrets ──────────────────────────────────────────────────────────────────────────────────────


def test_a_secret_stays_with_the_origin_that_it_is_for(web: Web) -> None:
    away = f"http://localhost:{web.port}"
    assert read(Client(NEAR), f"{web.url}/to//same", SECRET) == b"ok"
    assert [said for *_, said in web.asked] == ["Bearer hunter2"] * 2
    web.asked.clear()
    read(Client(NEAR), f"{web.url}/to/{away}/to/{web.url}/back", SECRET)
    assert [(host, said) for host, _, said in web.asked] == [
        ("127.0.0.1", "Bearer hunter2"),
        ("localhost", ""),
        ("127.0.0.1", "Bearer hunter2"),
    ]


@pytest.mark.parametrize("trick", ["http://localhost:{0}\\@127.0.0.1:{0}/x", "http://127.0.0.1:{0}@localhost:{0}/x"])
def test_a_redirect_that_pretends_to_stay_gets_no_secret(web: Web, trick: str) -> None:
    read(Client(NEAR), f"{web.url}/to/{trick.format(web.port)}", SECRET)
    assert [(host, said) for host, _, said in web.asked] == [("127.0.0.1", "Bearer hunter2"), ("localhost", "")]


def test_another_port_is_another_origin(web: Web) -> None:
    for other in running(Web()):
        read(Client(NEAR), f"{web.url}/to/{other.url}/x", SECRET)
        assert [said for *_, said in other.asked] == [""]


NO_NAME = "its name has no address; check this Mac's network and DNS, and the host name"


def test_no_error_shows_what_is_in_a_url(web: Web) -> None:
    refused(Client(NEAR), f"http://127.0.0.1:{free_ports(1)[0]}/x?sig=hunter2", "DownloadFailed", "is the server up?")
    refused(Client(SourcePolicy()), f"{web.url}/x?sig=hunter2", "SourceNotAllowed", *REFUSED)
    refused(Client(NEAR), "http://h:99999/x?sig=hunter2", "InvalidModel", "is no URL")
    error = refused(Client(NEAR), "http://user:hunter2@name.invalid/x?sig=hunter2", "DownloadFailed", NO_NAME)
    assert error.retry is Retry.SOON


def test_no_log_shows_what_is_in_a_url(web: Web, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG"):
        read(Client(NEAR), f"{web.url}/to/{web.url}/odd?sig=hunter2")
        credentials = s3.Credentials("id", "secret", "hunter2")
        signed = s3.presigned("GET", f"{web.url}/odd", {}, credentials, "us-east-1", 60)
        read(Client(NEAR), signed)
    assert "hunter2" in signed and [path for _, path, _ in web.asked if path in signed]
    assert not [each.getMessage() for each in caplog.records if "hunter2" in each.getMessage()]


def test_a_body_in_tiny_parts_takes_no_core(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(web_module.time, "sleep", pauses.append)
    assert read(Client(NEAR), f"{web.url}/bytes") == b"x" * 200 + b"y" * 512
    assert 200 <= pauses.count(0.001) <= 210


# ── addresses ────────────────────────────────────────────────────────────────────────────────────


class Names:
    """Answers for DNS: each name has a list of answers, the last of which lasts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers: dict[str, list[list[str]]] = {}
        self.asked: list[str] = []
        self._real = socket.getaddrinfo
        monkeypatch.setattr(socket, "getaddrinfo", self._look)

    def _look(self, host: str, *more: object, **named: object) -> object:
        known = self.answers.get(host)
        if known is None:
            return self._real(host, *more, **named)  # type: ignore[arg-type]
        self.asked.append(host)
        addresses = known.pop(0) if len(known) > 1 else known[0]
        port = more[0] if more else 0
        return [
            (
                socket.AF_INET6 if ":" in each else socket.AF_INET,
                socket.SOCK_STREAM,
                6,
                "",
                (each, port, 0, 0) if ":" in each else (each, port),
            )
            for each in addresses
        ]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    return Names(monkeypatch)


@pytest.mark.parametrize(
    "address",
    [
        "169.254.169.254",
        "127.0.0.1",
        "10.0.0.1",
        "192.168.1.1",
        "100.100.100.200",
        "0.0.0.0",
        "::1",
        "fe80::1",
        "fd00::1",
        "::ffff:127.0.0.1",
        "::ffff:169.254.169.254",
        "64:ff9b::a9fe:a9fe",
        "::7f00:1",
    ],
)
def test_a_public_name_with_another_address_is_refused(names: Names, address: str) -> None:
    names.answers["models.example.com"] = [[address]]
    connected: list[object] = []
    real, me = socket.socket.connect, threading.get_ident()

    def connect(*at: Any) -> None:
        if threading.get_ident() == me:  # threads of other tests may still be ending
            connected.append(at)
        real(*at)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", connect)
        error = refused(
            Client(SourcePolicy()), "http://models.example.com/m?x=hunter2", "SourceNotAllowed", address, *REFUSED
        )
    assert error.retry is Retry.LATER and connected == []


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "2130706433", "0x7f.1", "0177.0.0.1", "[::1]", "[::ffff:127.0.0.1]", "localhost"]
)
def test_no_spelling_of_loopback_gets_past(web: Web, host: str) -> None:
    with pytest.raises(Unusable):
        read(Client(SourcePolicy()), f"http://{host}:{web.port}/x")
    assert web.asked == []


def test_an_answer_that_changes_between_the_check_and_the_connection_does_not_help(web: Web, names: Names) -> None:
    names.answers["models.example.com"] = [["203.0.113.1"], ["127.0.0.1"]]
    url = f"http://models.example.com:{web.port}/x"
    refused(Client(SourcePolicy()), url, "SourceNotAllowed", "203.0.113.1")
    refused(Client(SourcePolicy()), url, "SourceNotAllowed", "127.0.0.1")
    assert web.asked == []


def test_of_many_addresses_only_those_that_are_allowed_are_connected_to(web: Web, names: Names) -> None:
    names.answers["models.example.com"] = [["10.0.0.1", "127.0.0.2", "127.0.0.1"]]
    names.asked.clear()
    client = Client(SourcePolicy(private=("127.0.0.1/32",)))
    assert read(client, f"http://models.example.com:{web.port}/x") == b"ok"
    assert names.asked == ["models.example.com"]  # nobody looks it up again
    assert web.asked[0][0] == "models.example.com"


def test_an_address_is_not_said_to_be_at_itself(web: Web) -> None:
    with pytest.raises(Unusable) as caught:
        Client(SourcePolicy()).get(f"{web.url}/plain/m.gguf", {}, {})
    assert ": 127.0.0.1 is no public address; --private-hosts" in str(caught.value)


def test_the_hub_is_looked_up_once_for_each_connection_and_that_address_is_checked(names: Names) -> None:
    names.answers["hub.example.com"] = [["10.0.0.1", "127.0.0.1"]]
    with Hub({"o/r": {"m.gguf": b"GGUF"}}) as hub:
        url, artifact = hub.url.replace("127.0.0.1", "hub.example.com"), Artifact("hf://o/r@main/m.gguf")
        found = locate(artifact, {"HF_TOKEN": "t"}, Client(SourcePolicy(private=("127.0.0.1/32",))), url)
        assert found.commit == COMMIT and names.asked == ["hub.example.com"] and len(hub.log) == 1
        with pytest.raises(Unusable, match="no public address") as caught:
            locate(artifact, {"HF_TOKEN": "t"}, Client(SourcePolicy()), url)
        assert caught.value.reason == "SourceNotAllowed" and len(hub.log) == 1


@pytest.mark.parametrize("private", ["models.example.com", "example.com", "127.0.0.0/8", "127.0.0.1"])
def test_private_hosts_are_allowed_by_name_or_by_network(web: Web, names: Names, private: str) -> None:
    names.answers["models.example.com"] = [["127.0.0.1"]]
    assert read(Client(SourcePolicy(private=(private,))), f"http://models.example.com:{web.port}/x") == b"ok"


def test_a_proxy_of_the_environment_is_not_used(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would look names up itself, where nobody checks them."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_ports(1)[0]}")
    assert read(Client(NEAR), f"{web.url}/x") == b"ok"


# ── the end ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("path", ["hold", "drip", "unsized"])
@pytest.mark.parametrize("kind", ["plain", "tls"])
def test_a_request_that_is_stopped_ends_within_a_second(
    request: pytest.FixtureRequest, kind: str, path: str, trusted: None
) -> None:
    server: Web = request.getfixturevalue("tls" if kind == "tls" else "web")
    client, ended = Client(NEAR), []

    def run() -> None:
        try:
            ended.append(read(client, f"{server.url}/{path}"))
        except Exception as error:  # noqa: BLE001 - whatever it is, it is looked at below
            ended.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert server.reached.wait(30)
    client.stop()
    thread.join(patience(1.0))
    assert not thread.is_alive()
    assert len(ended) == 1 and isinstance(ended[0], Stopped)
    with pytest.raises(Stopped):
        client.get(f"{server.url}/x")


def test_a_server_that_says_nothing_is_given_up(web: Web) -> None:
    error = refused(Client(NEAR, stall_s=0.1), f"{web.url}/hold", "DownloadFailed", "is the server up?")
    assert error.retry is Retry.SOON
    error = refused(Client(NEAR, stall_s=0.1), f"{web.url}/drip", "DownloadFailed", "the line was cut")
    assert error.retry is Retry.SOON


def test_a_client_that_was_stopped_connects_no_more(names: Names, monkeypatch: pytest.MonkeyPatch) -> None:
    names.answers["models.example.com"] = [["127.0.0.2", "127.0.0.3"]]
    client, tried = Client(NEAR), []

    def connect(connection: urllib3.connection.HTTPConnection) -> socket.socket:
        tried.append(connection._dns_host)
        client.stop()
        raise urllib3.exceptions.NewConnectionError(connection, "refused")

    monkeypatch.setattr(urllib3.connection.HTTPConnection, "_new_conn", connect)
    with pytest.raises(Stopped):
        client.get("http://models.example.com/x")
    assert tried == ["127.0.0.2"]


DRIPS = {
    "header": (b"HTTP/1.1 200 OK\r\nX-Slow: ", b"x"),
    "chunk extension": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nGGUF\r\n4;", b"x"),
}


@pytest.mark.parametrize(("begin", "drip"), DRIPS.values(), ids=DRIPS)
def test_a_server_that_drips_where_no_body_comes_is_given_up(begin: bytes, drip: bytes) -> None:
    """Each byte ends the timeout of a socket, and two such servers would hold every turn to download."""
    given_up = threading.Event()

    def serve(listener: socket.socket) -> None:
        with listener.accept()[0] as line, contextlib.suppress(OSError):
            line.recv(65536)
            line.sendall(begin)
            for _ in range(1000):
                if given_up.wait(0.02):
                    return
                line.sendall(drip)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,), daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/m.gguf"
        with contextlib.closing(Client(NEAR, 0.2)) as client, pytest.raises(Unusable, match="next to nothing") as found:
            b"".join(body(client, url, client.get(url), 1 << 16))
        assert found.value.retry is Retry.SOON
        given_up.set()
        thread.join(30)


def test_a_name_that_is_resolved_slowly_is_no_server_that_drips(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.closing(Client(NEAR, 0.2)) as client:
        addresses = client.addresses

        def slowly(host: str, port: int) -> list[str]:
            time.sleep(0.8)
            return addresses(host, port)

        monkeypatch.setattr(client, "addresses", slowly)
        url = f"{web.url}/m.gguf"
        assert b"".join(body(client, url, client.get(url), 1 << 16)) == b"ok"
