"""The download job of one artifact: find the model on this Mac, or fetch it into its slot file by file, each verified.

A job runs in one thread and may be stopped from any other. It raises an exception for whatever is in the way, and can
be run again at any time: complete files are kept, and a partial one is resumed.
"""

from __future__ import annotations

import contextlib
import errno
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from metal_supervisor.models import backups, model_files, repository, takeover
from metal_supervisor.models.listing import Listing, Piece, Retry, Unusable
from metal_supervisor.models.model_directory import Contents, PinnedFiles, kept, with_file
from metal_supervisor.models.places import Places
from metal_supervisor.models.remote import fetch
from metal_supervisor.models.remote.origins import locate
from metal_supervisor.models.remote.web import Client, Stopped
from metal_supervisor.models.store_context import StoreContext
from metal_supervisor.spec.progress import DownloadProgress
from metal_supervisor.spec.shards import shard_names
from metal_supervisor.spec.sizes import amount
from metal_supervisor.spec.sources import NO_KEYS, Artifact, Keys, shown
from metal_supervisor.spec.types import ModelFile

TELL_EVERY_S = 2.0
"""Interval at which the byte counts of a progress report change."""
SAY_EVERY_S = 10.0
"""Interval at which its message changes."""
POLL_S = 0.2


class DownloadJob:
    """The work for one artifact. Its methods run in one thread; `stop` may be called from any."""

    def __init__(
        self,
        artifact: Artifact,
        shelf: StoreContext,
        say: Callable[[ModelFile], None],
        ask: Callable[[Listing, Client], None],
    ) -> None:
        """`say`: called with each change of state; `ask`: waits for permission to fetch, and may raise."""
        self.artifact, self.shelf, self.slot = artifact, shelf, shelf.slot(artifact)
        self.keys: Keys = NO_KEYS
        self.namespaces: frozenset[str] = frozenset()
        """Namespaces of the services that want it."""
        self.meter = DownloadProgress()
        self._unnoted: Contents | None = None
        """What is in the slot, if its note could not be written, as on a full disk."""
        self.client = Client(shelf.terms.rules, shelf.terms.stall_s)
        self.stopped = threading.Event()
        self.say, self._ask = say, ask

    def stop(self) -> None:
        """Stop the job, whatever it waits for."""
        self.stopped.set()
        self.client.stop()
        self.shelf.downloads.leave(self)

    def check(self) -> None:
        """Raise Stopped if the job has been stopped."""
        if self.stopped.is_set():
            raise Stopped

    def ready(self) -> ModelFile:
        """Return the model on this Mac, fetched if necessary. Raises Unusable, Stopped, OSError."""
        artifact = self.artifact
        if artifact.local:
            path = Path(artifact.source)
            model_files.check_places(path, self.shelf.terms.places)
            # Directories are resolved once, so that the engine opens what was checked; the file's own name is kept,
            # because the Hub's cache has links to files whose names are only hashes.
            return self._in_place(path.parent.resolve() / path.name, self.shelf.terms.places)
        path = self.slot.model_path() or self._fetched()
        if not path.is_relative_to(self.slot.path):  # a local mirror
            return self._in_place(path)
        self._check_digests(path)
        self.slot.touch()
        try:
            return model_files.looked_at(path)
        except Unusable as error:
            if error.reason == "InvalidModelFile":  # one that cannot be read just now is as good as it was
                self._list_anew()
            raise

    def is_whole(self, path: Path) -> bool:
        """True if all files of a fetched model are there; of one in a mirror only the path is watched."""
        try:
            ours = path.is_relative_to(self.slot.path) or path.is_relative_to(self.slot.path.resolve())
            return not ours or self.slot.model_path() is not None
        except Unusable:
            return False

    def _in_place(self, path: Path, places: Places = model_files.ANYWHERE) -> ModelFile:
        """Return a model that is used where it is, its digests checked. Raises Unusable, Stopped, OSError."""
        found = model_files.looked_at(path, places)
        if found.directory == self.artifact.directory:
            self._check_digests(path)
        return found

    def _check_digests(self, path: Path) -> None:
        """Raise Unusable for a file that does not have the digest that its Model names. Raises Stopped, OSError."""
        if self.artifact.directory:
            files = {name: path / name for name, _ in self.artifact.digests}
        else:
            files = {name: path.with_name(name) for name in shard_names(path.name)}
        for (name, file), wanted in zip(files.items(), self.artifact.expected(tuple(files)), strict=True):
            if wanted:
                self._check_digest(file, wanted, self.artifact.digest_field(name))

    def _check_digest(self, path: Path, wanted: str, field: str) -> None:
        """Raise Unusable if a file does not have a digest. It is hashed once; the slot's note keeps the hash.

        `field`: the field that names the digest. Raises Stopped, OSError.
        """
        if not path.is_file():
            raise Unusable("ModelFileMissing", f"{path} does not exist, and {field} names it; put it there")
        self.slot.prepare()
        name = str(path.relative_to(self.slot.path)) if path.is_relative_to(self.slot.path) else str(path)
        if not (known := self._noted_digest(path, name)):
            with self._alone():  # another job may have hashed it meanwhile
                known = self._noted_digest(path, name) or self._hash(path, name)
        if known != wanted:
            text = f"{path} should have {field} {wanted}, and has {known}; correct one of them"
            if path.is_relative_to(self.slot.path):
                text += f", or have it fetched anew: metal-supervisor models rm {self.slot.name}"
            raise Unusable("ModelDigestMismatch", text, Retry.LATER if self.artifact.local else Retry.NEVER)

    def _noted_digest(self, path: Path, name: str) -> str:
        """SHA-256 that the slot's note has of a file as it is now, "" if it has none. Raises Unusable, OSError."""
        contents, now = self.slot.read(), kept(path.resolve())
        noted = contents.files.get(name) if contents else None
        if noted is None or (noted.size_bytes, noted.mtime_ns) != (now.size_bytes, now.mtime_ns):
            return ""
        return noted.sha256

    def _hash(self, path: Path, name: str) -> str:
        """Hash a file, and note its SHA-256 under a name. Raises Unusable, Stopped, OSError."""
        now = kept(path.resolve())
        found = fetch.digest(path, Hashing(self, now.size_bytes))
        contents = self.slot.read() or Contents(shown(self.artifact.source), name)
        with contextlib.suppress(OSError):  # on a full disk it is hashed again after the next start
            self.slot.write(with_file(contents, name, replace(now, sha256=found)))
        return found

    # ── a model that is not here ─────────────────────────────────────────────────────────────────

    def _fetched(self) -> Path:
        """Fetch the model, and return its path on this Mac. Raises Unusable, Stopped, OSError."""
        before = self.slot.read()
        mismatch = before.mismatch if before is not None else None
        for wanted in (self.artifact.sha256, *(digest for _, digest in self.artifact.digests)):
            self._refuse_again(mismatch, wanted)
        keys = self.keys  # another thread may replace them at any moment
        if keys.problem:
            raise Unusable(*keys.problem, Retry.RUNG if keys.passing else Retry.LATER)
        listing = self._listed(keys, before.commit if before else "", mismatch)
        if listing.path:
            return Path(listing.path)
        self.check()
        self._ask(listing, self.client)
        self.slot.prepare()
        backups.exclude(self.shelf.directory)
        with self._alone():
            return self.slot.model_path() or self._fill(listing)  # another process may have fetched it meanwhile

    def _listed(self, keys: Keys, pinned: str, mismatch: tuple[str, str] | None) -> Listing:
        """The files to fetch, of the commit of an earlier try if that will do. Raises Unusable, Stopped."""
        found = locate(self.artifact, keys.values, self.client, self.shelf.terms.hub, pinned)
        try:
            return self._acceptable(found, mismatch)
        except Unusable:
            fresh = locate(self.artifact, keys.values, self.client, self.shelf.terms.hub) if pinned else found
            if fresh.commit == found.commit:
                raise
            return self._acceptable(fresh, mismatch)  # it has been uploaded anew

    def _acceptable(self, listing: Listing, mismatch: tuple[str, str] | None) -> Listing:
        """A listing with the Model's own digests. Raises Unusable if it is known that it cannot be what is wanted."""
        artifact, pieces = self.artifact, []
        expected = artifact.expected([piece.name for piece in listing.pieces])
        for piece, wanted in zip(listing.pieces, expected, strict=True):
            if wanted and piece.sha256 not in ("", wanted):
                what = f"{shown(artifact.source)} should have {artifact.digest_field(piece.name)} {wanted}"
                text = f"{what}, and its server has {piece.sha256}; nothing was fetched"
                raise Unusable("ModelDigestMismatch", text, Retry.NEVER)
            pieces.append(replace(piece, wanted_sha256=wanted, gguf=piece.gguf or not artifact.directory))
        listing = replace(listing, pieces=tuple(pieces))
        for piece in listing.pieces:
            self._refuse_again(mismatch, piece.digest)
        return listing

    def _list_anew(self) -> None:
        """Have the next try ask the server again, for a model that cannot be used: it may be uploaded anew."""
        with contextlib.suppress(OSError):
            contents = self.slot.read()
            if contents is not None and contents.whole:
                self.slot.write(replace(contents, commit="", whole=False))

    def _refuse_again(self, mismatch: tuple[str, str] | None, wanted: str) -> None:
        """Raise Unusable if an earlier fetch already failed to give a file with this digest."""
        if mismatch is not None and wanted and mismatch[0] == wanted:
            text = f"{shown(self.artifact.source)} should have sha256 {wanted}, and had {mismatch[1]}"
            raise self._mismatched(text)

    def _mismatched(self, text: str) -> Unusable:
        """The failure of a fetch whose digest was wrong, with the way out of it."""
        anew = f"it is not fetched again until that changes, or after: metal-supervisor models rm {self.slot.name}"
        return Unusable("ModelDigestMismatch", f"{text}; {anew}", Retry.NEVER)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the slot's lock; wait while another thread or process holds it. Raises Stopped, OSError."""
        said_at = -SAY_EVERY_S
        while True:
            with self.slot.locked() as ours:
                if ours:
                    yield
                    return
            if time.monotonic() - said_at >= SAY_EVERY_S:
                said_at = time.monotonic()
                here = f"another fetch of it is under way, {amount(self.slot.partial_bytes())} of a file are here"
                self.say(ModelFile("Downloading", message=here))
            self.stopped.wait(POLL_S)
            self.check()

    def _fill(self, listing: Listing) -> Path:
        """Fetch the files that the slot lacks; note each as soon as it is whole. Raises Unusable, Stopped, OSError."""
        artifact, slot = self.artifact, self.slot
        base = f"{repository.directory_name(artifact)}/" if artifact.directory else ""
        model = base.rstrip("/") or listing.pieces[0].name
        known = self._unnoted or slot.read() or Contents(shown(artifact.source), model, artifact.directory)
        space = artifact.secret[0] if artifact.secret else ""
        names = {base + piece.name for piece in listing.pieces}  # an earlier listing may have had others
        files = {name: found for name, found in known.files.items() if name in names}
        contents = replace(
            known, model=model, commit=listing.commit, namespace=space, mismatch=None, whole=False, files=files
        )
        slot.write(contents)
        self._unnoted = None
        if artifact.directory:
            slot.remove_others(model, names)
        sizes = [piece.size_bytes for piece in listing.pieces]
        self.meter = DownloadProgress(0 if None in sizes else sum(size or 0 for size in sizes))
        missing = []
        for piece in listing.pieces:
            name = base + piece.name
            target, hashed = slot.place(name), Hashing(self, piece.size_bytes or 0)
            if self._has(name, piece, files.get(name)):
                self.meter.got(piece.size_bytes or 0)
            elif found := takeover.taken_over(piece, target, self.shelf.directory, artifact, hashed):
                self.meter.got(piece.size_bytes or 0)
                contents = with_file(contents, name, found)
                slot.write(contents)
            else:
                missing.append((name, piece, target))
        if missing:
            contents = self._fetch(missing, listing, contents)
        slot.write(replace(contents, whole=True))
        return slot.path / model

    def _fetch(self, missing: Sequence[tuple[str, Piece, Path]], listing: Listing, contents: Contents) -> Contents:
        """Fetch files, each (name, piece, target), and return the note with them. Raises Unusable, Stopped, OSError."""
        try:
            self._wait_for_a_turn()
            self._claim(missing)
            for name, piece, target in missing:
                fetch.fetch(self.client, piece, target, listing.headers, Progress(self, piece))
                model_files.check_content(target)  # config.json is first: before gigabytes of weights
                self._unnoted = contents = with_file(contents, name, kept(target, piece.digest, piece.validator))
                self.slot.write(contents)
                self._unnoted = None
        except Unusable as error:
            if error.reason == "InvalidModelFile":  # the next try asks for the commit of then
                self.slot.write(replace(contents, commit=""))
            if isinstance(error, fetch.Mismatch):
                self.slot.write(replace(contents, mismatch=(error.wanted, error.found)))
                raise self._mismatched(str(error)) from None
            raise
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            self.shelf.space.full(shown(self.artifact.source), self.meter.total_bytes - self.meter.got_bytes)
        finally:
            self.shelf.downloads.leave(self)
            self.shelf.space.release(self)
        return contents

    def _wait_for_a_turn(self) -> None:
        may_start = self.shelf.downloads.ask(self)
        self.check()  # it may have been stopped before it asked
        if not may_start.is_set():
            others = f"{self.shelf.terms.at_once} other models are being fetched, see --downloads"
            self.say(ModelFile("Downloading", message=f"it waits for its turn: {others}"))
            may_start.wait()
        self.check()

    def _has(self, name: str, piece: Piece, found: PinnedFiles | None) -> bool:
        """True if a file is already here, whole, and the one that is listed. `found`: what the note has of it."""
        if found is None or not self.slot.has(name, found) or piece.size_bytes not in (None, found.size_bytes):
            return False
        if piece.digest and found.sha256:
            return piece.digest == found.sha256
        return not piece.digest and found.validator == piece.validator

    def _claim(self, missing: Sequence[tuple[str, Piece, Path]]) -> None:
        """Reserve disk space for the bytes still to come. Raises Unusable if there is none, OSError."""
        need = sum(max(0, (piece.size_bytes or 0) - _size(fetch.partial(target))) for _, piece, target in missing)
        what = shown(self.artifact.source)
        self.shelf.space.claim(self, need, what, self.meter.total_bytes)


