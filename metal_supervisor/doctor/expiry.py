"""Expiry of credentials: the `exp` of a JWT, the `notAfter` of a certificate.

Nothing here is verified, and only the time is ever shown.
"""

from __future__ import annotations

import base64
import math
from datetime import datetime, timezone

from metal_supervisor.cluster.accounts import claims_of

SEQUENCE = 0x30
UTC_TIME = 0x17
GENERALIZED_TIME = 0x18
VERSION = 0xA0


def of_token(text: str) -> float | None:
    """Unix time at which a JWT expires; None for a token without it."""
    try:
        found = float(claims_of(text)["exp"])
        return found if math.isfinite(found) else None
    except (ValueError, LookupError, TypeError, OverflowError, RecursionError):
        return None


def of_certificate(pem: bytes) -> float | None:
    """Unix time at which the first certificate of a PEM expires; None if it cannot be parsed."""
    try:
        text = pem.split(b"-----BEGIN CERTIFICATE-----")[1].split(b"-----END")[0]
        der = base64.b64decode(b"".join(text.split()))
        certificate, _ = _part(der, SEQUENCE)
        signed, _ = _part(certificate, SEQUENCE)
        if signed[0] == VERSION:
            _, signed = _part(signed, VERSION)
        for _ in range(3):  # serial number, algorithm, issuer
            _, signed = _part(signed, signed[0])
        validity, _ = _part(signed, SEQUENCE)
        _, ends = _part(validity, validity[0])
        return _time(ends[0], _part(ends, ends[0])[0].decode("ascii"))
    except (ValueError, LookupError):
        return None


def _part(der: bytes, tag: int) -> tuple[bytes, bytes]:
    """(content of the first DER element, the rest). Raises ValueError, IndexError."""
    if der[0] != tag:
        raise ValueError("another element")
    length, at = der[1], 2
    if length & 0x80:
        at = 2 + (length & 0x7F)
        length = int.from_bytes(der[2:at], "big")
    if at + length > len(der):
        raise ValueError("cut off")
    return der[at : at + length], der[at + length :]


def _time(tag: int, text: str) -> float:
    """Unix time of an X.509 time: two digits for years until 2049, four for later ones. Raises ValueError."""
    if tag == UTC_TIME:
        text = ("20" if int(text[:2]) < 50 else "19") + text
    elif tag != GENERALIZED_TIME:
        raise ValueError("no time")
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=timezone.utc).timestamp()
