"""Executables of engines on this Mac, and the flags of their builds, read from `--help` in the background.

An engine written in Python takes seconds to print its help, and the controller needs the flags on every pass.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from metal_supervisor.confinement.seatbelt import APP
from metal_supervisor.host import machine
from metal_supervisor.runtimes.runtime import Binary, Executable
from metal_supervisor.settings.loader import flag_of
from metal_supervisor.state.kept_files import Edition, edition_from

LOOK_WAIT_S = 0.3
AGAIN_S = 10.0
HELP_WAIT_S = 5.0
"""Time limit for a program to print its help."""
SCRIPT_HELP_WAIT_S = 60.0
"""Time limit for a Python script, which imports its libraries first."""
SHEBANG = re.compile(r"""#!(?:/bin/sh\n'''exec' ["']?)?(/[^\n"']*?/python[0-9.]*)["']?[ \n]""")
"""Shebang as installers write it: `#!PYTHON`, or for a long path or one with spaces a line of shell that execs it."""
SHEBANG_BYTES = 2048
KEGS = "Cellar", "opt", "lib"
"""Directory of all kegs in Homebrew's prefix, and those of links by which a keg's programs find others' libraries."""
CODE = re.compile(r".+\.(dylib|so|so\.[0-9.]+|metallib|metal)|[\w-]+_\w+\.bundle|mlx_metal_\w+", re.ASCII)
"""Names of what an engine loads from beside it: libraries, among them ggml's backends, Metal's shaders, and bundles of
Swift packages with them."""


class Broken(Exception):
    """An executable is installed but does not work; the message says what to do."""


def find(settings: object, executables: Sequence[Executable]) -> tuple[Executable, Path]:
    """The first of a runtime's executables that is installed. `settings` hold their paths, "" to search PATH.

    Raises NoBinary, whose message names them all.
    """
    missing = []
    for each in executables:
        try:
            flag = flag_of(each.setting) if each.setting else None
            return each, machine.find_binary(getattr(settings, each.setting, ""), each.name, each.install, flag)
        except machine.NoBinary as error:
            missing.append(str(error))
    raise machine.NoBinary("; ".join(missing))


def interpreter_of(script: Path) -> str:
    """Path of the Python in a script's shebang, "" if there is none."""
    try:
        with script.open("rb") as file:
            found = SHEBANG.match(file.read(SHEBANG_BYTES).decode("utf-8", "replace"))
    except OSError:
        return ""
    return found[1] if found else ""


def seen_as(program: Path) -> Path:
    """What macOS takes a program's process for, by its real path: for the interpreter of a framework its Python.app."""
    programs = program.parent.parent / APP
    return programs.parent.parent if programs.is_dir() else program


def homes_of(path: Path, interpreter: str) -> tuple[str, ...]:
    """Directories and files of an engine's own code, which it may read as a whole.

    Of an interpreter: its environment, if it is of one, and its base installation. Of a program: its directory, and
    `lib` beside that. What Homebrew installed may need all kegs, but no more of the prefix: etc and var are the user's.
    """
    # Not Path.is_file and Path.is_dir, which raise in a directory that is closed to this user.
    if interpreter:
        real, environment = Path(os.path.realpath(interpreter)), Path(interpreter).parent.parent
        # Without this file it is only a link to an interpreter, as in ~/.local/bin, and above it lies anything.
        own = [each.parent for each in filter(os.path.isfile, [environment / "pyvenv.cfg"])]
        prefix, framework, _ = str(real).partition("/Library/Frameworks/")
        ports = [Path(prefix) / "lib"] if prefix and framework else []  # MacPorts: what it links lies in the prefix
        roots = [place for each in (*own, real.parent.parent) for place in _python_in(each)]
        return tuple(dict.fromkeys(map(str, (*roots, *ports, *_kegs(real)))))
    real = Path(os.path.realpath(path))
    if kegs := _kegs(real):
        return tuple(map(str, kegs))
    above = real.parent.parent
    places = real.parent, above / "lib", real.parent / "lib" / real.name, above / "lib" / real.name
    return tuple(str(each) for place in filter(os.path.isdir, places) for each in _code_in(place))


