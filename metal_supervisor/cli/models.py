"""`metal-supervisor models`: lists and verifies the models in the store, and removes those that are not needed.

A model is hours of download, so nothing is deleted unasked, and no model that a service uses.
"""

from __future__ import annotations

import json
import stat
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from metal_supervisor.cli.render import Bar, DownloadBars
from metal_supervisor.cli.terminal import FAILED, NOT_FOUND, OK, CommandError, say
from metal_supervisor.models import inventory
from metal_supervisor.models.housekeeping import LEFT_ALONE_S, Bounds, Kind, age, choose, left_alone, unused_models
from metal_supervisor.models.inventory import Stock, StoredModel
from metal_supervisor.models.model_directory import PinnedFiles
from metal_supervisor.models.remote import fetch
from metal_supervisor.models.repository import quantized
from metal_supervisor.settings.loader import Settings
from metal_supervisor.spec.fields import Bad
from metal_supervisor.spec.sizes import amount
from metal_supervisor.spec.sources import canonical, shown, without_quantization
from metal_supervisor.spec.terminal_text import printable, table
from metal_supervisor.spec.types import Json
from metal_supervisor.state.directory import StateDir

COLUMNS = ("SLOT", "SIZE", "LAST USE", "USED BY", "SOURCE")
EXAMPLES = {"--keep 0": Bounds(keep=0), "--older 30d": Bounds(older_s=30 * 86400.0)}
"""Options that `gc` without any shows the effect of."""


