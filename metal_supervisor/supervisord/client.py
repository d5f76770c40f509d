"""supervisord over XML-RPC, through its unix socket.

supervisor's own transport has no timeout and never recovers from a restart of supervisord, so this is a
small one of our own. No call waits for its effect (`wait=False`); the outcome is read from the process table
afterwards, never from a return value.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import socket
import threading
import time
import xmlrpc.client
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any
from xml.parsers.expat import ExpatError

from metal_supervisor.spec.processes import Diff, ProgramState, State
from metal_supervisor.spec.user_error import UserError

TIMEOUT_S = 5.0
# A reload takes supervisord half a second with 500 programs, and one that timed out would only be repeated: on a busy
# machine for ever.
RELOAD_TIMEOUT_S = 30.0
WHOLE_S = 60.0
BAD_NAME = 10
ALREADY_STARTED = 60
NOT_RUNNING = 70
ALREADY_ADDED = 90
STILL_RUNNING = 91
CANT_REREAD = 92
UNKNOWN_METHOD = 1
SHUTDOWN_STATE = 6


class Unavailable(UserError):
    """supervisord did not answer, or is shutting down."""


class ShuttingDown(Unavailable):
    """supervisord answers that it is shutting down, and everything below it with it."""

    def __init__(self) -> None:
        super().__init__("supervisord is shutting down")


class Refused(Exception):
    """supervisord answered with a fault."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"fault {code}: {text}")
        self.code = code


class BrokenFile(Exception):
    """A reload failed because of one file, whose path is given if it is known."""

    def __init__(self, path: Path | None, text: str) -> None:
        super().__init__(text)
        self.path = path


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)  # the transport closes a connection that fails


class _Transport(xmlrpc.client.Transport):
    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path
        self.timeout_s = TIMEOUT_S

    def make_connection(self, host: Any) -> http.client.HTTPConnection:
        connection = self._connection[1] or _Connection(self._path)
        self._connection = host, connection
        connection.timeout = self.timeout_s
        if connection.sock is not None:
            connection.sock.settimeout(self.timeout_s)
        return connection


