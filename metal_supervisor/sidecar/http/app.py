"""Health, readiness, metrics, status and the page over HTTP, from memory: no request waits for anything.

GET and HEAD only, and only with a loopback name in the Host header: otherwise a web page whose own name resolves to
127.0.0.1 (DNS rebinding) could read everything.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import flask
from werkzeug.exceptions import HTTPException

from metal_supervisor.sidecar import board as boards
from metal_supervisor.sidecar.board import Board
from metal_supervisor.sidecar.http.metrics import FORMATS, Exposition, format_of
from metal_supervisor.sidecar.http.page import POLICY, LogTail, render
from metal_supervisor.sidecar.http.server import HEADERS
from metal_supervisor.spec.terminal_text import printable

PATHS = ("/", "/healthz", "/livez", "/readyz", "/metrics", "/status")
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
METHODS = ("GET", "HEAD")


def _is_loopback(host: str) -> bool:
    """True if a Host header holds a loopback name, with or without a port."""
    found = re.fullmatch(r"(\[[^\]]*\]|[^:]*)(?::[0-9]{1,5})?", host, re.ASCII)
    return found is not None and found[1].lower() in LOOPBACK


def create_app(board: Callable[[], Board], log_of: LogTail = lambda _program: ()) -> flask.Flask:
    """The WSGI application. `board` returns the latest snapshot; `log_of`: as for `page.render`."""
    app = flask.Flask("metal_supervisor", static_folder=None)
    app.json.sort_keys = False  # type: ignore[attr-defined]
    _guard(app)
    metrics = {each: Exposition(each) for each in FORMATS}

    @app.get("/")
    def show_page() -> flask.typing.ResponseReturnValue:
        body, headers = render(board(), time.monotonic(), log_of), {"Content-Security-Policy": POLICY}
        return flask.Response(body, headers=headers, content_type="text/html; charset=utf-8")

    @app.get("/metrics")
    def show_metrics() -> flask.typing.ResponseReturnValue:
        body, content_type = metrics[format_of(flask.request.headers.get("Accept", ""))].render(board())
        return flask.Response(body, content_type=content_type)

    @app.get("/status")
    def show_status() -> flask.typing.ResponseReturnValue:
        return flask.jsonify(boards.status(board()))

    @app.get("/healthz")
    def healthz() -> flask.typing.ResponseReturnValue:
        code, body = boards.health(board(), time.monotonic())
        return flask.jsonify(body), code

    @app.get("/livez")
    def livez() -> flask.typing.ResponseReturnValue:
        return flask.jsonify({"status": "ok"})

    @app.get("/readyz")
    def readyz() -> flask.typing.ResponseReturnValue:
        code, checks = boards.readiness(board(), time.monotonic())
        if "verbose" not in flask.request.args and code == 200:
            return flask.jsonify({"status": "ready"})
        said = [(passed, name, "ok" if passed else printable(why)) for name, passed, why in checks]
        lines = [f"[{'+' if passed else '-'}]{name} {word}" for passed, name, word in said]
        lines.append("readyz check passed" if code == 200 else "readyz check failed")
        return flask.Response("\n".join(lines) + "\n", code, content_type="text/plain; charset=utf-8")

    return app


def _guard(app: flask.Flask) -> None:
    """Refuse other hosts and methods, and add security headers to every answer."""

    @app.before_request
    def refuse() -> flask.typing.ResponseReturnValue | None:
        if not _is_loopback(flask.request.headers.get("Host", "")):
            why = {"error": "Misdirected Request", "message": f"ask for one of {', '.join(sorted(LOOPBACK))}"}
            return flask.jsonify(why), 421
        if flask.request.method not in METHODS:
            return flask.jsonify({"error": "Method Not Allowed"}), 405, {"Allow": ", ".join(METHODS)}
        return None

    @app.after_request
    def protect(answer: flask.Response) -> flask.Response:
        for name, value in HEADERS.items():
            answer.headers.setdefault(name, value)
        return answer

    @app.errorhandler(HTTPException)
    def failed(error: HTTPException) -> flask.typing.ResponseReturnValue:
        return flask.jsonify({"error": error.name, "paths": PATHS}), error.code or 500
