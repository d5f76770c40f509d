"""Places on this Mac that a manifest may name: below an allowed directory, and outside the directories that are never.

A path alone proves little: `..`, links, `/proc/self/root`, another letter case or another Unicode form lead to the same
file. So a path is checked by what it resolves to, and each directory above that by its device and inode as well as by
its name. Hard links cannot be told from the file itself, but a manifest cannot create one. Every refusal has the same
text, whether the file exists or not.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from metal_supervisor.models import repository
from metal_supervisor.models.listing import Unusable
from metal_supervisor.settings.loader import Settings
from metal_supervisor.spec.terminal_text import shortened

LONGEST_NAME = 300
SYSTEM = (Path("/proc"), Path("/dev"), Path("/sys"))
"""Views of processes and devices: never models, and some are other names for this process's files."""
SLOT = re.compile(r"[0-9a-f]{16}")
"""Name of a fetched model's directory in the store; other directories in it may be the user's own."""
LIBRARY = "library"
"""Below the home directory: keychains, mail and browsers' cookies on a Mac."""


def named(path: Path) -> str:
    """Format a path for a message: a user wrote it, so it is made printable and cut to LONGEST_NAME."""
    return shortened(str(path), LONGEST_NAME)


@dataclass(frozen=True)
class Places:
    """Rules of this Mac for paths in manifests. All its own paths are resolved."""

    roots: tuple[Path, ...] = (Path("/"),)
    """Directories whose files a manifest may name."""
    closed: tuple[Path, ...] = ()
    """Directories in which no manifest may name a file, even below a root: the state directory, Ollama's models."""
    store: Path | None = None
    """The model store, whose slots no manifest may name: a model fetched for one service is not for another."""
    homes: tuple[Path, ...] = ()
    """Home directories: hidden files and Library in them are allowed only below a root of their own."""

    def check(self, path: Path) -> None:
        """Raise Unusable, always with the same text, for a path that a manifest may not name."""
        self.resolved(path)

    def resolved(self, path: Path) -> Path:
        """Resolve a path to the real one, and check that. Raises Unusable if a manifest may not name it."""
        try:
            real = Path(os.path.realpath(path))
            if ".." not in path.parts and self._allows(real):
                return real
        except (OSError, RuntimeError, ValueError):
            pass  # a name that no file can have, or a loop of links
        raise self._refusal(path)

    def check_opened(self, descriptor: int, path: Path) -> None:
        """Check a file that has been opened, by the path that the system has for it. Raises Unusable."""
        real = _name_of(descriptor)
        if real is not None and not self._allows(real):
            raise self._refusal(path)

    def _refusal(self, path: Path) -> Unusable:
        where = ", ".join(map(str, self.roots))
        text = f"{named(path)} is not below --allowed-roots of this Mac ({where})"
        return Unusable("SourceNotAllowed", f"{text}, or is in a part of it that no manifest may name")

    def _allows(self, real: Path) -> bool:
        roots = [root for root in self.roots if real.is_relative_to(root)]
        if not roots:
            return False
        above = _chain(real)
        if any(_below(above, each) is not None for each in (*SYSTEM, *self.closed)):
            return False
        inside = _below(above, self.store) if self.store is not None else None
        if inside is not None and (not inside or SLOT.fullmatch(inside[0])):
            return False
        return all(_is_open(above, home, roots) for home in self.homes)


def places_of(settings: Settings) -> Places:
    """Rules from this Mac's settings."""
    models = Path(settings.ollama_models_path).expanduser().resolve()
    return Places(settings.roots, (settings.state_path, models), settings.store_path.resolve(), settings.homes)


Above = Sequence[tuple[Path, tuple[int, int] | None]]


def _is_open(above: Above, home: Path, roots: Sequence[Path]) -> bool:
    """True unless a part of the path below a home directory is private: hidden, or its Library.

    Parts that a root names are not private. `above`: the path and its parents.
    """
    inside = _below(above, home)
    if inside is None:
        return True
    named_by_roots = [found for root in roots if (found := _below(_chain(root), home)) is not None]
    deepest = max((len(each) for each in named_by_roots), default=0)
    if deepest == 0 and inside[:1] == (LIBRARY,):
        return False
    return not any(part.startswith(".") for part in inside[deepest:])


def _chain(path: Path) -> Above:
    """A path and its parents, each with its identity."""
    return [(each, _identity(each)) for each in (path, *path.parents)]


def _below(above: Above, directory: Path) -> tuple[str, ...] | None:
    """Folded parts of a path below a directory, None if it is not in it. `above`: the path and its parents."""
    folded, identity = _folded(directory), _identity(directory)
    whole = _folded(above[0][0])
    for each, known in above:
        depth = len(each.parts)
        if (known is not None and known == identity) or whole[:depth] == folded:
            return whole[depth:]
    return None


def _folded(path: Path) -> tuple[str, ...]:
    """Parts of a path, folded: equal for names that a Mac's disk does not tell apart."""
    return tuple(map(repository.folded, path.parts))


def _identity(path: Path) -> tuple[int, int] | None:
    """(device, inode) of a path, None if it does not exist or may not be read."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return None
    return found.st_dev, found.st_ino


def _name_of(descriptor: int) -> Path | None:
    """Path that the system has for an open file, None if it has none."""
    get_path = getattr(fcntl, "F_GETPATH", None)
    try:
        if get_path is not None:
            return Path(os.fsdecode(fcntl.fcntl(descriptor, get_path, bytes(1024)).rstrip(b"\0")))
        return Path(f"/proc/self/fd/{descriptor}").readlink()
    except OSError:
        return None
