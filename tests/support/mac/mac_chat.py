"""Chats with an engine, as a client would: one answer, or a stream whose every token is noted when it comes."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

TIMEOUT_S = 120.0
CHAT = "/v1/chat/completions"


def ask(port: int, path: str = CHAT, host: str = "127.0.0.1", **body: Any) -> tuple[int, Any]:
    """(status, answer) of one request; without a body a GET. Text where the answer is no JSON."""
    connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
    with contextlib.closing(connection):
        if body:
            body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, **body}
        headers = {"Content-Type": "application/json"}
        connection.request("POST" if body else "GET", path, json.dumps(body) if body else None, headers)
        answer = connection.getresponse()
        text = answer.read().decode("utf-8", "replace")
        try:
            return answer.status, json.loads(text)
        except ValueError:
            return answer.status, text


class Stream:
    """One streamed answer in a thread of its own."""

    def __init__(self, port: int, tokens: int, model: str = "", endless: bool = True) -> None:
        """`endless`: ask an engine that knows how for as many tokens as were asked for, whatever its model says."""
        self.asked_at = time.monotonic()
        self.arrivals_s: list[float] = []
        """When each event with content came."""
        self.whole = False
        """Whether it ended as an answer does."""
        self.error = ""
        self._port, self._body = (
            port,
            {
                "messages": [{"role": "user", "content": "hi"}],
                "stream": True,
                "max_tokens": tokens,
                **({"model": model} if model else {}),
                **({"ignore_eos": True} if endless else {}),
            },
        )
        self._flows = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stream", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=TIMEOUT_S)
        try:
            connection.request("POST", CHAT, json.dumps(self._body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            if answer.status != 200:
                raise ValueError(f"status {answer.status}: {answer.read(400)!r}")
            for event in _events(answer):
                if event == b"[DONE]":
                    self.whole = True
                elif _has_content(event):
                    self.arrivals_s.append(time.monotonic())
                    self._flows.set()
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.error = f"{type(error).__name__}: {error}"
        finally:
            connection.close()
            self._flows.set()

    def flowing(self, within_s: float = TIMEOUT_S) -> Stream:
        """Waits for the first token. Raises AssertionError."""
        assert self._flows.wait(within_s) and self.arrivals_s, f"no token: {self.error or 'nothing came'}"
        return self

    def end(self, within_s: float) -> bool:
        """Waits for its end; whether the answer was whole."""
        self._thread.join(within_s)
        return self.whole and not self.error and not self._thread.is_alive()

    @property
    def alive(self) -> bool:
        """Whether it goes on."""
        return self._thread.is_alive()

    def told(self) -> str:
        """In a few words, for a claim that does not hold."""
        end = "whole" if self.whole else "cut"
        return f"{len(self.arrivals_s)} tokens, {end}{', ' + self.error if self.error else ''}"


def _events(answer: http.client.HTTPResponse) -> Iterator[bytes]:
    """What stands after each `data:`."""
    for line in answer:
        if line.startswith(b"data:"):
            yield line[5:].strip()


def _has_content(event: bytes) -> bool:
    """Whether an event has a token in it; the first one often has only the role."""
    try:
        choices = json.loads(event).get("choices") or [{}]
        delta = choices[0].get("delta") or {}
    except (ValueError, AttributeError, LookupError, TypeError):
        return False
    return bool(delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning"))
