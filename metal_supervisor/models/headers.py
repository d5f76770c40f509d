"""Headers of model files, from the disk or from a web server, so that a model's memory is known before it is loaded.

Admission asks on every pass and must not wait: a network mount may hang, and a server may be slow. So `Headers` reads
in threads and returns what is known so far. Of a file on a server only the first bytes are read (HTTP Range). Errors
are not raised: they are the `problem` of a `Reading`.
"""

from __future__ import annotations

import contextlib
import json
import re
import stat
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import urllib3

from metal_supervisor.models.fetch import Opened
from metal_supervisor.models.listing import Listing, Piece, Unusable
from metal_supervisor.models.metadata import Reading
from metal_supervisor.models.model_files import CONFIG, WEIGHTS
from metal_supervisor.models.ollama_library import NotThere, blob_url
from metal_supervisor.models.repository import MOST_CONFIG_BYTES
from metal_supervisor.models.source_policy import SourcePolicy
from metal_supervisor.models.web import Client, Stopped
from metal_supervisor.spec.gguf import MAX_DATA_BYTES, MAX_HEADER_BYTES, BadGguf, NeedMore, Prefix, read_header
from metal_supervisor.spec.shards import merge, shard_names
from metal_supervisor.spec.sources import shown

READ_S = 20.0
ALTOGETHER_S = 180.0
"""Deadline of all requests about one model together, against a server that drips bytes."""
FIRST_BYTES, CHUNK_BYTES = 1 << 20, 1 << 16
LOOK_WAIT_S = 0.1
LOCAL_AGAIN_S, REMOTE_AGAIN_S = 10.0, 60.0
"""Age after which the next request checks a file, or tries a failed server, again."""
CONTENT_RANGE = re.compile(r"bytes +(\d{1,18})-(\d{1,18})/(\d{1,18}|\*)", re.ASCII)


class _HeaderFailed(Exception):
    """A server did not give the bytes asked for; the text says what it did instead."""


# ── files on this Mac ────────────────────────────────────────────────────────────────────────────


def read_file(path: Path) -> Reading:
    """Read the header of a GGUF file on this Mac, merged with its other shards; of a directory, the config.json.

    Never raises: an error is the reading's problem. The size is known only if every shard is there.
    """
    with contextlib.suppress(OSError, ValueError):  # reading the file reports the same error
        if path.is_dir():
            return _read_directory(path)
    names = shard_names(path.name)
    if len(names) == 1:
        return _read_one(path)
    return _together(names, [_read_one(path.with_name(name)) for name in names])


def _read_one(path: Path) -> Reading:
    size = None
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for its other end
            return Reading(None, problem="it is not a regular file")
        size = status.st_size
        with path.open("rb", buffering=0) as file:
            return Reading(size, read_header(Opened(file.fileno()), size))
    except OSError as error:
        return Reading(size, problem=f"it cannot be read: {error.strerror or type(error).__name__}")
    except (BadGguf, ValueError) as error:  # ValueError: a path that no file can have
        return Reading(size, problem=str(error))


