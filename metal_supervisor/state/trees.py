"""Directory trees whose shape may be hostile: an engine or a model's author decides how deep they are.

`shutil.rmtree` and, before Python 3.12, `os.walk` recurse for each level: a thousand nested directories end them with
RecursionError, and paths longer than PATH_MAX end everything else. Here nothing recurses, no link is followed, and a
removal needs neither long paths nor a descriptor for each level.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
LOOK_EVERY_S = 60.0
"""Interval at which the trash is emptied without a wake: launchers put directories there too."""


def walk(top: str | Path) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield (directory, names of its directories, other names), as `os.walk` does from the top down."""
    pending = [os.fspath(top)]
    while pending:
        where = pending.pop()
        folders, names = list[str](), list[str]()
        with contextlib.suppress(OSError), os.scandir(where) as entries:
            for each in entries:
                (folders if each.is_dir() else names).append(each.name)
        yield where, folders, names
        below = [os.path.join(where, each) for each in reversed(folders)]  # noqa: PTH118 - text, as `os.walk` has it
        pending += [each for each in below if not os.path.islink(each)]  # noqa: PTH114 - as above


def size_bytes(top: Path, suffix: str = "") -> int:
    """Total size of the entries below a directory whose names end in `suffix`; of links, their own."""
    total = 0
    for where, folders, names in walk(top):
        for each in (*folders, *names):
            with contextlib.suppress(OSError):
                total += Path(where, each).lstat().st_size if each.endswith(suffix) else 0
    return total


def remove(top: Path) -> None:
    """Remove a directory with all that is in it. Raises OSError."""
    clear(top)
    top.rmdir()


def clear(top: Path) -> None:
    """Remove all that is in a directory. Raises the first OSError, once all else is removed.

    Nested directories are moved up into `top` and removed there one by one.
    """
    failed: dict[str, OSError] = {}
    root = _opened(None, os.fspath(top))
    try:
        while names := set(os.listdir(root)) - failed.keys():  # noqa: PTH208 - of a descriptor
            for name in names:
                try:
                    _reduce(root, name)
                except OSError as error:
                    failed[name] = error
    finally:
        os.close(root)
    for problem in failed.values():
        raise problem


def _reduce(root: int, name: str) -> None:
    """Remove an entry of the root; the directories in it become entries of the root."""
    if _unlinked(root, name):
        return
    inner = _opened(root, name)
    try:
        for each in os.listdir(inner):  # noqa: PTH208 - as above
            if not _unlinked(inner, each):
                os.close(_opened(inner, each))  # for its mode: only who may write a directory may move it
                os.rename(each, secrets.token_hex(8), src_dir_fd=inner, dst_dir_fd=root)
    finally:
        os.close(inner)
    os.rmdir(name, dir_fd=root)


def _unlinked(directory: int, name: str) -> bool:
    """Remove an entry; False for a directory."""
    try:
        os.unlink(name, dir_fd=directory)
    except OSError:  # EISDIR or EPERM
        if stat.S_ISDIR(os.lstat(name, dir_fd=directory).st_mode):
            return False
        raise
    return True


def _opened(parent: int | None, name: str) -> int:
    """Descriptor of a directory, which gets the mode 0700."""
    try:
        found = os.open(name, _DIRECTORY, dir_fd=parent)
    except PermissionError:
        _make_accessible(parent, name)
        found = os.open(name, _DIRECTORY, dir_fd=parent)
    with contextlib.suppress(OSError):
        os.fchmod(found, 0o700)
    return found


def _make_accessible(parent: int | None, name: str) -> None:
    """Give a directory the mode 0700, without following a link that has taken its place."""
    if os.chmod in os.supports_follow_symlinks:
        os.chmod(name, 0o700, dir_fd=parent, follow_symlinks=False)
        return
    handle = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
    try:
        os.chmod(f"/proc/self/fd/{handle}", 0o700)  # noqa: PTH101 - as above
    finally:
        os.close(handle)


class TrashCollector(threading.Thread):
    """Empties a directory in the background, at its start and whenever it is woken."""

    def __init__(self, trash: Path) -> None:
        super().__init__(name="trash", daemon=True)
        self.problem = ""
        """Why something in it cannot be removed, "" if all could be."""
        self._trash, self._due = trash, threading.Event()

    def wake(self) -> None:
        """Empty the directory soon."""
        self._due.set()

    def run(self) -> None:
        """Empty the directory for as long as the process lives."""
        while True:
            self._due.clear()
            try:
                clear(self._trash)
                self.problem = ""
            except FileNotFoundError:  # nothing was ever put there
                self.problem = ""
            except OSError as error:
                self.problem = f"{self._trash} cannot be emptied: {error.strerror} ({error.filename}); remove that"
            self._due.wait(LOOK_EVERY_S)
