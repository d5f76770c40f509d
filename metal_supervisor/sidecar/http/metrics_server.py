"""HTTP application for a Prometheus on another machine: /metrics and /healthz, and no other page.

All else that the sidecar serves is for this Mac alone. Off unless `metrics_listen` names an address.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Any

from metal_supervisor.sidecar import board as boards
from metal_supervisor.sidecar.board import Board
from metal_supervisor.sidecar.http.metrics import Exposition
from metal_supervisor.sidecar.http.render_cache import RenderCache

TAKEN = "metrics cannot be served to the cluster; free the port, or set --metrics-listen to an address of this Mac"
TEXT = "text/plain; charset=utf-8"
Answer = tuple[int, bytes, str]
"""(HTTP status, body, content type)."""


def create_app(board: Callable[[], Board]) -> Callable[..., Iterable[bytes]]:
    """The WSGI application; `board` returns the latest snapshot."""

    metrics = RenderCache(board, Exposition().render, warm=True)

    def app(environ: dict[str, Any], start_response: Callable[..., object]) -> Iterable[bytes]:
        method = environ["REQUEST_METHOD"]
        status, body, content_type = answer(board, metrics, method, environ.get("PATH_INFO", ""), _accepted(environ))
        headers = [("Content-Type", content_type), ("Content-Length", str(len(body)))]
        if status == HTTPStatus.METHOD_NOT_ALLOWED:
            headers.append(("Allow", "GET, HEAD"))
        start_response(f"{status} {HTTPStatus(status).phrase}", headers)
        return [] if method == "HEAD" else [body]

    return app


def _accepted(environ: dict[str, Any]) -> str:
    return str(environ.get("HTTP_ACCEPT", ""))


def answer(
    board: Callable[[], Board], metrics: RenderCache[tuple[bytes, str]], method: str, path: str, accept: str
) -> Answer:
    """The answer to a request. `accept`: its Accept header."""
    if path not in ("/metrics", "/healthz"):
        return 404, b"/metrics and /healthz are here, and nothing else\n", TEXT
    if method not in ("GET", "HEAD"):
        return 405, b"GET and HEAD only\n", TEXT
    if path == "/metrics":
        return 200, *metrics.get(accept)
    status, body = boards.health(board(), time.monotonic())
    return status, json.dumps(body).encode(), "application/json"
