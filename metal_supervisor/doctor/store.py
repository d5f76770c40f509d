"""Checks of the model store: permissions and free space."""

from __future__ import annotations

import errno
import os
import sys

from metal_supervisor.doctor.findings import Check, Found, fail, ok, warn
from metal_supervisor.doctor.surroundings import Surroundings
from metal_supervisor.models.backups import is_temporary
from metal_supervisor.models.disk_space import KEPT_FREE_BYTES, nearest_existing
from metal_supervisor.spec.sizes import amount
from metal_supervisor.state.downloads import downloads

FULL_DISK_ACCESS = (
    "System Settings > Privacy & Security > Full Disk Access: add the real python of this environment; "
    "or keep models on the internal disk (--model-store), outside Desktop, Documents and Downloads"
)


def _readable(around: Surroundings) -> Found:
    store, error = around.settings.store_path, None
    try:
        around.list_directory(store)
    except OSError as caught:
        error = caught
    if error is None or error.errno == errno.ENOENT:
        if around.settings.model_store and is_temporary(store):
            return warn(f"{store} is temporary: the system empties it", "keep models elsewhere with --model-store")
        return ok(f"{store} {'can be read' if error is None else 'is made with the first download'}")
    if error.errno == errno.EPERM:
        python = os.path.realpath(sys.executable)
        return fail(f"macOS does not let {python} read {store} (Operation not permitted)", FULL_DISK_ACCESS)
    why = error.strerror or type(error).__name__
    return fail(f"{store} cannot be read: {why}", "give it to the user that the system runs as, or set --model-store")


def _room(around: Surroundings) -> Found:
    """Free space, and the largest model that is still to come."""
    free_bytes = around.free_bytes(nearest_existing(around.settings.store_path))
    incomplete = [each for each in downloads(around.report()) if each.total_bytes]
    coming = [(each.total_bytes - each.got_bytes, "/".join(each.key)) for each in incomplete]
    need, name = max(coming, default=(0, ""))
    usable = free_bytes - KEPT_FREE_BYTES
    free = f"{amount(free_bytes, 'down')} free, {amount(KEPT_FREE_BYTES)} of them left to the machine"
    if name and need > usable:
        text = f"{name} still needs {amount(need, 'up')}; {free}"
        return fail(text, "metal-supervisor models gc, or free some of the disk")
    if usable <= 0:
        return warn(f"{free}: no model can be fetched", "metal-supervisor models gc, or free some of the disk")
    return ok(f"{free}" + (f"; the largest model that is to come, {name}, needs {amount(need, 'up')}" if name else ""))


CHECKS = (
    Check("store", _readable),
    Check("disk", _room),
)
