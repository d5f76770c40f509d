"""Headers of model files, so that a model's memory is known before it is loaded.

Admission asks on every pass and must not wait: a network mount may hang, and a server may be slow. So `Headers` reads
in threads and returns what is known so far. Errors are not raised: they are the `problem` of a `Reading`.
"""

from __future__ import annotations

import contextlib
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from metal_supervisor.models.background import LOOK_WAIT_S, BackgroundLooks
from metal_supervisor.models.listing import Listing, Piece, Unusable
from metal_supervisor.models.metadata import Reading, merged, read_config, unreadable
from metal_supervisor.models.remote.fetch import Opened
from metal_supervisor.models.remote.ollama_library import blob_url
from metal_supervisor.models.remote.remote_headers import READ_S, read_listing
from metal_supervisor.models.remote.web import Client
from metal_supervisor.models.repository import CONFIG, MOST_CONFIG_BYTES, WEIGHTS, contents
from metal_supervisor.models.store_context import lax_rules
from metal_supervisor.settings.schema import Settings
from metal_supervisor.spec.gguf import BadGguf, read_header
from metal_supervisor.spec.shards import shard_names

LOCAL_AGAIN_S = 10.0
"""Age after which the next request checks a file again."""
REMOTE_AGAIN_S = 60.0
"""Age after which the next request tries a failed server again."""
MISSING = Reading(None, problem="it is not here, or a manifest may not name it")


def read_file(path: Path) -> Reading:
    """Read the header of a GGUF file on this Mac, merged with its other shards; of a directory, the config.json.

    Never raises: an error is the reading's problem. The size is known only if every shard is there.
    """
    with contextlib.suppress(OSError, ValueError):  # reading the file reports the same error
        if path.is_dir():
            return _read_directory(path)
    names = shard_names(path.name)
    return merged(names, [_read_one(path.with_name(name)) for name in names])


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
        return unreadable(error, size)
    except ValueError as error:  # a path that no file can have
        return Reading(size, problem=str(error))


def _read_directory(path: Path) -> Reading:
    """Read an MLX model: config.json and the size of the weights, in the directory itself."""
    size = None
    try:
        held = list(path.iterdir())
        weights = [each for each in held if each.name.endswith(WEIGHTS) and each.is_file()]
        size = sum(each.stat().st_size for each in weights) or None
        if not (path / CONFIG).is_file():
            what = contents([each.name for each in held])
            return Reading(size, problem=f"it is a directory without a {CONFIG}: {what}")
        with (path / CONFIG).open("rb") as file:
            config = read_config(file.read(MOST_CONFIG_BYTES))
    except OSError as error:
        return Reading(size, problem=f"it cannot be read: {error.strerror or type(error).__name__}")
    if config is None:
        return Reading(size, problem=f"its {CONFIG} cannot be read")
    return Reading(size, config=config)


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


@dataclass(frozen=True)
class _KnownHeader:
    """The latest reading of a source."""

    reading: Reading
    state: object = field(default=None, compare=False)
    """`state_of` the file before the reading; another value means that it has been replaced."""


class Headers:
    """Cache of headers, read in background threads. Use it from one thread; `on_change` is called from others."""

    def __init__(self, on_change: Callable[[], None]) -> None:
        self._looks: BackgroundLooks[_KnownHeader] = BackgroundLooks("headers", on_change)

    def look(self, path: str) -> Reading | None:
        """Return the latest reading of a file on this Mac; None until it has been read, here or by `judged`."""
        return self._local(path, path, lambda: read_file(Path(path)))

    def latest(self, path: str) -> Reading | None:
        """As `look`; what is known is not read again, however old it is."""
        return _reading(self._looks.latest(path)) or self.look(path)

    def judged(self, path: str, is_here: Callable[[], bool]) -> Reading | None:
        """As `look`, for a path that has not been judged: MISSING unless `is_here`, which the thread asks first."""
        return self._local(_judged_name(path), path, lambda: read_file(Path(path)) if is_here() else MISSING)

    def _local(self, name: str, path: str, read: Callable[[], Reading]) -> Reading | None:
        def ask(known: _KnownHeader | None) -> _KnownHeader:
            state = state_of(path)
            known = known or self._looks.latest(_judged_name(path))
            if known is not None and state is not None and state == known.state and not known.reading.problem:
                return known
            return _KnownHeader(read(), state)

        return _reading(self._looks.look(name, ask, LOOK_WAIT_S, LOCAL_AGAIN_S))

    def library(self, source: str, settings: Settings) -> Reading | None:
        """Return the latest reading of a model in Ollama's library; None until it has been read."""

        def ask(known: _KnownHeader | None) -> _KnownHeader:
            if known is not None and not known.reading.problem:
                return known
            return _KnownHeader(read_library(source, settings))

        return _reading(self._looks.look(source, ask, 0.0, REMOTE_AGAIN_S))

    def forget_others(self) -> None:
        """Forget the headers not asked for since the last call.

        What comes anew is read anew: a file may have been put back in the meantime.
        """
        self._looks.forget_others()


def _judged_name(path: str) -> str:
    """Name of the reading of a path that has not been judged."""
    return f"judged {path}"


def _reading(known: _KnownHeader | None) -> Reading | None:
    return None if known is None else known.reading


def read_library(source: str, settings: Settings) -> Reading:
    """Read the header of a model in Ollama's library. Never raises: an error is the reading's problem."""
    client = Client(lax_rules(settings), READ_S)
    try:
        return read_listing(Listing((Piece("model", blob_url(source, settings.ollama_registry, client)),)), client)
    except Unusable as error:
        return Reading(None, problem=str(error))
    finally:
        client.close()
