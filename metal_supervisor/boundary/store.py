"""Model files, and directories of MLX models: where a Model's source is on this Mac, fetched if it has to be.

The controller only asks; a worker looks at disks (a network mount may hang) and fetches, one thread for
each source, one fetch for many services. What is no longer wanted stops at the next chunk. A file counts
as a model only if it begins like one: a login page saved under a model's name must never reach an engine.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import urllib3

from metal_supervisor.core.types import ModelFile

MAGIC = b"GGUF"
CONFIG, WEIGHTS = "config.json", (".safetensors", ".npz")
CHUNK_BYTES = 1 << 20
CONNECT_S, STALL_S = 10.0, 60.0
FIRST_RETRY_S, LONGEST_RETRY_S = 5.0, 300.0
LOOK_WAIT_S = 0.1
PROGRESS_EVERY_S = 5.0


class Unusable(Exception):
    """A source cannot become a model file; `reason` is CamelCase, the message says what to do."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass
class _Task:
    """One source, and the thread that looks after it."""

    state: ModelFile = field(default_factory=lambda: ModelFile("Checking"))
    dropped: threading.Event = field(default_factory=threading.Event)
    first_look: threading.Event = field(default_factory=threading.Event)
    again: threading.Event = field(default_factory=threading.Event)
    waited_for: bool = True
    """Whoever wanted it still waits for the first look, so nobody has to be told of it."""
    asks: bool = False
    """It is not here, and waits for leave to be fetched."""
    leave: threading.Event = field(default_factory=threading.Event)


def check_file(path: Path) -> int:
    """Size in bytes of a usable model file. Raises Unusable."""
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            raise Unusable("InvalidModelFile", f"{path} is not a regular file; spec.source must name one .gguf file")
        if path.is_dir():
            raise Unusable("InvalidModelFile", f"{path} is a directory; spec.source must name one .gguf file")
        with path.open("rb") as file:
            head = file.read(512)
        size = path.stat().st_size
    except FileNotFoundError:
        raise Unusable("ModelFileMissing", f"{path} does not exist on this Mac; put the file there") from None
    except OSError as error:
        raise Unusable("ModelFileUnreadable", f"{path}: {error.strerror}") from None
    if not size:
        raise Unusable("InvalidModelFile", f"{path} is empty; fetch it again")
    if not head.startswith(MAGIC):
        raise Unusable("InvalidModelFile", f"{path} is {_kind(head)}, not a GGUF file; check spec.source")
    return size


def check_directory(path: Path) -> int:
    """Size in bytes of the weights in a directory of an MLX model. Raises Unusable."""
    try:
        sizes = {each.name: each.stat().st_size for each in path.iterdir() if each.is_file()}
    except OSError as error:
        raise Unusable("ModelFileUnreadable", f"{path}: {error.strerror}") from None
    weights = sum(size for name, size in sizes.items() if name.endswith(WEIGHTS))
    lacks = "config.json" if CONFIG not in sizes else "" if weights else "*.safetensors"
    if lacks:
        text = f"{path} is a directory without {lacks}"
        raise Unusable("InvalidModelFile", f"{text}; spec.source must name one .gguf file, or an MLX model's directory")
    return weights


def _looked_at(path: Path) -> ModelFile:
    """What a source that is on this Mac comes to. Raises Unusable."""
    try:
        directory = path.is_dir()
        real = path.resolve() if directory else path
    except OSError as error:
        raise Unusable("ModelFileUnreadable", f"{path}: {error.strerror}") from None
    size = check_directory(real) if directory else check_file(path)
    return ModelFile("Ready", str(real), size, directory=directory)


def _kind(head: bytes) -> str:
    start = head.lstrip()[:64].lower()
    if start.startswith((b"<!doctype", b"<html", b"<head", b"<?xml")):
        return "a web page (a login or error page?)"
    if start.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer"
    return f"something else (it begins with {head[:8]!r})"


def shown_url(url: str) -> str:
    """A URL without credentials or query, fit for a log or a status."""
    plain = url.partition("?")[0].partition("#")[0]
    scheme, separator, rest = plain.partition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}{separator}{host.rpartition('@')[2]}{slash}{path}"[:300]


