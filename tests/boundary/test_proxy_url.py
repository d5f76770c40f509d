"""A kubeconfig's `proxy-url`, in the client, the doctor, install's copy and the advertised address, loopback or not."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from doctor_support import found, shown, surroundings
from test_kube import TOKEN, answering, everything, failure, http
from test_kube_tls import OURS, SERVER, SERVER_KEY, config, pem, server_context

from metal_supervisor.cluster.credentials import BadKubeconfig
from metal_supervisor.cluster.kube import Kube
from metal_supervisor.cluster.kubeconfig_copy import copy
from metal_supervisor.cluster.network_watcher import AddressBook
from metal_supervisor.host import addresses
from metal_supervisor.host.proxies import proxy_for
from tests.support.forward_proxy import forward_proxy, socks_stand_in
from tests.support.system import eventually, free_ports

DEAD = "http://127.0.0.1:9"
LOGIN = "mac:p%40ss"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment whose proxies and exceptions must not matter to what a user wrote."""
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, DEAD)
    monkeypatch.setenv("no_proxy", "127.0.0.1,localhost")


@contextlib.contextmanager
def proxied(directory: Path, kind: str, target: str) -> Iterator[tuple[str, Any]]:
    """(proxy-url, a function that returns the hosts that it was asked for)."""
    if kind == "socks5":
        with socks_stand_in(int(target.rpartition(":")[2])) as (address, asked):
            yield f"socks5://{address}", lambda: asked
        return
    certificate = directory / "proxy.pem"
    certificate.write_text(pem(SERVER) + pem(SERVER_KEY, "PRIVATE KEY"))
    with forward_proxy(directory, certificate=certificate if kind == "https" else None) as proxy:
        yield proxy.url, lambda: [each.partition(" ")[2].partition("/")[0] for each in proxy.requests]


@pytest.mark.parametrize("kind", ["http", "https", "socks5"])
@pytest.mark.parametrize("tls", [False, True])
def test_a_server_on_loopback_is_reached_through_its_proxy(tmp_path: Path, kind: str, tls: bool) -> None:
    with (
        answering(lambda _: http(b"{}"), server_context(tmp_path) if tls else None) as url,
        proxied(tmp_path, kind, url) as (proxy, asked),
    ):
        original = config(tmp_path / "k", url, **{"proxy-url": proxy}, **OURS)
        copied = tmp_path / "copy"
        copied.write_text(copy(original).kubeconfig)
        for count, path in enumerate((original, copied), 1):
            kube = Kube(path)
            assert kube.request("GET", "/x") == {}
            kube.close()
            seen = eventually(lambda wanted=count: len(asked()) >= wanted and asked(), what="the proxy's log")
            assert set(seen) == {url.rpartition("//")[2]}


def test_a_name_is_resolved_by_a_socks_proxy_as_kubectl_leaves_it(tmp_path: Path) -> None:
    with (
        answering(lambda _: http(b"{}")) as url,
        socks_stand_in(int(url.rpartition(":")[2])) as (address, asked),
    ):
        kube = Kube(config(tmp_path / "k", "http://api.invalid:6443", **{"proxy-url": f"socks5://{address}"}))
        assert kube.request("GET", "/x") == {}
        kube.close()
    assert asked == ["api.invalid:6443"]


def test_a_proxy_of_the_environment_serves_all_but_loopback_and_no_proxy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        answering(lambda _: http(b"{}")) as url,
        socks_stand_in(int(url.rpartition(":")[2])) as (address, asked),
    ):
        monkeypatch.setenv("http_proxy", f"socks5://{address}")
        for server in (url, "http://api.invalid"):
            kube = Kube(config(tmp_path / "k", server))
            assert kube.request("GET", "/x") == {}
            kube.close()
        assert asked == ["api.invalid:80"]
        monkeypatch.setenv("no_proxy", ".invalid")
        assert failure(Kube(config(tmp_path / "k", "http://api.invalid"))).code == 0
        assert asked == ["api.invalid:80"]


