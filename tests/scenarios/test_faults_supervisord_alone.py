"""supervisord as a neighbour (cases S47 to S64) where a fault takes a system of its own.

Full and read-only file systems are mounts in a mount namespace of this very process, which needs root on Linux; the
kernel takes them away with the process, whatever becomes of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from metal_supervisor.controller import boot
from tests.support.engines import either, gone, stand_in
from tests.support.faults import Figure, fault
from tests.support.system import System, eventually, free_ports, kill, running, service

CLONE_NEWNS = 0x20000


def mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True, capture_output=True)


@pytest.fixture(scope="module")
def no_mounts() -> str:
    """Why there can be none; "" once mounts are seen by this process and its later children only, and end with them."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "full and read-only disks are shown with mounts, which takes root on Linux"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS):
        return f"no mount namespace of our own: {os.strerror(ctypes.get_errno())}"
    mount("--make-rprivate", "/")
    return ""


@pytest.fixture
def own_mounts(no_mounts: str) -> None:
    if no_mounts:
        pytest.skip(no_mounts)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, no_mounts: str) -> Iterator[System]:
    base = tmp_path_factory.mktemp("alone")
    with running(base, engine=either(base)) as system:
        system.apply(system.tiny_model(), service("tiny", contextSize=16384))
        yield system


@pytest.fixture
def system(shared: System) -> System:
    """One with an engine that serves; a test may leave it stopped."""
    shared.start_if_stopped().ready()
    return shared


@fault(
    "S50",
    "SIGTERM to supervisord while three engines take 3 s each to end",
    happens="endpoints are withdrawn, all engines are told at once, and each ends by itself",
    sees="`run` ends with 0; the next one resumes",
    bound="all gone within 30 s, the time one engine has",
)
def test_a_sigterm_ends_all_engines_at_once(system: System, figure: Figure) -> None:
    names, log = ("a", "b", "c"), system.state / "log" / "supervisord.log"
    system.apply(*(stand_in(name, term_delay_s=3) for name in names))
    for name in names:
        system.ready(name)
    said = len(log.read_text())
    assert system.process is not None
    with figure.timed("all gone"):
        os.kill(system.supervisord_pid(), signal.SIGTERM)
        assert system.process.wait(60) == 0
    system.process = None
    assert system.processes() == []
    text = log.read_text()[said:]
    assert "SIGKILL" not in text and text.count("terminated by SIGTERM") + text.count("exit status 0") >= len(names)
    system.start()
    for name in names:
        system.ready(name)
    gone(system, *names)


# ── disks ────────────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def read_only(path: Path) -> Iterator[None]:
    mount("--bind", str(path), str(path))
    try:
        mount("-o", "remount,bind,ro", str(path))
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


@contextlib.contextmanager
def small_disk(path: Path, mebibytes: int) -> Iterator[None]:
    path.mkdir()
    mount("-t", "tmpfs", "-o", f"size={mebibytes}m,mode=0700", "none", str(path))
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


@contextlib.contextmanager
def filled(directory: Path) -> Iterator[None]:
    """Takes every byte that is left."""
    filler = directory / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (1 << 20, 4096, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(size))
    try:
        yield
    finally:
        filler.unlink()


@fault(
    "S62",
    "the disk with the state directory is full (a tmpfs) while an edit is to be written and another engine dies",
    happens="what runs goes on, what dies is started again; the edit is carried out when there is room",
    sees="the dead engine Ready again while the disk is full; the API refuses new objects",
    bound="Ready again within 30 s; the edit within 30 s of there being room",
)
def test_a_full_disk_stops_no_engine_and_the_edit_follows_when_there_is_room(
    tmp_path: Path, figure: Figure, own_mounts: None
) -> None:
    with small_disk(tmp_path / "run", 32), running(tmp_path) as system:
        system.apply(system.tiny_model(), service("tiny", contextSize=16384), service("edited"), service("dies"))
        engine, edited, dies = (system.ready(name) for name in ("tiny", "edited", "dies"))
        stream = system.stream()
        # The API keeps its data on the same disk, so the edit is there before, and read after.
        system.supervisorctl("stop", "controller")
        system.apply(service("edited", contextSize=1024))
        with filled(system.state):
            system.supervisorctl("start", "controller")
            kill(dies)
            with figure.timed("dead engine serves again"):
                eventually(lambda: system.pid("dies") not in (0, dies), 30, "a new engine")
                eventually(lambda: "hello world" in system.chat("dies"), 30, "an answer")
            eventually(lambda: system.observe("dies").get("pid") == system.pid("dies"), 30, "the sidecar to see it")
            assert (system.pid(), system.pid("edited")) == (engine, edited)
            assert "hello world" in system.chat("edited")
            assert "Error from server" in system.kubectl("scale", "isvc/tiny", "--replicas=0", check=False)
        with figure.timed("edit carried out"):
            eventually(lambda: system.pid("edited") not in (0, edited), 30, "the edit to be carried out")
            system.ready("edited")
        assert stream.completed(), f"{stream.chunks} chunks, {stream.error}"
        assert system.pid() == engine
        figure.add("engine restarts", system.observe()["restarts"], "")
        eventually(lambda: system.health() == (200, {"status": "ok"}), 30, "health")
        assert not list(system.state.glob("*/.*.tmp"))


