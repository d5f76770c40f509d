"""Headers of model files on a web server. Of a file only the first bytes are read (HTTP Range)."""

from __future__ import annotations

import time
from collections.abc import Mapping

from metal_supervisor.models.listing import Listing, Piece, Unusable
from metal_supervisor.models.metadata import Reading, merged, read_config, unreadable
from metal_supervisor.models.remote.web import Client, read_part
from metal_supervisor.models.remote.web_answers import Answer, extent, is_encoded
from metal_supervisor.models.repository import CONFIG, MOST_CONFIG_BYTES, WEIGHTS
from metal_supervisor.spec.gguf import MAX_DATA_BYTES, MAX_HEADER_BYTES, BadGguf, read_header
from metal_supervisor.spec.sources import shown

READ_S = 20.0
"""Longest pause of a server."""
ALTOGETHER_S = 180.0
"""Deadline of all requests about one model together, against a server that drips bytes."""
FIRST_BYTES = 1 << 20
CHUNK_BYTES = 1 << 16


class _Remote:
    """The first bytes of a file on a server, as many as were requested so far. Requests raise Unusable, Stopped."""

    def __init__(self, client: Client, url: str, secret: Mapping[str, str], until: float) -> None:
        self._client, self._url, self._secret, self._until = client, url, secret, until
        self._whole: Answer | None = None
        """Answer of a server that ignores ranges and sends the file from its start."""
        self.data = b""
        self.size_bytes: int | None = None
        """Size of the whole file, None until it is known."""

    def close(self) -> None:
        if self._whole is not None:
            self._whole.close()

    def read_on(self, upto: int) -> bool:
        """Read on towards the first `upto` bytes; False if none came."""
        before = len(self.data)
        if self._whole is None:
            self._ask(upto)
        if self._whole is not None:
            self._take(self._whole, upto)
        return len(self.data) > before

    def _take(self, answer: Answer, upto: int) -> None:
        parts, have = [self.data], len(self.data)
        while have < upto and (part := read_part(self._client, self._url, answer, min(CHUNK_BYTES, upto - have))):
            if time.monotonic() > self._until:
                raise self._failed("takes too long")
            parts.append(part)
            have += len(part)
        self.data = b"".join(parts)

    def _ask(self, upto: int) -> None:
        have = len(self.data)
        answer = self._client.get(self._url, {"Range": f"bytes={have}-{upto - 1}"}, self._secret)
        start, size = extent(answer)
        try:
            if is_encoded(answer):
                raise self._failed("answers with an encoding of the file, not with its bytes")
            if answer.status == 416 and have:
                self.size_bytes = have
            elif answer.status not in (200, 206):
                raise self._failed(f"answered {answer.status}")
            elif answer.status == 206 and start != have:
                said = answer.headers.get("Content-Range", "")
                raise self._failed(f"was asked for a range from byte {have}, and gives {said!r:.80}")
            elif size is not None and self.size_bytes not in (None, size):
                raise self._failed("gives another size each time; is the file being replaced?")
            elif size is not None and size <= MAX_DATA_BYTES:
                self.size_bytes = size
            if answer.status == 206:
                self._take(answer, upto)
                if answer.length_remaining == 0:  # None for one in chunks, which may never end
                    answer.drain_conn()  # fully read: return the connection to the pool
            elif answer.status == 200:
                self.data, self._whole = b"", answer
        finally:
            if answer is not self._whole:
                answer.close()

    def _failed(self, text: str) -> Unusable:
        return Unusable("DownloadFailed", f"{shown(self._url)} {text}")

    def read(self, offset: int, size: int) -> bytes:
        """Bytes from `offset`, for the header reader. Requests at least twice as many as are here: few requests do."""
        while offset >= len(self.data) and (self.size_bytes is None or offset < self.size_bytes):
            # Up to the longest header allowed: the reader itself refuses a longer one.
            wanted = min(max(offset + size, 2 * len(self.data), FIRST_BYTES), MAX_HEADER_BYTES)
            if not self.read_on(wanted):
                if self.size_bytes is not None and len(self.data) < self.size_bytes:
                    raise self._failed(f"ended after {len(self.data)} of {self.size_bytes} bytes")
                self.size_bytes = len(self.data)  # the end of the file
        return self.data[offset : offset + size]

    def header(self) -> Reading:
        """Read the header. Raises BadGguf."""
        self.read(0, 1)  # the server tells the size
        header, size = read_header(self, self.size_bytes), self.size_bytes
        return Reading(header.data_offset + header.data_bytes if size is None else size, header)


def read_listing(listing: Listing, client: Client) -> Reading:
    """Read the header, or the config.json, of a model listed on a server. Raises Stopped, but never Unusable."""
    until = time.monotonic() + ALTOGETHER_S
    config = next((piece for piece in listing.pieces if piece.name.rpartition("/")[2] == CONFIG), None)
    if config is not None:
        return _read_config(client, config, listing, until)
    readings = [_read_url(client, piece.url, listing.headers, until) for piece in listing.pieces]
    return merged([piece.name for piece in listing.pieces], readings)


def _read_config(client: Client, config: Piece, listing: Listing, until: float) -> Reading:
    """Read an MLX model on a server: its config.json, and the size of the weights beside it, which engines load."""
    weights = [each.size_bytes for each in listing.pieces if each.name.endswith(WEIGHTS) and "/" not in each.name]
    size = sum(each or 0 for each in weights) if weights and all(weights) else None
    remote = _Remote(client, config.url, listing.headers, until)
    try:
        while len(remote.data) < MOST_CONFIG_BYTES and remote.read_on(MOST_CONFIG_BYTES):
            pass
    except Unusable as error:
        return Reading(size, problem=str(error))
    finally:
        remote.close()
    found = read_config(remote.data)
    return Reading(size, config=found, problem=f"{shown(config.url)} cannot be read" if found is None else "")


def _read_url(client: Client, url: str, headers: Mapping[str, str], until: float) -> Reading:
    remote = _Remote(client, url, headers, until)
    try:
        return remote.header()
    except BadGguf as error:
        return unreadable(error, remote.size_bytes)
    except Unusable as error:
        return Reading(remote.size_bytes, problem=str(error))
    finally:
        remote.close()
