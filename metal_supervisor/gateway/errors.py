"""Errors of the gateway, in the shape that the clients of each API expect."""

from __future__ import annotations

import json
from collections.abc import Mapping

MESSAGES = "/v1/messages"
"""Path of Anthropic's API; its errors have another shape."""
LONGEST_QUOTE = 100
_ANTHROPIC_TYPES: Mapping[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}


class GatewayError(Exception):
    """A request that the gateway answers itself: a status, a code and a sentence for the client."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        retry_after_s: int | None = None,
        final: bool = False,
        close: bool = False,
    ) -> None:
        """`final`: the same request cannot succeed, so SDKs must not send it again. `close`: end the connection too."""
        super().__init__(message)
        self.status, self.code, self.message = status, code, message
        self.retry_after_s, self.final, self.close = retry_after_s, final, close

    def headers(self) -> dict[str, str]:
        """Headers of the answer besides its type."""
        found: dict[str, str] = {}
        if self.status == 401:
            found["WWW-Authenticate"] = 'Bearer realm="metal-supervisor"'
        if self.retry_after_s is not None:
            found["Retry-After"] = str(self.retry_after_s)
        if self.final:
            found["x-should-retry"] = "false"
        return found

    def body(self, path: str, request_id: str) -> bytes:
        """JSON body of the answer to a request for `path`."""
        return json.dumps(self._document(path, request_id)).encode() + b"\n"

    def event(self, path: str, request_id: str) -> bytes:
        """The error as the last event of a stream that has begun."""
        name = b"event: error\n" if is_anthropic(path) else b""
        return b"\n\n" + name + b"data: " + json.dumps(self._document(path, request_id)).encode() + b"\n\n"

    def _document(self, path: str, request_id: str) -> dict[str, object]:
        if is_anthropic(path):
            kind = _ANTHROPIC_TYPES.get(self.status, "api_error")
            error: dict[str, object] = {"type": kind, "message": self.message}
            return {"type": "error", "error": error, "request_id": request_id}
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": None, "code": self.code}}


def is_anthropic(path: str) -> bool:
    """True for a path of Anthropic's API, also below `/services/…`."""
    return path.endswith((MESSAGES, f"{MESSAGES}/count_tokens"))


def quoted(text: str) -> str:
    """A client's own text within a message: printable, and cut."""
    clean = "".join(char if char.isprintable() else "�" for char in text)
    return clean if len(clean) <= LONGEST_QUOTE else f"{clean[:LONGEST_QUOTE]}…"
