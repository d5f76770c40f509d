"""Download of one file from a server to the disk: resumed after an interruption, and verified before it is used.

Bytes go into `NAME.partial`, and a journal beside it records which version of the file they belong to. A killed process
loses none of them, because the kernel keeps what was written; after a power cut only synced bytes count, and the
journal records how many those are. The file gets its final name once it is whole, checked and synced.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from metal_supervisor.host import machine
from metal_supervisor.models import repository
from metal_supervisor.models.listing import Piece, Retry, Unusable
from metal_supervisor.models.model_directory import PARTIAL, SUFFIXES, open_own, sync, sync_path, write_text
from metal_supervisor.models.remote import web, web_answers
from metal_supervisor.spec.gguf import BadGguf, CutShort, read_header
from metal_supervisor.spec.sources import shown

CHUNK_BYTES = 256 << 10
SYNC_BYTES = 64 << 20
SLOWEST_BYTES = 64 << 10
"""Least that must arrive within the stall timeout: a server that only drips counts as stalled."""
HASH_BYTES = 4 << 20
MAGIC = b"GGUF"


class FetchWatcher(Protocol):
    """Callbacks for the progress of a fetch. Any of them may end it by raising."""

    def begin(self) -> None:
        """Called once: bytes reported before it were on disk already, bytes reported after it are downloaded."""

    def got(self, more_bytes: int) -> None:
        """Called when `more_bytes` more bytes are on the disk; fewer than 0 if a server starts over."""

    def synced(self) -> None:
        """Called after a sync, a good moment to check the free disk space. Raises Unusable."""

    def hashed(self, more_bytes: int) -> None:
        """Called when `more_bytes` more bytes have been hashed. Raises Stopped."""


@dataclass
class Journal:
    """Record of the version of a file that its partial bytes belong to."""

    validator: str
    size_bytes: int | None
    sha256: str
    durable_bytes: int = 0
    """Bytes that survive a power cut."""
    boot: str = ""
    """Id of the boot in which the rest was written."""


def fetch(client: web.Client, piece: Piece, target: Path, secret: Mapping[str, str], watcher: FetchWatcher) -> None:
    """Fetch a piece to `target`, whose directory must exist. Raises Unusable, Stopped, OSError."""
    part = partial(target)
    try:
        _Fetch(client, piece, target, watcher).run(secret)
        with part.open("rb") as file:
            check_head(file.read(512), piece)
    except Unusable as error:
        if error.reason == "InvalidModelFile":
            discard(target)
        raise
    if piece.digest:
        found = digest(part, watcher.hashed)
        if found != piece.digest:
            discard(target)
            text = f"{shown(piece.url)} should have sha256 {piece.digest}, and has {found}"
            raise Mismatch(piece.digest, found, text)
    sync_path(part)  # bytes of an earlier, killed process may not be on the disk yet
    part.replace(target)
    sync_path(target.parent)
    discard(target)


class Mismatch(Unusable):
    """A file does not have the sha256 that it should have."""

    def __init__(self, wanted: str, found: str, message: str) -> None:
        super().__init__("ModelDigestMismatch", message, Retry.NEVER)
        self.wanted, self.found = wanted, found


def partial(target: Path) -> Path:
    """Path of a file while it is being fetched."""
    return target.with_name(f"{target.name}{PARTIAL}")


def discard(target: Path) -> None:
    """Delete the partial bytes of a file, and their journal."""
    for suffix in SUFFIXES:
        target.with_name(target.name + suffix).unlink(missing_ok=True)


def _usable(part: Path, note: Path, wanted: Journal) -> int:
    """Number of bytes to resume from: those of the same file that are certain to be on disk. Cuts off the rest."""
    try:
        size = part.lstat().st_size
        before = Journal(**json.loads(note.read_text("utf-8")))
        if wanted.sha256:
            same = before.sha256 == wanted.sha256
        else:
            same = bool(wanted.validator) and before.validator == wanted.validator
        if same and (before.size_bytes is None or before.size_bytes == wanted.size_bytes):
            have = size if before.boot == wanted.boot else min(size, before.durable_bytes)
            if wanted.size_bytes is None or have <= wanted.size_bytes:
                descriptor = open_own(part, os.O_WRONLY)
                try:
                    os.ftruncate(descriptor, have)
                finally:
                    os.close(descriptor)
                wanted.durable_bytes = min(before.durable_bytes, have)
                return have
    except (OSError, ValueError, TypeError, RecursionError):
        pass  # no earlier try, or none that can be resumed
    part.unlink(missing_ok=True)
    return 0


class _Fetch:
    """The transfer of one piece to its partial file."""

    def __init__(self, client: web.Client, piece: Piece, target: Path, watcher: FetchWatcher) -> None:
        self._client, self._piece, self._target, self._watcher = client, piece, target, watcher
        self._part = partial(target)
        self._note = self._part.with_name(f"{self._part.name}.json")
        self._journal = Journal(piece.validator, piece.size_bytes, piece.sha256, boot=machine.boot_id())
        self._what = shown(piece.url)

    def run(self, secret: Mapping[str, str]) -> None:
        """Fetch what the partial file lacks. Raises Unusable, Stopped, OSError."""
        piece = self._piece
        have = _usable(self._part, self._note, self._journal)
        if have:
            self._watcher.got(have)
        self._watcher.begin()
        if piece.size_bytes == 0:
            os.close(open_own(self._part, os.O_WRONLY | os.O_CREAT))
        elif piece.size_bytes is None or have < piece.size_bytes:
            self._download(secret, have)

    def _download(self, secret: Mapping[str, str], have: int) -> None:
        """Download the file from byte `have` on."""
        piece = self._piece
        asked = {"Range": f"bytes={have}-"} if have else {}
        if have and (piece.validator.startswith('"') or not (piece.sha256 or piece.validator.startswith("W/"))):
            asked["If-Range"] = piece.validator
        answer = self._client.get(piece.url, asked, secret)
        try:
            if answer.status == 416 and have:
                discard(self._target)
                raise self._failed("has become shorter; it is fetched anew")
            if answer.status not in (200, 206):
                refusal = web_answers.refusal(piece.url, answer, bool(secret))
                if answer.status in (401, 403):
                    refusal.retry = Retry.SOON  # the listing was allowed: the link has expired since
                raise refusal
            if web_answers.is_encoded(answer):
                raise self._failed("answers with an encoding of the file, not with its bytes", Retry.LATER)
            start, size = self._extent(answer, have)
            if start != have:
                self._watcher.got(start - have)
            with os.fdopen(open_own(self._part, os.O_WRONLY | os.O_CREAT), "wb", buffering=0) as file:
                file.truncate(start)
                file.seek(start)
                self._journal.size_bytes = size
                if answer.status == 200:  # may be another version than the listed one
                    self._journal.validator = web_answers.validator(answer) or piece.validator
                self._write_journal(min(self._journal.durable_bytes, start))
                got = self._stream(answer, file.fileno(), start)
            ends = "chunked" in answer.headers.get("Transfer-Encoding", "").lower()
        finally:
            answer.close()
        if size is None and not piece.digest:
            self._check_end(got, ends)
        if size is not None and got != size:
            raise self._failed(f"ended after {got} of {size} bytes")

    def _extent(self, answer: web_answers.Answer, have: int) -> tuple[int, int | None]:
        """Return (offset of an answer's first byte, size of the whole file or None). Raises Unusable."""
        piece, (start, size) = self._piece, web_answers.extent(answer)
        # Status 200 is the whole file: the server has no ranges, or the file has changed.
        if start is None or (answer.status == 206 and start != have):
            raise self._failed("does not give the range that it is asked for", Retry.LATER)
        if start and not piece.sha256 and _is_other(answer.headers.get("ETag", ""), piece.validator):
            raise self._failed("has changed; it is fetched anew")
        if piece.size_bytes is not None and size is not None and size != piece.size_bytes:
            raise self._failed(f"has {size} bytes, and should have {piece.size_bytes}; is it being replaced?")
        return start, size if size is not None else piece.size_bytes

    def _stream(self, answer: web_answers.Answer, descriptor: int, start: int) -> int:
        """Write the body to the disk, and return the file's size then. Raises Unusable, Stopped, OSError."""
        piece, most, watcher = self._piece, self._journal.size_bytes, self._watcher
        got, unsynced, window, window_at = start, 0, 0, time.monotonic()
        head = b"" if start == 0 else MAGIC
        for chunk in web.body(self._client, piece.url, answer, CHUNK_BYTES):
            if len(head) < len(MAGIC):
                head += chunk[:512]
                if len(head) >= len(MAGIC):
                    check_head(head, piece)
            if most is not None and got + len(chunk) > most:
                raise self._failed(f"sends more than the {most} bytes that it has")
            view = memoryview(chunk)
            while view:
                view = view[os.write(descriptor, view) :]
            size = len(chunk)
            got, unsynced, window = got + size, unsynced + size, window + size
            watcher.got(size)
            if unsynced >= SYNC_BYTES:
                sync(descriptor)
                unsynced = 0
                self._write_journal(got)
                watcher.synced()
                window, window_at = 0, time.monotonic()  # a slow disk is not a slow server
            if window >= SLOWEST_BYTES:
                window, window_at = 0, time.monotonic()
            elif time.monotonic() - window_at > self._client.stall_s:
                raise self._failed(f"sent only {window} bytes in {self._client.stall_s:.0f} s")
        return got

    def _write_journal(self, durable_bytes: int) -> None:
        self._journal.durable_bytes = durable_bytes
        write_text(self._note, json.dumps(asdict(self._journal)))

    def _check_end(self, size: int, ends: bool) -> None:
        """Raise Unusable unless the file's own header shows that a body without a length is complete.

        `ends`: the body said that it ends; then only a header that shows the contrary counts. A proxy may end well what
        its own server has cut.
        """
        try:
            with self._part.open("rb") as file:
                read_header(Opened(file.fileno()), size)
        except BadGguf as error:
            if ends and not isinstance(error, CutShort):
                return
            discard(self._target)
            raise self._failed(f"tells no length, and what came of it does not end as it should: {error}") from None

    def _failed(self, text: str, retry: Retry = Retry.SOON) -> Unusable:
        return Unusable("DownloadFailed", f"{self._what} {text}", retry)


def _is_other(tag: str, validator: str) -> bool:
    """True if an ETag differs from the validator, and that is an ETag too: a date cannot be compared with one."""
    return bool(tag) and validator.endswith('"') and tag != validator


class Opened:
    """An open file with the interface that the header reader takes."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def read(self, offset: int, size: int) -> bytes:
        return os.pread(self._descriptor, size, offset)


def check_head(head: bytes, piece: Piece) -> None:
    """Raise Unusable for the first bytes of a GGUF file without its magic number, or of another that is a program."""
    if not piece.is_gguf:
        repository.refuse_program(head, shown(piece.url))
        return
    if why := no_gguf(head):
        raise Unusable("InvalidModelFile", f"{shown(piece.url)} {why}")


def no_gguf(head: bytes) -> str:
    """Reason why a file with these first bytes is no GGUF file, "" if it may be one."""
    start, kind = head.lstrip()[:64].lower(), "something else"
    if not head:
        return "is empty; fetch it again"
    if head.startswith(MAGIC):
        return ""
    if start.startswith((b"<!doctype", b"<html", b"<head", b"<?xml")):
        kind = "a web page (a login or error page?)"
    elif start.startswith(repository.LFS_POINTER):
        return "is a Git LFS pointer, not a GGUF file; run git lfs pull in its repository"
    return f"is {kind}, not a GGUF file; check spec.source"


def digest(path: Path, tell: Callable[[int], None] = lambda _: None) -> str:
    """SHA-256 of a file, lower-case hex. `tell`: gets the size of each block. Raises OSError, and what `tell` does."""
    found = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while block := file.read(HASH_BYTES):
            found.update(block)
            tell(len(block))
    return found.hexdigest()
