"""A system with a gateway, and raw requests to it."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.system import System, eventually, free_ports, running


class Gateway:
    """The gateway of a system under test."""

    def __init__(self, system: System, port: int) -> None:
        self.system, self.port = system, port
        self.url = f"http://127.0.0.1:{port}"

    def ask(
        self, method: str, path: str, body: object = None, headers: dict[str, str] | None = None, timeout_s: float = 30
    ) -> tuple[int, dict[str, str], Any]:
        """(status, headers by lower-case name, JSON answer, None without one) of one request."""
        sent = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)) as connection:
            connection.request(method, path, sent, {"Content-Type": "application/json", **(headers or {})})
            answer = connection.getresponse()
            content = answer.read()
            lowered = {name.lower(): value for name, value in answer.getheaders()}
            return answer.status, lowered, json.loads(content) if content else None

    def chat(
        self, model: str, headers: dict[str, str] | None = None, timeout_s: float = 30, **body: Any
    ) -> tuple[int, Any]:
        """(status, answer) of a short chat."""
        document = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, **body}
        status, _, told = self.ask("POST", "/v1/chat/completions", document, headers, timeout_s)
        return status, told

    def state(self, name: str) -> str:
        """The state of a model in /v1/models, "" if it is not there."""
        rows = self.ask("GET", "/v1/models")[2]["data"]
        return next((row["status"]["value"] for row in rows if row["id"] == name), "")

    def serves(self, *names: str) -> None:
        """Waits until these services are ready for the gateway."""
        eventually(lambda: all(self.state(name) == "loaded" for name in names), 30, f"{names}; {self.system.said()}")

    def log(self) -> list[dict[str, Any]]:
        """The entries of its log."""
        return self.log_of("gateway")

    def log_of(self, program: str, message: str = "") -> list[dict[str, Any]]:
        """The entries of a program's log, with this message or any."""
        lines = self.system.files.log_path(program).read_text("utf-8").splitlines()
        found = [json.loads(line) for line in lines if line.startswith("{")]
        return [each for each in found if message in ("", each["msg"])]


@contextlib.contextmanager
def with_gateway(base: Path, *flags: str, engine: Path | None = None) -> Iterator[Gateway]:
    """A running system with a gateway on a free port, its own log included in what a failure shows."""
    (port,) = free_ports(1)
    with running(base, "--gateway", f"127.0.0.1:{port}", *flags, engine=engine) as system:
        gateway = Gateway(system, port)
        eventually(lambda: gateway.ask("GET", "/healthz")[0] == 200, what="the gateway to answer")
        yield gateway