@pytest.mark.parametrize(
    ("direct", "host", "skipped"),
    [
        ("example.com", "api.example.com", True),
        (".example.com", "api.example.com", True),
        ("*", "a", True),
        ("example.com", "badexample.com", False),
        ("10.0.0.0/8", "10.1.2.3", True),
        ("10.0.0.0/8", "11.1.2.3", False),
        ("10.0.0.0/8", "10.example.com", False),
        ("a:81", "a", False),
        ("a:443", "a", True),
        ("fd00::/8", "[fd00::1]", True),
        ("nonsense/99, b", "b", True),
        ("", "a", False),
    ],
)
def test_no_proxy_names_hosts_suffixes_ports_and_networks(direct: str, host: str, skipped: bool) -> None:
    url = f"https://{host}:443/x"
    assert proxy_for(url, {"https": "proxy:3128", "no": direct}) == ("" if skipped else "http://proxy:3128")


def test_a_proxys_login_is_used_and_never_shown(tmp_path: Path) -> None:
    with (
        answering(lambda _: http(b"{}"), server_context(tmp_path)) as url,
        forward_proxy(tmp_path, "mac:p@ss") as proxy,
    ):
        address = proxy.url.removeprefix("http://")
        kube = Kube(config(tmp_path / "k", url, **{"proxy-url": f"http://{LOGIN}@{address}"}, **OURS))
        assert kube.request("GET", "/x") == {}
        kube.close()
        wrong = failure(Kube(config(tmp_path / "k", url, **{"proxy-url": f"http://{TOKEN}@{address}"}, **OURS)))
    assert "proxy answered 407" in wrong.message and TOKEN not in everything(wrong)


@pytest.mark.parametrize("proxy", ["gopher://h:1", "h:3128", "http://", "http://h:0", "http://h:x", 7, ["http://h"]])
def test_a_proxy_url_that_is_none_is_refused_by_name(tmp_path: Path, proxy: Any) -> None:
    with pytest.raises(BadKubeconfig, match="proxy-url must be a URL such as"):
        Kube(config(tmp_path / "k", "https://127.0.0.1:1", **{"proxy-url": proxy}))


def test_anonymous_access_is_not_for_the_loopback_behind_a_proxy(tmp_path: Path) -> None:
    with pytest.raises(BadKubeconfig, match="no credential"):
        Kube(config(tmp_path / "k", "http://127.0.0.1:1", {}, **{"proxy-url": DEAD}))


def test_the_doctor_connects_to_the_proxy_and_names_it(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    with answering(lambda _: http(b'{"gitVersion": "v1.36.0"}')) as url, forward_proxy(tmp_path) as proxy:
        for written, status, word in (
            (proxy.url, "ok", "Kubernetes v1.36.0"),
            (f"http://{LOGIN}@127.0.0.1:{port}", "fail", f"http://127.0.0.1:{port}, the proxy to {url}: connection"),
        ):
            file = config(tmp_path / "k", url, **{"proxy-url": written})
            told = found(surroundings(tmp_path, settings={"kubeconfig": str(file)}), "api")["api"]
            assert told[0].status == status and word in shown(told)


def test_the_advertised_address_is_that_of_the_route_to_the_proxy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def advertised(_asked: str, server: str, _embedded: bool) -> addresses.AddressChoice:
        seen.append(server)
        return addresses.AddressChoice("192.0.2.9", "test")

    file = config(tmp_path / "k", "http://127.0.0.1:6443", **{"proxy-url": "http://bastion.test:3128"})
    found(surroundings(tmp_path, settings={"kubeconfig": str(file)}, advertised=advertised), "address")
    monkeypatch.setattr(addresses, "advertised", advertised)
    AddressBook(Kube(file), "", False, lambda: None).look()
    assert seen == ["http://bastion.test:3128"] * 2