def _python_in(root: Path) -> list[Path]:
    """An environment or installation, of one in the home directory itself, or in `/`, only what is Python's."""
    if len(root.parts) > 1 and not Path(os.path.realpath(Path.home())).is_relative_to(os.path.realpath(root)):
        return [root]
    with contextlib.suppress(OSError):
        own = "pyvenv.cfg", "lib/python3*", "lib/libpython*"
        return [each for pattern in own for each in sorted(root.glob(pattern))]
    return []


def _kegs(real: Path) -> list[Path]:
    """Directories of Homebrew in which the libraries of a program lie, by its real path; none if it is not brewed."""
    cellar = next((above for above in real.parents if above.name == KEGS[0]), None)
    return [cellar.parent / name for name in KEGS] if cellar else []


def _code_in(directory: Path) -> list[Path]:
    """A directory that an engine has to itself, else only what engines load from it, by name.

    A program may also lie among the user's files: in the home directory, directly below it (~/Downloads), or at the
    top of a disk (/Volumes/Data, /tmp).
    """
    home = Path(os.path.realpath(Path.home()))
    if len(directory.parts) > 3 and directory.parent != home and not home.is_relative_to(directory):
        return [directory]
    try:
        return [each for each in sorted(directory.iterdir()) if CODE.fullmatch(each.name)]
    except OSError:  # macOS may keep ~/Downloads to itself; the engine's trial then tells what it misses
        return []


@dataclass
class _BuildLook:
    """What is known of one build."""

    interpreter: str
    """See `interpreter_of`; "" for a program."""
    help: str = ""
    flags: frozenset[str] | None = None
    """None until its help has been read, none where that fails."""
    version: str = ""
    done: threading.Event = field(default_factory=threading.Event)


class Builds:
    """Help, flags and versions of the engines' builds. Call it from one thread; `on_change` is called from others."""

    def __init__(self, settings: object, on_change: Callable[[], None]) -> None:
        self._settings, self._on_change = settings, on_change
        self._looks: dict[tuple[Path, Edition], _BuildLook] = {}

    def look(self, executables: Sequence[Executable]) -> Binary | None:
        """The executable of a runtime; None while its help is being read. Raises NoBinary, Broken."""
        executable, path = find(self._settings, executables)
        try:
            build = path, edition_from(path.stat())
        except OSError as error:
            raise machine.NoBinary(f"{path} cannot be looked at: {error.strerror}") from None
        look = self._looks.get(build)
        if look is None:
            look = _BuildLook(interpreter_of(path) if executable.script else "")
            threading.Thread(target=self._ask, args=(path, look, executable), name="builds", daemon=True).start()
            self._looks[build] = look
            look.done.wait(LOOK_WAIT_S)
        if look.flags is None:
            return None
        if not look.flags:
            raise Broken(f"{path} --help does not work; reinstall it")
        if executable.script and not look.interpreter:
            raise Broken(f"{path} does not say in its first line which Python runs it; reinstall it")
        homes, edition = homes_of(path, look.interpreter), f"{path}|{build[1]}"
        name, python = executable.name, look.interpreter
        return Binary(str(path), look.flags, name, python, look.help, homes, edition, look.version)

    def _ask(self, path: Path, look: _BuildLook, executable: Executable) -> None:
        wait_s = SCRIPT_HELP_WAIT_S if executable.script else HELP_WAIT_S
        while not look.flags:
            look.help = machine.help_of(path, wait_s, executable.help)
            if executable.package and look.interpreter:  # before the flags, which make it known
                look.version = machine.package_version(look.interpreter, executable.package, wait_s)
            before, look.flags = look.flags, machine.flags_in(look.help)
            look.done.set()
            if before != look.flags:
                self._on_change()
            if not look.flags:
                time.sleep(AGAIN_S)