class ModelsCommand:
    """The subcommands, on the store of one Mac."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def _look(self) -> Stock:
        settings = self._settings
        try:
            return inventory.look(settings.store_path, StateDir(settings.state_path), Path(settings.ollama_models_path))
        except OSError as error:
            where = error.filename or settings.store_path
            raise CommandError(f"{where}: {error.strerror}; see --model-store and --state-dir") from None

    def ls(self, as_json: bool) -> int:
        """Print the models."""
        found = self._look()
        if as_json:
            print(json.dumps(_as_json(found), indent=2))
            return OK
        now = time.time()
        if found.entries:
            print("\n".join(table([COLUMNS, *(_row(each, now) for each in found.entries)])))
        if found.others_bytes:
            _print(f"beside them Ollama's own models, {amount(found.others_bytes)}: see `ollama list`")
        total, free = amount(found.size_bytes), amount(found.free_bytes, "down")
        _print(f"{total} in {found.path}, {free} free")
        if found.unread:
            say(_unread(found))
        return OK

    def verify(self, words: Sequence[str], as_json: bool = False) -> int:
        """Hash the files of the named models, or of all, again. Raises CommandError."""
        found = self._look()
        chosen = [_named(found, word) for word in words] if words else found.slots
        verdicts, rows = [], list[Json]()

        def tell(line: str, **row: Any) -> None:
            rows.append(row)
            if not as_json:
                _print(line)

        for entry in chosen:
            if entry.contents is None or not entry.contents.files:
                text = "nothing of it is whole yet" if entry.kind is Kind.PARTIAL else "there is no note of what it is"
                tell(f"unknown  {entry.name}  {text}", slot=entry.name, file="", verdict="unknown", why=text)
                continue
            for name, kept in entry.contents.files.items():
                verdict, why = self._verified(entry, name, kept)
                verdicts.append(verdict)
                line = f"{verdict:<7}  {entry.name}/{name}  {amount(kept.size_bytes)}{f'; {why}' if why else ''}"
                tell(line, slot=entry.name, file=name, verdict=verdict, why=why)
        if as_json:
            print(json.dumps(rows, indent=2))
        elif not chosen:
            _print(f"there are no models in {found.path}")
        damaged = verdicts.count("damaged")
        if damaged:
            text = f"{damaged} of {len(verdicts)} files are damaged; remove such a model with `metal-supervisor models"
            say(f"{text} rm SLOT`, and it is fetched again when it is wanted")
        return FAILED if damaged else OK

    def _verified(self, entry: StoredModel, name: str, kept: PinnedFiles) -> tuple[str, str]:
        """(ok, damaged or unknown; why) of one file."""
        assert entry.contents is not None
        elsewhere = entry.kind is Kind.IN_PLACE
        if (name.startswith("/") and not elsewhere) or ".." in Path(name).parts:
            return "damaged", "that is no name of a file within the model store"
        path = entry.slot.path / name
        try:
            found = path.stat() if elsewhere else path.lstat()
            if not stat.S_ISREG(found.st_mode):
                return "damaged", "it is no regular file"
            if found.st_size != kept.size_bytes:
                return "damaged", f"it has {found.st_size} bytes, and had {kept.size_bytes}"
            now = self._hashed(path, f"{entry.name}/{name}", found.st_size)
        except FileNotFoundError:
            return "damaged", "it is missing"
        except OSError as error:
            return "damaged", f"it cannot be read: {error.strerror}"
        if not kept.sha256:
            return "unknown", f"its server told no digest; its sha256 is {now}"
        return ("ok", "") if now == kept.sha256 else ("damaged", f"its sha256 is {now}, and was {kept.sha256}")

    def _hashed(self, path: Path, name: str, size_bytes: int) -> str:
        """The digest of a file, with its progress on a terminal. Raises OSError."""
        bars, told_at, read_bytes = DownloadBars(sys.stderr), 0.0, 0

        def tell(more_bytes: int) -> None:
            nonlocal told_at, read_bytes
            read_bytes += more_bytes
            now = time.monotonic()
            if now - told_at > 0.2:
                told_at = now
                bars.draw([Bar(name, read_bytes, size_bytes)])

        try:
            return fetch.digest(path, tell)
        finally:
            bars.clear()

    def rm(self, words: Sequence[str], yes: bool, force: bool) -> int:
        """Remove the named models. Raises CommandError, before anything is removed.

        `yes`: do not ask on the terminal; `force`: remove even models that a service uses.
        """
        found = self._look()
        chosen = list({entry.name: entry for entry in (_named(found, word) for word in words)}.values())
        for entry in chosen:
            if entry.busy:
                raise CommandError(f"{_title(entry)} is being fetched; stop that first")
            if entry.used_by and not force:
                text = f"{_title(entry)} is used by {', '.join(entry.used_by)}; delete that first, or add --force"
                raise CommandError(text)
        if found.unread and not force:
            raise CommandError(f"{_unread(found)}; try again in a moment, or add --force")
        return self._remove([(entry, "") for entry in chosen], yes, "rm")

    def gc(self, bounds: Bounds, yes: bool, dry_run: bool) -> int:
        """Remove leftovers, and the models that `bounds` select; `yes`: do not ask. Raises CommandError."""
        found, now = self._look(), time.time()
        if found.unread:
            raise CommandError(f"{_unread(found)}, so nothing is removed; try again in a moment")
        items = [entry.item() for entry in found.entries]
        why = choose(items, bounds, found.size_bytes, now)
        entries = {entry.name: entry for entry in found.entries}
        chosen = [(entries[name], text) for name, text in why.items()]
        if fresh := left_alone(items, now):
            count = _counted(len(fresh), "partial model was", "partial models were")
            _print(f"{count} written to within {age(LEFT_ALONE_S)}, and may be tried again: left alone until then")
        elif not chosen:
            empty = "nothing is in the store" if not items else "nothing is left over"
            _print(empty if bounds == Bounds() else "nothing has to go")
        if bounds == Bounds() and len(items) > len(chosen) + len(fresh):
            _advise(entries, now)
        return self._remove(chosen, yes, "gc", dry_run) if chosen else OK

    def _remove(self, chosen: Sequence[tuple[StoredModel, str]], yes: bool, command: str, dry_run: bool = False) -> int:
        for entry, why in chosen:
            _print(f"{entry.name}  {_size(entry)}  {_title(entry)}{f': {why}' if why else ''}")
        size = amount(_freed([entry for entry, _ in chosen]), "down")
        if dry_run:
            _print(f"{size} would be freed; nothing was removed")
            return OK
        if not yes and not sys.stdin.isatty():
            raise CommandError(f"nothing was removed: there is no terminal to ask on; add --yes to models {command}")
        if not yes and not _agreed(f"Delete {_counted(len(chosen), 'directory', 'directories')}, {size}?"):
            _print("nothing was removed")
            return FAILED
        gone, failed = [], 0
        for entry, _ in chosen:
            try:
                inventory.remove(entry)
                gone.append(entry)
            except inventory.Busy:
                failed += 1
                say(f"{printable(_title(entry))} is being fetched by now; it stays")
            except OSError as error:
                failed += 1
                say(f"{printable(str(entry.slot.path))}: {error.strerror or error}")
        _print(f"{amount(_freed(gone), 'down')} freed{_shared(gone)}")
        return FAILED if failed else OK


def _print(text: str) -> None:
    print(printable(text))


def _agreed(question: str) -> bool:
    sys.stderr.write(f"{question} [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _advise(entries: Mapping[str, StoredModel], now: float) -> None:
    """Print what each option of `gc` would remove. `entries`: the store, by name."""
    items = [entry.item() for entry in entries.values()]
    idle = [entries[item.name] for item in unused_models(items)]
    if not idle:
        _print("every other model is used")
        return
    size = amount(_freed(idle), "down")
    _print(f"nothing uses {len(idle)} of the models, {size}; the longest unused would go first with")
    for flag, bounds in EXAMPLES.items():
        chosen = [entries[name] for name in choose(items, bounds, 0, now) if entries[name] in idle]
        _print(f"  {flag:<12} {len(chosen)} of them, {amount(_freed(chosen), 'down')}")
    _print(f"  {'--size 200G':<12} as many as it takes until the store has that size")


def _counted(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"


def _unread(found: Stock) -> str:
    return f"what {', '.join(map(printable, found.unread))} uses is not known, its record cannot be read"


def _title(entry: StoredModel) -> str:
    return entry.source or entry.name


def _freed(entries: Sequence[StoredModel]) -> int:
    return inventory.frees_bytes([file for entry in entries for file in entry.files])


def _shared(entries: Sequence[StoredModel]) -> str:
    """Reason why less is freed than the models' size, "" if it is not: their files have other hard links."""
    files = [file for entry in entries for file in entry.files]
    shared = sum({each.inode: each.size_bytes for each in files}.values()) - inventory.frees_bytes(files)
    return f"; {amount(shared)} stay, for those files have other names too (hard links)" if shared else ""


