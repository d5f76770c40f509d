"""TLS to a real server: whom it trusts, why it does not, and certificates that come, change and leave no trace."""

from __future__ import annotations

import base64
import json
import re
import socketserver
import ssl
import stat
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
from test_credentials import V1, reply, runs, script
from test_kube import TOKEN, answering, everything, failure, http

from metal_supervisor.cluster.kube import BadKubeconfig, Kube
from metal_supervisor.host import authorities
from tests.support.faults import Figure, fault

# Of one authority (and a stranger), valid for a century but for the expired one; keys of tests and nothing else.
AUTHORITY = """
MIIBaTCCAQ6gAwIBAgIUaCaBEbeyWVGCJEbeZgW8L9dJeU4wCgYIKoZIzj0EAwIwETEPMA0GA1UEAwwGY2Etb25lMCAXDTI0MDEwMTAwMDAwMF
oYDzIxMjQwMTAxMDAwMDAwWjARMQ8wDQYDVQQDDAZjYS1vbmUwWTATBgcqhkjOPQIBBggqhkjOPQMBBwNCAAQZWqwlb4YSouYCHOneQOdu0+uj
GYoKuzVfPwSbqADqJORFGahQLXDacqTOrFa1KRHYsgpTQjwWe46lOnVhhCdNo0IwQDAPBgNVHRMBAf8EBTADAQH/MA4GA1UdDwEB/wQEAwIBBj
AdBgNVHQ4EFgQUx0rSVrcmElZLdvJDNE46A7oZ0OowCgYIKoZIzj0EAwIDSQAwRgIhAOUIKfn3prmJn/ZNnsiaIY5uXd8xLDFadRtMg2idOhly
AiEAtVJ0oBMhAdln3OeIJXs5BHGaPF31NRnwO8kpVAt6ji8=
"""
STRANGER = """
MIIBaTCCAQ6gAwIBAgIUFsbMqh2ecxvJmnLOccNi3/VISygwCgYIKoZIzj0EAwIwETEPMA0GA1UEAwwGY2EtdHdvMCAXDTI0MDEwMTAwMDAwMF
oYDzIxMjQwMTAxMDAwMDAwWjARMQ8wDQYDVQQDDAZjYS10d28wWTATBgcqhkjOPQIBBggqhkjOPQMBBwNCAARHes1oPgE5SxSl3pNxHwmDO0Be
CFxi94zOeKBPMTfPEA7g/GZF2lqseU5LjKwiNmUZ+nzdNhuv/9HHYN6qTLYwo0IwQDAPBgNVHRMBAf8EBTADAQH/MA4GA1UdDwEB/wQEAwIBBj
AdBgNVHQ4EFgQU4Dgg1J1Zt1qdxfEbVCH8t/dURKcwCgYIKoZIzj0EAwIDSQAwRgIhAMWS+TYtJJ9jk+M9aj1HEsHFEgg61yVZcl/xzlju9W8B
AiEA5dBGTmBth0qo9fdl1xJXctzfsyTXfIozZPmKxX+e2K4=
"""
SERVER_KEY = """
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgj72hCGxCHMzH04Wyy1Fhzq5HzF6HsROA9DvwJHIRA4ihRANCAAThnK2rq9hWtn
grgHZQiFnQN0NaIp+RQ/g12It1hC/aT0ylj2QC5kA1M80AmWDA5GmyyNEdcG2U7ksj00IEOXnF
"""
SERVER = """
MIIBqjCCAVGgAwIBAgIUTIOAOMCEbFrohJP6t0xOLalklnYwCgYIKoZIzj0EAwIwETEPMA0GA1UEAwwGY2Etb25lMCAXDTI0MDEwMTAwMDAwMF
oYDzIxMjQwMTAxMDAwMDAwWjAOMQwwCgYDVQQDDANzcnYwWTATBgcqhkjOPQIBBggqhkjOPQMBBwNCAAThnK2rq9hWtngrgHZQiFnQN0NaIp+R
Q/g12It1hC/aT0ylj2QC5kA1M80AmWDA5GmyyNEdcG2U7ksj00IEOXnFo4GHMIGEMAwGA1UdEwEB/wQCMAAwDgYDVR0PAQH/BAQDAgeAMBMGA1
UdJQQMMAoGCCsGAQUFBwMBMB0GA1UdDgQWBBRnRE777N8nYF7KuQezlEWnR05KYDAfBgNVHSMEGDAWgBTHStJWtyYSVkt28kM0TjoDuhnQ6jAP
BgNVHREECDAGhwR/AAABMAoGCCqGSM49BAMCA0cAMEQCIHXKzr13+NMnvPr2incGTH0fINKRFkTaoVMztSVcTHxcAiA+144hh6kWw+q/s0jE2E
TcXnHjJ6d9yHZ4+JRJ6pWJag==
"""
EXPIRED = """
MIIBqTCCAU+gAwIBAgIUGTl1TtEEoeQynJG3odMC7GHGcdwwCgYIKoZIzj0EAwIwETEPMA0GA1UEAwwGY2Etb25lMB4XDTI0MDEwMTAwMDAwMF
oXDTI0MDIwMTAwMDAwMFowDjEMMAoGA1UEAwwDc3J2MFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAE4Zytq6vYVrZ4K4B2UIhZ0DdDWiKfkUP4
NdiLdYQv2k9MpY9kAuZANTPNAJlgwORpssjRHXBtlO5LI9NCBDl5xaOBhzCBhDAMBgNVHRMBAf8EAjAAMA4GA1UdDwEB/wQEAwIHgDATBgNVHS
UEDDAKBggrBgEFBQcDATAdBgNVHQ4EFgQUZ0RO++zfJ2BeyrkHs5RFp0dOSmAwHwYDVR0jBBgwFoAUx0rSVrcmElZLdvJDNE46A7oZ0OowDwYD
VR0RBAgwBocEfwAAATAKBggqhkjOPQQDAgNIADBFAiAwNQ55qfciSrvekw+wIK9zG2DIaDNaDB4VVel0Sxmx1QIhANS43XuLpZGgYjeCcpO3VV
tQUfUejiboUyIwt7EZUS70
"""
ELSEWHERE = """
MIIBsTCCAVegAwIBAgIUZZIf6pAnL365fBnhYQMjGrmagz0wCgYIKoZIzj0EAwIwETEPMA0GA1UEAwwGY2Etb25lMCAXDTI0MDEwMTAwMDAwMF
oYDzIxMjQwMTAxMDAwMDAwWjAOMQwwCgYDVQQDDANzcnYwWTATBgcqhkjOPQIBBggqhkjOPQMBBwNCAAThnK2rq9hWtngrgHZQiFnQN0NaIp+R
Q/g12It1hC/aT0ylj2QC5kA1M80AmWDA5GmyyNEdcG2U7ksj00IEOXnFo4GNMIGKMAwGA1UdEwEB/wQCMAAwDgYDVR0PAQH/BAQDAgeAMBMGA1
UdJQQMMAoGCCsGAQUFBwMBMB0GA1UdDgQWBBRnRE777N8nYF7KuQezlEWnR05KYDAfBgNVHSMEGDAWgBTHStJWtyYSVkt28kM0TjoDuhnQ6jAV
BgNVHREEDjAMggpvdGhlci50ZXN0MAoGCCqGSM49BAMCA0gAMEUCIQCRIiAuLOSPYKx4aPYFquxER6jpHAmKq+ajtl0KsNwZWwIgOpHLAt8m4f
qh3xZJMaYMTgREnk5E7vIQqWS5o2Q5Ty4=
"""
MAC = """
MIIBmDCCAT6gAwIBAgIUfueV/xjj18mC2L+9/R0QLFvnqXcwCgYIKoZIzj0EAwIwETEPMA0GA1UEAwwGY2Etb25lMCAXDTI0MDEwMTAwMDAwMF
oYDzIxMjQwMTAxMDAwMDAwWjAOMQwwCgYDVQQDDANtYWMwWTATBgcqhkjOPQIBBggqhkjOPQMBBwNCAASh/JPEwzmw62z/rr1yaWarqwNtuW6t
Uts9ic3V9lWZvhUGXMt691pJt3bdp7N2HJaGgLaSJSgzLHE1G1D0KaADo3UwczAMBgNVHRMBAf8EAjAAMA4GA1UdDwEB/wQEAwIHgDATBgNVHS
UEDDAKBggrBgEFBQcDAjAdBgNVHQ4EFgQUkBEGlGq80wVxlowe5ScrL4m6F/swHwYDVR0jBBgwFoAUx0rSVrcmElZLdvJDNE46A7oZ0OowCgYI
KoZIzj0EAwIDSAAwRQIhAOrVrELu5IVxYmQGwwitiY5AfnyKsUhs+8+DHHcEVj2YAiAjeYnM99lWJPgpW/S8Mu3hDDwSTzF8KOEgtyNFKr5WWg
==
"""
MAC_KEY = """
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgZFHPBgzwaZH3YhO+DsuiofKg+yrZapbwV3+6opvfi1uhRANCAASh/JPEwzmw62
z/rr1yaWarqwNtuW6tUts9ic3V9lWZvhUGXMt691pJt3bdp7N2HJaGgLaSJSgzLHE1G1D0KaAD
"""
RENEWED = """
MIIBmjCCAT+gAwIBAgIUaQTXlCwhqmW15xK6XhICV9FTPxkwCgYIKoZIzj0EAwIwETEPMA0GA1UEAwwGY2Etb25lMCAXDTI0MDEwMTAwMDAwMF
oYDzIxMjQwMTAxMDAwMDAwWjAPMQ0wCwYDVQQDDARtYWMyMFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAEG5SEth4jFZdRp6ZkkVK0Zkhd26Kw
IfFqfjOJcFDtFi9iQ1mEICLIXpVxgOrrwL4R24chbMIABGlC9Poj8/y+PqN1MHMwDAYDVR0TAQH/BAIwADAOBgNVHQ8BAf8EBAMCB4AwEwYDVR
0lBAwwCgYIKwYBBQUHAwIwHQYDVR0OBBYEFGT1QlIvssZSNp9BQVw9r+sAn1pmMB8GA1UdIwQYMBaAFMdK0la3JhJWS3byQzROOgO6GdDqMAoG
CCqGSM49BAMCA0kAMEYCIQCwhXaPvnNqj3WYpe6cKX0jnVVS+UA/QA81A4DLGKWk1QIhALxKjJZ+Xf/CNfvm8c6tKoN4p391YqhLFRg0AiA5TN
L4
"""
RENEWED_KEY = """
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgE0RHsftc9KgzjrkWv6BlzK/aYUTAivoydMHXxQhckhyhRANCAAQblIS2HiMVl1
GnpmSRUrRmSF3borAh8Wp+M4lwUO0WL2JDWYQgIshelXGA6uvAvhHbhyFswgAEaUL0+iPz/L4+
"""


