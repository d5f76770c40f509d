"""Health, readiness, metrics and status over HTTP, from memory: no request waits for anything.

Flask behind waitress, GET and HEAD only, loopback only. If the port is taken the sidecar goes on without
it, says who has it, and tries again: publishing endpoints matters more than being looked at.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import flask
from waitress.server import create_server
from werkzeug.exceptions import HTTPException

from metal_supervisor import __version__
from metal_supervisor.boundary import host
from metal_supervisor.sidecar import board as boards
from metal_supervisor.sidecar.board import Board
from metal_supervisor.sidecar.metrics import exposition

RETRY_S = 10.0
HOST = "127.0.0.1"
TAKEN = "the port of health and metrics is taken; free it, or set --port"
log = logging.getLogger("sidecar")


def create_app(board: Callable[[], Board]) -> flask.Flask:
    """The application; `board` returns the latest snapshot."""
    app = flask.Flask("metal_supervisor", static_folder=None)
    app.json.sort_keys = False  # type: ignore[attr-defined]

    def route(path: str) -> Callable[[Callable[[], flask.typing.ResponseReturnValue]], None]:
        def add(view: Callable[[], flask.typing.ResponseReturnValue]) -> None:
            app.add_url_rule(path, path, view, methods=["GET"], provide_automatic_options=False)

        return add

    @route("/healthz")
    def healthz() -> flask.typing.ResponseReturnValue:
        status, body = boards.health(board(), time.monotonic())
        return flask.jsonify(body), status

    @route("/livez")
    def livez() -> flask.typing.ResponseReturnValue:
        return flask.jsonify({"status": "ok"})

    @route("/readyz")
    def readyz() -> flask.typing.ResponseReturnValue:
        status, checks = boards.readiness(board(), time.monotonic())
        if "verbose" not in flask.request.args and status == 200:
            return flask.jsonify({"status": "ready"})
        lines = [f"[{'+' if passed else '-'}]{name} {'ok' if passed else why}" for name, passed, why in checks]
        lines.append("readyz check passed" if status == 200 else "readyz check failed")
        return flask.Response("\n".join(lines) + "\n", status, content_type="text/plain; charset=utf-8")

    @route("/metrics")
    def metrics() -> flask.typing.ResponseReturnValue:
        body, content_type = exposition(board(), flask.request.headers.get("Accept", ""))
        return flask.Response(body, content_type=content_type)

    @route("/status")
    def status() -> flask.typing.ResponseReturnValue:
        return flask.jsonify(boards.status(board(), __version__))

    @app.errorhandler(HTTPException)
    def failed(error: HTTPException) -> flask.typing.ResponseReturnValue:
        paths = ["/healthz", "/livez", "/readyz", "/metrics", "/status"]
        return flask.jsonify({"error": error.name, "paths": paths}), error.code or 500

    return app


def serve(app: Callable[..., object], port: int, address: str = HOST, taken: str = TAKEN) -> None:
    """Serves in a thread of its own, now or as soon as the port is free; until then `taken` says what to do."""

    def run() -> None:
        told = False
        while True:
            try:
                server = create_server(
                    app, host=address, port=port, threads=2, ident="",
                    connection_limit=1000, channel_timeout=10, cleanup_interval=5,
                )
            except OSError as error:
                if not told:
                    told = True
                    holder = host.port_holder(port)
                    detail = {"port": port, "holder": holder, "error": error.strerror}
                    log.error(taken, extra=detail)
                time.sleep(RETRY_S)
                continue
            server.run()

    threading.Thread(target=run, name="http", daemon=True).start()
