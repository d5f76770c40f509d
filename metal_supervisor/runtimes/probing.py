"""HTTP probes of an engine, as its runtime describes them: readiness, identity, activity.

Every request has a timeout and generates no tokens, so a probe can neither hang nor disturb. The one exception is the
first request of a process, which may take as long as loading: it is polled, and can be cancelled.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import re
import socket
import struct
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypeVar

from metal_supervisor.host import local_status, processes
from metal_supervisor.spec import first_request
from metal_supervisor.spec.hosts import in_url
from metal_supervisor.spec.terminal_text import printable
from metal_supervisor.spec.types import Probe

TIMEOUT_S = 2.0
CONNECT_S = 1.0
BUSY_S = 0.5
MOST_ASKED = 64
"""Engines that are asked at a time whether they are busy."""
MOST_BYTES = 1 << 20
MODEL_NAME = re.compile(r"\w[\w .:@+/-]{0,199}", re.ASCII)
"""Names of models that a status may show."""
RESET = struct.pack("ii", 1, 0)
"""SO_LINGER of a socket whose close is a reset."""
K = TypeVar("K")


@dataclass(frozen=True)
class ProbeAnswer:
    """The result of a probe."""

    ready: bool
    message: str
    """Reason why not, "" when ready."""
    refused: bool = False
    """The connection was refused."""
    loading: bool = False
    """It answers, and says that it is loading its model."""


def _get(host: str, port: int, path: str, timeout_s: float = TIMEOUT_S) -> tuple[int, bytes]:
    """(status, body) of a GET. Raises OSError, HTTPException."""
    return _parsed(_received(host, port, path, timeout_s))


def _received(host: str, port: int, path: str, timeout_s: float, key: str = "") -> bytes:
    """A whole answer, or MOST_BYTES of it and a little more. Raises OSError.

    One deadline for all of it: an engine that sends bytes one by one, however fast, is no better than one that hangs.
    """
    until = time.monotonic() + timeout_s
    data = bytearray()
    with _connected(host, port, timeout_s) as connection:
        _send(connection, f"GET {path}", f"{in_url(host)}:{port}", key)
        if not _read(connection, data, until):
            raise TimeoutError
    return bytes(data)


def _send(connection: socket.socket, what: str, host: str, key: str, body: str = "") -> None:
    """Send a request. `what`: method and path; `key`: bearer token, "" for none; `body`: JSON. Raises OSError."""
    head = [f"{what} HTTP/1.1", f"Host: {host}", "Connection: close"]
    head += ["Content-Type: application/json", f"Content-Length: {len(body.encode())}"] if body else []
    head += [f"Authorization: Bearer {key}"] if key else []
    connection.sendall("\r\n".join([*head, "", body]).encode())


def _read(connection: socket.socket, data: bytearray, until: float) -> bool:
    """Read more of an answer until then (monotonic). Returns True if it is complete, or larger than MOST_BYTES."""
    while (left_s := until - time.monotonic()) > 0:
        connection.settimeout(left_s)
        try:
            part = connection.recv(65536)
        except TimeoutError:
            return False
        if not part:  # the engine has closed it: a reset ends it for both, where a FIN leaves a port in TIME_WAIT
            with contextlib.suppress(OSError):  # a Mac refuses that for a connection which is reset by then
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        data += part
        if not part or len(data) >= MOST_BYTES:
            return True
    return False


def _connected(host: str, port: int, timeout_s: float) -> socket.socket:
    connection = socket.create_connection((host, port), timeout=timeout_s)
    try:
        if connection.getsockname() == connection.getpeername():
            raise ConnectionRefusedError  # connected to itself: nothing listens, and the ephemeral port is this one
    except OSError:
        connection.close()
        raise
    return connection


def _parsed(data: bytes) -> tuple[int, bytes]:
    """(status, body) of a whole HTTP answer. Raises as `_response`."""
    answer, body = _response(data)
    return answer.status, body


def _response(data: bytes) -> tuple[http.client.HTTPResponse, bytes]:
    """(answer, its body). Raises HTTPException if it is truncated or malformed.

    Other exceptions of the parser become one too, as of a length that is too large to count.
    """
    received = SimpleNamespace(makefile=lambda _mode: io.BytesIO(data))  # all that the parser asks of a socket
    answer = http.client.HTTPResponse(received)  # type: ignore[arg-type]
    try:
        answer.begin()
        return answer, answer.read()
    except (OSError, http.client.HTTPException):
        raise
    except Exception as error:  # noqa: BLE001 - no engine's answer may end the probing thread
        raise http.client.HTTPException(type(error).__name__) from None


def _json(body: bytes) -> Any:
    """The JSON of a body, None for what is none."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