def pem(body: str, kind: str = "CERTIFICATE") -> str:
    return f"-----BEGIN {kind}-----\n{body.strip()}\n-----END {kind}-----\n"


def data(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


KEYS = {name: pem(key, "PRIVATE KEY") for name, key in (("mac", MAC_KEY), ("renewed", RENEWED_KEY))}
CERTIFICATES = {"mac": pem(MAC), "renewed": pem(RENEWED)}
OURS = {"certificate-authority-data": data(pem(AUTHORITY))}


def server_context(directory: Path, certificate: str = SERVER, ask: bool = False) -> ssl.SSLContext:
    """A server's side; `ask`: it wants a certificate of our authority, and TLS fails without."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    path = directory / "server.pem"
    path.write_text(pem(certificate) + pem(SERVER_KEY, "PRIVATE KEY"))
    context.load_cert_chain(path)
    if ask:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=pem(AUTHORITY))
    return context


def config(path: Path, server: str, user: dict[str, Any] | None = None, **cluster: Any) -> Path:
    path.write_text(
        json.dumps(
            {
                "current-context": "c",
                "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
                "clusters": [{"name": "c", "cluster": {"server": server, **cluster}}],
                "users": [{"name": "u", "user": {"token": TOKEN} if user is None else user}],
            }
        )
    )
    return path


class Names:
    """Answers; notes as whom TLS knew each client."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.status = "200 OK"

    def __call__(self, request: bytes) -> bytes:
        self.seen.append(re.findall(rb"'commonName', '(mac2?)'", request)[0].decode())
        return http(b"{}", self.status)


def test_the_authority_of_the_kubeconfig_is_trusted_as_data_and_as_file(tmp_path: Path) -> None:
    (tmp_path / "ca.crt").write_text(pem(AUTHORITY))
    with answering(lambda _: http(b"{}"), server_context(tmp_path)) as url:
        for cluster in (OURS, {"certificate-authority": "ca.crt"}):
            kube = Kube(config(tmp_path / "k", url, **cluster))
            assert kube.request("GET", "/x") == {}
            kube.close()


def test_without_an_authority_of_its_own_those_that_a_mac_keeps_are_trusted_where_openssl_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "ca.crt").write_text(pem(AUTHORITY))
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("SSL_CERT_DIR", str(tmp_path / "empty"))
    monkeypatch.setattr(authorities, "OF_THE_SYSTEM", tmp_path / "ca.crt")
    with answering(lambda _: http(b"{}"), server_context(tmp_path)) as url:
        kube = Kube(config(tmp_path / "k", url))
        assert kube.request("GET", "/x") == {}
        kube.close()


