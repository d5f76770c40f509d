"""Memory limit of the container that this process runs in, from Linux's cgroups, version 2.

The whole path counts: a limit of a parent binds as well as our own. A container often sees its own group as the
root of the tree while `/proc/self/cgroup` still names the host's path, so directories that are missing are skipped, up
to the root of the mount. Engines are assumed to be in our own group, as supervisord starts them and us.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
UNLIMITED_BYTES = 1 << 60


@dataclass(frozen=True)
class Group:
    """A group with a memory limit."""

    path: Path
    limit_bytes: int

    def used_bytes(self) -> int:
        """Memory charged to the group, its page cache included. Raises OSError, ValueError."""
        return int((self.path / "memory.current").read_text("ascii"))

    def reclaimable_bytes(self) -> int:
        """The part of it that the kernel can reclaim: file pages, and slabs. Raises OSError, ValueError.

        The same that MemAvailable counts. Without it, a group that has just read a model would always seem full.
        """
        text = (self.path / "memory.stat").read_text("ascii")
        stat = {name: int(value) for name, value in re.findall(r"(?m)^(\w+) (\d+)\n", text)}
        try:
            return stat["active_file"] + stat["inactive_file"] + stat.get("slab_reclaimable", 0)
        except KeyError as error:
            raise ValueError(f"memory.stat without {error}") from None


def _number(path: Path) -> int | None:
    """A limit, None if there is none or it cannot be read."""
    try:
        found = int(path.read_text("ascii"))  # "max" is no number
    except (OSError, ValueError):
        return None
    return found if 0 < found < UNLIMITED_BYTES else None


def exists(path: Path) -> bool:
    """True if a file exists. Unlike Path.exists, raises neither for an impossible name nor for a lack of permission."""
    try:
        path.stat()
    except (OSError, ValueError):
        return False
    return True


def limiting(procfs: Path = PROC, root: Path = CGROUPS) -> Group | None:
    """The group with the lowest limit of those this process is in; None without a limit, or without cgroups."""
    try:
        lines = (procfs / "self" / "cgroup").read_text("utf-8", "surrogateescape").splitlines()
    except OSError:
        return None
    own = (line.removeprefix("0::") for line in lines if line.startswith("0::"))
    limits = [(each, _number(each / "memory.max")) for path in own for each in _upwards(root, path)]
    found = [Group(each, limit) for each, limit in limits if limit is not None]
    return min(found, key=lambda group: group.limit_bytes, default=None)


def _upwards(mount: Path, path: str) -> list[Path]:
    """The directories from a group up to the root of the mount; none for a path outside our namespace."""
    parts = [] if ".." in (parts := PurePosixPath(path).parts[1:]) else parts
    return [mount.joinpath(*parts[:count]) for count in range(len(parts), -1, -1)]


def container_bytes(procfs: Path = PROC, root: Path = CGROUPS) -> int | None:
    """The lowest memory limit that applies to this process, None without one."""
    group = limiting(procfs, root)
    return group.limit_bytes if group else None