def probe(
    port: int, asked: Probe, identify: bool, host: str = "127.0.0.1", timeout_s: float = TIMEOUT_S
) -> ProbeAnswer:
    """Check that the engine on the port is ready; with `identify`, also that it is the expected one."""
    path = asked.path
    try:
        status, body = _get(host, port, path, timeout_s)
        if status == 503:
            return ProbeAnswer(False, "the engine is loading its model", loading=True)
        if status != 200:
            return ProbeAnswer(False, f"{path} answered {status}")
        if asked.expects.encode() not in body:
            return ProbeAnswer(False, f"{path} answered something else: {_shown(body)}")
        if not (identify and asked.identity):
            return ProbeAnswer(True, "")
        path = asked.identity_path
        return _identity(asked, port, *_get(host, port, path, timeout_s))
    except ConnectionRefusedError:
        return ProbeAnswer(False, "the engine does not listen yet", refused=True)
    except TimeoutError:
        return ProbeAnswer(False, f"{path} has not answered within {timeout_s:g} s")
    except (OSError, http.client.HTTPException) as error:
        return ProbeAnswer(False, f"{path}: {type(error).__name__}")


def _shown(body: bytes) -> str:
    text = "".join(char for char in body[:80].decode("utf-8", "replace") if char.isprintable())
    return text or "nothing"


def works(port: int, asked: Probe, host: str = "127.0.0.1", timeout_s: float = TIMEOUT_S) -> bool | None:
    """True if the engine's work loop takes requests, False if it does not in time; None where nothing tells.

    That loop, not the HTTP server, answers queries about the slots: it says more than the engine's health.
    An engine that unloads its model when idle is not asked: each such query counts as activity, which delays that, or
    wakes it. Its health has to suffice.
    """
    if not asked.busy_path or asked.asleep_path:
        return None
    try:
        status, _ = _get(host, port, asked.busy_path, timeout_s)
    except TimeoutError:
        return False
    except (OSError, http.client.HTTPException):
        return None  # refused or cut off: that says nothing about the work loop
    return True if status == 200 else None


def busy(port: int, asked: Probe, host: str = "127.0.0.1", timeout_s: float = TIMEOUT_S) -> bool | None:
    """True if the engine has requests in flight, or is too busy to answer. None if it does not report that.

    One whose model is unloaded has none, and the query does not wake it.
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
        return False  # nothing listens, or all connections are closed
    slots = _json(body) if status == 200 else None
    if not isinstance(slots, list):
        return None  # it requires a key, or its slots endpoint is disabled
    return any(isinstance(slot, dict) and slot.get("is_processing") is True for slot in slots)


def is_busy(pid: int, port: int, asked: Probe, host: str = "127.0.0.1", timeout_s: float = TIMEOUT_S) -> bool:
    """As `busy`; an engine that cannot tell is judged by its connections."""
    told = busy(port, asked, host, timeout_s)
    return processes.has_clients(pid, port) if told is None else told


@dataclass(frozen=True)
class Asked:
    """Address and probe by which an engine is asked whether it is busy."""

    pid: int
    address: str
    """The address that it listens on."""
    port: int
    probe: Probe


def are_busy(engines: Mapping[K, Asked]) -> dict[K, bool]:
    """Key -> True if that engine is serving a request. Asks all at once: each may be slow to answer, or not answer."""

    def is_one(asked: Asked) -> bool:
        return is_busy(asked.pid, asked.port, asked.probe, local_status.asked_at(asked.address), BUSY_S)

    if not engines:
        return {}
    with ThreadPoolExecutor(min(len(engines), MOST_ASKED), "busy") as pool:
        return dict(zip(engines, pool.map(is_one, engines.values()), strict=True))


def _sleeps(host: str, port: int, asked: Probe, timeout_s: float) -> bool:
    """True if the engine reports that it sleeps. Raises OSError, also when it does not answer in time."""
    try:
        told = _json(_get(host, port, asked.asleep_path, timeout_s)[1])
    except http.client.HTTPException:
        return False
    return isinstance(told, dict) and told.get("is_sleeping") is True


class FirstRequest:
    """The first request of an engine's process, sent by the first `wait`."""

    def __init__(
        self, port: int, asked: Probe, key: tuple[str, str], timeout_s: float, host: str = "127.0.0.1"
    ) -> None:
        """`key`: (variable, key) as of `first_request.key_of`; `timeout_s`: for the whole of the answer."""
        self._at, self._asked, self._key, self._timeout_s = (host, port), asked, key, timeout_s
        self._until = time.monotonic() + timeout_s
        self._connection: socket.socket | None = None
        self._data = bytearray()
        self.model_name = ""
        """Name by which an engine that `names_itself` wants to be asked, once it is; "" if it cannot be shown."""

    def wait(self, seconds: float) -> ProbeAnswer | None:
        """The result; None if there is none within these seconds."""
        path = self._asked.first_path
        try:
            connection = self._connection or self._sent()
            if not _read(connection, self._data, time.monotonic() + seconds):
                late = time.monotonic() >= self._until
                return ProbeAnswer(False, f"{path} has not answered within {self._timeout_s:g} s") if late else None
            why = first_request.fault(path, *_parsed(bytes(self._data)), self._key)
            return ProbeAnswer(not why, why)
        except (OSError, http.client.HTTPException) as error:
            return ProbeAnswer(False, f"{path} was not answered to the end: {type(error).__name__}")

    def close(self) -> None:
        """Cancel the request: an engine aborts one whose client has disconnected."""
        if self._connection is not None:
            self._connection.close()

    def _sent(self) -> socket.socket:
        host, port = self._at
        body = self._asked.first_body
        if self._asked.names_itself:
            name = _own_name(host, port, self._asked)
            self.model_name = name if MODEL_NAME.fullmatch(name) else ""
            body = first_request.named(body, name)
        connection = self._connection = _connected(host, port, TIMEOUT_S)
        _send(connection, f"POST {self._asked.first_path}", f"{in_url(host)}:{port}", self._key[1], body)
        return connection