class Hashing:
    """Progress of hashing one file. Raises Stopped out of it once the job is stopped."""

    def __init__(self, job: DownloadJob, size_bytes: int) -> None:
        self._job, self._meter, self._told_at = job, DownloadProgress(size_bytes), time.monotonic()
        self._every_s = TELL_EVERY_S
        """Short at first, so that hashing is not taken for a stall."""

    def __call__(self, more_bytes: int) -> None:
        """Count `more_bytes` bytes as hashed. Raises Stopped."""
        self._job.check()
        self._meter.got(more_bytes)
        now = time.monotonic()
        if now - self._told_at >= self._every_s:
            self._told_at, self._every_s = now, SAY_EVERY_S
            self._meter.look(now)
            self._job.say(ModelFile("Checking", message=f"its sha256 is being checked: {self._meter}"))


class Progress:
    """Progress of downloading one file, with a check of the free disk space. Implements FetchWatcher."""

    def __init__(self, job: DownloadJob, piece: Piece) -> None:
        self._job = job
        self.hashed = Hashing(job, piece.size_bytes or 0)
        self._said_at, self._told_at, self._words = 0.0, 0.0, ""

    def begin(self) -> None:
        """Start the rate here: the bytes counted so far were on disk already."""
        now = time.monotonic()
        self._job.meter.begin(now)
        self._tell(now)

    def got(self, more_bytes: int) -> None:
        """Count `more_bytes` bytes as written to the disk."""
        self._job.meter.got(more_bytes)
        now = time.monotonic()
        if now - self._told_at >= TELL_EVERY_S:
            self._tell(now)

    def _tell(self, now: float) -> None:
        meter = self._job.meter
        meter.look(now)
        self._job.shelf.space.left(self._job, max(0, meter.total_bytes - meter.got_bytes))
        if not self._words or now - self._said_at >= SAY_EVERY_S:
            self._words, self._said_at = str(meter), now
        self._told_at = now
        said = ModelFile("Downloading", message=self._words, got_bytes=meter.got_bytes, total_bytes=meter.total_bytes)
        self._job.say(said)

    def synced(self) -> None:
        """Raise Unusable if the disk is getting full. Raises OSError."""
        self._job.shelf.space.check()


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return 0
