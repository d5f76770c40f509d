"""A daemon that answers what a test tells it to, also what no daemon should."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from range_server import Quiet, QuietPage

FULL = -1


@dataclass(frozen=True)
class Answer:
    """One answer."""

    status: int
    body: bytes = b""
    promised_bytes: int = FULL
    """What Content-Length says; FULL: the truth. A longer one is an answer that is cut off."""
    stalls: bool = False
    """It is held, after its body, until the test is over."""


def said(status: int, body: object) -> Answer:
    """An answer with JSON."""
    return Answer(status, json.dumps(body).encode())


class Stand(Quiet):
    """Answers by method and path; what it was not told is a 404 without a body."""

    def __init__(self) -> None:
        super().__init__(_Page)
        self.answers: dict[tuple[str, str], Answer | Callable[[], Answer]] = {}
        self.asked: list[tuple[str, str, bytes, str]] = []
        """(method, path, body, Authorization) of every request."""
        self.reached = threading.Event()
        """Something stalls."""

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def paths(self, method: str) -> list[str]:
        """What was asked for by one method, in order."""
        return [path for said, path, _, _ in list(self.asked) if said == method]


class _Page(QuietPage):
    server: Stand

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.asked.append((self.command, self.path, body, self.headers.get("Authorization", "")))
        answer = self.server.answers.get((self.command, self.path), Answer(404))
        answer = answer() if callable(answer) else answer
        promised = len(answer.body) if answer.promised_bytes == FULL else answer.promised_bytes
        self.send_response(answer.status)
        self.send_header("Content-Length", str(promised))
        self.end_headers()
        self.wfile.write(answer.body)
        self.wfile.flush()
        if answer.stalls:
            self.server.reached.set()
            self.server.hold.wait()
        self.close_connection = promised != len(answer.body)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = _answer


@contextlib.contextmanager
def standing() -> Iterator[Stand]:
    """A stand that is gone afterwards."""
    made = Stand()
    threading.Thread(target=made.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield made
    finally:
        made.hold.set()
        made.shutdown()
        made.server_close()