def _read_directory(path: Path) -> Reading:
    """Read an MLX model: config.json and the size of the weights, in the directory itself."""
    size = None
    try:
        weights = [each for each in path.iterdir() if each.name.endswith(WEIGHTS) and each.is_file()]
        size = sum(each.stat().st_size for each in weights) or None
        if not (path / CONFIG).is_file():
            return Reading(size, problem=f"it is a directory without a {CONFIG}: no MLX model")
        with (path / CONFIG).open("rb") as file:
            config = json.loads(file.read(MOST_CONFIG_BYTES))
    except OSError as error:
        return Reading(size, problem=f"it cannot be read: {error.strerror or type(error).__name__}")
    except (ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        return Reading(size, problem=f"its {CONFIG} cannot be read")
    return Reading(size, config=config)


def _together(names: Sequence[str], readings: Sequence[Reading]) -> Reading:
    """Merge the readings of all shards, given in their order."""
    sizes = [reading.size_bytes for reading in readings if reading.size_bytes is not None]
    size = sum(sizes) if len(sizes) == len(readings) else None
    for name, reading in zip(names, readings, strict=True):
        if reading.header is None:
            return Reading(size, problem=f"{name}: {reading.problem}")
    first, *rest = [reading.header for reading in readings if reading.header is not None]
    try:
        return Reading(size, merge(first, rest))
    except BadGguf as error:
        return Reading(size, problem=str(error))


# ── files on a web server ────────────────────────────────────────────────────────────────────────


class _Remote:
    """The first bytes of a file on a server, as many as have been requested so far."""

    def __init__(self, client: Client, url: str, secret: Mapping[str, str], until: float) -> None:
        self._client, self._url, self._secret, self._until = client, url, secret, until
        self._whole: urllib3.BaseHTTPResponse | None = None
        """Answer of a server that ignores ranges and sends the file from its start."""
        self.data = b""
        self.size_bytes: int | None = None
        """Size of the whole file, None until it is known."""

    def close(self) -> None:
        if self._whole is not None:
            self._whole.close()

    def read_on(self, upto: int) -> bool:
        """Read on towards the first `upto` bytes; False if none came. Raises _HeaderFailed, and what urllib3 raises."""
        before = len(self.data)
        if self._whole is None:
            self._ask(upto)
        if self._whole is not None:
            self._take(self._whole, upto)
        return len(self.data) > before

    def _take(self, answer: urllib3.BaseHTTPResponse, upto: int) -> None:
        parts, have = [self.data], len(self.data)
        while have < upto:
            if time.monotonic() > self._until:
                raise _HeaderFailed("takes too long")
            part = answer.read1(min(CHUNK_BYTES, upto - have))  # what has arrived; `read` would wait for all of it
            if not part:
                break
            parts.append(part)
            have += len(part)
        self.data = b"".join(parts)

    def _ask(self, upto: int) -> None:
        have = len(self.data)
        answer = self._client.get(self._url, {"Range": f"bytes={have}-{upto - 1}"}, self._secret)
        try:
            if answer.headers.get("Content-Encoding", "identity") != "identity":
                raise _HeaderFailed("answers with an encoding of the file, not with its bytes")
            if answer.status == 416 and have:
                self.size_bytes = have
            elif answer.status == 206:
                self._check_range(answer.headers.get("Content-Range", ""), have)
                self._take(answer, upto)
                if answer.headers.get("Content-Length") == str(len(self.data) - have):
                    answer.drain_conn()  # fully read: return the connection to the pool
            elif answer.status == 200:
                said = answer.headers.get("Content-Length", "")
                self._learn(int(said) if re.fullmatch(r"\d{1,18}", said, re.ASCII) else None)
                self.data, self._whole = b"", answer
            else:
                raise _HeaderFailed(f"answered {answer.status}")
        finally:
            if answer is not self._whole:
                answer.close()

    def _check_range(self, said: str, have: int) -> None:
        found = CONTENT_RANGE.fullmatch(said.strip())
        if found is None or int(found[1]) != have:
            raise _HeaderFailed(f"was asked for a range from byte {have}, and gives {said!r:.80}")
        self._learn(None if found[3] == "*" else int(found[3]))

    def _learn(self, size: int | None) -> None:
        if size is not None and self.size_bytes not in (None, size):
            raise _HeaderFailed("gives another size each time; is the file being replaced?")
        if size is not None and size <= MAX_DATA_BYTES:
            self.size_bytes = size


def read_remote(url: str, client: Client | None = None, headers: Mapping[str, str] | None = None) -> Reading:
    """Read the header of a GGUF file on a server from its first bytes, merged with its other shards.

    `headers`: sent with every request, but not to other hosts. Never raises: an error is the reading's problem, which
    shows the URL without credentials or query.
    """
    try:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https"):
            return Reading(None, problem=f"{shown(url)} is no URL of a web server")
        directory, slash, name = parts.path.rpartition("/")
        names = shard_names(urllib.parse.unquote(name))
        paths = [directory + slash + urllib.parse.quote(each) for each in names] if len(names) > 1 else [parts.path]
        urls = [urllib.parse.urlunsplit(parts._replace(path=path)) for path in paths]
    except ValueError:
        return Reading(None, problem=f"{shown(url)} is no URL")
    pieces = tuple(Piece(name, each) for name, each in zip(names, urls, strict=True))
    own = client or Client(SourcePolicy(lax=True), READ_S)
    try:
        return read_listing(Listing(pieces, headers=headers or {}), own)
    except Stopped:
        return Reading(None, problem=f"{shown(url)} is not wanted any more")
    finally:
        if client is None:
            own.close()


def read_listing(listing: Listing, client: Client) -> Reading:
    """Read the header, or the config.json, of a model listed on a server. Raises Stopped, but never Unusable."""
    until = time.monotonic() + ALTOGETHER_S
    config = next((piece for piece in listing.pieces if piece.name.rpartition("/")[2] == CONFIG), None)
    if config is not None:
        return _read_config(client, config, listing, until)
    readings = [_read_url(client, piece.url, listing.headers, until) for piece in listing.pieces]
    return readings[0] if len(readings) == 1 else _together([piece.name for piece in listing.pieces], readings)


def _read_config(client: Client, config: Piece, listing: Listing, until: float) -> Reading:
    """Read an MLX model on a server: its config.json, and the size of the listed weights."""
    weights = [piece.size_bytes for piece in listing.pieces if piece.name.endswith(WEIGHTS)]
    size = sum(each or 0 for each in weights) if weights and all(weights) else None
    remote = _Remote(client, config.url, listing.headers, until)
    try:
        while len(remote.data) < MOST_CONFIG_BYTES and remote.read_on(MOST_CONFIG_BYTES):
            pass
        found = json.loads(remote.data)
    except (Unusable, _HeaderFailed) as error:
        return Reading(size, problem=str(error))
    except Exception as error:  # noqa: BLE001 - whatever a server makes a library raise
        return Reading(size, problem=_why(client, config.url, error))
    finally:
        remote.close()
    if not isinstance(found, dict):
        return Reading(size, problem=f"its {CONFIG} is no object")
    return Reading(size, config=found)


def _why(client: Client, url: str, error: Exception) -> str:
    """Error text for a failed request, which quotes neither the server nor the library. Raises Stopped."""
    if isinstance(error, ValueError | RecursionError):
        return f"{shown(url)} cannot be read"
    trouble = client.trouble(url, error)
    if isinstance(trouble, Stopped):
        raise trouble
    return str(trouble)


def _read_url(client: Client, url: str, headers: Mapping[str, str], until: float) -> Reading:
    remote = _Remote(client, url, headers, until)
    try:
        return _read_prefix(remote)
    except BadGguf as error:
        return Reading(remote.size_bytes, problem=str(error))
    except _HeaderFailed as error:
        return Reading(remote.size_bytes, problem=f"{shown(url)} {error}")
    except Unusable as error:
        return Reading(remote.size_bytes, problem=str(error))
    except Stopped:
        raise
    except Exception as error:  # noqa: BLE001 - whatever a URL or a server makes a library raise
        return Reading(remote.size_bytes, problem=_why(client, url, error))
    finally:
        remote.close()


def _read_prefix(remote: _Remote) -> Reading:
    """Read as many first bytes as the header needs. Raises BadGguf, _HeaderFailed, and what urllib3 raises."""
    wanted = FIRST_BYTES
    while True:
        if not remote.read_on(wanted):
            if remote.size_bytes is not None and len(remote.data) < remote.size_bytes:
                raise _HeaderFailed(f"ended after {len(remote.data)} of {remote.size_bytes} bytes")
            remote.size_bytes = len(remote.data)  # the end of the file
        try:
            header = read_header(Prefix(remote.data, remote.size_bytes), remote.size_bytes)
        except NeedMore as more:
            # Up to the longest header allowed: the reader itself refuses a longer one.
            wanted = min(max(more.total_bytes_wanted, wanted), MAX_HEADER_BYTES)
            continue
        size = remote.size_bytes
        return Reading(header.data_offset + header.data_bytes if size is None else size, header)


def _state_of(path: str) -> object:
    """Inode, size and mtime of each shard, which change when a model is replaced; None if they cannot be read."""
    try:
        whole = Path(path)
        found = [whole.with_name(name).stat() for name in shard_names(whole.name)]
        return tuple((each.st_ino, each.st_size, each.st_mtime_ns) for each in found)
    except (OSError, ValueError):
        return None


# ── asked for on every pass ──────────────────────────────────────────────────────────────────────


@dataclass
class _Look:
    """One source and its latest reading."""

    reading: Reading | None = None
    state: object = None
    """`_state_of` the file before the reading; another value means that it has been replaced."""
    at: float = 0.0
    """Monotonic time of the reading."""
    busy: bool = True
    """True while a thread reads it."""
    quiet: bool = True
    """True while the first caller still waits, so that `on_change` need not be called."""
    done: threading.Event = field(default_factory=threading.Event)


class Headers:
    """Cache of headers, read in background threads. Use it from one thread; `on_change` is called from others."""

    def __init__(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change
        self._lock = threading.Lock()
        self._looks: dict[str, _Look] = {}
        self._http = urllib3.PoolManager(retries=False)

    def look(self, path: str) -> Reading | None:
        """Return the latest reading of a file on this Mac; None until it has been read."""
        # A local file is read within a millisecond: a short wait here saves a second pass.
        return self._asked(path, lambda: read_file(Path(path)), LOOK_WAIT_S, LOCAL_AGAIN_S, lambda: _state_of(path))

    def library(self, source: str, registry: str) -> Reading | None:
        """Return the latest reading of a model in Ollama's library; None until it has been read."""
        return self._asked(source, lambda: self._read_library(source, registry), 0.0, REMOTE_AGAIN_S, None)

    def _read_library(self, source: str, registry: str) -> Reading:
        try:
            return read_remote(blob_url(source, registry, self._http))
        except NotThere as error:
            return Reading(None, problem=str(error))

    def keep(self, sources: Iterable[str]) -> None:
        """Forget all paths and URLs but these; one that is asked for later is read again."""
        wanted = set(sources)
        with self._lock:
            self._looks = {source: look for source, look in self._looks.items() if source in wanted}

    def _asked(
        self,
        source: str,
        read: Callable[[], Reading],
        wait_s: float,
        again_s: float,
        state_of: Callable[[], object] | None,
    ) -> Reading | None:
        with self._lock:
            look = self._looks.get(source)
            known = look is not None
            if look is None:
                look = self._looks[source] = _Look()
            failed = look.reading is not None and bool(look.reading.problem)
            due = not look.busy and time.monotonic() - look.at >= again_s
            start = not known or (due and (failed or state_of is not None))
            look.busy = look.busy or start
        if start:
            work = source, look, read, state_of
            threading.Thread(target=self._read, args=work, name="headers", daemon=True).start()
        if not known:
            look.done.wait(wait_s)
        with self._lock:
            look.quiet = False
            return look.reading

    def _read(
        self, source: str, look: _Look, read: Callable[[], Reading], state_of: Callable[[], object] | None
    ) -> None:
        state = state_of() if state_of else None
        known = look.reading
        same = state is not None and state == look.state and known is not None and not known.problem
        found = known if same and known is not None else read()
        with self._lock:
            changed, look.state = look.reading != found, state
            look.reading, look.at, look.busy = found, time.monotonic(), False
            tell = changed and not look.quiet and self._looks.get(source) is look
        look.done.set()
        if tell:
            self._on_change()
