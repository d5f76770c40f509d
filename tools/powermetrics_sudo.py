#!/usr/bin/env python3
"""Lets one user measure the power of the chip: a file in /etc/sudoers.d that allows one command line of powermetrics.

What is installed is rendered from the constants that the command itself is made of, and has passed `visudo -cf`
before it gets there: a broken file in that directory would take sudo away from everybody. Root reads it from standard
input and has visudo check the very file that it puts in place.

    python tools/powermetrics_sudo.py install|remove|print [--user USER] [--root DIRECTORY]

`--root` is for a look at what would be there: nothing becomes root's, and sudo is not asked.
"""

from __future__ import annotations

import argparse
import os
import pwd
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from metal_supervisor.host import root_file
from metal_supervisor.host.powermetrics import FRAGMENT, POWERMETRICS
from metal_supervisor.install.steps import shown_as_root

UNDO = "make uninstall-powermetrics-sudo"
DO = "make install-powermetrics-sudo"
VISUDO_TIMEOUT_S = 20.0
# A macOS account may have dots. Nothing here means anything to sudoers, which a capital letter (ALL) might.
USER = re.compile(r"[a-z_][a-z0-9_.-]*")


class Refused(Exception):
    """It is not done; the message says why, and what to do."""


def say(text: str) -> None:
    print(f"powermetrics_sudo: {text}", flush=True)


def user_of(named: str | None) -> str:
    """Who is to be allowed: the one named, else who asked sudo for this, else who runs it. Raises Refused."""
    user = named or os.environ.get("SUDO_USER") or pwd.getpwuid(os.getuid()).pw_name
    if user == "root" and not named:
        raise Refused("root needs no permission; say which user runs metal_supervisor, with --user")
    return user


def sudoers(user: str) -> str:
    """The sudoers file that lets a user run exactly this powermetrics as root. Raises ValueError for a strange name."""
    if not USER.fullmatch(user):
        raise ValueError(
            f"{user!r:.80} is no user name that can be put into sudoers: it takes small letters, digits, _, - and ., "
            "and no digit, - or . at the beginning"
        )
    words = " ".join(word.replace(",", r"\,") for word in POWERMETRICS)
    return (
        "# metal_supervisor: lets its user measure the power of the chip, and nothing else. Every argument is\n"
        "# literal: a wildcard would also match -o FILE, which writes any file as root.\n"
        f"{user} ALL=(root) NOPASSWD: NOSETENV: {words}\n"
    )


def check(text: str) -> None:
    """Has visudo read it. Raises Refused."""
    visudo = shutil.which("visudo", path=os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin"]))
    if visudo is None:
        raise Refused("there is no visudo here to check the file with; nothing was installed")
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "fragment"
        file.write_text(text, "utf-8")
        file.chmod(0o440)
        try:
            done = subprocess.run(
                [visudo, "-cf", str(file)],
                capture_output=True,
                text=True,
                timeout=VISUDO_TIMEOUT_S,
                stdin=subprocess.DEVNULL,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise Refused(f"{visudo}: {error}; nothing was installed") from None
    if done.returncode:
        said = done.stderr.strip() or done.stdout.strip()
        raise Refused(f"visudo refuses the file, so nothing was installed: {said}")


def target(root: Path) -> Path:
    return root / FRAGMENT.lstrip("/")


def as_root(*command: str, content: str = "") -> None:
    """Run a command as root, who may ask for a password; `content` is its standard input. Raises Refused."""
    if sys.platform != "darwin":
        raise Refused("powermetrics is on Macs only; --root shows elsewhere what would be installed")
    words = [*([] if os.geteuid() == 0 else ["/usr/bin/sudo"]), *command]
    if subprocess.run(words, input=content.encode()).returncode:
        raise Refused(f"this failed: {shown_as_root(command)}")


def install(text: str, root: Path) -> Path:
    """Puts the file in place; returns its path. Raises Refused."""
    check(text)
    path = target(root)
    if root != Path("/"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.write_text(text, "utf-8")
        path.chmod(0o440)
        return path
    as_root(*root_file.command(str(path), 0o440, text.encode(), sudoers=True), content=text)
    return path


def remove(root: Path) -> Path:
    """Takes the file away, if it is there; returns its path. Raises Refused."""
    path = target(root)
    if root == Path("/"):
        as_root("/bin/rm", "-f", str(path))
    else:
        path.unlink(missing_ok=True)
    return path


def main(arguments: list[str] | None = None) -> int:
    """0: done, 1: refused, and why is said."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("command", choices=("install", "remove", "print"))
    parser.add_argument("--user", help="who may run powermetrics; default: whoever runs this")
    parser.add_argument("--root", type=Path, default=Path("/"), help="directory to take for / [/]")
    asked = parser.parse_args(arguments)
    try:
        if asked.command == "remove":
            say(f"removed {remove(asked.root)}; {DO} allows it again")
            return 0
        user = user_of(asked.user)
        text = sudoers(user)
        if asked.command == "print":
            print(text, end="")
            return 0
        say(f"installed {install(text, asked.root)}, which says:")
        print(text, end="")
        say(f"{user} may now run this as root, and nothing else of it; to undo: {UNDO}")
    except (Refused, ValueError) as error:
        print(f"powermetrics_sudo: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
