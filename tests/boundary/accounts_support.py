"""A cluster as far as tokens of ServiceAccounts are concerned, and tokens that say of themselves what they should."""

from __future__ import annotations

import base64
import contextlib
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

ADMIN = "adm1n-s3cr3t"
SIGNATURE = "c2lnbmF0dXJl"
DAY = 86400


def jwt(payload: Any) -> str:
    parts = (base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in ({}, payload))
    return ".".join((*parts, SIGNATURE))


def token(issued: float, expires: float, account: str = "metal-mac-a") -> str:
    return jwt({"sub": f"system:serviceaccount:llm:{account}", "iat": issued, "exp": expires})


@dataclass
class Api:
    """What a cluster would be asked here: tokens of ServiceAccounts, and one list."""

    url: str = ""
    now: float = 0.0
    """The server's clock; 0.0: this machine's."""
    accounts: set[str] = field(default_factory=lambda: {"metal-mac-a"})
    longest_s: float = 365 * DAY
    listing: int = 200
    refuse: int = 0
    answer: Any = None
    """What to answer instead of a token."""
    asked: list[tuple[str, str, float]] = field(default_factory=list)
    """(account, who asked, for how long)."""
    given: list[str] = field(default_factory=list)

    def post(self, path: str, bearer: str, body: Any) -> tuple[int, Any]:
        account = path.split("/")[-2]
        self.asked.append((account, bearer, body["spec"]["expirationSeconds"]))
        if bearer != ADMIN and bearer not in self.given:
            return 401, {}
        if self.refuse:
            text = f'User "u" cannot create resource "serviceaccounts/token", saw {bearer}'
            return self.refuse, {"reason": "Forbidden", "message": text}
        if account not in self.accounts:
            return 404, {"reason": "NotFound", "message": f'serviceaccounts "{account}" not found'}
        if self.answer is not None:
            return 201, self.answer
        now = self.now or time.time()
        made = token(now, now + min(self.longest_s, body["spec"]["expirationSeconds"]), account)
        self.given.append(made)
        return 201, {"kind": "TokenRequest", "status": {"token": made}}

    def get(self, bearer: str) -> tuple[int, Any]:
        if bearer not in self.given:
            return 401, {"message": f"{bearer} is not known"}
        text = 'User "metal-mac-a" cannot list resource "inferenceservices"'
        return self.listing, {"items": [], "message": text if self.listing == 403 else ""}


@contextlib.contextmanager
def serving() -> Iterator[Api]:
    """A server on loopback, over plain HTTP."""
    api = Api()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            pass

        def _reply(self) -> None:
            size = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(size)) if size else None
            bearer = self.headers.get("Authorization", "").partition(" ")[2]
            path = self.path.partition("?")[0]
            code, answer = api.post(path, bearer, body) if self.command == "POST" else api.get(bearer)
            data = json.dumps(answer).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = _reply

        def date_time_string(self, timestamp: Any = None) -> str:
            return super().date_time_string(api.now or None)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        api.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield api
        finally:
            server.shutdown()
            thread.join()


def kubeconfig(path: Path, server: str, user: dict[str, Any], **cluster: Any) -> Path:
    path.write_text(
        json.dumps(
            {
                "current-context": "c",
                "clusters": [{"name": "c", "cluster": {"server": server, **cluster}}],
                "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
                "users": [{"name": "u", "user": user}],
            }
        )
    )
    return path
