"""Downloads through a real forward proxy: from the environment and from settings, and what must not go through it."""

from __future__ import annotations

import contextlib
import dataclasses
import select
import socket
import socketserver
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_web import SECRET, Web, certificate, read, refused, tls, web

from metal_supervisor.models.listing import Unusable
from metal_supervisor.models.remote.origins import locate
from metal_supervisor.models.remote.source_policy import HUB_HOSTS
from metal_supervisor.models.remote.web import Client, body
from metal_supervisor.models.store_context import lax_rules, terms_of
from metal_supervisor.settings.loader import ConfigError, Settings, checked
from metal_supervisor.spec.sources import Artifact
from tests.support.forward_proxy import forward_proxy, socks_stand_in
from tests.support.hub import Hub
from tests.support.s3 import Server as S3Server
from tests.support.system import eventually, free_ports

__all__ = ["certificate", "tls", "web"]
LOGIN = "mac:p@ss"
VARIABLES = ("https_proxy", "http_proxy", "all_proxy", "no_proxy", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


def client(lax: bool = False, **settings: Any) -> Client:
    """The client of downloads with these settings."""
    return Client(lax_rules(Settings(**settings)) if lax else terms_of(Settings(**settings)).rules)


def test_https_goes_through_connect_with_a_private_authority_and_the_proxys_login(
    tmp_path: Path, tls: Web, certificate: Path
) -> None:
    with forward_proxy(tmp_path, LOGIN) as proxy:
        file = tmp_path / "proxy-url"
        file.write_text(proxy.url.replace("//", "//mac:p%40ss@") + "\n")
        said = {"download_proxy": str(file), "download_ca_file": str(certificate), "allowed_hosts": "localhost"}
        through = client(**said)
        assert read(through, f"{tls.url}/x", dict(SECRET)) == b"ok"
        assert tls.asked == [("localhost", "/x", SECRET["Authorization"])]
        assert "p%40ss" not in repr(through.rules) and "p@ss" not in repr(through.rules)
        through.close()
        eventually(lambda: proxy.requests == [f"CONNECT localhost:{tls.port}"], what="the proxy's log")
        refused(client(**{**said, "download_proxy": proxy.url}), f"{tls.url}/x", "DownloadFailed", "proxy answered 407")
        untrusted = client(**{**said, "download_ca_file": ""})
        told = refused(untrusted, f"{tls.url}/x", "DownloadFailed", "--download-ca-file")
        assert "p%40ss" not in str(told)


def test_the_environment_is_honoured_but_for_loopback_and_no_proxy(
    tmp_path: Path, tls: Web, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(certificate))
    with socks_stand_in(tls.port) as (address, asked):
        monkeypatch.setenv("HTTPS_PROXY", f"socks5://{address}")
        assert read(client(lax=True), f"{tls.url}/x") == b"ok" and asked == []
        refused(client(allowed_hosts="example.com"), "https://x.example.com/y", "DownloadFailed", "certificate")
        assert asked == ["x.example.com:443"]
        monkeypatch.setenv("NO_PROXY", "example.com")
        refused(client(), "https://x.example.com.invalid/y", "SourceNotAllowed", "--allowed-hosts")
        refused(client(), "https://no-such.example.com/y", "DownloadFailed", "its name has no address")
        assert asked == ["x.example.com:443"]
    monkeypatch.setenv("HTTPS_PROXY", "socks5://127.0.0.1:1")
    assert client(download_proxy="off").rules.proxies == {}


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "127.1",
        "2130706433",
        "0x7f.1",
        "0177.0.0.1",
        "[::1]",
        "[::ffff:127.0.0.1]",
        "169.254.169.254",
        "intranet",
        "huggingface.co.evil.test",
        "evilhf.co",
        "LOCALHOST.",
        "8.8.8.8",
    ],
)
def test_through_a_proxy_only_the_hub_and_named_hosts_are_requested(tmp_path: Path, host: str) -> None:
    (port,) = free_ports(1)
    through = client(download_proxy=f"http://127.0.0.1:{port}")
    refused(through, f"https://{host}/x", "SourceNotAllowed", "--allowed-hosts")
    for named in ("127.0.0.1", "127.1", "2130706433"):  # a private address needs leave of its own, as without a proxy
        if host == named:
            also = client(download_proxy=f"http://127.0.0.1:{port}", allowed_hosts=named)
            refused(also, f"https://{host}/x", "SourceNotAllowed", "--private-hosts")


def test_the_hub_its_cdn_and_hosts_that_settings_name_are_requested() -> None:
    (port,) = free_ports(1)
    said = {"hf_endpoint": "https://mirror.test", "ollama_registry": "https://ollama.test", "private_hosts": "nas.test"}
    through = client(download_proxy=f"http://127.0.0.1:{port}", **said)
    for host in (*HUB_HOSTS, "cdn-lfs.hf.co", "cas-bridge.xethub.hf.co", "mirror.test", "ollama.test", "nas.test"):
        refused(through, f"https://{host}/x", "DownloadFailed", "the proxy cannot be used")


