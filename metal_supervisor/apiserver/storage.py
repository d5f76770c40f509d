"""All objects, their versions and their recent history, in memory and in one SQLite file.

Every write increments one counter, the resourceVersion, is committed before it is answered, and becomes a
change that watchers of that kind get at once. History is bounded: a client that wants to resume from before
it must list again. Objects in the store are never modified in place, so readers may keep them.
"""

from __future__ import annotations

import json
import random
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import TypeAlias

from .codec import encode
from .errors import ApiError, Json, expired

Name: TypeAlias = tuple[str, str]
"""(namespace, name); the namespace is empty for cluster-scoped objects."""

HISTORY_CHANGES = 1000
"""Changes remembered per kind."""

_GAP = 10**9
"""Most versions left out at a start. The number is random, so that two histories from one copy share no version."""

_LOCK_WAIT_S = 1.0
"""Time that a new server waits for a dying one to release the file."""

_TABLES = """
CREATE TABLE IF NOT EXISTS objects (
    kind TEXT NOT NULL, namespace TEXT NOT NULL, name TEXT NOT NULL, written_s REAL NOT NULL, body BLOB NOT NULL,
    PRIMARY KEY (kind, namespace, name)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL);
"""


@dataclass(frozen=True)
class StoredChange:
    """One write, as watchers see it."""

    version: int
    type: str
    """ADDED, MODIFIED or DELETED."""
    obj: Json
    previous: Json | None
    """The object before the write, for selectors that it enters or leaves."""


class UnusableData(RuntimeError):
    """The data file cannot be used; the message names it, and says what to do."""


class ObjectStore:
    """The objects. Hold `lock` around every sequence of calls that must see one state.

    Raises UnusableData if the file is damaged, cannot be opened, or is another server's.
    """

    def __init__(self, data_file: Path, empty_refused: str = "") -> None:
        """`empty_refused`: why a file without objects must not be served, "" if a new one may begin."""
        self.lock = threading.RLock()
        self._data_file = data_file
        self.version = 1
        """The latest resourceVersion."""
        self._objects: dict[str, dict[Name, Json]] = {}
        self._written_s: dict[tuple[str, Name], float] = {}
        self._history: dict[str, deque[StoredChange]] = {}
        self._floor = 1
        """Latest version before the start, before which there is no history."""
        self._first = 2
        """Version of the first write after the start; no version between the two exists."""
        self._conditions: dict[str, threading.Condition] = {}
        self._db = _open(data_file)
        try:
            self._load()
            if empty_refused and not self._objects:
                raise UnusableData(f"{data_file} has no objects, but {empty_refused}")
        except BaseException:
            self._db.close()
            raise

    def close(self) -> None:
        """Closes the file; the store is of no use afterwards."""
        with self.lock:
            self._db.close()

    def _load(self) -> None:
        place = "the row `version` of its table `counters`"
        try:
            row = self._db.execute("SELECT value FROM counters WHERE name = 'version'").fetchone()
            self.version = int(row[0]) if row else 1
            self._floor = self.version
            self._first = self._floor + (random.randint(1, _GAP) if row else 1)
            for kind, namespace, name, written_s, body in self._db.execute("SELECT * FROM objects"):
                place = f"the row of {kind.lstrip('/')} {namespace}/{name} in its table `objects`"
                obj = json.loads(body)
                int(obj["metadata"]["resourceVersion"])  # raises for what was not stored here
                self._keep(kind, (namespace, name), obj, written_s)
        except sqlite3.DatabaseError as problem:
            raise _damaged(self._data_file, str(problem)) from problem
        except (LookupError, RecursionError, TypeError, ValueError) as problem:
            raise _damaged(self._data_file, f"{place} cannot be read") from problem

    def _keep(self, kind: str, name: Name, obj: Json, written_s: float) -> None:
        self._objects.setdefault(kind, {})[name] = obj
        self._written_s[kind, name] = written_s

    # ---- reading -------------------------------------------------------------------------------

    def get(self, kind: str, name: Name) -> Json | None:
        """One object, None when there is none."""
        return self._objects.get(kind, {}).get(name)

    def items(self, kind: str, namespace: str | None = None) -> list[Json]:
        """Objects of a kind in the order of namespace and name; None means every namespace."""
        found = self._objects.get(kind, {})
        names = found if namespace is None else [name for name in found if name[0] == namespace]
        return [found[name] for name in sorted(names)]

    def everything(self) -> Iterator[tuple[str, Name, Json]]:
        """(kind, name, object) of all objects; a snapshot."""
        return iter([(kind, name, obj) for kind, found in self._objects.items() for name, obj in found.items()])

    def written_s(self, kind: str, name: Name) -> float:
        """Unix time of the last write of an object."""
        return self._written_s.get((kind, name), 0.0)

    # ---- writing -------------------------------------------------------------------------------

    def put(self, kind: str, name: Name, obj: Json) -> Json:
        """Stores an object under the next resourceVersion and returns it with that version in it."""
        previous, written_s = self.get(kind, name), time.time()
        with self._transaction() as version:
            stored = {**obj, "metadata": {**obj["metadata"], "resourceVersion": str(version)}}
            row = (kind, *name, written_s, encode(stored))
            self._db.execute("REPLACE INTO objects VALUES (?, ?, ?, ?, ?)", row)
        self._keep(kind, name, stored, written_s)
        self._remember(kind, StoredChange(version, "MODIFIED" if previous else "ADDED", stored, previous))
        return stored

    def remove(self, kind: str, name: Name) -> Json:
        """Removes an object; returns its last state with the resourceVersion of the removal."""
        previous = self._objects[kind][name]
        with self._transaction() as version:
            self._db.execute("DELETE FROM objects WHERE kind = ? AND namespace = ? AND name = ?", (kind, *name))
        del self._objects[kind][name]
        del self._written_s[kind, name]
        last = {**previous, "metadata": {**previous["metadata"], "resourceVersion": str(version)}}
        self._remember(kind, StoredChange(version, "DELETED", last, previous))
        return last

    @contextmanager
    def _transaction(self) -> Iterator[int]:
        """Commit what is written within, as the version that it yields, or nothing.

        Raises ApiError 507 if the disk is full, 500 if it fails.
        """
        version = max(self.version + 1, self._first)
        try:
            with self._db:
                yield version
                self._db.execute("REPLACE INTO counters VALUES ('version', ?)", (version,))
        except sqlite3.DatabaseError as problem:
            full = "is full" in str(problem)
            fix = "make room on its disk" if full else "see whether its disk is in order"
            why = f"{self._data_file} cannot be written ({problem}), and nothing was changed: {fix}, and try again"
            raise ApiError(507 if full else 500, "InsufficientStorage" if full else "InternalError", why) from problem
        self.version = version

    def _remember(self, kind: str, change: StoredChange) -> None:
        self._history.setdefault(kind, deque(maxlen=HISTORY_CHANGES + 1)).append(change)
        self.condition(kind).notify_all()

    # ---- watching ------------------------------------------------------------------------------

    def condition(self, kind: str) -> threading.Condition:
        """Notified, under `lock`, whenever an object of that kind changes."""
        return self._conditions.setdefault(kind, threading.Condition(self.lock))

    def wake_all(self) -> None:
        """Wakes every watcher, for reasons other than a change."""
        with self.lock:
            for condition in self._conditions.values():
                condition.notify_all()

    def changes_since(self, kind: str, version: int) -> list[StoredChange]:
        """Changes of a kind after a resourceVersion, oldest first. Raises ApiError 410 if history begins later,
        or has not come that far.
        """
        history = self._history.get(kind) or deque()
        # Of a full history the first change only says where the others begin.
        oldest = history[0].version if len(history) > HISTORY_CHANGES else self._floor
        if version < oldest:
            raise expired(f"too old resource version: {version} ({oldest})")
        if self._floor < version < self._first or version > self.version:  # the client saw what a restored file lacks
            raise expired(f"too large resource version: {version} ({self.version})")
        return [*takewhile(lambda change: change.version > version, reversed(history))][::-1]


