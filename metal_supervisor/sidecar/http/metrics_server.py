"""HTTP application for a Prometheus on another machine: our metrics, and those of the engines.

/metrics and /healthz are answered from memory. /sd lists the engines that serve, in the format of Prometheus' HTTP
service discovery. Each target is a path of this listener, which passes the scrape on: an engine may listen on loopback
only, or require a key that no scraper should hold. Time, size and number of such scrapes are limited. An engine that
loads, hangs, ends, or unloads its model when idle is neither listed nor asked: a scrape would wake it or keep it awake.

All else that the sidecar serves is for this Mac alone. Off unless `metrics_listen` names an address.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from http import HTTPStatus

from werkzeug.wrappers import Request, Response

from metal_supervisor.host import local_status
from metal_supervisor.runtimes import RUNTIMES, probing
from metal_supervisor.sidecar import board as boards
from metal_supervisor.sidecar.board import Board, Row
from metal_supervisor.sidecar.http.metrics import FORMATS, PLAIN_TYPE, Exposition, format_of
from metal_supervisor.sidecar.http.server import HEADERS

TAKEN = "metrics cannot be served to the cluster; free the port, or set --metrics-listen to an address of this Mac"
PATHS = ("/metrics", "/healthz", "/sd")
ENGINE_PATH = re.compile(r"/engines/[a-z0-9-]{1,63}/[a-z0-9][a-z0-9.-]{0,252}(@[0-9]{1,4})?/metrics")
HOST = re.compile(r"([A-Za-z0-9][A-Za-z0-9.-]{0,252}|\[[0-9A-Fa-f:.]{2,45}\])(:[0-9]{1,5})?")
ENGINE_S = 5.0
"""Longest time for an engine's whole answer; a llama-server answers between two batches of a prompt."""
AT_ONCE = 4
"""Most engines asked at a time. Each takes a thread of the server, which has others for the rest."""


def create_app(
    board: Callable[[], Board], key_of: Callable[[str], tuple[str, str]], bind: str
) -> Callable[..., Iterable[bytes]]:
    """The WSGI application; `board` returns the latest snapshot.

    `key_of`: program -> result of `first_request.key_of` for its engine. `bind`: default listen address of engines.
    """
    metrics = {each: Exposition(each) for each in FORMATS}
    turns = threading.BoundedSemaphore(AT_ONCE)

    @Request.application
    def app(request: Request) -> Response:
        path = request.environ["PATH_INFO"]  # as it came: `request.path` makes one of several slashes
        engines = _engines(board()) if path == "/sd" or ENGINE_PATH.fullmatch(path) else {}
        if path not in PATHS and path not in engines:
            return _answer(404, b"/metrics, /healthz, /sd and the paths listed in /sd are served here\n")
        if request.method not in ("GET", "HEAD"):
            answer = _answer(405, b"GET and HEAD only\n")
            answer.headers["Allow"] = "GET, HEAD"
            return answer
        if path in engines:
            return _scrape(engines[path])
        if path == "/metrics":
            return _answer(200, *metrics[format_of(request.headers.get("Accept", ""))].render(board()))
        if path == "/sd":
            return _targets(engines, request.headers.get("Host", ""))
        status, body = boards.health(board(), time.monotonic())
        return _answer(status, json.dumps(body).encode(), "application/json")

    def _scrape(row: Row) -> Response:
        """Pass a scrape to an engine."""
        record = row.record
        if not _is_scraped(row):
            return _answer(503, b"not scraped: it does not serve, unloads its model when idle, or has no metrics\n")
        if not turns.acquire(blocking=False):
            answer = _answer(503, f"{AT_ONCE} engines are being scraped; try again\n".encode())
            answer.headers["Retry-After"] = "1"
            return answer
        try:
            where, (_, key) = local_status.asked_at(record.host or bind), key_of(record.program)
            text, error = probing.metrics_text(
                where, record.port or 0, RUNTIMES[record.runtime].metrics_path, key, ENGINE_S
            )
        finally:
            turns.release()
        return _answer(502, f"{error}\n".encode()) if error else _answer(200, text.encode(), PLAIN_TYPE)

    return app


def _engines(board: Board) -> dict[str, Row]:
    """The engines by their path here."""
    found = {"/engines/{}/{}/metrics".format(*row.record.key): row for row in board.rows}
    return {path: row for path, row in found.items() if ENGINE_PATH.fullmatch(path)}


def _is_scraped(row: Row) -> bool:
    """True if an engine serves and has metrics, and asking it neither wakes it nor keeps it awake."""
    record, observed, runtime = row.record, row.observed, RUNTIMES.get(row.record.runtime)
    if runtime is None or not runtime.metrics_path or record.probe.asleep_path or record.port is None:
        return False
    return bool(observed.pid) and observed.ready and not observed.hung and not record.withdraw


def _targets(engines: Mapping[str, Row], host: str) -> Response:
    """The engines to scrape, as targets at the address from which the list was requested."""
    if not HOST.fullmatch(host):
        return _answer(400, b"the Host header must be a name or an address, and a port\n")
    found = [
        {"targets": [host], "labels": {"__metrics_path__": path, "namespace": namespace, "name": name}}
        for path, (namespace, name) in ((path, row.record.key) for path, row in engines.items() if _is_scraped(row))
    ]
    return _answer(200, json.dumps(found).encode(), "application/json")


def _answer(status: int, body: bytes, content_type: str = "text/plain; charset=utf-8") -> Response:
    return Response(body, f"{status} {HTTPStatus(status).phrase}", HEADERS, content_type=content_type)
