"""Rules shared by the gates in front of engines: clients on this machine, requests of web pages, foreign media.

Standard library only, and no import of metal_supervisor: other interpreters run it beside `mlx_engine.py` and
`omlx_engine.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from urllib.parse import urlsplit

LOCAL = frozenset({"127.0.0.1", "::1", "::ffff:127.0.0.1"})
"""Addresses of clients on this machine."""
LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
MOST_BYTES = 64 << 20
"""Size limit of an inference request's body."""
TOO_LONG = f"a request may have {MOST_BYTES} bytes"
FOREIGN = "a web page of another host may not use this engine (Origin)"


def from_foreign_page(origins: Iterable[str]) -> bool:
    """True if a browser sent the request for a page of another host. `origins`: its `Origin` headers.

    Browsers send the header with every POST, also after DNS rebinding, when `Host` and address both look right. `Host`
    itself proves nothing: pods use a Service's name, and an Ingress any name.
    """
    return any(not _is_local(each) for each in origins)


def _is_local(origin: str) -> bool:
    try:
        parts = urlsplit(origin)
        return parts.hostname in LOCAL_NAMES and "@" not in parts.netloc
    except ValueError:
        return False


MEDIA = frozenset(
    {
        "image",
        "image_url",
        "input_image",
        "video",
        "video_url",
        "input_video",
        "audio",
        "audio_url",
        "input_audio",
    }
)
"""Keys and types under which a request's content names an image, a recording or the like."""
HOLDERS = MEDIA | {"source", "file", "input_file"}
"""Keys of objects that may hold its URL."""
NOT_DATA = "images and the like must be data: URLs; nothing is opened or fetched for a request"


def names_foreign_media(asked: Any) -> bool:
    """True if the JSON of a request names media elsewhere: by a URL to fetch, or a path of this machine."""
    left = [asked]
    while left:  # a loop: nested as deep as the parser allows, recursion would fail where the engine does not
        each = left.pop()
        if isinstance(each, list):
            left += each
        elif isinstance(each, dict):
            left += each.values()
            named = [each[key] for key in MEDIA & each.keys()]
            named += [
                value.get(name)
                for key in HOLDERS & each.keys()
                if isinstance(value := each[key], dict)
                for name in ("url", "path")
            ]
            if isinstance(kind := each.get("type"), str) and kind in HOLDERS:
                named += [each.get("url"), each.get("path")]
            if any(isinstance(value, str) and not value.startswith("data:") for value in named):
                return True
    return False
