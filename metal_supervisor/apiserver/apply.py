"""Field ownership: server-side apply, and the bookkeeping of every other write.

Each object carries `metadata.managedFields`: one entry per (manager, operation, subresource) with the
set of fields it owns. Apply is a declaration: it may not change what others own (409, unless forced),
and what a manager no longer declares is removed. That makes an apply without force a
compare-and-swap, on which the claims of several Macs rest.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from . import fields
from .codec import clone, dig, listed, section, timestamp
from .errors import ApiError, Json
from .fields import PRESENT, Path, leaves, show
from .metadata import readable
from .schema import settle, validate
from .schemas import METADATA

_MISSING: Any = object()
_MISFITS = ("FieldValueTypeInvalid", "FieldValueDuplicate")
"""Problems with which no field of a declaration can be owned."""


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


def read_entries(obj: Json | None) -> Entries:
    """The entries of an object's managedFields."""
    entries: Entries = {}
    for raw in listed(section(obj, "metadata").get("managedFields")):
        parts = ("manager", "operation", "subresource", "apiVersion")
        manager = Manager(*(str(dig(raw, part) or "") for part in parts))
        if manager.name and manager.operation:
            paths = fields.decode_set(raw.get("fieldsV1"))
            entries[manager.identity] = FieldsEntry(manager, paths, str(raw.get("time") or ""))
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
        metadata["managedFields"] = [
            {
                "apiVersion": entry.manager.api_version,
                "fieldsType": "FieldsV1",
                "fieldsV1": fields.encode_set(entry.paths),
                "manager": entry.manager.name,
                "operation": entry.manager.operation,
                "time": entry.time,
                **({"subresource": entry.manager.subresource} if entry.manager.subresource else {}),
            }
            for entry in ordered
        ]


def apply(
    schema: Json,
    live: Json,
    applied: Json,
    manager: Manager,
    *,
    force: bool,
    has_status: bool,
) -> tuple[Json, Entries]:
    """Merge a manager's declaration into `live`; return the result and the new ownership.

    Raises ApiError 409 with one cause per contested field. The declaration fits the schema (`check_declaration`).
    """
    entries = read_entries(live)
    previous = entries.pop(manager.identity, None)
    of_status = manager.subresource == "status"
    scoped = {name: value for name, value in applied.items() if not has_status or (name == "status") is of_status}
    declared = leaves(schema, scoped)
    changed = _changed(leaves(schema, live), declared)
    contested = [(entry, path) for entry in entries.values() for path in sorted(changed & entry.paths)]
    if contested and not force:
        raise _conflict(contested)
    entries = {identity: replace(entry, paths=entry.paths - changed) for identity, entry in entries.items()}
    merged: Json = fields.merge(schema, live, scoped)
    if previous:
        # A container is removed together with the fields that were declared in it, and with its defaults, which have
        # no owner. The fields of other managers stay, and so do their containers, and `metadata`, that of the name.
        owned = fields.with_containers([*declared, ("f:metadata",)], *(entry.paths for entry in entries.values()))
        merged = fields.without(schema, merged, fields.with_containers(previous.paths) - owned)
    entries[manager.identity] = _renewed(previous, manager, frozenset(declared))
    return merged, entries


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
    count = f"{len(named)} conflict" + ("s" if len(named) > 1 else "")
    listing = ", ".join(f"conflict with {manager}: {field}" for manager, field in named)
    return ApiError(409, "Conflict", f"Apply failed with {count}: {listing}", details={"causes": causes})


def _renewed(previous: FieldsEntry | None, manager: Manager, paths: frozenset[Path]) -> FieldsEntry:
    """The manager's entry; its time stays when nothing about it changed."""
    if previous and previous.paths == paths and previous.manager == manager:
        return previous
    return FieldsEntry(manager, paths, timestamp())


def track_update(
    schema: Json, before: Json, after: Json, entries: Entries, manager: Manager, has_status: bool
) -> Entries:
    """Ownership after a create, update or patch: the manager that changes a field becomes its only owner."""
    old = leaves(schema, before, containers=True)
    new = leaves(schema, after, containers=True)
    of_status = manager.subresource == "status"
    touched = {
        path
        for path, value in new.items()
        if (path not in old or _differs(old[path], value)) and (not has_status or (path[0] == "f:status") is of_status)
    }
    gone = frozenset(old.keys() - new.keys())
    result: Entries = {}
    for identity, entry in entries.items():
        lost = gone if identity == manager.identity else gone | touched
        result[identity] = replace(entry, paths=entry.paths - lost)
    if touched:
        mine = result.get(manager.identity)
        paths = (mine.paths if mine else frozenset()) | touched
        result[manager.identity] = _renewed(mine, manager, paths)
    return result


def is_unchanged(before: Json, after: Json, owners: Entries, new_owners: Entries) -> bool:
    """True if a write changes nothing but versions, and the times of ownership."""

    def plain(obj: Json) -> Json:
        ignored = ("managedFields", "resourceVersion")
        return {**obj, "metadata": {name: value for name, value in obj["metadata"].items() if name not in ignored}}

    owned = {identity: entry.paths for identity, entry in owners.items()}
    now_owned = {identity: entry.paths for identity, entry in new_owners.items() if entry.paths}
    return plain(before) == plain(after) and owned == now_owned


# ---- what may be declared -----------------------------------------------------------------------


def check_declaration(schema: Json, declaration: Json) -> None:
    """Raise ApiError 500, as the real server does, for a declaration that cannot be owned as a whole.

    It may have no unknown fields, wrong types, or items with the same key. What fits may still be invalid, as in any
    other write.
    """
    settled = clone(declaration)
    own, unknown = readable(section(settled, "metadata"))
    problems = [f".{path}: field not declared in schema" for path in unknown + settle(schema, settled)]
    found = validate(METADATA, own, "metadata") + validate(schema, settled)
    problems += [f".{problem}" for problem in found if problem.reason in _MISFITS]
    if problems:
        raise ApiError(500, "", "failed to create typed patch object: " + ", ".join(problems))
