"""A web server on loopback whose line is bad: it serves one file by path, resumed or not, cut, slow, or wrong."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

from range_server import Quiet, QuietPage


@dataclass
class File:
    """One file, and how it is served. Everything may change meanwhile."""

    data: bytes
    etag: str = '"one"'
    """Its validator, "" for none."""
    date: str = ""
    """Its Last-Modified, "" for none."""
    ranges: bool = True
    cuts: list[int] = field(default_factory=list)
    """After how many bytes the next bodies end, one each; then they are whole."""
    statuses: list[int] = field(default_factory=list)
    """What the next requests of its body answer instead."""
    retry_after: str = ""
    length_off: int = 0
    """By how much Content-Length of a body is wrong."""
    sized: bool = True
    """False: chunked, with no Content-Length."""
    endless: bool = False
    """More bytes follow, for ever."""
    stalls_at: int = -1
    """Where a body stops until the server's `hold` is set; -1: nowhere."""
    type: str = "application/octet-stream"


@dataclass
class Asked:
    """One request of a body; those of one byte, which ask what a file is, are not among them."""

    path: str
    start: int | None
    """First byte of the range, None if none was asked for."""
    if_range: str
    status: int
    sent_bytes: int = 0


class Uneven(Quiet):
    """The server."""

    def __init__(self) -> None:
        super().__init__(Page)
        self.files: dict[str, File] = {}
        self.asked: list[Asked] = []
        self.heads = 0
        """How many requests asked what a file is."""
        self.stalled, self.left = threading.Event(), threading.Event()
        """A body has come to where it stalls; a client left in the middle of one."""

    def sent(self) -> int:
        """Bytes of bodies."""
        return sum(each.sent_bytes for each in self.asked)

    def starts(self) -> list[int | None]:
        """What each body was asked from."""
        return [each.start for each in self.asked]


class Page(QuietPage):
    """One answer."""

    server: Uneven

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        file = self.server.files.get(path)
        said = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if said and said[0] == "bytes=0-0":
            self.server.heads += 1
            return self._about(file)
        asked = Asked(path, int(said[1]) if said else None, self.headers.get("If-Range", ""), 200)
        self.server.asked.append(asked)
        if file is None or file.statuses:
            asked.status = file.statuses.pop(0) if file else 404
            more = {"Retry-After": file.retry_after} if file and file.retry_after else {}
            return self._head(asked.status, 0, more)
        start, more = 0, self._said(file)
        if asked.start is not None and file.ranges and asked.if_range in ("", file.etag or file.date):
            start = asked.start
            if start >= len(file.data):
                asked.status = 416
                return self._head(416, 0, {"Content-Range": f"bytes */{len(file.data)}"})
            asked.status = 206
            more["Content-Range"] = f"bytes {start}-{len(file.data) - 1}/{len(file.data)}"
        return self._body(file, asked, start, more)

    def _said(self, file: File) -> dict[str, str]:
        said = {"ETag": file.etag, "Last-Modified": file.date, "Content-Type": file.type}
        return {name: value for name, value in said.items() if value}

    def _about(self, file: File | None) -> None:
        if file is None:
            return self._head(404, 0, {})
        if file.ranges and file.data:
            self._head(206, 1, {**self._said(file), "Content-Range": f"bytes 0-0/{len(file.data)}"})
            self.wfile.write(file.data[:1])
            return None
        self.close_connection = True
        return self._head(200, len(file.data) if file.sized else None, {**self._said(file), "Connection": "close"})

    def _head(self, status: int, length: int | None, more: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in more.items():
            self.send_header(name, value)
        if length is not None:
            self.send_header("Content-Length", str(length))
        self.end_headers()

    def _body(self, file: File, asked: Asked, start: int, more: dict[str, str]) -> None:
        data, cut = file.data[start:], file.cuts.pop(0) if file.cuts else None
        if not file.sized:
            more["Transfer-Encoding"] = "chunked"
        self._head(asked.status, len(data) + file.length_off if file.sized else None, more)
        at, end, part = 0, len(data) if cut is None else min(cut, len(data)), b""
        try:
            while at < end or file.endless:
                if start + at == file.stalls_at:
                    self.server.stalled.set()
                    self.server.hold.wait(30)
                stop = file.stalls_at - start if start + at < file.stalls_at else end
                part = data[at : min(at + (1 << 16), stop, end)] or bytes(1 << 16)
                # Counted first: a client that has them all may look at once.
                asked.sent_bytes += len(part)
                self.wfile.write(part if file.sized else b"%x\r\n%s\r\n" % (len(part), part))
                at += len(part)
        except OSError:
            asked.sent_bytes -= len(part)
            self.server.left.set()
            self.close_connection = True
            return
        if cut is not None or file.length_off:
            self.close_connection = True
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)
        elif not file.sized:
            self.wfile.write(b"0\r\n\r\n")


@contextlib.contextmanager
def serving() -> Iterator[Uneven]:
    """A server for as long as the block lasts."""
    with Uneven() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.hold.set()
            server.shutdown()
            thread.join()
