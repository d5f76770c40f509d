"""The /status document that a sidecar on this machine answers with."""

from __future__ import annotations

import http.client
import json
import urllib.request
from pathlib import Path
from typing import Any

from metal_supervisor.spec.terminal_text import printable

MOST_BYTES = 64 << 20
ANY_V4 = "0.0.0.0"
ANY_V6 = "::"


def asked_at(bind: str) -> str:
    """Address on this machine of a server that listens on `bind`."""
    return {ANY_V4: "127.0.0.1", ANY_V6: "::1"}.get(bind, bind)


def document(port: int, timeout_s: float) -> Any:
    """JSON from /status on a loopback port, of any shape. Raises OSError, ValueError, RecursionError."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://127.0.0.1:{port}/status", timeout=timeout_s) as answer:
            return json.loads(answer.read(MOST_BYTES))
    except http.client.HTTPException as error:  # the listener does not speak HTTP
        raise ValueError(f"no HTTP: {type(error).__name__}") from None


def other_system(found: Any, state: Path) -> str:
    """State directory that a document names, "" if it is `state` or the document names none."""
    told = found.get("stateDirectory") if isinstance(found, dict) else None
    return printable(told) if isinstance(told, str) and told.startswith("/") and Path(told) != state else ""


def other_system_on(port: int, state: Path, timeout_s: float) -> str:
    """State directory of another metal-supervisor that listens on this port, "" if none does."""
    try:
        return other_system(document(port, timeout_s), state)
    except (OSError, ValueError, RecursionError):
        return ""
