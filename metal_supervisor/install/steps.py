"""Steps of an installation: each can be shown before it is done, and is idempotent.

Files of the user are written as the user. A file of root's takes one sudo command with literal arguments; content goes
to it on standard input, because an engine could replace a file that the user owns. No code of this package runs as
root.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from metal_supervisor.host import root_file
from metal_supervisor.host.commands import Feeder
from metal_supervisor.host.launchd import LABEL
from metal_supervisor.spec.user_error import UserError
from metal_supervisor.state.kept_files import write_atomic

SUDO = "/usr/bin/sudo"
REMOVE = "/bin/rm"
PLACE = "$PLACE"
"""Short for root_file.SCRIPT where commands are shown."""
COMMAND_S = 30.0
PASSWORD_S = 300.0
Say = Callable[[str], None]


class InstallError(UserError):
    """Failure to install; the message says what is in the way and what to do."""


@dataclass(frozen=True)
class Machine:
    """The Mac to install on, and its user."""

    root: Path
    """`/`, or the directory that a test uses instead."""
    home: Path
    user: str
    group: str
    uid: int
    run: Feeder
    pause: Callable[[float], None] = time.sleep
    label: str = LABEL
    """launchd's name for the job; a trial beside a real installation has another."""

    def shown(self, path: Path) -> str:
        """A path as its owner would write it."""
        return f"~/{path.relative_to(self.home)}" if path.is_relative_to(self.home) else str(path)

    def as_root(self, *argv: str, content: bytes = b"") -> None:
        """Run one command by sudo, with what it reads on standard input. Raises InstallError."""
        done = self.run([SUDO, *argv], COMMAND_S, content)
        if not done.ok:
            raise InstallError(f"{shown_as_root(argv)} failed with {done.code}: {done.said}")


def shown_as_root(argv: Sequence[str]) -> str:
    """A sudo command as shown to the user, with a short name for the script that writes root's files."""
    return " ".join(["sudo", *(PLACE if word == root_file.SCRIPT else word for word in argv if word)])


@dataclass(frozen=True)
class FileStep:
    """Step that leaves one file, link or nothing at a path; missing directories are made with the rights of the file.

    `do` raises InstallError and OSError.
    """

    path: Path
    content: bytes | Path | None = field(default=None, repr=False)
    """Content of a file, target of a link, or None to remove what is there."""
    mode: int = 0o600
    root: bool = False
    """The file belongs to root; else to the user."""
    secret: bool = False
    """The content must not be shown."""

    def due(self) -> bool:
        """True if the step would change something. Only a link replaces a link, and nothing else becomes one."""
        if isinstance(self.content, Path):
            return self.path.readlink() != self.content if self.path.is_symlink() else not self.path.exists()
        if self.content is None:
            return os.path.lexists(self.path)
        try:
            return self.path.read_bytes() != self.content or self.path.stat().st_mode & 0o777 != self.mode
        except OSError:
            return True

    def lines(self) -> Iterator[str]:
        """The step as a dry run shows it, with the content of a file."""
        if isinstance(self.content, bytes):
            yield f"write  {self.path} ({self.mode:04o}{', by root' if self.root else ''})"
            shown = ["(not shown: it holds credentials)"] if self.secret else self.content.decode("utf-8").splitlines()
            yield from (f"       | {line}" for line in shown)
        elif self.content:
            yield f"link   {self.path} -> {self.content}"
        elif not self.root:
            yield f"remove {self.path}"
        if self.root:
            yield f"run    {shown_as_root(self._root_command())}"

    def do(self, machine: Machine) -> None:
        """Carry it out."""
        if self.root:
            content = self.content if isinstance(self.content, bytes) else b""
            machine.as_root(*self._root_command(), content=content)
            return
        if self.content is not None:
            self.path.parent.mkdir(self.mode | (self.mode & 0o444) >> 2, parents=True, exist_ok=True)
        if isinstance(self.content, bytes):
            write_atomic(self.path, self.content)
            self.path.chmod(self.mode)
            return
        self.path.unlink(missing_ok=True)
        if self.content:
            self.path.symlink_to(self.content)

    def _root_command(self) -> list[str]:
        if isinstance(self.content, bytes):
            return root_file.command(str(self.path), self.mode, self.content)
        return [REMOVE, "-f", str(self.path)]


def ask_for_sudo(machine: Machine, why: str, say: Say) -> None:
    """Have sudo ask for the password once, on the terminal. Raises InstallError."""
    if machine.run([SUDO, "-n", "-v"], COMMAND_S).ok:
        return
    say(f"sudo may ask for your password: {why}")
    if not machine.run([SUDO, "-v"], PASSWORD_S).ok:
        raise InstallError("sudo refused; run this in a terminal as a user who may use sudo, or with --agent")
