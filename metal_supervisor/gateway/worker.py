"""A worker of the gateway: it accepts connections, reads what serves, and ends in order."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import io
import logging
import os
import signal
import socket
import ssl
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from metal_supervisor.gateway import watched
from metal_supervisor.gateway.access import Doorman
from metal_supervisor.gateway.backends import BackendReader
from metal_supervisor.gateway.connections import ClientConnections
from metal_supervisor.gateway.holder import SOCKET_FILE
from metal_supervisor.gateway.listeners import Listeners
from metal_supervisor.gateway.proxy import CONTAINERS, Proxy
from metal_supervisor.gateway.tls import BadCertificate
from metal_supervisor.gateway.watched import WatchedFiles
from metal_supervisor.host import processes
from metal_supervisor.settings.checks import listed
from metal_supervisor.settings.schema import GATEWAY, Settings
from metal_supervisor.spec.document import items
from metal_supervisor.spec.processes import EngineUse
from metal_supervisor.spec.types import Json
from metal_supervisor.state import gateway_note, use_notes
from metal_supervisor.state.directory import StateDir
from metal_supervisor.state.doorbell import Doorbell, ring

LOOK_EVERY_S = 5.0
RETIRED_LOOK_S = 0.2
RETRY_S = 10.0
INTEGER_DIGITS = 640
"""Of an integer in a body: the fewest that Python lets be the limit."""
KEPT_ALIVE_S = 3.0
"""Time that clients of a retired worker have to be told, with an answer, that their connection ends."""
TAKEN = "the port of the gateway is taken; free it, or set --gateway"
HANDED_OVER = 0
"""Exit code of a worker whose successor serves: the only one after which supervisord leaves the program ended."""
TERMINATED = 128 + signal.SIGTERM
"""Exit code of any other worker, which supervisord starts again unless it was told to stop it."""
log = logging.getLogger("gateway")


class _Log(io.TextIOBase):
    """Standard error that loses lines while supervisord, which may hang, reads none: to wait would halt all streams."""

    def __init__(self) -> None:
        if not sys.stderr.isatty():  # a terminal is shared with other programs
            os.set_blocking(sys.stderr.fileno(), False)

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            os.write(sys.stderr.fileno(), text.encode("utf-8", "replace"))
        return len(text)


def run(settings: Settings, directory: StateDir, each_look: Callable[[], object]) -> int:
    """Serve until TERM or INT, or until another worker serves. Returns the exit code.

    `each_look`: called every LOOK_EVERY_S.
    """
    # Longer ones in a body would hold up all streams: the time is quadratic, and no other thread runs meanwhile.
    if hasattr(sys, "set_int_max_str_digits"):  # not in Python 3.10.6 and before
        sys.set_int_max_str_digits(INTEGER_DIGITS)
    for each in logging.getLogger().handlers:
        if isinstance(each, logging.StreamHandler):
            each.setStream(_Log())

    async def main() -> bool:
        return await Worker(settings, directory, each_look).serve()

    return HANDED_OVER if asyncio.run(main()) else TERMINATED


class Worker:
    """Serves until it is told to end, or another worker serves. Made where an event loop runs."""

    def __init__(self, settings: Settings, directory: StateDir, each_look: Callable[[], object]) -> None:
        self._settings, self._state, self._each_look = settings, directory, each_look
        self._reader = BackendReader(settings, directory)
        self._doorman = Doorman()
        self._watched: list[WatchedFiles] = []
        self._tls: ssl.SSLContext | None = None
        self._public = "{}:{}".format(*settings.gateway_address)
        self._listeners: Listeners | None = None
        self._fronts = [each for each in items(gateway_note.read(directory.path), "fronts") if isinstance(each, int)]
        """Ports of on-demand services at which it listens; until it does, those of the worker before."""
        self._problems: dict[str, str] = {}
        """Why an address cannot be listened on; of "": why none can."""
        self._taken: set[str] = set()
        """Addresses of on-demand services that other programs have."""
        origins = frozenset(listed(settings.gateway_origins))
        self._proxy = Proxy(
            self._reader, self._doorman, self._hosts(), settings.gateway_address[1], self._keep_uses, origins
        )
        self._server = ClientConnections(self._proxy)
        self._news = asyncio.Event()
        self._bell: Doorbell | None = None
        self._serves = False
        self._retired = False

    async def serve(self) -> bool:
        """Serve until TERM or INT, or until another worker serves; return once the requests under way have ended.

        True if another worker serves.
        """
        loop, leave = asyncio.get_running_loop(), asyncio.Event()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, leave.set)
        self._reader.read()
        self._proxy.room.look(self._reader.services)
        follows, listens, leaves = map(asyncio.create_task, (self._follow(), self._listen(), leave.wait()))
        await asyncio.wait((follows, listens, leaves), return_when=asyncio.FIRST_COMPLETED)
        for task in (follows, listens):
            if task.done():
                task.result()  # raises its error
        listens.cancel()
        await asyncio.gather(listens, return_exceptions=True)
        if self._retired and not leave.is_set():
            await self._finish_unhurried(leave)
        await self._finish()
        for each in (follows, leaves):
            each.cancel()
        await asyncio.gather(follows, leaves, return_exceptions=True)
        return self._retired

    def _open_bell(self) -> None:
        """Hear the doorbell. Its FIFO wakes one reader only, so a worker that does not serve leaves it alone."""
        bell = self._bell = Doorbell(self._state.path, "gateway")

        def rung() -> None:
            bell.wait(0)
            self._news.set()

        asyncio.get_running_loop().add_reader(bell.fileno(), rung)
        self._news.set()  # it may have been rung since the records were read

    # ── what serves ──────────────────────────────────────────────────────────────────────────────

    async def _follow(self) -> None:
        """Read the records whenever the doorbell rings, and now and then."""
        news = self._news
        while True:
            with contextlib.suppress(asyncio.TimeoutError):
                # One that retired does not hear the doorbell any more, and may have requests that wait.
                waits = self._retired and self._proxy.room.waiting.total()
                await asyncio.wait_for(news.wait(), RETIRED_LOOK_S if waits else LOOK_EVERY_S)
            if news.is_set():
                await asyncio.sleep(max(0.0, self._reader.next_at - time.monotonic()))
            news.clear()
            try:
                await asyncio.to_thread(self._reader.read)
            except OSError:
                log.exception("the records cannot be read; what was read last stays")
            self._proxy.hosts = self._hosts()
            self._proxy.room.look(self._reader.services)
            self._proxy.traffic.forget_all_but([(each.namespace, each.name) for each in self._reader.services.backends])
            if self._listeners is not None and not self._retired:
                self._listeners.fronts(self._reader.services.fronts())
            self._each_look()
            for each in self._watched:
                each.look()
            self._tell()

    def _hosts(self) -> frozenset[str] | None:
        """Names for the Host header: a Mac may get another. With keys any will do, as a page with its own has none."""
        if self._settings.gateway_keys_path:
            return None
        own = socket.gethostname().lower()
        short = own.partition(".")[0]
        return frozenset({"localhost", *CONTAINERS, own, short, f"{short}.local"} - {""})

    # ── the listener ─────────────────────────────────────────────────────────────────────────────

    async def _listen(self) -> None:
        """Accept connections on the holder's sockets, from when there is one until another worker does."""
        while not self._prepared():
            await asyncio.sleep(RETRY_S)
        path = f"{self._state.home}/{SOCKET_FILE}"
        self._listeners = Listeners(path, self._public, self._server.accept, self._not_given)
        self._listeners.fronts(self._reader.services.fronts())
        await self._listeners.serve(self._tls, self._serving)
        self._retired = True
        if self._bell is not None:  # each ring wakes one reader, which should be the next worker
            asyncio.get_running_loop().remove_reader(self._bell.fileno())

    def _serving(self, address: str) -> None:
        if self._bell is None:
            self._open_bell()
        if address == self._public:
            self._serves = True
            self._tell()
            log.info("listening", extra={"url": self._settings.gateway_url})

    def _not_given(self, address: str, why: str) -> None:
        """Note why an address cannot be listened on, "" once it can."""
        if not why or not address:
            told = why
        elif (told := self._problems.get(address, "")) and f" cannot be listened on: {why}" in told:
            pass  # who has it takes some time to find
        elif address == self._public:
            holder = processes.port_holder(self._settings.gateway_address[1])
            told = f"{self._settings.gateway or GATEWAY} cannot be listened on: {why} ({holder} has it); {TAKEN}"
        else:
            told = f"{address} cannot be listened on: {why}; an on-demand service is not reached there"
        theirs = {address} if why == os.strerror(errno.EADDRINUSE) and address not in ("", self._public) else set()
        before, self._taken = self._taken, self._taken - {address} | theirs
        self._say(told, address)
        if self._taken != before:  # the controller chooses another
            ring(self._state.path, "controller")

    def _prepared(self) -> bool:
        """Load keys and certificate for the first time; False, with the problem told, if that cannot be."""
        settings = self._settings
        if problem := settings.gateway_problem:
            self._say(problem)
            return False
        if (path := settings.gateway_keys_path) and not self._watched:
            keys = watched.keys(path, self._doorman, settings.gateway_keys_secret)
            keys.look()
            self._watched.append(keys)
        if settings.gateway_tls_cert and self._tls is None:
            pair = (Path(each).expanduser() for each in (settings.gateway_tls_cert, settings.gateway_tls_key))
            try:
                watch, self._tls = watched.certificate(*pair)
            except BadCertificate as error:
                self._say(f"--gateway-tls-cert: {error}")
                return False
            self._watched.append(watch)
        self._problems.pop("", None)
        return True

    def _say(self, problem: str, address: str = "") -> None:
        """Log a problem once, and keep it for `status`. `address`: the one it concerns, "" for all."""
        if problem and problem != self._problems.get(address):
            log.error("the gateway cannot listen; it is tried again", extra={"why": problem})
        self._problems[address] = problem
        self._tell()

    def _keep_uses(self, uses: Mapping[str, EngineUse]) -> bool:
        """Keep the uses of on-demand engines for the controller, and wake it; False if they cannot be kept."""
        kept = use_notes.write(self._state.path, uses)
        ring(self._state.path, "controller")
        return kept

    def _tell(self) -> None:
        """Write the gateway's note for `status`; the worker that serves does, or without one that which is to."""
        if self._retired:
            return
        problems = [*self._problems.values(), *(each.problem for each in self._watched)]
        told = "; ".join(each for each in problems if each)
        if not self._serves and (others := self._note_of_another()):
            if told:
                gateway_note.write(self._state.path, {**others, "next": {"pid": os.getpid(), "problem": told}})
            return
        note: Json = {
            "at": time.time(),
            "pid": os.getpid(),
            "url": self._settings.gateway_url,
            "problem": told,
            "closed": any(self._problems.get(each) for each in ("", self._public)),
        }
        flights = [[*self._reader.services.key_of(name), count] for name, count in self._proxy.in_flight.items()]
        waiting = [[*self._reader.services.key_of(name), count] for name, count in self._proxy.room.waiting.items()]
        note |= {"active": self._proxy.active, "inFlight": flights, "waiting": waiting}
        note |= self._proxy.traffic.as_json()
        # The holder keeps the sockets of the worker before, so they count until this one listens, or cannot.
        addresses = [] if self._problems.get("") else self._reader.services.fronts()
        wanted = {_port(each) for each in addresses if not self._problems.get(each)}
        now = self._listeners.ports if self._listeners is not None else ()
        fronts = sorted({*now, *(wanted & set(self._fronts))})
        taken = sorted(_port(each) for each in self._taken.intersection(addresses))
        gateway_note.write(self._state.path, {**note, "fronts": fronts, "taken": taken})
        if fronts != self._fronts:
            self._fronts = fronts
            ring(self._state.path, "sidecar")

    def _note_of_another(self) -> Json:
        """The note if it is that of another worker, which lives, else {}. `upgrade` reads what is added as `next`."""
        note = gateway_note.read(self._state.path)
        return note if note.get("pid") != os.getpid() and processes.has_written(note) else {}

    async def _finish_unhurried(self, leave: asyncio.Event) -> None:
        """Let the requests under way end, however long they take, while another worker takes the new ones."""
        proxy = self._proxy
        log.info("another worker serves; this one finishes its answers", extra={"count": proxy.active})
        proxy.closing = True  # connections that are kept alive are told with their next answer
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(leave.wait(), KEPT_ALIVE_S)
        self._server.close_idle()
        while proxy.active and not leave.is_set():
            await asyncio.sleep(0.05)
            self._server.close_idle()

    async def _finish(self) -> None:
        """Let the requests at engines end, for as long as the system's stop allows."""
        proxy = self._proxy
        proxy.closing = True
        proxy.room.close()
        self._server.close_idle()
        until = time.monotonic() + self._settings.stop_timeout
        while proxy.active and time.monotonic() < until:
            await asyncio.sleep(0.02)
            self._server.close_idle()
        if proxy.active:
            detail = {"count": proxy.active, "seconds": self._settings.stop_timeout}
            log.warning("some answers are cut: they did not end in time", extra=detail)
        await self._server.shutdown(0.5)
        await proxy.close()
        use_notes.remove(self._state.path)


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])
