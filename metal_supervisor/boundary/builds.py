"""Engines' executables on this Mac, and what their builds know, asked in the background.

An engine written in Python takes seconds to print its help, and the controller asks on every pass.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from metal_supervisor.boundary import host
from metal_supervisor.runtimes.place import Binary, Executable

LOOK_WAIT_S = 0.3
AGAIN_S = 10.0


class Broken(Exception):
    """An executable is there, and does not work; the message says what to do."""


def find(settings: object, executables: Sequence[Executable]) -> tuple[Executable, Path]:
    """The first of a runtime's executables that is here; `settings` hold their paths, "" to be found.

    Raises NoBinary, which names them all.
    """
    missing = []
    for each in executables:
        try:
            return each, host.find_binary(getattr(settings, each.setting), each.name, each.install)
        except host.NoBinary as error:
            missing.append(str(error))
    raise host.NoBinary("; ".join(missing))


class Builds:
    """What the builds of engines know. Safe to ask from one thread; `on_change` is called from others."""

    def __init__(self, settings: object, on_change: Callable[[], None]) -> None:
        self._settings, self._on_change = settings, on_change
        self._flags: dict[tuple[Path, float], frozenset[str]] = {}
        self._asked: dict[tuple[Path, float], threading.Event] = {}

    def look(self, executables: Sequence[Executable]) -> Binary | None:
        """The executable of a runtime; None while it is being asked what it knows. Raises NoBinary, Broken."""
        executable, path = find(self._settings, executables)
        try:
            build = path, path.stat().st_mtime
        except OSError as error:
            raise host.NoBinary(f"{path} cannot be looked at: {error.strerror}") from None
        if build not in self._asked:
            done = self._asked[build] = threading.Event()
            threading.Thread(target=self._ask, args=(build, done), name="builds", daemon=True).start()
            done.wait(LOOK_WAIT_S)
        flags = self._flags.get(build)
        if flags is None:
            return None
        if not flags:
            raise Broken(f"{path} --help does not work; reinstall it")
        return Binary(str(path), flags, executable.name)

    def _ask(self, build: tuple[Path, float], done: threading.Event) -> None:
        while True:
            found = host.flags_of(build[0])
            changed = self._flags.get(build) != found
            self._flags[build] = found
            done.set()
            if changed:
                self._on_change()
            if found:
                return
            time.sleep(AGAIN_S)