def _open(data_file: Path) -> sqlite3.Connection:
    try:
        data_file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        data_file.touch(mode=0o600, exist_ok=True)
        db = sqlite3.connect(data_file, check_same_thread=False, timeout=_LOCK_WAIT_S)
    except (OSError, sqlite3.OperationalError) as problem:
        raise UnusableData(f"{data_file} cannot be opened ({problem}): make it a file that is yours") from problem
    try:
        # One process per file: a second server on the same objects would corrupt both their memories.
        db.execute("PRAGMA locking_mode = EXCLUSIVE")
        db.execute("PRAGMA journal_mode = WAL")
        # A commit that is in the log survives the death of this process; only a power cut can lose the
        # last few, and then whole ones. Waiting for the disk on every heartbeat would cost more than that.
        db.execute("PRAGMA synchronous = NORMAL")
        # When the log is moved into the file, it has to be on the disk first: a Mac's fsync alone promises no order.
        db.execute("PRAGMA checkpoint_fullfsync = ON")
        db.execute("BEGIN IMMEDIATE")
        db.execute("COMMIT")
        db.executescript(_TABLES)
    except sqlite3.OperationalError as problem:
        db.close()
        locked = "locked" in str(problem)
        fix = "it is in use by another server: end that one" if locked else "make it writable, and room on its disk"
        raise UnusableData(f"{data_file} cannot be opened ({problem}): {fix}") from problem
    except sqlite3.DatabaseError as problem:
        db.close()
        raise _damaged(data_file, str(problem)) from problem
    return db


def _damaged(data_file: Path, detail: str) -> UnusableData:
    remedy = (
        f"move {data_file.name} and {data_file.name}-* away, then put your copy of it there "
        "(docs/operations.md, What to keep a copy of), or start without one and apply your manifests again"
    )
    return UnusableData(f"{data_file} is damaged ({detail}): {remedy}")
