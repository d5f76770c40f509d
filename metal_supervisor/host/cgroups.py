"""Memory limit of the container that this process runs in, from Linux's cgroups, version 2 or 1.

The whole path counts: a limit of a parent binds as well as our own. A container often sees its own group as the
root of the tree while `/proc/self/cgroup` still names the host's path, so directories that are missing are skipped, up
to the root of the mount. Engines are assumed to be in our own group, as supervisord starts them and us.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
UNLIMITED_BYTES = 1 << 60
"""Version 1 has no word for "no limit", but a number near 2**63."""


@dataclass(frozen=True)
class Group:
    """A group with a memory limit."""

    path: Path
    limit_bytes: int
    second: bool
    """The group is of version 2."""

    def used_bytes(self) -> int:
        """Memory charged to the group, its page cache included. Raises OSError, ValueError."""
        return int((self.path / ("memory.current" if self.second else "memory.usage_in_bytes")).read_text("ascii"))

    def reclaimable_bytes(self) -> int:
        """The part of it that the kernel can reclaim: file pages, and slabs. Raises OSError, ValueError.

        The same that MemAvailable counts. Without it, a group that has just read a model would always seem full.
        """
        stat = _stat(self.path)
        whole = "" if self.second else "total_"  # version 1's plain figures leave the groups below out
        names = [f"{whole}active_file", f"{whole}inactive_file"]
        missing = [name for name in names if name not in stat]
        if missing:
            raise ValueError(f"memory.stat without {', '.join(missing)}")
        return sum(stat[name] for name in names) + stat.get("slab_reclaimable", 0)


def _stat(group: Path) -> dict[str, int]:
    text = (group / "memory.stat").read_text("ascii")
    return {name: int(value) for name, value in re.findall(r"(?m)^(\w+) (\d+)\n", text)}


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
    found: list[Group] = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            # A machine with both versions has the second one beside the first one's controllers.
            for mount in (root, root / "unified"):
                found += _of_version_2(mount, path)
        elif "memory" in controllers.split(","):
            found += _of_version_1(root / "memory", path)
    return min(found, key=lambda group: group.limit_bytes, default=None)


def _upwards(mount: Path, path: str) -> list[Path]:
    """The directories from a group up to the root of the mount; none for a path outside our namespace."""
    parts = [] if ".." in (parts := PurePosixPath(path).parts[1:]) else parts
    return [mount.joinpath(*parts[:count]) for count in range(len(parts), -1, -1)]


def _of_version_2(mount: Path, path: str) -> list[Group]:
    limits = [(each, _number(each / "memory.max")) for each in _upwards(mount, path)]
    return [Group(each, limit, True) for each, limit in limits if limit is not None]


def _of_version_1(mount: Path, path: str) -> list[Group]:
    groups = [each for each in _upwards(mount, path) if exists(each / "memory.limit_in_bytes")]
    limits = [(each, _number(each / "memory.limit_in_bytes")) for each in groups]
    found = [Group(each, limit, False) for each, limit in limits if limit is not None]
    if groups:
        with contextlib.suppress(OSError, ValueError):
            whole = _stat(groups[0]).get("hierarchical_memory_limit", 0)
            if 0 < whole < UNLIMITED_BYTES:  # perhaps that of a parent that we may not see
                found.append(Group(groups[0], whole, False))
    return found


def container_bytes(procfs: Path = PROC, root: Path = CGROUPS) -> int | None:
    """The lowest memory limit that applies to this process, None without one."""
    group = limiting(procfs, root)
    return group.limit_bytes if group else None
