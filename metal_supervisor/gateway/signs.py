"""Signs of life in a stream whose engine is still being loaded.

A client, or a proxy on the way, takes a long silence for a dead connection. Comments of event streams break some
clients, so a sign is an event of the API that was asked, which adds nothing to the answer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

FIRST_S = 20.0
"""Silence before the first sign of life, so that errors keep their status."""
EVERY_S = 15.0
"""Silence between two signs."""
HOLD_S = 1800.0
"""Longest time that a stream with signs waits."""
_CHAT = {"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {}, "finish_reason": None}]}
_TEXT = {"object": "text_completion", "choices": [{"index": 0, "text": "", "finish_reason": None}]}
_OF_OPENAI: Mapping[str, object] = {
    "/v1/chat/completions": _CHAT,
    "/chat/completions": _CHAT,
    "/v1/completions": _TEXT,
}
HEADERS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def sign(path: str, number: str, model: str) -> bytes:
    """One event, b"" where none is known that clients would ignore. `number`: of the request; `model`: its name."""
    if path == "/v1/messages":
        return b'event: ping\ndata: {"type": "ping"}\n\n'
    event = _OF_OPENAI.get(path)
    if not isinstance(event, dict):
        return b""
    return f"data: {json.dumps({'id': number, 'created': 0, 'model': model, **event})}\n\n".encode()
