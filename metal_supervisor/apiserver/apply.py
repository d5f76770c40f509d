"""Field ownership: server-side apply, and the bookkeeping of every other write.

Each object carries `metadata.managedFields`: one entry per (manager, operation, subresource) with the
set of fields it owns. Apply is a declaration: it may not change what others own (409, unless forced),
and what a manager no longer declares is removed. That makes an apply without force a
compare-and-swap, on which the claims of several Macs rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from .codec import listed, timestamp
from .errors import ApiError, Json
from .fields import OWNABLE_METADATA, PRESENT, Path, decode_set, encode_set, leaves, merge, show, without

_MISSING: Any = object()


@dataclass(frozen=True)
class Manager:
    """Identity of an entry of managedFields."""

    name: str
    operation: str
    """`Apply` or `Update`."""
    subresource: str
    """Empty for the main resource."""
    api_version: str

    @property
    def identity(self) -> tuple[str, str, str, str]:
        """Key of an entry; an applier keeps its own when it moves to another version."""
        version = "" if self.operation == "Apply" else self.api_version
        return (self.name, self.operation, self.subresource, version)

    def __str__(self) -> str:
        part = f' with subresource "{self.subresource}"' if self.subresource else ""
        version = f" using {self.api_version}" if self.operation == "Update" else ""
        return f'"{self.name}"{part}{version}'


@dataclass(frozen=True)
class FieldsEntry:
    """One manager and what it owns."""

    manager: Manager
    paths: frozenset[Path]
    time: str
    """When the set last changed, RFC 3339."""


Entries: TypeAlias = dict[tuple[str, str, str, str], FieldsEntry]


def read_entries(obj: Mapping[str, Any] | None) -> Entries:
    """The entries of an object's managedFields."""
    entries: Entries = {}
    for raw in listed(((obj or {}).get("metadata") or {}).get("managedFields")):
        if not isinstance(raw, dict) or not raw.get("manager"):
            continue
        manager = Manager(
            str(raw["manager"]),
            str(raw.get("operation") or "Update"),
            str(raw.get("subresource") or ""),
            str(raw.get("apiVersion") or ""),
        )
        entries[manager.identity] = FieldsEntry(manager, decode_set(raw.get("fieldsV1")), str(raw.get("time") or ""))
    return entries


def write_entries(obj: Json, entries: Entries) -> None:
    """Puts entries into an object's metadata; those that own nothing are dropped."""
    ordered = sorted(
        (entry for entry in entries.values() if entry.paths),
        key=lambda entry: (entry.manager.operation, entry.time, entry.manager.name, entry.manager.subresource),
    )
    metadata = obj.setdefault("metadata", {})
    metadata.pop("managedFields", None)
    if ordered:
        metadata["managedFields"] = [_encoded(entry) for entry in ordered]


def _encoded(entry: FieldsEntry) -> Json:
    return {
        "apiVersion": entry.manager.api_version,
        "fieldsType": "FieldsV1",
        "fieldsV1": encode_set(entry.paths),
        "manager": entry.manager.name,
        "operation": entry.manager.operation,
        "time": entry.time,
        **({"subresource": entry.manager.subresource} if entry.manager.subresource else {}),
    }


def apply(
    schema: Json, live: Json, applied: Json, manager: Manager, *, force: bool, has_status: bool,
    yielding: frozenset[Path] = frozenset(),
) -> tuple[Json, Entries]:  # fmt: skip
    """Merge a manager's declaration into `live`; return the result and the new ownership.

    Raises ApiError 409 with one cause per contested field, unless all those are `yielding`: free to take, whichever
    manager owns them. The declaration fits the schema (`typed.check`).
    """
    entries = read_entries(live)
    scoped = _scoped_object(applied, manager.subresource, has_status)
    declared = leaves(schema, scoped)
    before = leaves(schema, live)
    changed = _changed(before, declared)
    contested = [
        (entry, path)
        for entry in entries.values()
        if entry.manager.identity != manager.identity
        for path in sorted(changed & entry.paths)
    ]
    defended = [(entry, path) for entry, path in contested if path not in yielding]
    if defended and not force:
        raise _conflict(defended)
    for entry, path in contested:
        owner = entries[entry.manager.identity]
        entries[entry.manager.identity] = replace(owner, paths=owner.paths - {path})

    merged: Json = merge(schema, live, scoped)
    previous = entries.get(manager.identity)
    others = frozenset().union(*(e.paths for e in entries.values() if e.manager.identity != manager.identity))
    if previous:
        # What another manager owns stays, and so does a container of what is owned.
        kept = {path[:length] for path in others.union(declared) for length in range(1, len(path) + 1)}
        merged = without(schema, merged, previous.paths - kept, others.union(declared))
    entries[manager.identity] = _renewed(previous, manager, frozenset(declared))
    return merged, entries