@fault(
    "S63a",
    "models.d becomes read-only while services run, are applied and are deleted",
    happens="what needs no file there goes on, a deletion too; the rest follows when it is writable",
    sees="the file and the reason in the log",
    bound="the deletion within 30 s, the new service Ready within 30 s of it being writable",
)
def test_a_read_only_models_d_delays_what_needs_it_and_nothing_else(
    system: System, figure: Figure, own_mounts: None
) -> None:
    system.apply(service("leaver"))
    system.ready("leaver")
    engine, stream = system.pid(), system.stream()
    with read_only(system.state / "models.d"):
        system.apply(service("comer"))
        eventually(lambda: "Read-only file system" in _controller_log(system), 30, "the reason to be logged")
        with figure.timed("deletion carried out"):
            system.delete("leaver")
            eventually(lambda: system.pid("leaver") == 0, 30, "the engine to end")
        assert system.pid("comer") == 0
        assert system.health()[0] == 200
    with figure.timed("Ready when writable"):
        system.ready("comer")
    eventually(lambda: not system.files.section_path("default.leaver").exists(), 30, "its section to go")
    assert stream.completed(), f"{stream.chunks} chunks, {stream.error}"
    assert system.pid() == engine
    figure.add("engine restarts", system.observe()["restarts"], "")
    gone(system, "comer")


def _controller_log(system: System) -> str:
    return (system.state / "log" / "controller.log").read_text()


@fault(
    "S63b",
    "the state directory is on a read-only file system at the start",
    happens="`run` does not start anything",
    sees="exit code 1 and a line that names the directory and the reason",
    bound="at once",
)
def test_a_read_only_state_directory_is_refused_at_the_start(tmp_path: Path, figure: Figure, own_mounts: None) -> None:
    state = tmp_path / "run"
    state.mkdir()
    with read_only(state):
        port = free_ports(1)[0]
        command = [sys.executable, "-m", "metal_supervisor", "run", "--state-dir", str(state), "--port", str(port)]
        with figure.timed("refused"):
            done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    said = done.stdout + done.stderr
    assert f"state directory {state}" in said and os.strerror(errno.EROFS) in said and "Traceback" not in said


# ── not running at all; last, because it is left stopped ─────────────────────────────────────────


def by_hand(system: System, *command: str) -> subprocess.Popen[bytes]:
    """A process of the system, as supervisord would start it."""
    with system.log.open("ab") as log:
        return subprocess.Popen(
            command, env=boot.environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )


def without_our_programs(system: System) -> list[str]:
    """A supervisord command line for the static configuration less controller and sidecar."""
    parts = (system.state / "supervisord.conf").read_text().split("\n[")
    kept = "\n[".join(part for part in parts if not part.startswith(("program:controller]", "program:sidecar]")))
    (system.state / "less.conf").write_text(kept)
    return [*boot.command(system.files)[:-1], f"{system.files.home}/less.conf"]


@fault(
    "S47",
    "supervisord does not run when controller and sidecar start, and starts later",
    happens="both wait, changing no file; then the models of the last run start",
    sees="503 of /healthz with the reason; then 200, and Ready",
    bound="Ready within 60 s of supervisord's start",
)
def test_controller_and_sidecar_wait_for_a_supervisord_that_is_not_there(system: System, figure: Figure) -> None:
    assert system.stop() == 0
    section = system.files.section_path("default.tiny").read_bytes()
    with contextlib.ExitStack() as started:

        def start(*command: str) -> subprocess.Popen[bytes]:
            process = by_hand(system, *command)
            started.callback(process.wait, 60)
            started.callback(process.terminate)
            return process

        own = f"{system.state}/current/metal-supervisor"
        with figure.timed("told"):
            ours = [start(own, each, "--state-dir", str(system.state)) for each in ("controller", "sidecar")]
            eventually(lambda: system.health()[0] == 503, 40, "/healthz to say so")
        assert "supervisord: " in system.health()[1]["reason"]
        assert system.files.section_path("default.tiny").read_bytes() == section
        with figure.timed("Ready"):
            start(*without_our_programs(system))
            system.ready(within_s=60)
        eventually(lambda: system.health()[0] == 200, 30, "health")
        assert [each.poll() for each in ours] == [None, None]
        figure.add("restarts of ours", 0, "")
