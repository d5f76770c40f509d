"""Asks an engine, over loopback HTTP, what a runtime described as data: does it serve, and is it ours?

Every question has a timeout and asks for no tokens, so a probe can neither hang nor disturb. The one exception is the
first request of a process, which may take as long as loading: it is looked at now and then, and can be given up.
"""

from __future__ import annotations

import http.client
import io
import json
import socket
import time
from dataclasses import dataclass

from metal_supervisor.spec import first_request
from metal_supervisor.spec.progress_bar import printable
from metal_supervisor.spec.types import Probe

TIMEOUT_S = 2.0
MOST_BYTES = 1 << 20


@dataclass(frozen=True)
class ProbeAnswer:
    """What a probe found."""

    ready: bool
    message: str
    """Why not, "" when ready."""
    refused: bool = False
    """Nobody listens there."""


class _Received:
    """What was received, as `HTTPResponse` wants to read it."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, _mode: str) -> io.BytesIO:
        return io.BytesIO(self._data)


def _get(host: str, port: int, path: str, timeout_s: float = TIMEOUT_S) -> tuple[int, bytes]:
    """(status, body)."""
    return _parsed(_received(host, port, path, timeout_s))


def _received(host: str, port: int, path: str, timeout_s: float, key: str = "") -> bytes:
    """A whole answer, or MOST_BYTES of it and a little more.

    One deadline for all of it: an engine that drips bytes, however fast, is no better than one that hangs.
    """
    until = time.monotonic() + timeout_s
    data = bytearray()
    head = [f"GET {path} HTTP/1.1", f"Host: {host}:{port}", "Connection: close"]
    head += [f"Authorization: Bearer {key}"] if key else []
    with _connected(host, port, timeout_s) as connection:
        connection.sendall("\r\n".join([*head, "", ""]).encode())
        while len(data) < MOST_BYTES:
            if (left_s := until - time.monotonic()) <= 0:
                raise TimeoutError
            connection.settimeout(left_s)
            part = connection.recv(65536)
            if not part:
                break
            data += part
    return bytes(data)


def _connected(host: str, port: int, timeout_s: float) -> socket.socket:
    connection = socket.create_connection((host, port), timeout=timeout_s)
    try:
        if connection.getsockname() == connection.getpeername():
            raise ConnectionRefusedError  # nobody listens, and the system gave this connection that very port
    except OSError:
        connection.close()
        raise
    return connection


def _parsed(data: bytes) -> tuple[int, bytes]:
    """(status, body) of a whole HTTP answer. Raises HTTPException if it is cut, or none.

    Whatever else reading it raises is one, too: a length that no machine can count is no error of ours.
    """
    answer = http.client.HTTPResponse(_Received(data))  # type: ignore[arg-type]
    try:
        answer.begin()
        return answer.status, answer.read()
    except (OSError, http.client.HTTPException):
        raise
    except Exception as error:  # noqa: BLE001 - what an engine sends must end no thread of ours
        raise http.client.HTTPException(type(error).__name__) from None


def probe(
    port: int, asked: Probe, identify: bool, host: str = "127.0.0.1", timeout_s: float = TIMEOUT_S
) -> ProbeAnswer:
    """Whether the engine on the port serves; with `identify`, whether it is the one we mean."""
    try:
        status, body = _get(host, port, asked.path, timeout_s)
        if status == 503:
            return ProbeAnswer(False, "the engine is loading its model")
        if status != 200:
            return ProbeAnswer(False, f"{asked.path} answered {status}")
        if asked.expects.encode() not in body:
            return ProbeAnswer(False, f"{asked.path} answered something else: {_shown(body)}")
        return _identity(host, port, asked, timeout_s) if identify and asked.identity else ProbeAnswer(True, "")
    except ConnectionRefusedError:
        return ProbeAnswer(False, "the engine does not listen yet", refused=True)
    except TimeoutError:
        return ProbeAnswer(False, f"{asked.path} has not answered within {timeout_s:g} s")
    except (OSError, http.client.HTTPException) as error:
        return ProbeAnswer(False, f"{asked.path}: {type(error).__name__}")


def _shown(body: bytes) -> str:
    text = "".join(char for char in body[:80].decode("utf-8", "replace") if char.isprintable())
    return text or "nothing"


def turns(port: int, asked: Probe, host: str = "127.0.0.1", timeout_s: float = TIMEOUT_S) -> bool:
    """Whether the engine's work loop takes requests: what its slots do is answered from there, not by its server.

    An engine that is to fall asleep is not asked: each such question counts as work, and puts that off (or wakes it).
    Its health has to do.
    """
    if not asked.busy_path or asked.asleep_path:
        return True
    try:
        _get(host, port, asked.busy_path, timeout_s)
    except TimeoutError:
        return False
    except (OSError, http.client.HTTPException):
        return True  # refused or cut: no word about the work loop
    return True


def busy(port: int, asked: Probe, host: str = "127.0.0.1", timeout_s: float = TIMEOUT_S) -> bool | None:
    """Whether the engine answers somebody right now; one too busy to say so is busy. None if it does not tell.

    One that sleeps answers nobody, and is not woken by asking.
    """
    if not asked.busy_path:
        return None
    try:
        if asked.asleep_path and _sleeps(host, port, asked, timeout_s):
            return False
        status, body = _get(host, port, asked.busy_path, timeout_s)
    except TimeoutError:
        return True
    except (OSError, http.client.HTTPException):
        return False  # nobody listens, or it cuts everybody off
    try:
        slots = json.loads(body) if status == 200 else None
    except (ValueError, RecursionError):
        slots = None
    if not isinstance(slots, list):
        return None  # it wants a key, or was told to keep its slots to itself
    return any(isinstance(slot, dict) and slot.get("is_processing") is True for slot in slots)


def _sleeps(host: str, port: int, asked: Probe, timeout_s: float) -> bool:
    """Whether the engine says that it sleeps. Raises OSError, also when it does not answer in time."""
    try:
        _, body = _get(host, port, asked.asleep_path, timeout_s)
        told = json.loads(body)
    except (http.client.HTTPException, ValueError, RecursionError):
        return False
    return isinstance(told, dict) and told.get("is_sleeping") is True


class FirstRequest:
    """The first request of an engine's process, under way from the first `wait` on."""

    def __init__(
        self, port: int, asked: Probe, key: tuple[str, str], timeout_s: float, host: str = "127.0.0.1"
    ) -> None:
        """`key`: (variable, key) as of `first_request.key_of`; `timeout_s`: for the whole of the answer."""
        self._at, self._asked, self._key, self._timeout_s = (host, port), asked, key, timeout_s
        self._until = time.monotonic() + timeout_s
        self._connection: socket.socket | None = None
        self._data = bytearray()

    def wait(self, seconds: float) -> ProbeAnswer | None:
        """What came of it; None if nothing has within these seconds."""
        path = self._asked.first_path
        try:
            connection = self._connection or self._sent()
            if not self._received(connection, time.monotonic() + seconds):
                late = time.monotonic() >= self._until
                return ProbeAnswer(False, f"{path} has not answered within {self._timeout_s:g} s") if late else None
            why = first_request.fault(path, *_parsed(bytes(self._data)), self._key)
            return ProbeAnswer(not why, why)
        except (OSError, http.client.HTTPException) as error:
            return ProbeAnswer(False, f"{path} was not answered to the end: {type(error).__name__}")

    def close(self) -> None:
        """Gives it up: an engine ends what nobody waits for."""
        if self._connection is not None:
            self._connection.close()

    def _sent(self) -> socket.socket:
        host, port = self._at
        body = self._asked.first_body
        if self._asked.names_itself:
            body = first_request.named(body, _own_name(host, port, self._asked))
        head = [f"POST {self._asked.first_path} HTTP/1.1", f"Host: {host}:{port}", "Connection: close"]
        head += ["Content-Type: application/json", f"Content-Length: {len(body.encode())}"]
        head += [f"Authorization: Bearer {self._key[1]}"] if self._key[1] else []
        connection = self._connection = _connected(host, port, TIMEOUT_S)
        connection.sendall("\r\n".join([*head, "", body]).encode())
        return connection

    def _received(self, connection: socket.socket, until: float) -> bool:
        """Reads what comes until then; whether that was the end of the answer."""
        while (left_s := until - time.monotonic()) > 0:
            connection.settimeout(left_s)
            try:
                part = connection.recv(65536)
            except TimeoutError:
                return False
            self._data += part
            if not part or len(self._data) >= MOST_BYTES:
                return True
        return False


