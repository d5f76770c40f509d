"""The state directory itself: where it is, how supervisord may name it, and how it is made. Its files: `directory`."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
from pathlib import Path

from metal_supervisor import launch
from metal_supervisor.spec.ini import SAFE_HOME
from metal_supervisor.spec.terminal_text import printable
from metal_supervisor.spec.user_error import UserError
from metal_supervisor.state.kept_files import write_atomic

DIRECTORIES = (
    "records",
    "specs",
    "models.d",
    "observed",
    "runs",
    "attached",
    "log",
    "quarantine",
    "current",
    "hub",
    "scratch",
    "trash",
)
# sun_path has 104 bytes on macOS, and supervisord first binds `<path>.<pid>`.
LONGEST_HOME = 60
POWER_FILE = "power.json"
FORMAT_FILE = "format"
STATE_FORMAT = "2"
"""Format of the files that one build leaves for the next: records, specs, sections, notes."""


class StateError(UserError):
    """The state directory cannot be used; the message says what to do."""


def _link_for(path: Path) -> Path:
    digest = hashlib.sha256(str(path).encode("utf-8", "surrogateescape")).hexdigest()[:10]
    # Not the temporary directory of the session: on a Mac that alone is too long for a socket.
    return Path("/tmp").resolve() / f"metal-supervisor-{os.getuid()}-{digest}"


class StateHome:
    """Path of one state directory, and what makes it.

    `home` is the directory as supervisord may name it: itself, or a symbolic link in the system's
    temporary directory when its own path is too long for a socket or holds what an ini cannot.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        plain = SAFE_HOME.fullmatch(str(path)) and len(str(path)) <= LONGEST_HOME
        self.link = None if plain else _link_for(path)
        self.home = str(self.link or path)

    @property
    def socket(self) -> str:
        """Path of supervisord's socket. Raises StateError if the short link is another user's."""
        self._check_link()
        return f"{self.home}/supervisor.sock"

    def create(self) -> None:
        """Make the directories, mode 0700. Raises StateError, also for a directory of another format."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.path.chmod(0o700)
            self._check_format()
            for name in DIRECTORIES:
                (self.path / name).mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            where = f" ({error.filename})" if error.filename else ""
            text = f"state directory {self.path}: {error.strerror}{where}; put that right, or"
            raise StateError(f"{text} choose another with --state-dir") from None
        self.refresh_link()

    def _check_format(self) -> None:
        """Raises OSError, StateError."""
        path = self.path / FORMAT_FILE
        if not path.exists() and not (self.path / "records").exists():
            write_atomic(path, STATE_FORMAT)
        found = path.read_text("utf-8", "replace").strip() if path.exists() else "1"
        if found != STATE_FORMAT:
            text = f"state directory {self.path} has format {printable(found):.20}, and this version has {STATE_FORMAT}"
            raise StateError(f"{text}: use the version that made it, or choose another directory with --state-dir")

    def other_home(self) -> str:
        """Home of the directory that this one is a copy of, or was moved from, until the next boot; "" if neither.

        Until then its sections, specs and kubeconfig lead to the other.
        """
        try:
            text = (self.path / "supervisord.conf").read_text("utf-8")
        except (OSError, UnicodeDecodeError):
            return ""
        found = re.search(r"(?m)^pidfile=(.*)/supervisord\.pid$", text)
        if found is None or found[1] == self.home or launch.identity(found[1]) == launch.identity(str(self.path)):
            return ""
        return found[1]

    def remove_unfinished(self) -> None:
        """Remove what writers that were killed left unfinished: that of a spec holds its service's environment."""
        for path in (*self.path.glob("*.tmp"), *self.path.glob("*/*.tmp")):
            pid = path.name.removesuffix(".tmp").rpartition(".")[2]
            if pid.isascii() and pid.isdigit() and not launch.start_time(int(pid)):
                with contextlib.suppress(OSError):
                    path.unlink()

    def refresh_link(self) -> None:
        """Make the short link again if a cleaner of temporary files removed it. Raises StateError."""
        if self.link is None:
            return
        self._check_link()
        with contextlib.suppress(FileNotFoundError):
            if self.link.readlink() == self.path:
                return
            self.link.unlink()
        try:
            self.link.symlink_to(self.path)
        except FileExistsError:
            self._check_link()  # another process made it just now

    def _check_link(self) -> None:
        """Raise StateError for a short link that is not this user's: anyone may make one in /tmp before us."""
        with contextlib.suppress(FileNotFoundError):
            found = self.link.lstat() if self.link is not None else None
            if found is not None and not (stat.S_ISLNK(found.st_mode) and found.st_uid == os.getuid()):
                text = f"{self.link} is not a link of this user (it is of uid {found.st_uid}): what is behind it"
                raise StateError(f"{text} is not trusted; remove it, or choose a shorter --state-dir")

    def remove_link(self) -> None:
        """Remove the short link, once nothing runs."""
        if self.link is not None:
            self.link.unlink(missing_ok=True)
