"""Checks of the model store: permissions, places of files, and free space."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from metal_supervisor.doctor.findings import Check, Finding, fail, ok, warn
from metal_supervisor.doctor.surroundings import Surroundings
from metal_supervisor.models.backups import is_temporary
from metal_supervisor.models.disk_space import KEPT_FREE_BYTES
from metal_supervisor.models.listing import Unusable
from metal_supervisor.models.places import SLOT, places_of
from metal_supervisor.spec.sizes import amount
from metal_supervisor.spec.types import Json
from metal_supervisor.state.downloads import downloads

FULL_DISK_ACCESS = (
    "System Settings > Privacy & Security > Full Disk Access: add the real python of this environment; "
    "or keep models on the internal disk (--model-store), outside Desktop, Documents and Downloads"
)


def judge_readable(store: Path, error: OSError | None, python: str, temporary: bool) -> Finding:
    """Finding about reading the store. `error`: of listing it, None if that worked; `python`: real path of the
    interpreter; `temporary`: True if the system empties that directory.
    """
    if error is None or error.errno == errno.ENOENT:
        if temporary:
            return warn(f"{store} is temporary: the system empties it", "keep models elsewhere with --model-store")
        return ok(f"{store} {'can be read' if error is None else 'is made with the first download'}")
    if error.errno == errno.EPERM:
        return fail(f"macOS does not let {python} read {store} (Operation not permitted)", FULL_DISK_ACCESS)
    why = error.strerror or type(error).__name__
    return fail(f"{store} cannot be read: {why}", "give it to the user that the system runs as, or set --model-store")


def _readable(around: Surroundings) -> Sequence[Finding]:
    store, error = around.settings.store_path, None
    try:
        around.list_directory(store)
    except OSError as caught:
        error = caught
    temporary = bool(around.settings.model_store) and is_temporary(store)
    return [judge_readable(store, error, os.path.realpath(sys.executable), temporary)]


def judge_room(free_bytes: int, report: Json) -> Finding:
    """Finding about free space. `report`: the controller's, with all Models that are not complete yet."""
    coming = [(each.total_bytes - each.got_bytes, "/".join(each.key)) for each in downloads(report) if each.total_bytes]
    need, name = max(coming, default=(0, ""))
    usable = free_bytes - KEPT_FREE_BYTES
    free = f"{amount(free_bytes, 'down')} free, {amount(KEPT_FREE_BYTES)} of them left to the machine"
    if name and need > usable:
        text = f"{name} still needs {amount(need, 'up')}; {free}"
        return fail(text, "metal-supervisor models gc, or free some of the disk")
    if usable <= 0:
        return warn(f"{free}: no model can be fetched", "metal-supervisor models gc, or free some of the disk")
    return ok(f"{free}" + (f"; the largest model that is to come, {name}, needs {amount(need, 'up')}" if name else ""))


def _room(around: Surroundings) -> Sequence[Finding]:
    store = around.settings.store_path
    place = next(each for each in (store, *store.parents) if each.exists())
    return [judge_room(around.free_bytes(place), around.report())]


def judge_places(lost: Mapping[str, Sequence[str]], services: int) -> Finding:
    """Finding about places of files. `lost`: InferenceService -> its files that a manifest may not name; `services`:
    number of services checked.
    """
    if not lost:
        return ok(f"the files of {services} services are in places that a manifest may name")
    told = "; ".join(f"{name}: {', '.join(paths)}" for name, paths in sorted(lost.items()))
    text = f"{len(lost)} of {services} services have files that a manifest may not name, and do not start again: {told}"
    return warn(text, "move the files below a directory of --allowed-roots, or name theirs there; see docs/models.md")


def _places(around: Surroundings) -> Sequence[Finding]:
    state, rules, store = around.directory, places_of(around.settings), around.settings.store_path.resolve()
    inside = [state.path / name for name in ("current", "hub", "scratch")]
    records = {name: each for name, each in around.records().items() if each.namespace}
    lost: dict[str, list[str]] = {}
    for record in records.values():
        argv = state.read_spec(record.spec_file or "").get("argv")
        words = (each for each in argv[1:] if isinstance(each, str)) if isinstance(argv, list) else ()
        named = [each for each in words if each.startswith("/") and os.path.exists(each)]  # noqa: PTH110 - never raises
        # Arguments count as paths if they exist. Files in the store were fetched for a service, and need no allowance.
        for text in dict.fromkeys((*record.files, *named)):
            path = Path(text)
            real = path.resolve()
            slot = real.relative_to(store).parts[:1] if real.is_relative_to(store) else ()
            if any(map(SLOT.fullmatch, slot)) or any(real.is_relative_to(each.resolve()) for each in inside):
                continue
            try:
                rules.check(path)
            except Unusable:
                lost.setdefault("/".join(record.owner), []).append(text)
    return [judge_places(lost, len(records))] if records else []


CHECKS = (
    Check("store", _readable),
    Check("places", _places),
    Check("disk", _room),
)
