"""HTTP: connections, answers and streams.

One thread per connection (they are few and local), another per watch that notices when its client has
gone, and answers in a single send, so that no delayed acknowledgement holds them up.
"""

from __future__ import annotations

import hmac
import logging
import signal
import socket
import socketserver
import threading
import time
from contextlib import suppress
from http.client import responses
from http.server import BaseHTTPRequestHandler
from typing import Any

from .codec import MAX_BODY_BYTES, encode, whole_number
from .errors import ApiError, no_such_path
from .kernel import Kernel, Options, Request, Response, Stream, split_url

log = logging.getLogger(__name__)

_HOST = "127.0.0.1"
_IDLE_S = 600.0
"""Time that a connection may be silent between requests, and that a client may refuse to take data."""

MOST = 512
"""Open connections. For one more, the longest idle one is closed: first of clients that never knew the prefix."""

_PARTING_S = 0.5
_ACCEPT_PAUSE_S = 0.1
_DISCARD_BYTES = 64 * 1024 * 1024
"""Part of a body that is too large which is still read."""


class _Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    timeout = _IDLE_S
    server_version, sys_version = "metal-supervisor", ""
    server: _HttpServer

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: requests are many, and their paths hold the prefix."""

    def _serve(self) -> None:
        try:
            answer = self._answer()
        except ApiError as problem:
            answer = Response(problem.code, encode(problem.status()), headers=problem.headers)
        except OSError:
            self.close_connection = True
            return
        except Exception:
            # A bug in this server must not look like a network problem to the client, nor go unnoticed.
            where = self.path[len(self.server.kernel.options.prefix) :]
            log.exception("request failed", extra={"method": self.command, "path": where})
            internal = ApiError(500, "InternalError", "Internal error occurred: see the log of the API server")
            answer = Response(500, encode(internal.status()))
        try:
            if isinstance(answer, Stream):
                self._stream(answer)
            else:
                self._reply(answer)
        except OSError:
            # The client is gone.
            self.close_connection = True
        self.server.connections.resting(self.connection)

    def handle_expect_100(self) -> bool:
        """Ask for the body only of a client that knows the prefix."""
        return self._below_prefix() is None or super().handle_expect_100()

    def finish(self) -> None:
        """Let the last answer arrive: what is left unread would have the kernel reset the connection."""
        with suppress(OSError, ValueError):
            self.connection.shutdown(socket.SHUT_WR)
            self.connection.settimeout(_PARTING_S)
            self._discard(65536)
        super().finish()

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _serve

    def _answer(self) -> Response | Stream:
        url = self._below_prefix()
        if url is None:
            self.close_connection = True
            raise no_such_path()
        self.server.connections.working(self.connection)
        body = self._body()
        path, query = split_url(url)
        headers = {name.lower(): value for name, value in self.headers.items()}
        return self.server.kernel.answer(Request(self.command, path, query, headers, body))

    def _below_prefix(self) -> str | None:
        """The URL without the prefix, None when it has another one. Takes the same time either way."""
        prefix = self.server.kernel.options.prefix.encode()
        given = self.path.encode("utf-8", "replace")
        same = hmac.compare_digest(given[: len(prefix)].ljust(len(prefix)), prefix)
        rest = given[len(prefix) :]
        if not same or rest[:1] not in (b"", b"/", b"?"):
            return None
        return rest.decode("utf-8", "replace") or "/"

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding"):
            self.close_connection = True
            raise ApiError(411, "BadRequest", "a request body needs a Content-Length")
        size_bytes = whole_number(self.headers.get("Content-Length") or "0")
        if size_bytes is None:
            self.close_connection = True
            raise ApiError(400, "BadRequest", "Content-Length is not a number")
        if size_bytes > MAX_BODY_BYTES:
            self.close_connection = True
            self._discard(min(size_bytes, _DISCARD_BYTES))
            message = f"Request entity too large: limit is {MAX_BODY_BYTES}"
            raise ApiError(413, "RequestEntityTooLarge", message)
        body = self.rfile.read(size_bytes) if size_bytes else b""
        if len(body) < size_bytes:
            # A cut request may mean something else: a DELETE works without its options.
            self.close_connection = True
            message = f"the request body ended after {len(body)} of {size_bytes} bytes: send the request again"
            raise ApiError(400, "BadRequest", message)
        return body

    def _discard(self, size_bytes: int) -> None:
        """Read and discard a body: a client that is still sending would not see the answer."""
        while size_bytes > 0:
            part = self.rfile.read(min(size_bytes, 65536))
            if not part:
                return
            size_bytes -= len(part)

    def _reply(self, answer: Response) -> None:
        headers = {"Content-Type": answer.content_type, "Content-Length": str(len(answer.body)), **answer.headers}
        self.wfile.write(self._head(answer.code, headers, answer.warnings) + answer.body)

    def _head(self, code: int, headers: dict[str, str], warnings: tuple[str, ...] = ()) -> bytes:
        lines = [f"HTTP/1.1 {code} {responses.get(code, '')}", f"Date: {self.date_time_string()}"]
        lines.append("Cache-Control: no-cache, private")
        lines += [f"{name}: {value}" for name, value in headers.items()]
        lines += ['Warning: 299 - "{}"'.format(text.replace("\\", "\\\\").replace('"', '\\"')) for text in warnings]
        if self.close_connection:
            lines.append("Connection: close")
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1", "replace")

    def _stream(self, stream: Stream) -> None:
        headers = {"Content-Type": "application/json", "Transfer-Encoding": "chunked"}
        try:
            self.wfile.write(self._head(200, headers))
            threading.Thread(target=self._await_hangup, args=(stream,), name="apiserver-hangup", daemon=True).start()
            stream.run(lambda data: self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data)))
            self.wfile.write(b"0\r\n\r\n")
        finally:
            stream.close()

    def _await_hangup(self, stream: Stream) -> None:
        """Notify a stream when its client hangs up. Clients send nothing during a watch; data is the next request."""
        with suppress(OSError):
            while True:
                with suppress(TimeoutError):
                    self.connection.recv(1, socket.MSG_PEEK)
                    break
        stream.close()


class Connections:
    """Every open connection. Safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: dict[socket.socket, bool] = {}
        """Those that are not being answered, the longest idle first -> whether the client has known the prefix."""
        self._working: set[socket.socket] = set()

    def admit(self, connection: socket.socket) -> bool:
        """Take in a new connection, if need be for an idle one; False if all are being answered."""
        with self._lock:
            if len(self._idle) + len(self._working) >= MOST:
                if not self._idle:
                    return False
                victim = min(self._idle, key=lambda each: self._idle[each])
                del self._idle[victim]
                with suppress(OSError):
                    victim.shutdown(socket.SHUT_RDWR)  # its thread closes it
            self._idle[connection] = False
        return True

    def working(self, connection: socket.socket) -> None:
        """Keep a connection: its client knows the prefix, and is being answered."""
        with self._lock:
            if self._idle.pop(connection, None) is not None:
                self._working.add(connection)

    def resting(self, connection: socket.socket) -> None:
        """Note that a connection is idle again."""
        with self._lock:
            if connection in self._working:
                self._working.discard(connection)
                self._idle[connection] = True

    def gone(self, connection: socket.socket) -> None:
        """Forget a connection that has ended."""
        with self._lock:
            self._idle.pop(connection, None)
            self._working.discard(connection)

    def all(self) -> list[socket.socket]:
        """Every connection that is open now."""
        with self._lock:
            return [*self._idle, *self._working]


