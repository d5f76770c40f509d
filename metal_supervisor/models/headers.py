"""Headers of model files, from the disk or from a web server, so that a model's memory is known before it is loaded.

Admission asks on every pass and must not wait: a network mount may hang, and a server may be slow. So `Headers` reads
in threads and returns what is known so far. Of a file on a server only the first bytes are read (HTTP Range). Errors
are not raised: they are the `problem` of a `Reading`.
"""

from __future__ import annotations

import contextlib
import json
import stat
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from metal_supervisor.models.listing import Listing, Piece, Unusable
from metal_supervisor.models.metadata import Reading
from metal_supervisor.models.remote.fetch import Opened
from metal_supervisor.models.remote.ollama_library import NotThere, blob_url
from metal_supervisor.models.remote.source_policy import SourcePolicy
from metal_supervisor.models.remote.web import Client, read_part
from metal_supervisor.models.remote.web_answers import Answer, extent, is_encoded
from metal_supervisor.models.repository import CONFIG, MOST_CONFIG_BYTES, WEIGHTS
from metal_supervisor.spec.gguf import (
    MAX_DATA_BYTES,
    MAX_HEADER_BYTES,
    BadGguf,
    CutShort,
    NeedMore,
    NotGguf,
    Prefix,
    read_header,
)
from metal_supervisor.spec.shards import merge, shard_names
from metal_supervisor.spec.sources import shown

READ_S = 20.0
ALTOGETHER_S = 180.0
"""Deadline of all requests about one model together, against a server that drips bytes."""
FIRST_BYTES, CHUNK_BYTES = 1 << 20, 1 << 16
LOOK_WAIT_S = 0.1
LOCAL_AGAIN_S, REMOTE_AGAIN_S = 10.0, 60.0
"""Age after which the next request checks a file, or tries a failed server, again."""
MISSING = Reading(None, problem="it is not here, or a manifest may not name it")


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
    except BadGguf as error:
        return _refused(error, size)
    except ValueError as error:  # a path that no file can have
        return Reading(size, problem=str(error))


def _refused(error: BadGguf, size: int | None) -> Reading:
    """Reading of a file that is not understood. Its size is kept only if no engine loads it either.

    An engine has other limits than this reader, and the size of a file says nothing of its cache.
    """
    return Reading(size if isinstance(error, (NotGguf, CutShort)) else None, problem=str(error))


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
        if reading.header is None:  # an engine may take a first one that can be read for the whole model
            return Reading(size if readings[0].header is None else None, problem=f"{name}: {reading.problem}")
    first, *rest = [reading.header for reading in readings if reading.header is not None]
    try:
        return Reading(size, merge(first, rest))
    except BadGguf as error:
        return _refused(error, size)


# ── files on a web server ────────────────────────────────────────────────────────────────────────


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
                if answer.headers.get("Content-Length") == str(len(self.data) - have):
                    answer.drain_conn()  # fully read: return the connection to the pool
            elif answer.status == 200:
                self.data, self._whole = b"", answer
        finally:
            if answer is not self._whole:
                answer.close()

    def _failed(self, text: str) -> Unusable:
        return Unusable("DownloadFailed", f"{shown(self._url)} {text}")

    def header(self) -> Reading:
        """Read as many first bytes as the header needs. Raises BadGguf."""
        wanted = FIRST_BYTES
        while True:
            if not self.read_on(wanted):
                if self.size_bytes is not None and len(self.data) < self.size_bytes:
                    raise self._failed(f"ended after {len(self.data)} of {self.size_bytes} bytes")
                self.size_bytes = len(self.data)  # the end of the file
            try:
                header = read_header(Prefix(self.data, self.size_bytes), self.size_bytes)
            except NeedMore as more:
                # Up to the longest header allowed: the reader itself refuses a longer one.
                wanted = min(max(more.total_bytes_wanted, wanted), MAX_HEADER_BYTES)
                continue
            size = self.size_bytes
            return Reading(header.data_offset + header.data_bytes if size is None else size, header)


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
    except Unusable as error:
        return Reading(size, problem=str(error))
    except (ValueError, RecursionError):
        return Reading(size, problem=f"{shown(config.url)} cannot be read")
    finally:
        remote.close()
    if not isinstance(found, dict):
        return Reading(size, problem=f"its {CONFIG} is no object")
    return Reading(size, config=found)