def test_each_redirect_is_checked_and_a_token_needs_connect(tmp_path: Path, web: Web) -> None:
    with forward_proxy(tmp_path) as proxy:
        said = {"download_proxy": proxy.url, "allowed_hosts": "127.0.0.1", "private_hosts": "127.0.0.1"}
        assert read(client(**said), f"{web.url}/x") == b"ok"
        refused(client(**said), f"{web.url}/x", "SourceNotAllowed", "the proxy could read its token")
        for where in (f"http://localhost:{web.port}/x", "http://2130706433/x"):
            with pytest.raises(Exception, match="not one of --allowed-hosts"):
                read(client(**said), f"{web.url}/to/{where}")
        with pytest.raises(Exception, match="token or signature"):
            read(client(**said), f"{web.url}/x?X-Amz-Signature=1")
    assert [path for _, path, _ in web.asked] == ["/x", f"/to/http://localhost:{web.port}/x", "/to/http://2130706433/x"]


def test_a_file_of_the_proxy_or_of_authorities_that_is_missing_is_named(tmp_path: Path) -> None:
    refused(client(download_ca_file=str(tmp_path / "none")), "https://hf.co/x", "DownloadFailed", "download_ca_file")
    (tmp_path / "empty").touch()
    for name in ("none", "empty"):
        through = client(download_proxy=str(tmp_path / name))
        refused(through, "https://hf.co/x", "DownloadFailed", "check download_proxy")


def test_a_password_belongs_into_a_file_and_is_not_repeated() -> None:
    with pytest.raises(ConfigError, match="absolute path of a file") as caught:
        checked("download_proxy", "http://mac:hunter2@proxy:3128", "--download-proxy")
    assert "hunter2" not in str(caught.value)
    assert dataclasses.asdict(Settings(download_proxy="http://proxy.test:3128"))["download_proxy"]


@contextlib.contextmanager
def behind_tls(port: int, certificate: Path) -> Iterator[int]:
    """The port of a TLS server for `localhost` that leads to a plain one."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with (
                contextlib.suppress(OSError),
                context.wrap_socket(self.request, server_side=True) as near,
                socket.create_connection(("127.0.0.1", port)) as far,
            ):
                sides = {near: far, far: near}
                while True:
                    ready = [near] if near.pending() else select.select([near, far], [], [])[0]
                    for each in ready:
                        if not (data := each.recv(65536)):
                            return
                        sides[each].sendall(data)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads, server.block_on_close = True, False
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


def test_hugging_faces_client_uses_the_proxy(tmp_path: Path, certificate: Path) -> None:
    content = b"GGUF" + b"x" * 100
    with (
        Hub({"o/r": {"m.gguf": content}}) as hub,
        behind_tls(int(hub.url.rpartition(":")[2]), certificate) as port,
        forward_proxy(tmp_path, LOGIN) as proxy,
    ):
        hub.token, hub.lfs = "hunter2", False
        file = tmp_path / "proxy-url"
        file.write_text(proxy.url.replace("//", "//mac:p%40ss@"))
        endpoint = f"https://localhost:{port}"
        through = client(download_proxy=str(file), download_ca_file=str(certificate), hf_endpoint=endpoint)
        found = locate(Artifact("hf://o/r/m.gguf"), {"HF_TOKEN": "hunter2"}, through, endpoint)
        (piece,) = found.pieces
        answer = through.get(piece.url, secret=found.headers)
        assert b"".join(body(through, piece.url, answer, 1 << 16)) == content
        through.close()
        assert {each.authorization for each in hub.log} == {"Bearer hunter2"}
        eventually(lambda: proxy.requests, what="the proxy's log")
        assert set(proxy.requests) == {f"CONNECT localhost:{port}"} and "hunter2" not in proxy.log.read_text()


def test_s3_uses_the_proxy_and_signs_only_for_https(tmp_path: Path, certificate: Path) -> None:
    (tmp_path / "s3").mkdir()
    server = S3Server(tmp_path / "s3")
    try:
        server.put("models", "", b"")
        assert server.put("models", "m.gguf", b"GGUF123")
        with (
            behind_tls(int(server.url.rpartition(":")[2]), certificate) as port,
            forward_proxy(tmp_path) as proxy,
        ):
            through = client(
                download_proxy=proxy.url,
                download_ca_file=str(certificate),
                allowed_hosts="localhost,127.0.0.1",
                private_hosts="localhost,127.0.0.1",
            )
            keys = {**server.keys, "AWS_ENDPOINT_URL": f"https://localhost:{port}"}
            (piece,) = locate(Artifact("s3://models/m.gguf"), keys, through, "").pieces
            assert read(through, piece.url) == b"GGUF123"
            through.close()
            eventually(lambda: proxy.requests, what="the proxy's log")
            assert set(proxy.requests) == {f"CONNECT localhost:{port}"} and "Signature" not in proxy.log.read_text()
            with pytest.raises(Unusable, match="token or signature"):
                locate(Artifact("s3://models/m.gguf"), server.keys, through, "")
    finally:
        server.end()
