"""A web server for headers of models: one that serves ranges, and the kinds that do it badly."""

from __future__ import annotations

import contextlib
import http.server
import re
import threading
from collections.abc import Iterator


class Quiet(http.server.ThreadingHTTPServer):
    """A server on loopback that says nothing; `hold` is for pages that stall until it is set."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, page: type[QuietPage]) -> None:
        super().__init__(("127.0.0.1", 0), page)
        self.hold = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that left is what some tests want."""


class QuietPage(http.server.BaseHTTPRequestHandler):
    """One answer of such a server."""

    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


class Web(Quiet):
    """Serves `files` by path. The first part of a path says how: `/range/…` well, others as `Page` has it."""

    def __init__(self) -> None:
        super().__init__(Page)
        self.files: dict[str, bytes] = {}
        self.padding: dict[str, int] = {}
        """Name → zeros that follow, which are sent but held nowhere."""
        self.asked: list[tuple[str, str]] = []
        """(path, Range) of every request."""
        self.headers: list[dict[str, str]] = []
        self.connections: set[tuple[str, int]] = set()
        self.sent_bytes = 0


class Page(QuietPage):
    """One answer."""

    server: Web

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        said = self.headers.get("Range", "")
        self.server.asked.append((path, said))
        self.server.headers.append(dict(self.headers))
        self.server.connections.add(self.client_address)
        _, how, name = path.split("/", 2)
        if how == "moved":
            return self._head(302, 0, Location=f"/range/{name}")
        if how == "loop":
            return self._head(302, 0, Location=self.path)
        if how in ("ftp", "file"):
            return self._head(302, 0, Location=f"{how}://localhost/etc/passwd")
        data = self.server.files.get(name)
        if data is None or how == "forbidden":
            return self._head(404 if data is None else 403, 0)
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", said)
        size = len(data) + self.server.padding.get(name, 0)
        start, end = (int(found[1]), min(int(found[2]) + 1, size)) if found else (0, size)
        if how in ("plain", "unsized", "dripping"):
            return self._whole(how, data, size)
        if start >= size:
            return self._head(416, 0, **{"Content-Range": f"bytes */{size}"})
        said_size, said_start = str(size), start
        if how == "star":
            said_size = "*"
        elif how == "short":
            end = min(end, start + 5000)
        elif how == "larger":
            said_size = str(size * 10)
        elif how == "smaller":
            said_size = str(size - 100)
        elif how == "changing":
            said_size = str(size + start)
        elif how == "shifted":
            said_start = start + 1
        elif how == "pebibytes":
            said_size = "9" * 17
        encoding = {"Content-Encoding": "gzip"} if how == "gzip" else {}
        if how == "endless":
            encoding = {"Transfer-Encoding": "chunked"}
        self._head(206, end - start, **{"Content-Range": f"bytes {said_start}-{end - 1}/{said_size}"}, **encoding)
        body = data[start:end] + bytes(max(0, end - max(start, len(data))))
        self.close_connection = how in ("breaking", "endless")
        if how == "endless":
            return self._chunks(body)
        self._send(body[: len(body) // 2] if how == "breaking" else body)
        return None

    def _whole(self, how: str, data: bytes, size: int) -> None:
        self.close_connection = True
        self._head(200, None if how == "unsized" else size, Connection="close")
        with contextlib.suppress(OSError):
            if how == "dripping":
                while not self.server.hold.wait(0.005):
                    self._send(b"G")
                return
            self._send(data)
            for _ in range((size - len(data)) >> 20):
                self._send(bytes(1 << 20))

    def _chunks(self, body: bytes) -> None:
        """In spite of its length, the body goes on: until the client leaves, or has taken far too much."""
        with contextlib.suppress(OSError):
            self._send(b"%x\r\n%s\r\n" % (len(body), body))
            while self.server.sent_bytes < 64 << 20:
                self._send(b"10000\r\n%s\r\n" % bytes(1 << 16))

    def _send(self, data: bytes) -> None:
        # Counted first: a client that has them all may look at once.
        self.server.sent_bytes += len(data)
        self.wfile.write(data)

    def _head(self, code: int, length: int | None, **headers: str) -> None:
        self.send_response(code)
        if length is not None:
            self.send_header("Content-Length", str(length))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()


@contextlib.contextmanager
def serving() -> Iterator[Web]:
    """A server for as long as the block lasts."""
    with Web() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.hold.set()
            server.shutdown()
            thread.join()
