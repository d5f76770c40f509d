"""What every acceptance check has at hand: commands, root, a directory, engines; and the undoing of all of it.

A check asks for something and says at the same moment how it is undone. That happens when the check is over, however
it ended, the last first, and one undoing that fails keeps no other from being tried.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from metal_supervisor.host import commands
from metal_supervisor.host.commands import Done, Feeder, Runner
from metal_supervisor.install.checks import KEPT_FROM_JOBS
from tests.support.mac.mac_report import Sheet, Skip

ROOT = Path(__file__).resolve().parents[3]
SUDO = "/usr/bin/sudo"
SUDO_AGAIN_S = 60.0
PASSWORD_S = 300.0
COMMAND_S = 15.0
END_S = 10.0
LOAD_S = 180.0
LOG_CHARACTERS = 2000
HOW_ROOT = "run it in a terminal without --no-sudo"


@dataclass(frozen=True)
class Options:
    """What the user said."""

    lan: str = ""
    """HOST:PORT of the local network; "" for none."""
    model: Path | None = None
    """A GGUF file to measure with; None: one is made."""
    mlx_model: Path | None = None
    """A directory of an MLX model; None: a tiny one is made where mlx_lm is installed."""
    model_mib: int = 1024
    """Size of the model that is made."""
    hosted: bool = False
    """Only what a virtual machine without a GPU of its own can show."""
    sudo: bool = True
    terminal: bool = True
    """Whether somebody is there to be asked."""


@dataclass(frozen=True)
class Served:
    """A llama-server of a check's own."""

    pid: int
    port: int