def _read_url(client: Client, url: str, headers: Mapping[str, str], until: float) -> Reading:
    remote = _Remote(client, url, headers, until)
    try:
        return remote.header()
    except BadGguf as error:
        return _refused(error, remote.size_bytes)
    except Unusable as error:
        return Reading(remote.size_bytes, problem=str(error))
    finally:
        remote.close()


def state_of(path: str) -> object:
    """Inode, size and mtime of each shard, of a directory of each file in it; None if they cannot be read.

    They change when a model is replaced.
    """
    try:
        whole = Path(path)
        found = [whole.with_name(name).stat() for name in shard_names(whole.name)]
        if stat.S_ISDIR(found[0].st_mode):  # which does not change when a file in it is written anew
            found += [each.stat() for each in sorted(whole.iterdir()) if each.exists()]
        return tuple((each.st_ino, each.st_size, each.st_mtime_ns) for each in found)
    except (OSError, ValueError):
        return None


# ── asked for on every pass ──────────────────────────────────────────────────────────────────────


@dataclass
class _Look:
    """One source and its latest reading."""

    reading: Reading | None = None
    state: object = None
    """`state_of` the file before the reading; another value means that it has been replaced."""
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

    def look(self, path: str) -> Reading | None:
        """Return the latest reading of a file on this Mac; None until it has been read."""
        return self._local(path, path, lambda: read_file(Path(path)))

    def judged(self, name: str, path: str, is_here: Callable[[], bool]) -> Reading | None:
        """As `look`, for a path that has not been judged: MISSING unless `is_here`, which the thread asks first.

        `name`: of this reading, for `keep`.
        """
        return self._local(name, path, lambda: read_file(Path(path)) if is_here() else MISSING)

    def _local(self, name: str, path: str, read: Callable[[], Reading]) -> Reading | None:
        # A local file is read within a millisecond: a short wait here saves a second pass.
        return self._asked(name, read, LOOK_WAIT_S, LOCAL_AGAIN_S, lambda: state_of(path))

    def library(self, source: str, registry: str) -> Reading | None:
        """Return the latest reading of a model in Ollama's library; None until it has been read."""
        return self._asked(source, lambda: self._read_library(source, registry), 0.0, REMOTE_AGAIN_S, None)

    def _read_library(self, source: str, registry: str) -> Reading:
        client = Client(SourcePolicy(lax=True), READ_S)
        try:
            return read_listing(Listing((Piece("model", blob_url(source, registry, client)),)), client)
        except NotThere as error:
            return Reading(None, problem=str(error))
        finally:
            client.close()

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
            try:
                threading.Thread(target=self._read, args=work, name="headers", daemon=True).start()
            except RuntimeError:  # the system has no more: it is read the next time
                with self._lock:
                    look.busy = False
                    if not known:
                        del self._looks[source]
                        raise
        if not known:
            look.done.wait(wait_s)
        with self._lock:
            look.quiet = False
            return look.reading

    def _read(
        self, source: str, look: _Look, read: Callable[[], Reading], state_of: Callable[[], object] | None
    ) -> None:
        state = state_of() if state_of else None
        known, unchanged = look.reading, state is not None and state == look.state
        found = known if unchanged and known is not None and not known.problem else read()
        with self._lock:
            changed, look.state = look.reading != found, state
            look.reading, look.at, look.busy = found, time.monotonic(), False
            tell = changed and not look.quiet and self._looks.get(source) is look
        look.done.set()
        if tell:
            self._on_change()
