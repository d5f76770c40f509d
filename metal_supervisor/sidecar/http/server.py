"""The HTTP server: waitress, with limits on the size and duration of everything that a client sends or receives.

It lives in the process that renews the heartbeat and withdraws dead endpoints, so a client must not exhaust threads or
file descriptors, or flood the log. If the port is taken, the sidecar runs without the server, logs which process holds
the port, and tries again: publishing endpoints matters more than status pages.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import sys
import threading
import time
from typing import Any

from waitress.channel import ClientDisconnected, HTTPChannel
from waitress.server import TcpWSGIServer, create_server
from waitress.task import ErrorTask, WSGITask

from metal_supervisor.host import processes

HOST = "127.0.0.1"
TAKEN = "the port of health and metrics is taken; free it, or set --port"
RETRY_S = 10.0
REQUEST_S = 10.0
"""Longest silence of a connection, and longest time for a request to arrive."""
MAX_HEADER_BYTES = 16 << 10
"""Generous: a browser sends the cookies of everything else on localhost along."""
MAX_BODY_BYTES = 1 << 10
"""No accepted request has a body; a short one is read, so that the client sees why it is refused."""
MAX_CONNECTIONS = 400
"""Far below supervisord's limit of file descriptors (minfds): the engines' probes and watches need the others."""
REST_S = 3600.0
"""Longest sleep without a connection."""
THREADS = 2
"""For requests that wait for nothing: all share one interpreter; the second lets a short answer overtake a long one."""
SWITCH_S = 0.001
"""sys.setswitchinterval: an answer passes three threads, beside a loop that may be busy."""

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""Security headers of every answer."""
log = logging.getLogger("sidecar")


class _Refusal(ErrorTask):  # type: ignore[misc]
    """The answer to a malformed or oversized request, with our headers."""

    def execute(self) -> None:
        self.response_headers.extend(HEADERS.items())
        super().execute()


class _Answer(WSGITask):  # type: ignore[misc]
    """The answer to a request, after which the connection is closed.

    A client that sends many requests and reads nothing would block a thread until there is room for the next answer.
    """

    def execute(self) -> None:
        try:
            super().execute()
        except (ClientDisconnected, OSError):
            raise
        except Exception:
            log.exception("a page could not be made", extra={"path": self.request.path})
            raise

    def build_response_header(self) -> Any:
        self.set_close_on_finish()
        return super().build_response_header()


class _Channel(HTTPChannel):  # type: ignore[misc]
    """A connection, closed if a request does not arrive within REQUEST_S, even if a byte comes now and then."""

    task_class = _Answer
    error_task_class = _Refusal
    _began_s = 0.0

    def received(self, data: bytes) -> Any:
        whole = super().received(data)
        if self.request is None:
            self._began_s = 0.0
        elif not self._began_s:
            self._began_s = time.monotonic()
        elif time.monotonic() - self._began_s > REQUEST_S:
            self.will_close = True
        return whole


def bound(app: Any, address: str, port: int, threads: int = THREADS) -> Any:
    """A listening server, for `run`. Raises OSError if the port is taken."""
    server = create_server(
        app,
        host=address,
        port=port,
        threads=threads,
        ident="",
        connection_limit=MAX_CONNECTIONS,
        channel_timeout=int(REQUEST_S),
        cleanup_interval=2,
        max_request_header_size=MAX_HEADER_BYTES,
        max_request_body_size=MAX_BODY_BYTES,
        log_socket_errors=False,
    )
    server.channel_class = _Channel
    # What it says is of clients: that requests wait, that one has left, a traceback for a URL that makes no sense.
    logging.getLogger("waitress").setLevel(logging.CRITICAL)
    return server


def run(server: TcpWSGIServer) -> None:
    """Serve until it is closed. Without a connection it sleeps: waitress alone would wake each second.

    A closing connection whose client does not read the rest of the answer is shut down: by itself it would stay open
    until there is room in the client's buffer.
    """
    sockets = server._map
    while sockets:
        pause_s = server.adj.asyncore_loop_timeout if server.active_channels else REST_S
        # select() fails for the whole process's descriptors beyond 1024, whosever they are.
        server.asyncore.loop(timeout=pause_s, use_poll=True, map=sockets, count=1)
        for channel in list(server.active_channels.values()):
            if channel.will_close and channel.total_outbufs_len:
                with contextlib.suppress(OSError):
                    channel.socket.shutdown(socket.SHUT_RDWR)


def serve(app: Any, port: int, address: str = HOST, taken: str = TAKEN, threads: int = THREADS) -> None:
    """Serve in a thread, now or as soon as the port is free; `taken`: advice that is logged until then."""
    sys.setswitchinterval(SWITCH_S)

    def listen() -> None:
        told = False
        while True:
            try:
                server = bound(app, address, port, threads)
            except OSError as error:
                if not told:
                    told = True
                    holder = processes.port_holder(port)
                    detail = {"port": port, "holder": holder, "error": error.strerror, "advice": taken}
                    log.error("a port cannot be listened on; it is tried again", extra=detail)
                time.sleep(RETRY_S)
                continue
            run(server)

    threading.Thread(target=listen, name="http", daemon=True).start()
