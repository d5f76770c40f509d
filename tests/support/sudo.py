"""A real sudo in a root directory of its own: its rules, its users, and programs that do as they are told there.

Nothing of this machine's own rules is read or written, and whoever may not change the root directory skips it.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from metal_supervisor.host.powermetrics import POWERMETRICS
from tests.support import parts
from tests.support.finders import find_sudo

USERS = {"root": 0, "mac.user": 1000, "other": 1001}
LIBRARIES = "usr/libexec/sudo"
PAM = "account required pam_permit.so\nsession required pam_permit.so\nauth required pam_deny.so\n"


def found() -> Path:
    """The directory that has sudo in it."""
    return parts.found(find_sudo.find)


def visudo(directory: Path) -> Path:
    """Makes a directory to put on PATH, with a visudo that works."""
    where = found()
    script = directory / "visudo"
    script.write_text(f'#!/bin/sh\nLD_LIBRARY_PATH={where / LIBRARIES} exec {where}/usr/sbin/visudo "$@"\n')
    script.chmod(0o755)
    return directory


class Room:
    """The root directory, with one set of rules."""

    def __init__(self, root: Path, rules: str, tools: Sequence[str] = ()) -> None:
        """`tools`: absolute paths of programs of this machine that are to be there too."""
        if sys.platform != "linux" or os.geteuid() != 0:
            pytest.skip("only root on Linux may give sudo a root directory, in which it reads our rules alone")
        root.mkdir(parents=True, exist_ok=True)
        if os.statvfs(root).f_flag & os.ST_NOSUID:
            pytest.skip(f"programs in {root} cannot become root: it is mounted nosuid")
        self._root, where = root, found()
        programs = [where / "usr/bin/sudo", where / "usr/sbin/visudo"]
        libraries = where / LIBRARIES
        plugins = sorted(libraries.glob("*.so*"))
        modules = [each for name in ("permit", "deny") for each in Path("/").glob(f"lib/*/security/pam_{name}.so")]
        if not plugins or len(modules) != 2:
            pytest.skip("sudo's plugins or PAM's modules are not where Debian has them")
        for path in programs:
            self._copy(path, f"/{path.relative_to(where)}")
        for path in plugins:
            self._copy(path, f"/{LIBRARIES}/{path.name}")
        shared = [Path(each) for each in ("/bin/sh", "/bin/sleep", *tools)]
        for path in (*programs, *plugins, *modules, *shared):
            self._copy_needed(path, libraries)
        for path in (*modules, *shared, *Path("/").glob("lib/*/libnss_files.so.2")):
            self._copy(path, str(path))
        accounts = "".join(f"{name}:x:{uid}:{uid}::/:/bin/sh\n" for name, uid in USERS.items())
        for name, text in (
            ("passwd", accounts),
            ("group", ""),
            ("hosts", f"127.0.0.1 localhost {socket.gethostname()}\n"),
            ("nsswitch.conf", "passwd: files\ngroup: files\nhosts: files\n"),
            ("pam.d/sudo", PAM),
            ("pam.d/other", PAM),
            ("sudoers", rules),
        ):
            self.write(f"etc/{name}", text, 0o440 if name == "sudoers" else 0o644)
        for name in ("run", "tmp", "var/lib"):
            (root / name).mkdir(parents=True, exist_ok=True)
        (root / "usr/bin/sudo").chmod(0o4755)
        for path in (root, *root.parents):  # others have to get there
            if path.stat().st_uid == os.geteuid() and str(path).startswith(str(root.parent)):
                path.chmod(0o755)
        (root / "dev").mkdir()
        try:
            os.mknod(root / "dev/null", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        except PermissionError:
            pytest.skip("this container may not make devices, and sudo wants /dev/null")
        (root / "dev/null").chmod(0o666)

    def write(self, name: str, text: str, mode: int = 0o644) -> None:
        path = self._root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(mode)

    def _copy(self, path: Path, name: str) -> None:
        target = self._root / name.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            shutil.copy(path, target)

    def _copy_needed(self, path: Path, libraries: Path) -> None:
        said = subprocess.run(
            ["ldd", str(path)], capture_output=True, text=True, env={**os.environ, "LD_LIBRARY_PATH": str(libraries)}
        ).stdout
        for name in re.findall(r"(/\S+) \(0x", said):
            if not name.startswith(str(libraries)):
                self._copy(Path(name), name)

    def command(self, user: str, *argv: str) -> list[str]:
        """The command line that runs something in here, as one of its users."""
        uid = USERS[user]
        return ["chroot", f"--userspec={uid}:{uid}", str(self._root), *argv]

    def run(self, user: str, *argv: str, content: str = "") -> subprocess.CompletedProcess[str]:
        """`content`: what the command reads on standard input."""
        return subprocess.run(self.command(user, *argv), capture_output=True, text=True, timeout=30, input=content)

    def allows(self, user: str, *argv: str) -> bool:
        """Whether root's question and the user's own get the same answer, and it is yes."""
        asked = self.run("root", "/usr/bin/sudo", "-l", "-U", user, *argv)
        own = self.run(user, "/usr/bin/sudo", "-n", "-l", *argv)
        assert asked.returncode == own.returncode, (asked, own)
        return asked.returncode == 0

    def powermetrics(self, script: str) -> None:
        """Puts a program in its place."""
        self.write(POWERMETRICS[0].lstrip("/"), f"#!/bin/sh\n{script}\n", 0o755)
