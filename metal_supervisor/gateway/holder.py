"""The holder of the gateway's listening sockets: it gives them to one worker after another.

A worker of another release can take over, or one that died be started anew, without a connection refused or reset: the
kernel queues them in the socket that the holder keeps open. The holder answers no client, and imports no more than it
needs. If it dies itself, the worker keeps serving, and gives the sockets to the next holder.

Workers talk to it over a socket in the state directory, one line of JSON for each message: `want` with an address (and
with `own` and the listening socket, if the worker has it), answered by `listener` and the socket, or by `error`; `drop`
with one that is not wanted any more; `serving` once the worker accepts; `retire` to those that were born before one
that serves.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import selectors
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from metal_supervisor import launch
from metal_supervisor.spec.document import Json

SOCKET_FILE = "gateway.sock"
MOST_MESSAGE_BYTES = 4096
MOST_DESCRIPTORS = 4
BACKLOG = 1024
LOOK_EVERY_S = 1.0
log = logging.getLogger("gateway-holder")


def bound(address: str, port: int) -> socket.socket:
    """A listening socket. Raises OSError."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            # As engines do: all addresses are those of IPv4, too.
            both = address == "::" and socket.has_dualstack_ipv6()
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(not both))
        listener.bind((address, port))
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def send(to: socket.socket, message: Json, *sockets: socket.socket) -> None:
    """Send one message, with sockets. Raises OSError."""
    socket.send_fds(to, [json.dumps(message).encode() + b"\n"], [each.fileno() for each in sockets])


def received(connection: socket.socket, rest: bytes) -> tuple[list[Json], bytes, list[socket.socket]]:
    """(whole messages, the beginning of another, sockets that came along).

    Raises OSError, and EOFError at the end, or for what neither side sends.
    """
    content, descriptors, _, _ = socket.recv_fds(connection, MOST_MESSAGE_BYTES, MOST_DESCRIPTORS)
    sockets = [socket.socket(fileno=each) for each in descriptors]
    if not content:
        raise EOFError
    *lines, rest = (rest + content).split(b"\n")
    try:
        found = [json.loads(line) for line in lines]
    except (ValueError, RecursionError):
        found = [None]
    if len(rest) > MOST_MESSAGE_BYTES or not all(isinstance(each, dict) for each in found):
        for each in sockets:
            each.close()
        raise EOFError
    return found, rest, sockets


@dataclass
class WorkerLine:
    """A worker's connection."""

    connection: socket.socket
    rest: bytes = b""
    addresses: set[str] = field(default_factory=set)
    born: float = 0.0
    """Monotonic time of its start: the machine's, so that workers can be compared."""
    serving: bool = False


class Holder:
    """Keeps the listening sockets, and tells workers to retire once another serves."""

    def __init__(self, path: Path) -> None:
        """`path`: of the socket that workers connect to, in a directory that only this user can enter."""
        self._path = path
        self._listeners: dict[str, socket.socket] = {}
        self._workers: dict[int, WorkerLine] = {}
        self._selector = selectors.DefaultSelector()

    def run(self, stopped: Callable[[], bool]) -> None:
        """Serve workers until `stopped`, which is looked at every LOOK_EVERY_S."""
        with self._door() as door:
            self._selector.register(door, selectors.EVENT_READ)
            while not stopped():
                for key, _ in self._selector.select(LOOK_EVERY_S):
                    if key.fileobj is door:
                        self._admit(door)
                    elif (line := self._workers.get(key.fd)) is not None:
                        self._hear(line)

    def _door(self) -> socket.socket:
        self._path.unlink(missing_ok=True)
        door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        before = os.umask(0o177)
        try:
            door.bind(str(self._path))
        finally:
            os.umask(before)
        door.listen(8)
        door.setblocking(False)
        return door

    def _admit(self, door: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):
            connection, _ = door.accept()
            connection.setblocking(False)
            self._workers[connection.fileno()] = WorkerLine(connection)
            self._selector.register(connection, selectors.EVENT_READ)

    def _hear(self, line: WorkerLine) -> None:
        try:
            messages, line.rest, sockets = received(line.connection, line.rest)
            for message in messages:
                self._obey(line, message, sockets)
            for each in sockets:
                each.close()
        except (OSError, EOFError, ValueError, TypeError, KeyError, OverflowError):
            self._forget(line)

    def _obey(self, line: WorkerLine, message: Json, sockets: list[socket.socket]) -> None:
        if "want" in message:
            address, line.born = str(message["want"]), float(message["born"])
            line.addresses.add(address)
            own = sockets.pop(0) if message.get("own") and sockets else None
            if own is not None and self._listeners.setdefault(address, own) is not own:
                own.close()
            self._give(line, address)
        elif "drop" in message:
            line.addresses.discard(str(message["drop"]))
            self._close_unwanted()
        elif message.get("serving"):
            line.serving = True
            self._retire()

    def _give(self, line: WorkerLine, address: str) -> None:
        try:
            if address not in self._listeners:
                host, _, number = address.rpartition(":")
                host, port = host.strip("[]"), int(number)
                if launch.holder_of(port, host) == launch.ANSWERED:
                    raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
                self._listeners[address] = bound(host, port)
        except (OSError, OverflowError) as error:  # the latter for a port that no system has
            why = getattr(error, "strerror", "") or str(error)
            send(line.connection, {"error": why, "address": address})
            return
        send(line.connection, {"listener": address}, self._listeners[address])

    def _retire(self) -> None:
        """Tell all but the youngest worker that serves to finish, and close what no worker listens on."""
        serving = [each for each in self._workers.values() if each.serving]
        youngest = max(serving, key=lambda each: each.born)
        for each in serving:
            if each is not youngest:
                each.serving = False
                with contextlib.suppress(OSError):
                    send(each.connection, {"retire": True})
        self._close_unwanted()
        log.info("another worker serves", extra={"address": ", ".join(sorted(youngest.addresses))})

    def _close_unwanted(self) -> None:
        """Close what no worker listens on. Not when a worker has died: the next one may want the same."""
        wanted = {address for each in self._workers.values() for address in each.addresses}
        for address in self._listeners.keys() - wanted:
            self._listeners.pop(address).close()

    def _forget(self, line: WorkerLine) -> None:
        self._selector.unregister(line.connection)
        del self._workers[line.connection.fileno()]
        line.connection.close()
