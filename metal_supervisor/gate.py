"""Rules that the gates before engines share: which clients are on this machine, and which requests a web page sent.

Standard library only, and no import of ours: other interpreters run it beside `mlx_engine.py` and `omlx_engine.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import urlsplit

LOCAL = frozenset({"127.0.0.1", "::1", "::ffff:127.0.0.1"})
"""Addresses of clients on this machine."""
LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
MOST_BYTES = 64 << 20
"""Size limit of an inference request's body."""
FOREIGN = "a web page of another host may not use this engine (Origin)"


def from_foreign_page(origins: Iterable[str]) -> bool:
    """Tell whether a browser sent a request for a page of another host; `origins`: its `Origin` headers.

    Browsers send the header with every POST, also after DNS rebinding, when `Host` and address both look right. `Host`
    itself proves nothing: pods use a Service's name, and an Ingress any name.
    """
    return any(not _is_local(each) for each in origins)


def _is_local(origin: str) -> bool:
    try:
        parts = urlsplit(origin)
        return parts.hostname in LOCAL_NAMES and "@" not in parts.netloc
    except ValueError:
        return False