@fault(
    "G140",
    "the API server's certificate is of another authority, has expired, or is for another address or name",
    happens="no request is sent, and none without TLS or unverified; the credential stays here",
    sees="Untrusted: what is wrong with it, and which fields of the kubeconfig to check",
    bound="0 requests, 0 tokens sent",
)
@pytest.mark.parametrize(
    ("certificate", "cluster", "says"),
    [
        (SERVER, {"certificate-authority-data": data(pem(STRANGER))}, "unable to get local issuer certificate"),
        (SERVER, {}, "unable to get local issuer certificate"),
        (EXPIRED, OURS, "certificate has expired"),
        (ELSEWHERE, OURS, "IP address mismatch, certificate is not valid for '127.0.0.1'"),
        (SERVER, {**OURS, "tls-server-name": "no.test"}, "Hostname mismatch, certificate is not valid for 'no.test'"),
    ],
    ids=["stranger", "system", "expired", "elsewhere", "server-name"],
)
def test_a_server_that_cannot_be_trusted_is_told_nothing_and_why_is_said(
    tmp_path: Path, certificate: str, cluster: dict[str, Any], says: str, figure: Figure
) -> None:
    requests: list[bytes] = []

    def note(request: bytes) -> bytes:
        requests.append(request)
        return http(b"{}")

    with answering(note, server_context(tmp_path, certificate)) as url:
        kube = Kube(config(tmp_path / "k", url, **cluster))
        error = failure(kube)
        kube.close()
    assert (error.code, error.reason, requests) == (0, "Untrusted", [])
    assert f"its certificate is not accepted: {says}; check server and certificate-authority" in str(error)
    assert TOKEN not in everything(error)
    figure.add("requests sent", len(requests), "")