def _own_name(host: str, port: int, asked: Probe) -> str:
    """The first name under which an engine says that it serves, "" if it says none. Raises OSError, HTTPException."""
    _, body = _get(host, port, asked.identity_path)
    try:
        return str(json.loads(body)["data"][0]["id"])
    except (ValueError, LookupError, TypeError, RecursionError):
        return ""


def metrics(host: str, port: int, timeout_s: float = TIMEOUT_S) -> str:
    """What an engine counts, as Prometheus reads it; "" if it does not tell, wants a key, or is too busy."""
    try:
        status, body = _get(host, port, "/metrics", timeout_s)
    except (OSError, http.client.HTTPException):
        return ""
    return body.decode("utf-8", "replace") if status == 200 else ""


def counted(host: str, port: int, path: str, key: str = "", timeout_s: float = TIMEOUT_S) -> tuple[str, str]:
    """(what an engine counts, "") or ("", why there is nothing, by `engine_metrics.REASONS`).

    `key`: sent along, "" for none. A redirect is not followed.
    """
    try:
        data = _received(host, port, path, timeout_s, key)
        if len(data) >= MOST_BYTES:
            return "", "size"
        status, body = _parsed(data)
    except TimeoutError:
        return "", "timeout"
    except OSError:
        return "", "unreachable"
    except http.client.HTTPException:
        return "", "format"
    if status == 200:
        return body.decode("utf-8", "replace"), ""
    return "", "key" if status in (401, 403) else "redirect" if 300 <= status < 400 else "status"


def answers_at(host: str, port: int, timeout_s: float = 1.0) -> bool:
    """Whether anybody listens there, asked from here."""
    try:
        _connected(host, port, timeout_s).close()
    except OSError:
        return False
    return True


def _identity(host: str, port: int, asked: Probe, timeout_s: float) -> ProbeAnswer:
    status, body = _get(host, port, asked.identity_path, timeout_s)
    try:
        listed = json.loads(body)["data"]
        loaded = [item for item in listed if item.get("loaded", True)]  # a daemon lists those it could load, too
        names = {name for item in loaded for name in (item.get("id"), *(item.get("aliases") or ()))}
        names |= {str(name).removesuffix(":latest") for name in names}  # Ollama's, by the tag that means nothing
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        names = None
    if status != 200 or names is None:
        return ProbeAnswer(False, f"{asked.identity_path} answered {status} without a list of models")
    if asked.identity in names:
        return ProbeAnswer(True, "")
    if asked.shared:
        return ProbeAnswer(False, f"the daemon has not loaded {asked.identity}")
    shown = printable(", ".join(sorted(str(name) for name in names)))[:200]
    return ProbeAnswer(False, f"port {port} is answered by another server: it serves {shown}, not {asked.identity}")
