"""Inventory of the store, for the commands that list and remove models, whatever program put them there.

Reading changes nothing. A directory is renamed before it is removed, so that an interrupted removal never leaves half a
model; nothing outside the store is touched, and no link is followed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import stat
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from metal_supervisor.models.disk_space import nearest_existing
from metal_supervisor.models.housekeeping import Item, Kind
from metal_supervisor.models.model_directory import OURS, PARTIAL, Contents, ModelDirectory
from metal_supervisor.models.places import SLOT
from metal_supervisor.spec.document import whole
from metal_supervisor.spec.fields import Bad
from metal_supervisor.spec.sources import canonical, shown, without_quantization
from metal_supervisor.state import trees
from metal_supervisor.state.directory import StateDir
from metal_supervisor.state.downloads import downloads
from metal_supervisor.state.reports import controller_report, read_object

GOING = ".removed-"


@dataclass(frozen=True)
class StoredFile:
    """One regular file on the disk."""

    path: Path
    inode: tuple[int, int]
    links: int
    size_bytes: int
    mtime: float
    """Unix time."""


@dataclass(frozen=True)
class StoredModel:
    """One directory of the store."""

    slot: ModelDirectory
    kind: Kind
    contents: Contents | None
    files: tuple[StoredFile, ...] = field(repr=False)
    last_used: float
    """Unix time."""
    used_by: tuple[str, ...] = ()
    """`NAMESPACE/NAME` of the services that use it, or whose engines still do; a daemon's program name."""
    wanted_by: tuple[str, ...] = ()
    """`Model NAMESPACE/NAME` or `a service` for each that waits for it; () if it is in use."""
    busy: bool = False
    """True while a process fetches into it."""

    @property
    def name(self) -> str:
        return self.slot.name

    @property
    def size_bytes(self) -> int:
        return sum(each.size_bytes for each in self.files if each.path.name not in OURS)

    @property
    def total_bytes(self) -> int:
        """Size once it is complete; 0 if unknown."""
        if self.contents is None or self.kind is not Kind.PARTIAL:
            return self.size_bytes
        coming = [_journal_bytes(each.path) for each in self.files if each.path.name.endswith(PARTIAL)]
        return self.contents.size_bytes + sum(coming) if all(coming) and coming else 0

    @property
    def source(self) -> str:
        """Source that it was fetched from, "" if unknown."""
        return self.contents.source if self.contents else ""

    def item(self) -> Item:
        """Input for `housekeeping.choose`."""
        used = bool(self.used_by or self.wanted_by or self.busy)
        at = max((each.mtime for each in self.files), default=0.0) if self.kind is Kind.PARTIAL else self.last_used
        return Item(self.name, self.kind, frees_bytes(self.files), at, used)


@dataclass(frozen=True)
class Stock:
    """The whole store."""

    path: Path
    entries: tuple[StoredModel, ...]
    others_bytes: int
    """Size of Ollama's own store, if it is inside this one."""
    size_bytes: int
    """Size without `others_bytes`; a file with several hard links counts once."""
    free_bytes: int
    unread: tuple[str, ...] = ()
    """Records that cannot be read, so that the models of their services are unknown."""

    @property
    def slots(self) -> list[StoredModel]:
        """Entries that can be removed: all but those of LLMKube's agent."""
        return [each for each in self.entries if each.kind is not Kind.LLMKUBE]


def look(store: Path, state: StateDir, ollama: Path) -> Stock:
    """Read the store as it is now. Raises OSError."""
    texts, unread = _used_texts(state)
    wanted = _wanted(state)
    entries, others = [], 0
    for path in sorted(store.iterdir()) if store.is_dir() else ():
        if path.is_symlink() or not path.is_dir():
            continue
        if path.name == "ollama" or path == ollama:
            others += sum({each.inode: each.size_bytes for each in files_of(path)}.values())
        elif (path.name.startswith(GOING) or not path.name.startswith(".")) and (
            entry := _entry(store, path, texts, wanted)
        ):
            entries.append(entry)
    once = {each.inode: each.size_bytes for entry in entries for each in entry.files}
    free = shutil.disk_usage(nearest_existing(store)).free
    return Stock(store, tuple(entries), others, sum(once.values()), free, unread)