def test_the_name_of_the_kubeconfig_goes_before_the_address(tmp_path: Path) -> None:
    with answering(lambda _: http(b"{}"), server_context(tmp_path, ELSEWHERE)) as url:
        kube = Kube(config(tmp_path / "k", url, **{**OURS, "tls-server-name": "other.test"}))
        assert kube.request("GET", "/x") == {}
        kube.close()


def test_an_unverified_server_is_used_where_that_is_asked_for_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with answering(lambda _: http(b"{}"), server_context(tmp_path, EXPIRED)) as url:
        kube = Kube(config(tmp_path / "k", url, **{"insecure-skip-tls-verify": True}))
        for _ in range(3):
            assert kube.request("GET", "/x") == {}
        kube.load()
        kube.close()
    assert [each.getMessage() for each in caplog.records] == ["server not verified: insecure-skip-tls-verify"]
    assert vars(caplog.records[0])["server"] == url


def test_a_server_without_tls_is_named_as_such(tmp_path: Path) -> None:
    class Plain(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(1000)
            self.request.sendall(b"HTTP/1.1 400 Client sent HTTPS\r\n\r\n")

    with socketserver.TCPServer(("127.0.0.1", 0), Plain) as plain:
        thread = threading.Thread(target=plain.handle_request)
        thread.start()
        kube = Kube(config(tmp_path / "k", f"https://127.0.0.1:{plain.server_address[1]}", **OURS))
        assert "no TLS: " in str(failure(kube))
        kube.close()
        thread.join()


def test_certificate_data_is_shown_and_nothing_of_it_stays_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    modes: list[int] = []
    load = ssl.SSLContext.load_cert_chain

    def look(context: ssl.SSLContext, path: Any, **more: Any) -> None:
        if "tmp/metal-supervisor-" in str(path):
            modes.extend(stat.S_IMODE(Path(each).stat().st_mode) for each in (path, Path(path).parent))
        load(context, path, **more)

    names, tls = Names(), server_context(tmp_path, ask=True)
    monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", look)
    user = {"client-certificate-data": data(CERTIFICATES["mac"]), "client-key-data": data(KEYS["mac"])}
    with answering(names, tls) as url:
        kube = Kube(config(tmp_path / "k", url, user, **OURS))
        assert (modes, list((tmp_path / "tmp").iterdir())) == ([0o600, 0o700], [])
        (tmp_path / "tmp").rmdir()  # nor is it missed when all of it is cleaned away
        for _ in range(2):  # each on a connection of its own
            assert kube.request("GET", "/x") == {}
        kube.close()
    assert names.seen == ["mac", "mac"]


def test_certificate_files_that_are_renewed_are_used_once_they_fit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names, tls = Names(), server_context(tmp_path, ask=True)
    (tmp_path / "c").write_text(CERTIFICATES["mac"])
    (tmp_path / "k").write_text(KEYS["mac"])
    with answering(names, tls) as url:
        kube = Kube(config(tmp_path / "config", url, {"client-certificate": "c", "client-key": "k"}, **OURS))
        kube.request("GET", "/x")
        (tmp_path / "new").write_text(CERTIFICATES["renewed"])
        (tmp_path / "new").replace(tmp_path / "c")
        for _ in range(3):  # the key is still that of before
            kube.request("GET", "/x")
        (tmp_path / "new").write_text(KEYS["renewed"])
        (tmp_path / "new").replace(tmp_path / "k")
        kube.request("GET", "/x")
        kube.close()
    assert names.seen == ["mac"] * 4 + ["mac2"]
    assert caplog.text.count("new certificates are not usable; the old ones stay") == 1


def test_certificates_of_a_plugin_are_shown_and_renewed(tmp_path: Path) -> None:
    names, tls = Names(), server_context(tmp_path, ask=True)
    reply(tmp_path, clientCertificateData=CERTIFICATES["mac"], clientKeyData=KEYS["mac"])
    with answering(names, tls) as url:
        kube = Kube(config(tmp_path / "k", url, {"exec": script(tmp_path)}, **OURS))
        kube.request("GET", "/x")
        reply(tmp_path, clientCertificateData=CERTIFICATES["renewed"], clientKeyData=KEYS["renewed"])
        names.status = "401 No"
        failure(kube)
        names.status = "200 OK"
        kube.request("GET", "/x")
        kube.close()
    assert (names.seen, runs(tmp_path)) == (["mac", "mac", "mac2", "mac2"], 2)


def encrypted() -> str:
    """A key that only a passphrase opens: nobody is there to be asked for it."""
    how = f"Proc-Type: 4,ENCRYPTED\nDEK-Info: AES-128-CBC,{'0123456789ABCDEF' * 2}\n\n"
    return pem(how + data("x" * 48) + "\n" + data("x" * 48), "EC PRIVATE KEY")


@pytest.mark.parametrize(
    "user",
    [
        {"client-certificate-data": data(CERTIFICATES["mac"]), "client-key-data": data(KEYS["renewed"])},
        {"client-certificate-data": data(CERTIFICATES["mac"]), "client-key-data": data(encrypted())},
        {"client-certificate-data": data(pem(TOKEN)), "client-key-data": data(KEYS["mac"])},
    ],
    ids=["of another", "encrypted", "garbage"],
)
def test_a_certificate_that_cannot_be_used_is_refused_at_once(tmp_path: Path, user: dict[str, Any]) -> None:
    with pytest.raises(BadKubeconfig, match="certificate-authority, certificate and key do not fit") as caught:
        Kube(config(tmp_path / "k", "https://127.0.0.1:1", user, **OURS))
    assert TOKEN not in everything(caught.value)


def test_an_authority_that_is_none_is_refused_at_once(tmp_path: Path) -> None:
    bad = {"certificate-authority-data": data(f"-----BEGIN CERTIFICATE-----\n{TOKEN}")}
    with pytest.raises(BadKubeconfig, match="cannot be used") as caught:
        Kube(config(tmp_path / "k", "https://127.0.0.1:1", **bad))
    assert TOKEN not in everything(caught.value)


def test_a_plugin_is_told_of_the_authority(tmp_path: Path) -> None:
    reply(tmp_path, token="t")
    spec = {**script(tmp_path, 'echo "$KUBERNETES_EXEC_INFO" > info; cat reply.json'), "provideClusterInfo": True}
    (tmp_path / "ca.crt").write_text(pem(AUTHORITY))
    named = {"certificate-authority": "ca.crt", "tls-server-name": "other.test"}
    Kube(config(tmp_path / "k", "https://127.0.0.1:1", {"exec": spec}, **named))
    info = json.loads((tmp_path / "info").read_text())
    assert info["apiVersion"] == V1
    cluster = info["spec"]["cluster"]
    assert base64.b64decode(cluster.pop("certificate-authority-data")).decode() == pem(AUTHORITY)
    assert cluster == {"server": "https://127.0.0.1:1", "tls-server-name": "other.test"}