class _HttpServer(socketserver.ThreadingTCPServer):
    """The listening socket and its connections."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128
    allow_reuse_address = True

    def __init__(self, address: tuple[str, int], kernel: Kernel) -> None:
        super().__init__(address, _Handler)
        self.kernel = kernel
        self.connections = Connections()
        self.thread = threading.Thread(target=self._loop, name="apiserver-accept", daemon=True)
        self._stopping = False

    def _loop(self) -> None:
        """Accept connections until `end`; unlike `serve_forever` it never wakes without a reason."""
        while not self._stopping:
            try:
                connection, address = self.socket.accept()
            except OSError:
                # Out of descriptors, most likely: the next attempt fails at once too, so do not spin until one is free.
                time.sleep(_ACCEPT_PAUSE_S)
                continue
            if self._stopping or not self.connections.admit(connection):
                connection.close()
                continue
            try:
                self.process_request(connection, address)
            except RuntimeError:  # the system has no thread to spare
                self.shutdown_request(connection)
                time.sleep(_ACCEPT_PAUSE_S)

    def shutdown_request(self, request: Any) -> None:
        """Called by socketserver when a connection ends."""
        self.connections.gone(request)
        with suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for a hang-up
        super().shutdown_request(request)

    def end(self) -> None:
        """End the loop and every connection."""
        self._stopping = True
        for connection in self.connections.all():
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        while self.thread.is_alive():
            # A connection wakes the loop: closing a socket does not end an `accept` everywhere. Without descriptors, a
            # first attempt fails.
            with suppress(OSError), socket.create_connection(self.socket.getsockname()[:2], _PARTING_S):
                pass
            self.thread.join(_ACCEPT_PAUSE_S)
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print no traceback for a broken connection."""


class ApiServer:
    """A running API, for the program and for tests."""

    def __init__(self, options: Options, kernel: type[Kernel] = Kernel) -> None:
        """`kernel`: what answers requests."""
        self.kernel = kernel(options)
        try:
            self._http = _HttpServer((_HOST, options.port), self.kernel)
        except OSError:
            self.kernel.store.close()
            raise

    @property
    def port(self) -> int:
        """The TCP port in use."""
        return int(self._http.server_address[1])

    @property
    def url(self) -> str:
        """Server URL for a kubeconfig, prefix included."""
        return f"http://{_HOST}:{self.port}{self.kernel.options.prefix}"

    def start(self) -> ApiServer:
        """Loads the data, installs the CRDs and starts to answer."""
        self.kernel.start()
        self._http.thread.start()
        return self

    def stop(self) -> None:
        """Ends all watches and connections and closes the data file. Takes well under a second."""
        self.kernel.watcher.close_all()
        self._http.end()
        self.kernel.stop()

    __enter__ = start

    def __exit__(self, *_: object) -> None:
        self.stop()


def serve(options: Options, kernel: type[Kernel] = Kernel) -> None:
    """Runs an API server in the foreground until SIGTERM or SIGINT. Call it from the main thread."""
    server = ApiServer(options, kernel)
    ends = {signal.SIGTERM, signal.SIGINT}
    # Blocked in every thread: the system may deliver a signal to any, and Python handles it only once this one wakes.
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    server.start()
    signal.sigwait(ends)
    server.stop()