class Kit:
    """The means of the checks, one check at a time."""

    def __init__(
        self,
        options: Options,
        base: Path,
        run: Runner = commands.run,
        here: Feeder = commands.run_here,
        say: Callable[[str], None] = lambda _text: None,
    ) -> None:
        """`base`: an empty directory for everything that is written. `here`: runs within this terminal's session."""
        self.options, self.base, self.say = options, base, say
        self.scratch = base / "none"
        self.roots = Path("/private/var/db")
        """A directory that only root can change, all the way up."""
        self._run, self.here = run, here
        self.ended = False
        """Whether the run is to end; what was done is undone all the same."""
        self._undo: list[tuple[str, Callable[[], object]]] = []

    @contextlib.contextmanager
    def directory_for(self, name: str) -> Iterator[None]:
        """A directory of its own for one check, in `scratch`."""
        self.scratch = self.base / name
        self.scratch.mkdir()
        self.cleanup(f"remove {name}/", lambda: shutil.rmtree(self.scratch))
        yield

    def cleanup(self, what: str, undo: Callable[[], object]) -> None:
        """Has something undone when the check is over."""
        self._undo.append((what, undo))

    def tidy(self) -> list[str]:
        """Undoes everything; says what could not be."""
        problems = []
        while self._undo:
            what, undo = self._undo.pop()
            try:
                undo()
            except KeyboardInterrupt:
                self.ended = True
                problems.append(f"{what}: the run was ended")
            except Exception as error:  # noqa: BLE001 - the rest has to be undone whatever it is
                problems.append(f"{what}: {type(error).__name__}: {error}")
        return problems

    def tidy_last(self) -> list[str]:
        """Undoes what was asked for last, before the check is over; says what could not be."""
        kept, self._undo = self._undo[:-1], self._undo[-1:]
        problems = self.tidy()
        self._undo = kept
        return problems

    # ── commands ─────────────────────────────────────────────────────────────────────────────────

    def run(self, *argv: str, timeout_s: float = COMMAND_S) -> Done:
        """One of the system's tools, as the user."""
        return self._run(argv, timeout_s)

    def need_root(self, why: str) -> None:
        """Raises Skip where sudo was not given."""
        if not self.options.sudo:
            raise Skip(f"{why}; {HOW_ROOT}")

    def root(self, *argv: str, timeout_s: float = COMMAND_S, content: bytes = b"") -> Done:
        """The same by sudo, which was asked for its password before and does not ask now."""
        # In this session: sudo remembers a password for a terminal, which a session of its own does not have.
        return self.here([SUDO, "-n", *argv], timeout_s, *([content] if content else []))

    def roots_directory(self) -> Path:
        """Make a directory that only root can change, where root's files may be put; it goes away with the check.

        Raises AssertionError.
        """
        path = self.roots / f"dev.metal-supervisor.acceptance-{os.getpid()}"
        self.cleanup(f"remove {path}", lambda: self.root("/bin/rm", "-rf", str(path)))
        self.make_roots(path)
        return path

    def make_roots(self, *paths: Path) -> None:
        """Make directories of root's, each below one that is there. Raises AssertionError."""
        for path in paths:
            done = self.root("/usr/bin/install", "-d", "-m", "0755", "-o", "root", "-g", "wheel", str(path))
            assert done.ok, f"root cannot make {path}: {done.err}"

    def start(self, argv: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        """A process that is ended with the check."""
        with log.open("ab") as output:
            child = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=env)
        self.cleanup(f"end {argv[0]}", lambda: end(child))
        return child

    def start_root(self, *argv: str) -> subprocess.Popen[bytes]:
        """A process of root's with its output in a pipe, ended with the check by sudo: it is not ours to signal."""
        child = subprocess.Popen(
            [SUDO, "-n", *argv], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        self.cleanup(f"end {argv[0]}", lambda: self.end_root(child))
        return child

    def end_root(self, child: subprocess.Popen[bytes]) -> None:
        """Ends a process of `start_root`."""
        if child.poll() is None:
            self.root("/bin/kill", "-TERM", str(child.pid))
        if child.stdout:
            child.stdout.close()
        try:
            child.wait(END_S)
        except subprocess.TimeoutExpired:
            self.root("/bin/kill", "-KILL", str(child.pid))
            child.wait(END_S)

    def pause(self, seconds: float, why: str) -> None:
        """Lets time pass for something that nobody tells of."""
        self.say(f"  waiting {seconds:.0f} s: {why}")
        threading.Event().wait(seconds)

    # ── engines ──────────────────────────────────────────────────────────────────────────────────

    def llama_server(self) -> Path:
        """The llama-server that is installed. Raises Skip."""
        import find_llama_server

        try:
            return find_llama_server.find()
        except find_llama_server.NotFound as error:
            raise Skip(str(error)) from None

    def model(self) -> Path:
        """The GGUF file to measure with, made once if none was named. Raises Skip."""
        if self.options.model is not None:
            return self.options.model
        return self.made_model(self.options.model_mib)

    def made_model(self, mib: int, context: int = 32768) -> Path:
        """A model of that size, of real layers and a fixed answer. Raises Skip."""
        try:
            import tiny_gguf

            path = self.base / f"model-{mib}.gguf"
            tiny_gguf.write_tiny_gguf(path, pad_mib=mib, context=context)
        except ImportError as error:
            text = f"no model can be made without {error.name}; `make lint` sets that up, or name one with --model"
            raise Skip(text) from None
        return path

    def serve(self, model: Path, *flags: str) -> Served:
        """A llama-server that answers /health. Raises Skip, AssertionError."""
        program, port = self.llama_server(), free_port()
        argv = [str(program), "--model", str(model), "--host", "127.0.0.1", "--port", str(port), *flags]
        log = self.scratch / f"engine-{port}.log"
        child = self.start(argv, log)
        wait_ready(port, lambda: child.poll() is None, log)
        return Served(child.pid, port)


def end(child: subprocess.Popen[bytes]) -> None:
    """Ends a child, by force if it does not listen."""
    if child.poll() is None:
        child.send_signal(signal.SIGTERM)
        try:
            child.wait(END_S)
        except subprocess.TimeoutExpired:
            child.kill()
    child.wait(END_S)


def free_port() -> int:
    """A port of this machine that was free a moment ago."""
    import find_llama_server

    return find_llama_server.free_port()


def wait_ready(port: int, alive: Callable[[], bool], log: Path, within_s: float = LOAD_S) -> None:
    """Waits until a server of this machine says that it is healthy. Raises AssertionError with its last words."""
    import find_llama_server

    until = time.monotonic() + within_s
    while find_llama_server.request(port, "GET", "/health")[0] != 200:
        if not alive() or time.monotonic() > until:
            said = log.read_text(errors="replace")[-800:] if log.exists() else ""
            raise AssertionError(f"the engine is not ready{'' if alive() else ', it ended'}: {said}")
        time.sleep(0.05)


def eventually(look: Callable[[], object], within_s: float, what: str) -> float:
    """Waits until something is so; how many seconds that took. Raises AssertionError."""
    began = time.monotonic()
    while not look():
        if time.monotonic() - began > within_s:
            raise AssertionError(f"not within {within_s:g} s: {what}")
        time.sleep(0.05)
    return time.monotonic() - began


@contextlib.contextmanager
def workplace() -> Iterator[Path]:
    """A directory that is gone afterwards. In the home directory: a path below /var/folders is too long for a socket
    of supervisord's, and launchd's jobs may read it."""
    # Not hidden: no manifest may name a hidden file of the home directory, and the models are here.
    path = Path(tempfile.mkdtemp(prefix="metal-supervisor-acceptance-", dir=Path.home())).resolve()
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


class Password:
    """sudo's leave, asked for once and kept fresh until the run is over."""

    def __init__(self, here: Runner = commands.run_here) -> None:
        self._here, self._over = here, threading.Event()

    def ask(self) -> bool:
        """Whether sudo may be used; it may ask for a password on the terminal."""
        if not self._here([SUDO, "-n", "-v"], COMMAND_S).ok and not self._here([SUDO, "-v"], PASSWORD_S).ok:
            return False
        threading.Thread(target=self._keep, name="sudo", daemon=True).start()
        return True

    def _keep(self) -> None:
        while not self._over.wait(SUDO_AGAIN_S):
            self._here([SUDO, "-n", "-v"], COMMAND_S)

    def close(self) -> None:
        """Asks no more."""
        self._over.set()


def need_readable() -> None:
    """Raises Skip where launchd's jobs may not read our own files."""
    for name in KEPT_FROM_JOBS:
        if any(path.is_relative_to(Path.home() / name) for path in (ROOT, Path(sys.prefix))):
            raise Skip(f"this checkout is in {name}, which macOS keeps from launchd's jobs; move it and run it again")


def show_logs(state: Path, sheet: Sheet) -> None:
    """Keeps the last words of a system that is about to be removed."""
    for path in sorted((state / "log").glob("*.log")):
        sheet.show(f"log/{path.name}, its end", path.read_text("utf-8", "replace")[-LOG_CHARACTERS:])


def python_of(script: Path) -> str:
    """The interpreter in a script's first line, "" if it has none."""
    try:
        with script.open("rb") as file:
            line = file.readline(4096).decode("utf-8", "replace")
    except OSError:
        return ""
    words = line[2:].split() if line.startswith("#!") else []
    return words[0] if words and Path(words[0]).name.startswith("python") else ""


def found_on_path(name: str) -> Path | None:
    """A program on PATH or in Homebrew's prefixes."""
    import find_llama_server

    places = os.pathsep.join([os.environ.get("PATH", os.defpath), *find_llama_server.HOMEBREW])
    found = shutil.which(name, path=places)
    return Path(found).absolute() if found else None
