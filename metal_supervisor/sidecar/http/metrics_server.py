"""HTTP application for a Prometheus on another machine: /metrics and /healthz, and no other page.

All else that the sidecar serves is for this Mac alone. Off unless `metrics_listen` names an address.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from http import HTTPStatus

from werkzeug.wrappers import Request, Response

from metal_supervisor.sidecar import board as boards
from metal_supervisor.sidecar.board import Board
from metal_supervisor.sidecar.http.metrics import format_of, metrics_pages

TAKEN = "metrics cannot be served to the cluster; free the port, or set --metrics-listen to an address of this Mac"


def create_app(board: Callable[[], Board]) -> Callable[..., Iterable[bytes]]:
    """The WSGI application; `board` returns the latest snapshot."""
    metrics = metrics_pages(board)

    @Request.application
    def app(request: Request) -> Response:
        path = request.environ["PATH_INFO"]  # as it came: `request.path` makes one of several slashes
        if path not in ("/metrics", "/healthz"):
            return _answer(404, b"/metrics and /healthz are here, and nothing else\n")
        if request.method not in ("GET", "HEAD"):
            answer = _answer(405, b"GET and HEAD only\n")
            answer.headers["Allow"] = "GET, HEAD"
            return answer
        if path == "/metrics":
            return _answer(200, *metrics[format_of(request.headers.get("Accept", ""))].get())
        status, body = boards.health(board(), time.monotonic())
        return _answer(status, json.dumps(body).encode(), "application/json")

    return app


def _answer(status: int, body: bytes, content_type: str = "text/plain; charset=utf-8") -> Response:
    return Response(body, f"{status} {HTTPStatus(status).phrase}", content_type=content_type)