def _is_remote(source: str) -> bool:
    return source.startswith(("http://", "https://"))


class Store:
    """The model files of this Mac. Safe to ask from one thread; `on_change` is called from others."""

    def __init__(self, directory: Path, on_change: Callable[[], None]) -> None:
        self._directory = directory
        self._on_change = on_change
        self._tasks: dict[str, _Task] = {}
        self._http = urllib3.PoolManager(retries=False, timeout=urllib3.Timeout(connect=CONNECT_S, read=STALL_S))

    def want(self, sources: Iterable[str]) -> None:
        """Looks after exactly these sources from now on; others are dropped, their fetches stopped."""
        wanted = set(sources)
        for source in self._tasks.keys() - wanted:
            task = self._tasks.pop(source)
            task.dropped.set()
            task.again.set()
            task.leave.set()
        started = []
        for source in wanted - self._tasks.keys():
            task = self._tasks[source] = _Task()
            threading.Thread(target=self._look_after, args=(source, task), name="store", daemon=True).start()
            started.append(task)
        # A local file is known within a millisecond: worth a moment, so that it needs no second pass.
        until = time.monotonic() + LOOK_WAIT_S
        for task in started:
            task.first_look.wait(max(0.0, until - time.monotonic()))
            task.waited_for = False

    def look_again(self) -> None:
        """Checks what failed again now, e.g. because somebody edited a resource."""
        for task in self._tasks.values():
            if task.state.phase == "Failed":
                task.again.set()

    def state(self, source: str) -> ModelFile:
        """Where a wanted source stands."""
        task = self._tasks.get(source)
        return task.state if task else ModelFile("Checking")

    def wants(self, source: str) -> bool:
        """Whether a source is looked after."""
        return source in self._tasks

    def asks_leave(self, source: str) -> bool:
        """Whether a source is not here, and waits for leave to be fetched."""
        task = self._tasks.get(source)
        return task is not None and task.asks

    def give_leave(self, source: str) -> None:
        """Lets a source be fetched: nothing that is known of it speaks against it."""
        if task := self._tasks.get(source):
            task.asks = False
            task.leave.set()

    def refuse(self, source: str, state: ModelFile) -> None:
        """Says of a source that waits for leave why it gets none."""
        if task := self._tasks.get(source):
            task.state = state

    def near(self, source: str) -> bool | None:
        """Whether a source is on this Mac already; None if it is a local path that is not there."""
        here = self.here(source) is not None
        return here or (False if _is_remote(source) else None)

    def here(self, source: str) -> Path | None:
        """Where a source is on this Mac, whether or not it is wanted; None if it is not there."""
        if _is_remote(source):
            path = self._target(source)
        else:
            path = Path(source if source.startswith("/") else urllib.parse.unquote(urllib.parse.urlsplit(source).path))
        try:
            return path if path.exists() else None
        except (OSError, ValueError):
            return None

    def _say(self, task: _Task, state: ModelFile) -> None:
        changed, task.state = task.state != state, state
        task.first_look.set()
        if changed and not task.waited_for and not task.dropped.is_set():
            self._on_change()

    def _look_after(self, source: str, task: _Task) -> None:
        pause_s = FIRST_RETRY_S
        while not task.dropped.is_set():
            try:
                self._say(task, _looked_at(self._local(source, task)))
                return
            except Unusable as error:
                self._say(task, ModelFile("Failed", reason=error.reason, message=str(error)))
            except Exception as error:  # noqa: BLE001 - whatever a URL or a server makes a library raise
                text = f"{shown_url(source)} cannot be used: {type(error).__name__}; check spec.source"
                self._say(task, ModelFile("Failed", reason="InvalidModel", message=text))
            task.again.wait(pause_s if source.startswith("http") else FIRST_RETRY_S)
            task.again.clear()
            pause_s = min(LONGEST_RETRY_S, pause_s * 2)

    def _local(self, source: str, task: _Task) -> Path:
        """The local path of a source, fetched if need be. Raises Unusable."""
        if source.startswith("/"):
            return Path(source)
        parts = urllib.parse.urlsplit(source)
        if parts.scheme == "file":
            if parts.netloc not in ("", "localhost"):
                raise Unusable("InvalidModel", f"spec.source {source!r:.200}: file:// needs three slashes")
            return Path(urllib.parse.unquote(parts.path))
        return self._fetched(source, task)

    def _target(self, url: str) -> Path:
        """Where a fetched source is kept."""
        name = re.sub(r"[^A-Za-z0-9._-]", "_", Path(urllib.parse.urlsplit(url).path).name)[-128:] or "model.gguf"
        return self._directory / hashlib.sha256(url.encode("utf-8", "replace")).hexdigest()[:16] / name

    def _fetched(self, url: str, task: _Task) -> Path:
        target = self._target(url)
        if not target.exists():
            self._wait_for_leave(task)
            try:
                target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                self._fetch(url, target, task)
            except OSError as error:
                raise Unusable("DownloadFailed", f"{target}: {error.strerror}") from None
        else:
            try:
                check_file(target)
            except Unusable:
                target.unlink(missing_ok=True)  # ours, and damaged: fetch it again
                return self._fetched(url, task)
        return target

    def _wait_for_leave(self, task: _Task) -> None:
        """A model may be too large for this Mac, which its first bytes tell. Raises Unusable."""
        if not task.leave.is_set():
            task.asks = True
            self._say(task, ModelFile("Pending", message="whether it fits is being looked at"))
            task.leave.wait()
        if task.dropped.is_set():
            raise Unusable("Dropped", "no longer wanted")

    def _fetch(self, url: str, target: Path, task: _Task) -> None:
        """Fetches into `<name>.part`, then renames. Raises Unusable, OSError."""
        # A name of its own: the fetch that was dropped a moment ago may still be cleaning up.
        shown, part = shown_url(url), target.with_name(f"{target.name}.{threading.get_ident()}.part")
        try:
            answer = self._http.request(
                "GET", url, preload_content=False, redirect=True, headers={"Accept-Encoding": "identity"},
                retries=urllib3.Retry(connect=0, read=0, redirect=5, other=0, status=0),
            )
        except (urllib3.exceptions.HTTPError, ValueError) as error:
            why = type(getattr(error, "reason", None) or error).__name__
            raise Unusable("DownloadFailed", f"{shown}: {why}; is the server up?") from None
        try:
            if answer.status != 200:
                raise Unusable("DownloadFailed", f"{shown} answered {answer.status}; check spec.source")
            said = answer.headers.get("Content-Length", "")
            length = int(said) if said.isascii() and said.isdigit() else 0
            if answer.headers.get("Content-Encoding", "identity") != "identity":
                length = 0  # of the encoded bytes
            got, told, head = 0, 0.0, b""
            with part.open("wb") as file:
                for chunk in answer.stream(CHUNK_BYTES):
                    if task.dropped.is_set():
                        raise Unusable("Dropped", "no longer wanted")
                    head = head if len(head) >= len(MAGIC) else head + chunk[:512]
                    if len(head) >= len(MAGIC) and not head.startswith(MAGIC):
                        raise Unusable("InvalidModelFile", f"{shown} is {_kind(head)}, not a GGUF file")
                    file.write(chunk)
                    got += len(chunk)
                    if time.monotonic() - told > PROGRESS_EVERY_S:
                        told = time.monotonic()
                        of = f" of {length}" if length else ""
                        self._say(task, ModelFile("Downloading", message=f"{got}{of} bytes of {shown}"))
            if not got:
                raise Unusable("InvalidModelFile", f"{shown} is empty")
            if length and got != length:
                raise Unusable("DownloadFailed", f"{shown} ended after {got} of {length} bytes")
            if len(head) < len(MAGIC):
                raise Unusable("InvalidModelFile", f"{shown} is {_kind(head)}, not a GGUF file")
            with part.open("rb") as file:
                os.fsync(file.fileno())
            part.replace(target)
        except urllib3.exceptions.HTTPError as error:
            raise Unusable("DownloadFailed", f"{shown} broke off: {type(error).__name__}") from None
        finally:
            answer.close()
            part.unlink(missing_ok=True)
