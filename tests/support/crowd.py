"""Clients that misbehave all at once, in a process of their own: `python -m tests.support.crowd PORT`.

Half of 200 connections say nothing, the others send a header that never ends, or ask for much and read nothing of it;
beside them come headers that are far too large, methods that are not taken and names that are not ours, as fast as
they are answered. They stay until standard input ends; then what was answered is told as JSON: kind -> status -> count.
What has no status is RESET, which is how a server says no that did not read to the end, or one of FAILURES.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator

IDLE = 160
SLOW = 20
DEAF = 20
PATHS = ("/", "/status", "/metrics", "/healthz")
REFUSED = {
    "huge header": lambda path: f"GET {path} HTTP/1.1\r\nHost: localhost\r\nX: {'x' * (64 << 10)}\r\n\r\n",
    "huge path": lambda path: f"GET {path}{'y' * (64 << 10)} HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "method": lambda path: f"DELETE {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
    "host": lambda path: f"GET {path} HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n",
    "none": lambda path: f"\x16\x03\x01{path}\r\n\r\n",
}
"""Kind -> the request, none of which is to be answered with what is asked for."""


RESET = "reset"
FAILURES = UNCONNECTED, UNANSWERED, EMPTY = "not connected", "not answered in time", "closed without a word"
"""What no client is to see, however badly the others behave."""
TIMEOUT_S = 20.0


class _Unconnected(OSError):
    """The server does not take a connection."""


class Crowd:
    """All of them, until `over`."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.over = threading.Event()
        self.answers: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.threads = [threading.Thread(target=self._hold, daemon=True)]
        self.threads += [threading.Thread(target=self._ask, args=(kind,), daemon=True) for kind in REFUSED]

    def _connected(self) -> socket.socket:
        """Raises _Unconnected."""
        try:
            return socket.create_connection(("127.0.0.1", self._port), timeout=TIMEOUT_S)
        except OSError as error:
            raise _Unconnected from error

    def _hold(self) -> None:
        """Keeps connections open, and opens those anew that are closed."""
        held: dict[int, socket.socket] = {}
        while not self.over.wait(0.05):
            for number in range(IDLE + SLOW + DEAF):
                try:
                    if number not in held:
                        held[number] = self._connected()
                        held[number].sendall(self._first(number))
                    elif number < SLOW:
                        held[number].sendall(b"x")
                    elif self._closed(held[number]):
                        raise ConnectionResetError
                except OSError as error:
                    self.answers["held"][UNCONNECTED if isinstance(error, _Unconnected) else "closed"] += 1
                    with contextlib.suppress(KeyError):
                        held.pop(number).close()
            self.answers["held"]["most"] = max(self.answers["held"]["most"], len(held))

    def _first(self, number: int) -> bytes:
        if number < SLOW:
            return b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nX: "
        return b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n" * 20 if number < SLOW + DEAF else b""

    def _closed(self, sock: socket.socket) -> bool:
        try:
            return sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False

    def _ask(self, kind: str) -> None:
        for path in self._paths():
            self.answers[kind][self._answer(REFUSED[kind](path).encode("latin-1"))] += 1

    def _answer(self, request: bytes) -> str:
        """The status that a request is answered with, or what else became of it."""
        answer, otherwise = b"", EMPTY
        try:
            with self._connected() as sock:
                with contextlib.suppress(ConnectionError):  # it may be refused before all was sent
                    sock.sendall(request)
                while part := sock.recv(65536):
                    answer += part
        except _Unconnected:
            return UNCONNECTED
        except TimeoutError:
            return UNANSWERED
        except ConnectionError:
            otherwise = RESET
        words = answer.split(None, 2)
        return words[1].decode("latin-1") if len(words) > 1 else otherwise

    def _paths(self) -> Iterator[str]:
        while not self.over.is_set():
            yield from PATHS


def main(port: int) -> None:
    """Until standard input ends."""
    crowd = Crowd(port)
    for thread in crowd.threads:
        thread.start()
    print("here", flush=True)
    sys.stdin.read()
    crowd.over.set()
    for thread in crowd.threads:
        thread.join(30)
    print(json.dumps(crowd.answers), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