def _own_name(host: str, port: int, asked: Probe) -> str:
    """The first name in the engine's list of models, "" if there is none. Raises OSError, HTTPException."""
    try:
        return str(_json(_get(host, port, asked.identity_path)[1])["data"][0]["id"])
    except (LookupError, TypeError):
        return ""


def metrics_text(
    host: str, port: int, path: str = "/metrics", key: str = "", timeout_s: float = TIMEOUT_S
) -> tuple[str, str]:
    """(an engine's metrics, ""), or ("", reason why there are none), which quotes nothing of the answer.

    `key`: bearer token, "" for none. A redirect is not followed.
    """
    try:
        data = _received(host, port, path, timeout_s, key)
        if len(data) >= MOST_BYTES:
            return "", "the engine's answer is 1 MiB or more"
        answer, body = _response(data)
    except TimeoutError:
        return "", f"the engine has not answered within {timeout_s:g} s"
    except (OSError, http.client.HTTPException) as error:
        return "", f"the engine's answer could not be read: {type(error).__name__}"
    if answer.status != 200:
        fix = f"; set {' or '.join(first_request.KEY_VARIABLES)} in spec.env" if answer.status in (401, 403) else ""
        return "", f"the engine answered {path} with status {answer.status}{fix}"
    if (answer.getheader("Content-Type") or "").partition(";")[0].strip().lower() != "text/plain":
        return "", "the Content-Type of the engine's answer is not text/plain"
    return body.decode("utf-8", "replace"), ""


def answers_at(host: str, port: int) -> bool:
    """True if a TCP connection can be opened from this Mac."""
    try:
        _connected(host, port, CONNECT_S).close()
    except OSError:
        return False
    return True


def _identity(asked: Probe, port: int, status: int, body: bytes) -> ProbeAnswer:
    """Check the answer with the list of models."""
    try:
        listed = _json(body)["data"]
        loaded = [item for item in listed if item.get("loaded", True)]  # a daemon also lists models that are not loaded
        names = {name for item in loaded for name in (item.get("id"), *(item.get("aliases") or ()))}
        names |= {str(name).removesuffix(":latest") for name in names}  # Ollama's names have the default tag
    except (KeyError, TypeError, AttributeError):
        names = None
    if status != 200 or names is None:
        return ProbeAnswer(False, f"{asked.identity_path} answered {status} without a list of models")
    if asked.identity in names:
        return ProbeAnswer(True, "")
    if asked.shared:
        return ProbeAnswer(False, f"the daemon has not loaded {asked.identity}")
    if not names:
        return ProbeAnswer(False, f"{asked.identity_path} lists no model")
    shown = printable(", ".join(sorted(str(name) for name in names)))[:200]
    return ProbeAnswer(False, f"port {port} is answered by another server: it serves {shown}, not {asked.identity}")
