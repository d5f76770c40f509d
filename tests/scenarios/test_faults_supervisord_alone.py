"""supervisord as a neighbour (cases S47 to S64) where a fault takes a system of its own.

Full and read-only file systems are mounts in a mount namespace of this very process, which needs root on Linux; the
kernel takes them away with the process, whatever becomes of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from metal_supervisor.controller import boot
from metal_supervisor.spec.processes import State
from tests.support.faults import Figure, fault
from tests.support.system import FAKE_ENGINE, System, eventually, free_ports, kill, running, service

CLONE_NEWNS = 0x20000
MANY = int(os.environ.get("METAL_MANY", "100"))
"""Programs of the largest Mac; 500 with `make faults`, which takes a minute longer."""
# It reads what nobody writes, in the shell itself: one process, which names the state directory as an engine does.
SLEEPER = """#!/bin/sh
case "$*" in *--help*) echo "--metrics --alias STRING" ;; *) read -r nothing ;; esac
"""


# ── not running at all ───────────────────────────────────────────────────────────────────────────


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
def test_controller_and_sidecar_wait_for_a_supervisord_that_is_not_there(tmp_path: Path, figure: Figure) -> None:
    with running(tmp_path) as system, contextlib.ExitStack() as started:
        system.apply(system.tiny_model(), service())
        system.ready()
        assert system.stop() == 0
        section = system.files.section_path("default.tiny").read_bytes()

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


@fault(
    "S50",
    "SIGTERM to supervisord while three engines take 3 s each to end",
    happens="endpoints are withdrawn, all engines are told at once, and each ends by itself",
    sees="`run` ends with 0; the next one resumes",
    bound="all gone within 30 s, the time one engine has",
)
def test_a_sigterm_ends_all_engines_at_once(tmp_path: Path, figure: Figure) -> None:
    names = ("a", "b", "c")
    with running(tmp_path, engine=FAKE_ENGINE) as system:
        system.apply(system.tiny_model(), *(service(name, extraArgs=["--fake-term-delay-s", "3"]) for name in names))
        for name in names:
            system.ready(name)
        assert system.process is not None
        with figure.timed("all gone"):
            os.kill(system.supervisord_pid(), signal.SIGTERM)
            assert system.process.wait(60) == 0
        assert system.processes() == []
        log = (system.state / "log" / "supervisord.log").read_text()
        assert "SIGKILL" not in log and log.count("terminated by SIGTERM") + log.count("exit status 0") >= len(names)
        system.start()
        for name in names:
            system.ready(name)


# ── disks ────────────────────────────────────────────────────────────────────────────────────────


def mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True, capture_output=True)


@pytest.fixture(scope="module")
def own_mounts() -> None:
    """From here on mounts are seen by this process and its children only, and end with them."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        pytest.skip("full and read-only disks are shown with mounts, which takes root on Linux")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS):
        pytest.skip(f"no mount namespace of our own: {os.strerror(ctypes.get_errno())}")
    mount("--make-rprivate", "/")


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
    tmp_path: Path, figure: Figure, own_mounts: None
) -> None:
    with running(tmp_path) as system:
        system.apply(system.tiny_model(), service("tiny", contextSize=16384), service("leaver"))
        engine, _ = system.ready(), system.ready("leaver")
        stream = system.stream()
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


# ── many ─────────────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def as_from_launchd() -> Iterator[None]:
    """The limit of open files that launchd gives a job: supervisord has to raise it by itself."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@fault(
    "S64",
    "500 InferenceServices are applied to one Mac (100 in `make test`), each with an engine that never gets ready",
    happens="all are started; one more edit still gets through, and supervisord keeps answering",
    sees="as many programs in supervisorctl",
    bound="all have a process within 240 s of the last apply",
)
def test_hundreds_of_programs_all_run(tmp_path: Path, figure: Figure) -> None:
    engine = tmp_path / "engine"
    engine.write_text(SLEEPER)
    engine.chmod(0o755)
    system = System(tmp_path, "--ports", "32100-32699", engine=engine)
    try:
        with as_from_launchd():
            system.start()
        figure.add("programs", MANY, "")
        with figure.timed("all applied"):
            system.apply(system.tiny_model())
            for number in range(MANY):
                system.apply(service(f"many-{number}"))
        with figure.timed("all have a process"):
            eventually(lambda: _live(system) == MANY, 240, "a process each")
        for name in ("supervisord", "controller", "sidecar"):
            pid = system.supervisord_pid() if name == "supervisord" else system.own_pid(name)
            process = psutil.Process(pid)
            figure.add(f"RSS of {name}", process.memory_info().rss / 2**20, "MiB")
            figure.add(f"CPU of {name}", sum(process.cpu_times()[:2]))
        for _ in range(5):
            with figure.timed("table"):
                system.rpc.table()
        for _ in range(3):
            with figure.timed("reload"):
                system.rpc.reload()
        before = system.pid("many-0")
        with figure.timed("an edit is carried out"):
            system.apply(service("many-0", contextSize=1024))
            eventually(lambda: system.pid("many-0") not in (0, before), 60, "the edit to run")
        eventually(lambda: _live(system) == MANY, 60, "it to be RUNNING beside the others")
        assert system.process is not None
        with figure.timed("all gone"):
            system.process.send_signal(signal.SIGTERM)
            assert system.process.wait(240) == 0
        system.process = None
    finally:
        system.close()


def _live(system: System) -> int:
    """How many models have a process that stays."""
    rows = system.rpc.table().items()
    time.sleep(0.2)  # asking all the time would be the load
    return sum(row.state is State.RUNNING and name.startswith("default.") for name, row in rows)