def _scoped_object(applied: Json, subresource: str, has_status: bool) -> Json:
    """The part of a declaration that may be merged."""
    if subresource == "status":
        return {"status": applied["status"]} if "status" in applied else {}
    ignored = {"apiVersion", "kind", "metadata"} | ({"status"} if has_status else set())
    scoped = {name: value for name, value in applied.items() if name not in ignored}
    metadata = applied.get("metadata") or {}
    scoped["metadata"] = {name: metadata[name] for name in OWNABLE_METADATA if name in metadata}
    return scoped


def _changed(before: dict[Path, Any], declared: dict[Path, Any]) -> set[Path]:
    """The paths of the live object, or of the declaration, whose value an apply changes."""
    changed: set[Path] = set()
    for path, value in declared.items():
        if _differs(before.get(path, _MISSING), value):
            changed.add(path)
        # A container where a plain value was, or the other way round, changes what was there.
        changed |= {path[:n] for n in range(1, len(path)) if before.get(path[:n], PRESENT) is not PRESENT}
        if value is not PRESENT and before.get(path, PRESENT) is PRESENT:
            changed |= {other for other in before if other[: len(path)] == path}
    return changed


def _differs(before: Any, wanted: Any) -> bool:
    if wanted is PRESENT:
        return before is not _MISSING and before is not PRESENT
    return bool(before is _MISSING or before is PRESENT or before != wanted or type(before) is not type(wanted))


def _conflict(contested: list[tuple[FieldsEntry, Path]]) -> ApiError:
    named = [(str(entry.manager), show(path)) for entry, path in contested]
    causes = [
        {"reason": "FieldManagerConflict", "message": f"conflict with {manager}", "field": field}
        for manager, field in named
    ]
    text = f"1 conflict: conflict with {named[0][0]}: {named[0][1]}"
    if len(named) > 1:
        lines: list[str] = []
        for manager in sorted({manager for manager, _ in named}):
            lines += [f"conflicts with {manager}:", *(f"- {field}" for owner, field in named if owner == manager)]
        text = f"{len(named)} conflicts: " + "\n".join(lines)
    return ApiError(409, "Conflict", f"Apply failed with {text}", details={"causes": causes})


def _renewed(previous: FieldsEntry | None, manager: Manager, paths: frozenset[Path]) -> FieldsEntry:
    """The manager's entry; its time stays when nothing about it changed."""
    if previous and previous.paths == paths and previous.manager == manager:
        return previous
    return FieldsEntry(manager, paths, timestamp())


def track_update(
    schema: Json, before: Json | None, after: Json, entries: Entries, manager: Manager, has_status: bool
) -> Entries:
    """Ownership after a create, update or patch: the manager that changes a field becomes its only owner."""
    old = leaves(schema, before, containers=True) if before else {}
    new = leaves(schema, after, containers=True)
    of_status = manager.subresource == "status"
    touched = {
        path
        for path, value in new.items()
        if (path not in old or _differs(old[path], value)) and (not has_status or (path[0] == "f:status") is of_status)
    }
    gone = frozenset(path for path in old if path not in new)
    result: Entries = {}
    for identity, entry in entries.items():
        lost = gone if identity == manager.identity else gone | touched
        result[identity] = replace(entry, paths=entry.paths - lost) if entry.paths & lost else entry
    if touched:
        mine = result.get(manager.identity)
        paths = (mine.paths if mine else frozenset()) | touched
        result[manager.identity] = _renewed(mine, manager, paths)
    return result


def same_apart_from_bookkeeping(left: Json, right: Json) -> bool:
    """True if two versions of an object differ in nothing but managedFields and resourceVersion."""

    def plain(obj: Json) -> Json:
        ignored = ("managedFields", "resourceVersion")
        return {**obj, "metadata": {name: value for name, value in obj["metadata"].items() if name not in ignored}}

    return plain(left) == plain(right)
