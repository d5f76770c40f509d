"""TLS of the gateway: a certificate that is exchanged while connections last."""

from __future__ import annotations

import ssl
from pathlib import Path


class BadCertificate(Exception):
    """A certificate and key that cannot be used; the message names the file."""


def loaded(cert: Path, key: Path) -> ssl.SSLContext:
    """A context of this certificate and key. Raises BadCertificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    renew(context, cert, key)
    return context


def renew(context: ssl.SSLContext, cert: Path, key: Path) -> None:
    """Take new handshakes to this certificate; connections that are up keep theirs. Raises BadCertificate.

    Each pair has a context of its own: a pair that does not match spoils the one that it is loaded into, and beside a
    key of another kind (RSA, ECDSA) that keeps the earlier certificate too, for clients that prefer it.
    """
    pair = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # A key with a passphrase would be asked for on a terminal that is not there.
        pair.load_cert_chain(cert, key, password=lambda: "")
    except ssl.SSLError as error:
        why = (error.reason or str(error)).lower().replace("_", " ")
        text = f"{cert} and {key}: {why}; they must be PEM files that belong together, the key without a passphrase"
        raise BadCertificate(text) from None
    except (OSError, ValueError) as error:
        raise BadCertificate(f"{cert} or {key} cannot be read: {error}") from None

    def choose(connection: ssl.SSLSocket | ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        connection.context = pair

    context.sni_callback = choose  # also called for a client that names no server