class Supervisord:
    """A client of one supervisord. Safe to share between threads."""

    def __init__(self, socket_path: str) -> None:
        self._path = socket_path
        self._lock = threading.Lock()
        self._transport = _Transport(socket_path)
        self._proxy: xmlrpc.client.ServerProxy | None = None
        self._reading = threading.Lock()
        self._table: dict[str, ProgramState] = {}
        self._edition = ""
        """Edition of that table."""
        self._whole_at = 0.0
        """Monotonic time at which all of it is read again, whatever has changed."""

    def call(self, method: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        """One RPC. Raises Unavailable or Refused."""
        with self._lock:
            try:
                if self._proxy is None:
                    self._transport = _Transport(self._path)
                    self._proxy = xmlrpc.client.ServerProxy("http://localhost", transport=self._transport)
                self._transport.timeout_s = timeout_s or TIMEOUT_S
                return getattr(self._proxy, method)(*arguments)
            except xmlrpc.client.Fault as fault:
                if fault.faultCode == SHUTDOWN_STATE:
                    raise ShuttingDown from None
                raise Refused(fault.faultCode, fault.faultString) from None
            except (OSError, http.client.HTTPException, xmlrpc.client.Error, ExpatError, ValueError) as error:
                self.close()
                raise Unavailable(f"supervisord at {self._path}: {error!r:.200}") from None

    def close(self) -> None:
        """Drop the connection; the next call makes a new one."""
        if self._proxy is not None:
            with contextlib.suppress(OSError):
                self._proxy("close")()
        self._proxy = None

    def table(self) -> Mapping[str, ProgramState]:
        """The process table, by program name; the very same mapping while nothing changes, and each row as well."""
        with self._reading:
            told = self._ours("changes", self._edition if time.monotonic() < self._whole_at else "")
            if told is None:
                every = self.call("supervisor.getAllProcessInfo")
                return _states((row["group"], row["statename"], row["pid"], row["start"], row["stop"]) for row in every)
            try:
                edition, whole, rows, gone = json.loads(told)
                changed = _states(rows)
            except (TypeError, ValueError) as error:
                raise Unavailable(f"supervisord at {self._path}: {error!r:.200}") from None
            if whole:
                self._table, self._whole_at = changed, time.monotonic() + WHOLE_S
            elif changed or gone:
                self._table = {name: row for name, row in self._table.items() if name not in gone} | changed
            self._edition = edition
            return self._table

    def _ours(self, method: str, *arguments: Any) -> Any:
        """Result of a method of `rpc_plugin`; None if this supervisord, of an earlier release, has none.

        Raises Unavailable or Refused.
        """
        try:
            return self.call(f"metal.{method}", *arguments)
        except Refused as error:
            if error.code != UNKNOWN_METHOD:
                raise
            return None

    def poke(self) -> None:
        """Wake supervisord's loop, so that it reaps dead processes now rather than within two seconds.

        Two calls, because a death is found in one turn of the loop and acted on in the next.
        """
        for _ in range(2):
            self.call("supervisor.getState")

    def reread(self, programs: Collection[str]) -> Diff | None:
        """Have supervisord read these programs' sections again; returns what they would change.

        None if it cannot: all of them have to be read again.
        """
        try:
            told = self._ours("reread", sorted(programs))
        except Refused as error:
            if error.code != CANT_REREAD:
                raise
            return None
        return None if told is None else Diff(*(frozenset(each) for each in told[0]))

    def reload(self) -> Diff:
        """Have supervisord read its files again; returns what they would change. Raises BrokenFile if one blocks it."""
        try:
            added, changed, removed = self.call("supervisor.reloadConfig", timeout_s=RELOAD_TIMEOUT_S)[0]
        except Refused as error:
            if error.code != CANT_REREAD:
                raise
            named = re.search(r"file: '([^']+)'", str(error))
            raise BrokenFile(Path(named[1]) if named else None, str(error)) from None
        return Diff(frozenset(added), frozenset(changed), frozenset(removed))

    def add(self, *programs: str) -> None:
        """Activate groups whose sections are on file; autostart starts them at once."""
        self._several((ALREADY_ADDED, BAD_NAME), [("addProcessGroup", each) for each in programs])

    def remove(self, program: str) -> None:
        """Drop a group that has no process any more."""
        self._tolerating((BAD_NAME, STILL_RUNNING), "supervisor.removeProcessGroup", program)

    def replace(self, program: str) -> None:
        """Drop a stopped group and activate its new section, with no other client in between."""
        calls = [("removeProcessGroup", program), ("addProcessGroup", program)]
        self._several((BAD_NAME, ALREADY_ADDED, STILL_RUNNING), calls)

    def start(self, program: str) -> None:
        """Start a program; no error if it runs already."""
        self._tolerating((ALREADY_STARTED, BAD_NAME), "supervisor.startProcess", program, False)

    def stop(self, program: str) -> None:
        """Send the stop signal; the process may take its time."""
        self._tolerating((NOT_RUNNING, BAD_NAME), "supervisor.stopProcess", program, False)

    def signal(self, program: str, name: str) -> None:
        self._tolerating((NOT_RUNNING, BAD_NAME), "supervisor.signalProcess", program, name)

    def shutdown(self) -> None:
        """Shut supervisord down, and everything below it."""
        self.call("supervisor.shutdown")

    def answers(self) -> bool:
        """True if a supervisord answers, even with a fault or while it shuts down."""
        try:
            self.call("supervisor.getState")
        except (Refused, ShuttingDown):
            return True
        except Unavailable:
            return False
        return True

    def _several(self, codes: Collection[int], calls: Iterable[tuple[str, str]]) -> None:
        """Make (method, program) calls in one turn of supervisord's loop; a fault does not stop the others.

        Faults with one of the `codes` are ignored. Raises ShuttingDown or Refused for others.
        """
        asked = [{"methodName": f"supervisor.{method}", "params": [program]} for method, program in calls]
        for answer in self.call("system.multicall", asked):
            if not isinstance(answer, Mapping) or answer["faultCode"] in codes:
                continue
            if answer["faultCode"] == SHUTDOWN_STATE:
                raise ShuttingDown
            raise Refused(answer["faultCode"], answer["faultString"])

    def _tolerating(self, codes: Iterable[int], method: str, *arguments: Any) -> None:
        try:
            self.call(method, *arguments)
        except Refused as error:
            if error.code not in codes:
                raise


def _states(rows: Iterable[Any]) -> dict[str, ProgramState]:
    return {
        name: ProgramState(name, State(state), pid, float(start), float(stop)) for name, state, pid, start, stop in rows
    }