def _entry(
    store: Path, path: Path, texts: Sequence[tuple[str, str]], wanted: Sequence[tuple[str, str]]
) -> StoredModel | None:
    slot, files = ModelDirectory(store, path.name), tuple(files_of(path))
    if path.name.startswith(GOING):  # it belongs to no service, and its files' times mean nothing
        return StoredModel(slot, Kind.PARTIAL, None, tuple(replace(each, mtime=0.0) for each in files), 0.0)
    users = _users(path, texts)
    if not SLOT.fullmatch(path.name):
        return StoredModel(slot, Kind.LLMKUBE, None, files, slot.last_used(), users) if files else None
    contents = slot.note()
    if contents is None:
        rest = [each for each in files if each.path.name not in OURS and PARTIAL not in each.path.name]
        kind = Kind.UNKNOWN if rest else Kind.PARTIAL
    elif contents.model.startswith("/"):
        kind = Kind.IN_PLACE
    else:
        kind = Kind.WHOLE if contents.whole else Kind.PARTIAL
    source = contents.source if contents else ""
    found = (name for name, each in wanted if path.name == each or (source and each == source))
    waiting = () if users else tuple(dict.fromkeys(found))
    return StoredModel(slot, kind, contents, files, slot.last_used(), users, waiting, slot.busy())


def files_of(path: Path) -> Iterable[StoredFile]:
    """Regular files below a directory, without following links."""
    for directory, _, names in trees.walk(path):
        for name in names:
            each = Path(directory, name)
            with contextlib.suppress(OSError):
                found = each.lstat()
                if stat.S_ISREG(found.st_mode):
                    inode = found.st_dev, found.st_ino
                    yield StoredFile(each, inode, found.st_nlink, found.st_size, found.st_mtime)


def frees_bytes(files: Iterable[StoredFile]) -> int:
    """Bytes that the removal of files frees: a file that keeps another hard link frees none."""
    known = {each.inode: each for each in files}
    names = Counter(each.inode for each in files)
    return sum(each.size_bytes for inode, each in known.items() if names[inode] >= each.links)


def _journal_bytes(part: Path) -> int:
    """Size of a file once it is complete, by its journal; 0 if the journal does not say."""
    return whole(read_object(part.with_name(f"{part.name}.json")), "size_bytes")


# ── who uses it ──────────────────────────────────────────────────────────────────────────────────


def _used_texts(state: StateDir) -> tuple[list[tuple[str, str]], tuple[str, ...]]:
    """Return ([(service, JSON that may name a model's path), …], records that cannot be read).

    Projectors and draft models are only on the command line, so the specs are searched too: the running and the next.
    """
    records, bad = state.records()
    notes = state.run_notes()
    found = []
    for program, record in records.items():
        name = program if record.is_daemon else "/".join(record.key)
        note = notes.get(program)
        said = [record.files, state.spec_of(program), note.spec if note else {}]
        found.append((name, json.dumps(said, ensure_ascii=False)))
    return found, tuple(sorted(bad))


def _users(path: Path, texts: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    spellings = {json.dumps(str(each), ensure_ascii=False)[1:-1] for each in (path, path.resolve())}
    within = re.compile("|".join(rf"{re.escape(each)}(?![\w.-])" for each in spellings))
    return tuple(sorted({name for name, text in texts if within.search(text)}))


def _wanted(state: StateDir) -> list[tuple[str, str]]:
    """Pairs (who wants it, a slot's name or its source) of what the controller wants, whether or not it is used now."""
    told = controller_report(state.path)
    slots = told.get("slots")
    found = [("a service", str(name)) for name in slots] if isinstance(slots, list) else []
    for each in downloads(told):
        with contextlib.suppress(Bad):
            source = canonical(without_quantization(each.source)[0])
            found.append((f"Model {each.namespace}/{each.model}", shown(source)))
    return found


# ── removing ─────────────────────────────────────────────────────────────────────────────────────


class Busy(Exception):
    """The entry is being fetched."""


def remove(entry: StoredModel) -> None:
    """Remove an entry from the disk. Raises Busy, OSError."""
    slot = entry.slot
    if not slot.path.is_relative_to(slot.store) or slot.path.is_symlink():
        raise OSError(f"{slot.path} is not below the model store")
    aside = slot.path
    if not slot.name.startswith(GOING):
        aside = slot.store / f"{GOING}{slot.name}-{os.getpid()}"
        with slot.locked() as ours:
            if not ours:
                raise Busy
            slot.path.rename(aside)
    trees.remove(aside)
