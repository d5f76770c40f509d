"""A worker's connection to the holder: it brings the listening sockets, and the word to retire."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from metal_supervisor.gateway.holder import Impostor, received, send

RETRY_S = 0.2
TAKEN_RETRY_S = 5.0
CONNECT_S = 5.0
ALONE_S = 60.0
"""Time without a holder after which a worker retires that has no supervisord either."""


@dataclass(frozen=True)
class LinkEvents:
    """What the link reports, from its own thread."""

    listener: Callable[[str, socket.socket], None]
    """A listening socket, once for each address."""
    retire: Callable[[], None]
    """Another worker serves."""
    problem: Callable[[str, str], None]
    """(address, why) of a socket that there is not yet."""


class HolderLink:
    """Connects, and connects again whenever the holder was replaced."""

    def __init__(self, path: str, addresses: Iterable[str], events: LinkEvents) -> None:
        """`path`: of the holder's socket; `addresses`: as ADDRESS:PORT, the most important first."""
        self._path, self._events = path, events
        self._addresses = list(addresses)
        self._born, self._parent = time.monotonic(), os.getppid()
        self._listeners: dict[str, socket.socket] = {}
        self._serving = threading.Event()
        self._retired = False
        self._heard_at = self._born
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None

    def start(self) -> None:
        """Connect in a thread."""
        threading.Thread(target=self._run, name="holder", daemon=True).start()

    def serving(self) -> None:
        """Tell the holder that this worker accepts connections."""
        self._serving.set()
        with self._lock:
            self._tell({"serving": True})

    def want(self, addresses: Iterable[str]) -> None:
        """Replace the addresses: those that are new are asked for, the others given up."""
        wanted = list(addresses)
        with self._lock:
            for address in [each for each in self._addresses if each not in wanted]:
                self._tell({"drop": address})
                if (listener := self._listeners.pop(address, None)) is not None:
                    listener.close()
            for address in [each for each in wanted if each not in self._addresses]:
                self._tell({"want": address, "born": self._born})
            self._addresses = wanted

    def ask_again(self, address: str) -> None:
        """Ask once more for the socket of an address that was taken."""
        with self._lock:
            if address in self._addresses and address not in self._listeners:
                self._tell({"want": address, "born": self._born})

    def _tell(self, message: dict[str, object]) -> None:
        """Send a message if there is a holder; the caller has the lock."""
        with contextlib.suppress(OSError):
            if self._connection is not None:
                send(self._connection, message)

    def _run(self) -> None:
        while not self._retired:
            try:
                with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                    connection.settimeout(CONNECT_S)
                    connection.connect(self._path)
                    connection.settimeout(None)
                    self._heard_at = time.monotonic()
                    self._talk(connection)
            except (OSError, EOFError, Impostor):
                if self._listeners and time.monotonic() - self._heard_at > ALONE_S and os.getppid() != self._parent:
                    self._leave()  # its supervisord was killed, and the next one has no gateway
                elif not self._listeners:
                    self._events.problem(self._addresses[0], "the gateway's holder does not answer; see its log")
            finally:
                with self._lock:
                    if self._connection is not None:
                        self._heard_at = time.monotonic()
                    self._connection = None
            time.sleep(RETRY_S)

    def _talk(self, connection: socket.socket) -> None:
        """Follow the holder until it ends the connection."""
        with self._lock:
            for address in self._addresses:
                own = [self._listeners[address]] if address in self._listeners else []
                send(connection, {"want": address, "born": self._born, "own": bool(own)}, *own)
            self._connection = connection
            if self._serving.is_set():  # to another holder, after the one before died
                send(connection, {"serving": True})
        rest = b""
        while not self._retired:
            messages, rest, sockets = received(connection, rest)
            for message in messages:
                if "error" in message:
                    self._events.problem(str(message.get("address")), str(message["error"]))
                elif "retire" in message:
                    self._leave()
                elif "listener" in message and sockets:
                    self._take(str(message["listener"]), sockets.pop(0))
            for each in sockets:
                each.close()

    def _leave(self) -> None:
        self._retired = True
        with self._lock:
            for each in self._listeners.values():
                each.close()
            self._listeners.clear()
        self._events.retire()

    def _take(self, address: str, listener: socket.socket) -> None:
        with self._lock:
            if address in self._listeners or address not in self._addresses:
                listener.close()
                return
            listener.setblocking(False)
            self._listeners[address] = listener.dup()  # asyncio closes the one that it serves
        self._events.listener(address, listener)
