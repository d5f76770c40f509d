"""Steps of an installation: each can be shown before it is done, and is idempotent.

Files of the user are written as the user. A file of root's takes one sudo command with literal arguments; content goes
to it on standard input, because an engine could replace a file that the user owns. No code of this package runs as
root.
"""

from __future__ import annotations

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
INSTALL = "/usr/bin/install"
REMOVE = "/bin/rm"
OWNER = ("-o", "root", "-g", "wheel")
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
class Directory:
    """Step that makes a directory, if it is missing."""

    path: Path
    mode: int = 0o700
    root: bool = False

    def due(self) -> bool:
        return not self.path.is_dir()

    def lines(self) -> Iterator[str]:
        if self.root:
            yield f"run    sudo {' '.join(self._argv())}"
        else:
            yield f"make   {self.path}/ ({self.mode:04o})"

    def do(self, machine: Machine) -> None:
        if self.root:
            machine.as_root(*self._argv())
        else:
            self.path.mkdir(mode=self.mode, parents=True, exist_ok=True)

    def _argv(self) -> list[str]:
        return [INSTALL, "-d", "-m", f"{self.mode:04o}", *OWNER, str(self.path)]


@dataclass(frozen=True)
class FileStep:
    """Step that writes a file with this content."""

    path: Path
    content: bytes = field(repr=False)
    mode: int = 0o600
    root: bool = False
    """The file belongs to root; else to the user."""
    record: Path | None = None
    """File that the content is recorded in before root puts it in place; root does not read it."""
    secret: bool = False
    """The content must not be shown."""

    def due(self) -> bool:
        try:
            return self.path.read_bytes() != self.content or self.path.stat().st_mode & 0o777 != self.mode
        except OSError:
            return True

    def lines(self) -> Iterator[str]:
        yield f"write  {self.path} ({self.mode:04o}{', by root' if self.root else ''})"
        shown = ["(not shown: it holds credentials)"] if self.secret else self.content.decode("utf-8").splitlines()
        yield from (f"       | {line}" for line in shown)
        if self.root:
            yield f"run    {shown_as_root(self._argv())}"

    def do(self, machine: Machine) -> None:
        if self.record:
            self.record.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_atomic(self.record, self.content)
        if self.root:
            machine.as_root(*self._argv(), content=self.content)
            return
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomic(self.path, self.content)
        self.path.chmod(self.mode)

    def _argv(self) -> list[str]:
        return root_file.command(str(self.path), self.mode, self.content)


@dataclass(frozen=True)
class LinkStep:
    """Step that makes a symbolic link for convenience; anything but a link in its place stays."""

    path: Path
    target: Path

    def due(self) -> bool:
        if self.path.is_symlink():
            return self.path.readlink() != self.target
        return not self.path.exists()

    def lines(self) -> Iterator[str]:
        yield f"link   {self.path} -> {self.target}"

    def do(self, _machine: Machine) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.unlink(missing_ok=True)
        self.path.symlink_to(self.target)


@dataclass(frozen=True)
class Remove:
    """Step that removes a file or link."""

    path: Path
    root: bool = False

    def due(self) -> bool:
        return self.path.is_symlink() or self.path.exists()

    def lines(self) -> Iterator[str]:
        yield f"run    sudo {REMOVE} -f {self.path}" if self.root else f"remove {self.path}"

    def do(self, machine: Machine) -> None:
        if self.root:
            machine.as_root(REMOVE, "-f", str(self.path))
        else:
            self.path.unlink(missing_ok=True)


Step = Directory | FileStep | LinkStep | Remove
"""`due`: it would change something. `lines`: its description, with the content of a file. `do`: do it.

Raises InstallError, OSError.
"""


def ask_for_sudo(machine: Machine, why: str, say: Say) -> None:
    """Have sudo ask for the password once, on the terminal. Raises InstallError."""
    if machine.run([SUDO, "-n", "-v"], COMMAND_S).ok:
        return
    say(f"sudo may ask for your password: {why}")
    if not machine.run([SUDO, "-v"], PASSWORD_S).ok:
        raise InstallError("sudo refused; run this in a terminal as a user who may use sudo, or with --agent")
