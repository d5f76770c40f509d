"""`metal-supervisor run` as a terminal program: odd directories, Ctrl-C, again, and what is left behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from metal_supervisor import launch
from metal_supervisor.host.processes import systems
from tests.support.faults import Figure, fault
from tests.support.own_logs import logged
from tests.support.system import ISVC, ROOT, System, eventually, free_ports, kill, running, service

from tests.support.mac import mac_whole  # isort: skip


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # which each run inherits, as from nohup
    try:
        with running(tmp_path_factory.mktemp("run"), "--stop-timeout", "2") as system:
            system.apply(system.tiny_model(), service(contextSize=32768))
            yield system
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.fixture
def system(shared: System) -> System:
    """One with a model that serves; a test may leave it stopped."""
    shared.start_if_stopped().ready()
    return shared


@pytest.fixture
def stopped(shared: System) -> System:
    """One that was stopped in order, with a model that served."""
    if shared.process is not None:
        shared.ready()
        assert shared.stop() == 0
    return shared


def test_it_works_in_odd_directories_and_leaves_nothing_outside(tmp_path: Path) -> None:
    base = tmp_path / "with some spaces" / ("x" * 200) / "sémi;colon % and 'quote\""
    base.mkdir(parents=True)
    with running(base) as system:
        system.apply(system.tiny_model(), service())
        system.ready()
        assert "hello world" in system.chat()
        where = f"http://127.0.0.1:{system.port()}/v1"
        assert system.status()["endpoint"] == f"{where}/chat/completions"
        eventually(lambda: f"Ready       {where}\n" in system.said(), what="the URL to be told")
        assert "default.tiny" in system.supervisorctl_program("status")
        assert system.supervisorctl_program("tail", "default.tiny")
        assert system.stop(signal.SIGINT) == 0
        assert system.processes() == []
        assert "nothing is left running" in system.said()
    assert system.files.link is not None and not system.files.link.is_symlink()
    assert sorted(path.name for path in base.iterdir()) == ["run", "run.log", "tiny.gguf"]


@fault(
    "U150",
    "the whole system is stopped, by Ctrl-C or SIGTERM",
    happens="all of it ends, and the next run resumes with the same ports",
    sees="`nothing is left running`",
    bound="0 processes left",
)
def test_a_signal_stops_everything_the_next_run_resumes_and_often_is_no_crash_loop(
    system: System, figure: Figure
) -> None:
    port = system.port()
    for signum, has_socket in ((signal.SIGINT, True), (signal.SIGTERM, True), (signal.SIGTERM, False)):
        if not has_socket:
            (system.state / "supervisor.sock").unlink()
        with figure.timed("stopped"):
            assert system.stop(signum) == 0
        figure.add("processes left", len(system.processes()), "")
        assert system.processes() == []
        system.start()
        system.ready(within_s=8)
        assert system.port() == port
        assert "hello world" in system.chat()


def test_a_run_under_nohup_outlives_its_terminal(system: System) -> None:
    before = len(system.said())
    assert system.process is not None
    system.process.send_signal(signal.SIGHUP)
    system.apply(service("later"))
    eventually(lambda: "default.later            Ready" in system.said()[before:], what="it to go on telling")
    assert system.process.poll() is None and "Stopping" not in system.said()[before:]
    system.delete("later")
    eventually(lambda: "default.later" not in system.rpc.table(), what="it to be gone")


@fault(
    "L7",
    "the whole system is stopped under an answer that would take minutes",
    happens="it is cut when the time is over",
    sees="what was cut is said in the log",
    bound="--stop-timeout and 40 s",
)
def test_a_stop_with_a_stream_under_way_ends_within_its_bound(system: System, figure: Figure) -> None:
    stream, log = system.stream(tokens=30000).last(), system.files.log_path("sidecar")
    logs = log.stat().st_size
    with figure.timed("signal to gone"):
        assert system.stop(signal.SIGINT) == 0
    assert not stream.completed()
    assert system.processes() == []
    assert logged(log, "some answers are cut: they did not end in time", logs)


@fault(
    "U147",
    "the Mac boots, and the cluster cannot be reached",
    happens="the models of the last known spec come up from the state directory",
    sees="/healthz: 200, cluster unreachable",
    bound="serving within 30 s",
)
def test_a_service_comes_up_from_this_macs_memory_while_the_cluster_is_away(stopped: System, figure: Figure) -> None:
    system = stopped
    # An API whose data cannot be opened does not come up at all.
    database, aside = system.state / "apiserver.db", system.base / "aside.db"
    database.rename(aside)
    database.mkdir()
    try:
        with system.log.open("ab") as log:
            system.process = subprocess.Popen(
                [sys.executable, "-m", "metal_supervisor", "run", *system.flags],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        with figure.timed("boot to serving"):
            eventually(lambda: system.observe().get("ready"), 30, "the engine to serve")
        assert system.health()[1]["cluster"] == "unreachable"
    finally:
        system.stop()
        database.rmdir()
        aside.rename(database)


@fault(
    "M106",
    "after a reboot, a note's pid belongs to another program",
    happens="the stranger is neither adopted nor ended; the engine is started",
    sees="nothing",
    bound="the stranger lives",
)
def test_a_pid_that_is_somebody_elses_by_now_is_left_alone(stopped: System, figure: Figure) -> None:
    system = stopped
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    try:
        path = system.files.note_path("default.tiny")
        note = json.loads(path.read_text())
        path.write_text(json.dumps({**note, "pid": stranger.pid, "launcher_pid": stranger.pid}))
        with figure.timed("boot to Ready"):
            system.start()
            engine = system.ready()
        assert engine != stranger.pid
        assert stranger.poll() is None and launch.start_time(stranger.pid)
    finally:
        os.kill(stranger.pid, signal.SIGKILL)
        stranger.wait()


def test_supervisord_killed_again_and_again_leaves_one_of_each(system: System) -> None:
    engine = system.pid()
    for _ in range(5):
        old = system.supervisord_pid()
        kill(old)
        eventually(lambda old=old: system.supervisord_pid() not in (0, old), 30, "supervisord to be back")
    eventually(lambda: system.rpc.answers() and system.pid() == engine, 30, "the survivor to be stood in for")
    system.ready()

    def own() -> list[str]:
        commands = ("controller", "sidecar", "apiserver")
        return sorted(part for each in system.commands().values() for part in each[1:6] if part in commands)

    eventually(lambda: own() == ["apiserver", "controller", "sidecar"], what="one of each")
    assert system.engines() == [engine]


def test_a_killed_run_leaves_the_models_serving_and_the_next_one_joins_them(system: System) -> None:
    pid, before = system.pid(), len(system.said())
    assert system.process is not None
    kill(system.process.pid)
    system.process.wait()
    assert "hello world" in system.chat()
    system.start()
    eventually(lambda: "joined   the supervisord that runs here already" in system.said()[before:], what="it to join")
    assert system.pid() == pid
    system.stop()
    assert system.processes() == []


def test_a_running_system_is_in_the_process_table_and_a_stopped_one_is_not(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = system.state.resolve()
    pid_file = system.state / "supervisord.pid"
    assert here in systems()
    noted = pid_file.read_text()
    pid_file.write_text("1\n")
    assert here not in systems(), "the process is of a directory that was replaced by another"
    pid_file.write_text(noted)
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("HOME", str(system.base))
        assert here not in systems()
    assert system.stop() == 0
    assert here not in systems()


def test_an_applied_manifest_is_not_applied_again_until_it_changes(stopped: System, tmp_path: Path) -> None:
    """A deleted demo stays deleted, and an edited one keeps its edits."""
    system, flags, before = stopped, stopped.flags, len(stopped.said())
    manifest = tmp_path / "demo.json"

    def started(*services: dict[str, Any]) -> None:
        manifest.write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": services}))
        system.start()
        eventually(lambda: system.said()[before:].count("kubectl apply") > len(told), what="the manifest to be handled")
        told.append(system.said())

    told: list[str] = []
    deleted, edited = service("deleted", replicas=0), service("edited", replicas=0)
    system.flags = [*flags, "--apply", str(manifest)]
    try:
        started(deleted)
        assert "deleted created" in told[-1][before:]
        system.delete("deleted")
        assert system.stop() == 0
        started(deleted)
        assert "Skipped     applied before; to repeat: kubectl --kubeconfig " in told[-1]
        assert system.maybe(f"{ISVC}/deleted") is None
        assert system.stop() == 0
        started(edited)
        eventually(lambda: system.get(f"{ISVC}/edited"), what="the changed manifest to be applied")
        system.delete("edited")
    finally:
        system.flags = flags


def test_make_run_in_this_checkout_shows_a_model_ready_and_stops_on_a_signal(tmp_path: Path) -> None:
    """The README's first command, in a copy of the checkout that borrows this one's virtual environment."""
    if not (ROOT / ".venv" / ".installed").exists():
        pytest.skip("no .venv: run the tests with `make test`")
    copy = tmp_path / "a checkout"
    copy.mkdir()
    for name in ("Makefile", "pyproject.toml", "requirements-dev.txt", "conf", "tools", "metal_supervisor"):
        source = ROOT / name
        shutil.copytree(source, copy / name) if source.is_dir() else shutil.copy(source, copy / name)
    # The environment is borrowed read-only: a stamp newer than the lock files keeps make from installing into it.
    (copy / ".venv").mkdir()
    for name in ("bin", "lib", "pyvenv.cfg"):
        (copy / ".venv" / name).symlink_to(ROOT / ".venv" / name)
    (copy / ".venv" / ".installed").touch()
    environ = {**os.environ, "KUBECONFIG": "/nonexistent", "PORT": "1", "HTTP_PROXY": "http://127.0.0.1:9"}
    environ = {name: value for name, value in environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    # As in a shell of the reader's own, where make has not put an environment first on the PATH.
    places = environ["PATH"].split(os.pathsep)
    environ["PATH"] = os.pathsep.join(place for place in places if not place.endswith(".venv/bin"))
    with mac_whole.make_run(copy, copy, environ) as system:
        assert "inferenceservice.inference.llmkube.dev/tiny created" in system.said()
        eventually(lambda: ".venv/bin/supervisorctl -c .run/supervisord.conf status" in system.said(), what="the hints")
        (line,) = [each for each in system.said().splitlines() if "export KUBECONFIG=" in each]
        typed = f"{line.replace('try', '', 1)}; kubectl get isvc tiny && metal-supervisor version"
        done = subprocess.run(["sh", "-c", typed], cwd="/", env=environ, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0 and {"tiny", "metal-supervisor"} <= set(done.stdout.split()), done
        assert mac_whole.answers(system)
        # What a hosted Mac goes through, as far as it goes here.
        assert {"controller", "sidecar", "supervisord", "the engine"} <= set(mac_whole.killed(system))
    assert "nothing is left running" in system.said()


@pytest.mark.parametrize("wrong", ["port", "manifest", "kubeconfig", "YAML"])
def test_a_run_that_cannot_start_leaves_nothing_behind(tmp_path: Path, wrong: str) -> None:
    state, broken = tmp_path / "state", tmp_path / "broken"
    broken.write_text("token: [sekrit\n" if wrong == "YAML" else "apiVersion: v1\nkind: Config\n")
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = stranger.getsockname()[1] if wrong == "port" else free_ports(1)[0]
        given = {"manifest": ["--apply", f"{broken}.yaml"], "port": []}
        flags = given.get(wrong, ["--kubeconfig", str(broken)])
        command = [sys.executable, "-m", "metal_supervisor", "run", "--state-dir", str(state), "--port", str(port)]
        done = subprocess.run([*command, *flags], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    taken = f"port {port} is taken", f"pid {os.getpid()}", "--port"
    named = {"port": taken, "manifest": ("no such file",), "YAML": ("broken", "cannot be used")}.get(wrong, ("broken",))
    assert all(words in done.stderr for words in named) and "sekrit" not in done.stderr
    assert not state.exists()


def test_a_run_that_cannot_write_says_so_in_one_line(tmp_path: Path) -> None:
    """A limit on the size of files stands for the full disk."""
    command = [sys.executable, "-m", "metal_supervisor", "run", "--state-dir", str(tmp_path / "state")]
    limited = ["/bin/sh", "-c", 'ulimit -f 0; exec "$@"', "sh", *command, "--port", str(free_ports(1)[0])]
    done = subprocess.run(limited, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 1
    assert f"state directory {tmp_path / 'state'}: File too large; put that right" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_run_whose_state_directory_is_removed_ends_all_of_it_and_says_why(system: System) -> None:
    before, removed = len(system.said()), system.base / "removed"
    assert system.process is not None
    system.state.rename(removed)
    try:
        assert system.process.wait(60) == 1
        system.process = None
        assert system.processes() == []
    finally:
        removed.rename(system.state)
    said = system.said()[before:]
    assert f"state directory {system.state}: No such file or directory" in said
    assert "nothing is left running" in said and "Traceback" not in said


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"ARGS": "--prot 1"}, "there is no flag '--prot' (did you mean --port?)"),
        ({"PORT": "0"}, "--port: port must be between 1 and 65535"),
        ({"NAMESPACE": "No_Such"}, "--namespace: namespace must be the name of a namespace"),
        ({"ARGS": "--runtimes nosuch"}, "--runtimes: runtimes "),
        ({"ARGS": "it's"}, "No closing quotation"),
        ({"CLUSTER": "/nosuch"}, "kubeconfig /nosuch does not exist"),
        ({"METAL_SUPERVISOR_PROT": "1"}, "METAL_SUPERVISOR_PROT"),
    ],
)
def test_wrong_flags_of_make_run_are_refused_before_anything_is_installed(
    tmp_path: Path, given: dict[str, str], says: str
) -> None:
    """By a Python without packages, with the message that the command itself ends with."""
    for name in ("tools", "metal_supervisor", "conf", "Makefile", "pyproject.toml", "requirements-dev.txt"):
        (tmp_path / name).symlink_to(ROOT / name)
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    python = f"PYTHON={sys.executable} -S"

    def refused(*command: str) -> tuple[list[str], int]:
        done = subprocess.run(
            command, cwd=tmp_path, env={**environ, **given}, capture_output=True, text=True, timeout=60
        )
        return [line for line in done.stderr.splitlines() if not line.startswith(("make:", "make["))], done.returncode

    words, code = refused("make", "run", python, *(f"{name}={value}" for name, value in given.items()))
    assert code == 2 and says in words[-1] and not (tmp_path / ".venv").exists()
    itself, code = refused(sys.executable, str(tmp_path / "tools" / "make_run.py"))
    assert code in (1, 2, 78) and itself == words


def test_the_set_up_names_a_python_that_is_too_old(tmp_path: Path) -> None:
    script = "import sys; sys.version_info = (3, 9, 6); import set_up; set_up.main()"
    command = [sys.executable, "-S", "-c", script, str(tmp_path / "venv")]
    done = subprocess.run(command, cwd=ROOT / "tools", capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "Python 3.9.6 is too old; name a Python 3.10 to 3.14" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_a_make_run_that_cannot_start_leaves_no_state_directory(tmp_path: Path) -> None:
    for name in ("tools", "metal_supervisor", "conf"):
        shutil.copytree(ROOT / name, tmp_path / name)
    command = [sys.executable, str(tmp_path / "tools" / "make_run.py")]
    wrong = (
        ({"CLUSTER": str(tmp_path / "nosuch")}, 1, "nosuch does not exist"),
        ({"ARGS": "it's"}, 2, "No closing quotation"),
    )
    for said, code, why in wrong:
        done = subprocess.run(command, env={**os.environ, **said}, capture_output=True, text=True, timeout=60)
        assert done.returncode == code and why in done.stderr and done.stderr.count("\n") == 1
        assert not (tmp_path / ".run").exists()
