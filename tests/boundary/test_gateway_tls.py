"""The gateway's certificate, renewed under real handshakes."""

from __future__ import annotations

import socket
import ssl
import subprocess
import threading
from pathlib import Path

import pytest

from metal_supervisor.gateway import tls
from metal_supervisor.gateway.tls import BadCertificate

RSA = ("rsa:2048",)
ECDSA = ("ec", "-pkeyopt", "ec_paramgen_curve:prime256v1")


def pair(directory: Path, name: str, kind: tuple[str, ...]) -> tuple[Path, Path]:
    """A fresh certificate with a key of a kind."""
    cert, key = directory / f"{name}.pem", directory / f"{name}.key"
    command = ["openssl", "req", "-x509", "-newkey", *kind, "-nodes", "-days", "2", "-subj", f"/CN={name}"]
    subprocess.run([*command, "-out", cert, "-keyout", key], check=True, capture_output=True)
    return cert, key


def served(context: ssl.SSLContext, version: ssl.TLSVersion, name: str | None) -> str:
    """The certificate that a client gets in a new connection, as PEM."""
    asks = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    asks.check_hostname, asks.verify_mode = False, ssl.CERT_NONE
    asks.minimum_version = asks.maximum_version = version
    ours, theirs = socket.socketpair()
    with ours, theirs:
        thread = threading.Thread(target=lambda: context.wrap_socket(ours, server_side=True).close())
        thread.start()
        with asks.wrap_socket(theirs, server_hostname=name) as client:
            found = client.getpeercert(binary_form=True)
        thread.join()
    assert found is not None
    return ssl.DER_cert_to_PEM_cert(found)


@pytest.mark.parametrize(("before", "after"), [(RSA, RSA), (RSA, ECDSA), (ECDSA, RSA)])
def test_a_renewed_certificate_is_the_only_one_whatever_its_kind_of_key(
    tmp_path: Path, before: tuple[str, ...], after: tuple[str, ...]
) -> None:
    first, second = pair(tmp_path, "first", before), pair(tmp_path, "second", after)
    context = tls.loaded(*first)
    clients = [(version, name) for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3) for name in ("a", None)]
    assert {served(context, *client) for client in clients} == {first[0].read_text()}
    with pytest.raises(BadCertificate):
        tls.renew(context, second[0], first[1])
    assert {served(context, *client) for client in clients} == {first[0].read_text()}
    tls.renew(context, *second)
    assert {served(context, *client) for client in clients} == {second[0].read_text()}