def _size(entry: StoredModel) -> str:
    if entry.kind is Kind.IN_PLACE:
        return "in place"
    if entry.kind is not Kind.PARTIAL:
        return amount(entry.size_bytes)
    total = entry.total_bytes
    return f"{amount(entry.size_bytes, 'down')} of {amount(total) if total else 'more'}"


def _row(entry: StoredModel, now: float) -> tuple[str, ...]:
    source = entry.source or ("LLMKube's own agent" if entry.kind is Kind.LLMKUBE else "not known")
    if entry.contents is not None and entry.contents.mismatch:
        source += " (refused: its sha256 is another than the Model says)"
    users = ", ".join((*entry.used_by, *entry.wanted_by))
    if entry.busy:
        users = f"{users} (being fetched)" if users else "being fetched"
    ago = f"{age(now - entry.last_used)} ago" if entry.last_used else ""
    return entry.name, _size(entry), ago, users, source


def _as_json(found: Stock) -> Json:
    return {
        "store": str(found.path),
        "sizeBytes": found.size_bytes,
        "freeBytes": found.free_bytes,
        "ollamaBytes": found.others_bytes,
        "models": [_entry_json(entry) for entry in found.entries],
    }


def _entry_json(entry: StoredModel) -> Json:
    contents = entry.contents
    return {
        "slot": entry.name,
        "kind": entry.kind.value,
        "source": entry.source,
        "path": str(entry.slot.path / contents.model) if contents else str(entry.slot.path),
        "sizeBytes": entry.size_bytes,
        "totalBytes": entry.total_bytes,
        "freesBytes": inventory.frees_bytes(entry.files),
        "lastUsed": entry.last_used,
        "usedBy": list(entry.used_by),
        "wantedBy": list(entry.wanted_by),
        "beingFetched": entry.busy,
        "namespace": contents.namespace if contents else "",
        "commit": contents.commit if contents else "",
        "mismatch": list(contents.mismatch) if contents and contents.mismatch else None,
        "files": [
            {"name": name, "sizeBytes": kept.size_bytes, "sha256": kept.sha256}
            for name, kept in (contents.files.items() if contents else ())
        ],
    }


def _named(found: Stock, word: str) -> StoredModel:
    """The one entry that a word names, by the beginning of its slot's name or by its source. Raises CommandError."""
    matches = [entry for entry in found.slots if word and entry.name.startswith(word)]
    if not matches:
        plain, quantization = without_quantization(word)
        try:
            source = shown(canonical(plain, "SOURCE"))
        except Bad:
            source = plain
        matches = [entry for entry in found.slots if entry.source and entry.source in (source, plain)]
        if quantization:
            matches = [each for each in matches if each.contents and quantized([each.contents.model], quantization)]
    if len(matches) == 1:
        return matches[0]
    what = f"{shown(word)!r:.200}"
    if not matches:
        known = [entry.name for entry in found.entries if entry.kind is Kind.LLMKUBE]
        theirs = "; that is LLMKube's own, remove it by hand" if word in known else ""
        raise CommandError(f"{what} is no model in {found.path}{theirs}; see metal-supervisor models ls", NOT_FOUND)
    names = ", ".join(entry.name for entry in matches)
    raise CommandError(f"{what} may be any of {names}; give more of the slot's name", NOT_FOUND)
