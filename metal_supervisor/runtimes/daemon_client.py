"""Client of a shared daemon's HTTP API on this machine, oMLX's or Ollama's: JSON in, JSON out, a timeout on everything.

Callers wait for a daemon that is away, and report the reason of one that refuses, so the two are different exceptions.
An error with status 200, as Ollama sends some, counts as a refusal.
"""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Iterator
from typing import IO, Any, TypeAlias

from metal_supervisor.spec.types import Json

TIMEOUT_S = 5.0
MOST_BYTES = 4 << 20
LONGEST_LINE = 1 << 20
LONGEST_TEXT = 500
Body: TypeAlias = Json | IO[bytes] | None
BROKEN = (OSError, http.client.HTTPException, ValueError, OverflowError)
"""Exceptions of reading an answer, also of a chunk length that is malformed or too large to count."""


class Away(Exception):
    """The daemon does not answer, or is not up yet; the message has the details."""


class DaemonRefused(Exception):
    """The daemon answered with an error. `status`: of HTTP, 200 for an error that was sent as a success."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Daemon:
    """One daemon at an address."""

    def __init__(self, host: str, port: int, key: str = "", ours: bool = False) -> None:
        self._host, self._port, self._key = host, port, key
        self.ours = ours
        """True if it is supervised here and uses our directory; False for the user's own daemon."""

    def call(self, method: str, path: str, body: Body = None, timeout_s: float = TIMEOUT_S) -> Json:
        """Send one request and return the JSON object; {} for an empty answer. Raises Away, DaemonRefused."""
        with self._sent(method, path, body, timeout_s) as answer:
            text = answer.read(MOST_BYTES)
            if answer.length:  # a read up to a limit does not tell that the end is missing
                raise http.client.IncompleteRead(text, answer.length)
        return _accepted(answer.status, _parsed(text), path)

    def lines(self, method: str, path: str, body: Body, stall_s: float) -> Iterator[Json]:
        """Send one request and yield its streamed answer, JSON lines. `stall_s`: longest pause between two lines.

        Raises Away, DaemonRefused.
        """
        with self._sent(method, path, body, stall_s) as answer:
            try:
                if answer.status >= 400:
                    _accepted(answer.status, _parsed(answer.read(MOST_BYTES)), path)
                while line := answer.readline(LONGEST_LINE):
                    if line.strip():
                        yield _accepted(answer.status, _parsed(line), path)
            except TimeoutError:
                raise Away(f"{path}: nothing has come for {stall_s:g} s") from None

    @contextlib.contextmanager
    def _sent(self, method: str, path: str, body: Body, timeout_s: float) -> Iterator[http.client.HTTPResponse]:
        """Send one request; its answer is to be read within the block. Raises Away."""
        connection = http.client.HTTPConnection(self._host, self._port, timeout=timeout_s)
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        data: Any = body
        if isinstance(body, dict):
            data, headers["Content-Type"] = json.dumps(body), "application/json"
        elif body is not None:  # a file goes as it is, in one piece
            headers["Content-Length"] = str(body.seek(0, 2))
            body.seek(0)
        try:
            try:
                connection.request(method, path, data, headers)
                answer = connection.getresponse()
            except TimeoutError:
                raise Away(f"{path}: no answer in time") from None
            yield answer
        except BROKEN as error:
            raise Away(f"{path}: {type(error).__name__}") from None
        finally:
            connection.close()


def _parsed(text: bytes) -> Json:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {"text": text.decode("utf-8", "replace")} if text.strip() else {}
    return found if isinstance(found, dict) else {"text": found}


def _accepted(status: int, found: Json, path: str) -> Json:
    told = found.get("error") or found.get("detail")
    if isinstance(told, dict):
        told = told.get("message")
    if status == 503:
        raise Away(f"{path} answered 503: {_shown(told or found.get('text'))}")
    if status >= 400 or found.get("error"):
        raise DaemonRefused(status, f"{path} answered {status}: {_shown(told or found.get('text'))}")
    return found


def _shown(told: object) -> str:
    return "".join(char for char in str(told or "nothing") if char.isprintable())[:LONGEST_TEXT]
