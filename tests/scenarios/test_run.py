"""`metal-supervisor run` as a terminal program: odd directories, Ctrl-C, again, and what is left behind."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.faults import Figure, fault
from tests.support.system import ROOT, eventually, free_ports, kill, running, service

from tests.support.mac import mac_whole  # isort: skip


@pytest.mark.parametrize("name", ["with some spaces", "x" * 200, "sémi;colon % and 'quote\""])
def test_it_works_in_odd_directories_and_leaves_nothing_outside(tmp_path: Path, name: str) -> None:
    base = tmp_path / name
    base.mkdir()
    with running(base) as system:
        system.apply(system.tiny_model(), service())
        system.ready()
        assert "hello world" in system.chat()
        where = f"http://127.0.0.1:{system.port()}/v1"
        assert system.status()["endpoint"] == f"{where}/chat/completions"
        eventually(lambda: f"Ready       {where}\n" in system.said(), what="the URL to be told")
        assert "default.tiny" in system.supervisorctl("status")
        assert system.supervisorctl("tail", "default.tiny")
        assert system.stop(signal.SIGINT) == 0
        assert system.processes() == []
        assert "nothing is left running" in system.said()
    assert system.files.link is not None and not system.files.link.is_symlink()
    assert sorted(path.name for path in base.iterdir()) == ["run", "run.log", "tiny.gguf"]


@fault(
    "U150", "the whole system is stopped, by Ctrl-C or SIGTERM",
    happens="all of it ends, and the next run resumes with the same ports", sees="`nothing is left running`",
    bound="0 processes left",
)
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_everything_and_the_next_run_resumes(
    tmp_path: Path, signum: signal.Signals, figure: Figure
) -> None:
    with running(tmp_path) as system:
        system.apply(system.tiny_model(), service())
        system.ready()
        port = system.port()
        with figure.timed("stopped"):
            assert system.stop(signum) == 0
        figure.add("processes left", len(system.processes()), "")
        assert system.processes() == []
        system.start()
        system.ready()
        assert system.port() == port
        assert "hello world" in system.chat()


@fault(
    "U147", "the Mac boots, and the cluster cannot be reached",
    happens="the models of the last known spec come up from the state directory",
    sees="/healthz: 200, cluster unreachable", bound="serving within 30 s",
)
def test_a_service_comes_up_from_this_macs_memory_while_the_cluster_is_away(tmp_path: Path, figure: Figure) -> None:
    with running(tmp_path) as system:
        system.apply(system.tiny_model(), service())
        system.ready()
        system.stop()
        # An API whose data cannot be opened does not come up at all.
        database = system.state / "apiserver.db"
        database.rename(tmp_path / "aside.db")
        database.mkdir()
        with system.log.open("ab") as log:
            system.process = subprocess.Popen(
                [sys.executable, "-m", "metal_supervisor", "run", *system.flags], stdout=log, stderr=log,
                stdin=subprocess.DEVNULL, start_new_session=True,
            )
        with figure.timed("boot to serving"):
            eventually(lambda: system.observe().get("ready"), 30, "the engine to serve")
        assert system.health()[1]["cluster"] == "unreachable"


def test_a_killed_run_leaves_the_models_serving_and_the_next_one_joins_them(tmp_path: Path) -> None:
    with running(tmp_path) as system:
        system.apply(system.tiny_model(), service())
        pid = system.ready()
        assert system.process is not None
        kill(system.process.pid)
        system.process.wait()
        assert "hello world" in system.chat()
        system.start()
        eventually(lambda: "joined   the supervisord that runs here already" in system.said(), what="it to join")
        assert system.pid() == pid
        system.stop()
        assert system.processes() == []


def test_a_run_under_nohup_outlives_its_terminal(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # which its process inherits, as from nohup
    try:
        with running(tmp_path) as system:
            assert system.process is not None
            system.process.send_signal(signal.SIGHUP)
            system.apply(system.tiny_model(), service())
            eventually(lambda: " Ready " in system.said(), what="it to go on telling")
            assert system.process.poll() is None and "Stopping" not in system.said()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_stop_with_a_stream_under_way_ends_within_its_bound(tmp_path: Path) -> None:
    with running(tmp_path, "--stop-timeout", "2") as system:
        system.apply(system.tiny_model(), service("tiny", contextSize=32768))
        system.ready()
        stream = system.stream(tokens=20000)
        assert system.stop() == 0
        assert system.processes() == []
        assert not stream.completed()


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


def test_a_run_whose_state_directory_is_removed_ends_all_of_it_and_says_why(tmp_path: Path) -> None:
    with running(tmp_path) as system:
        system.apply(system.tiny_model(), service())
        system.ready()
        assert system.process is not None
        system.state.rename(tmp_path / "removed")
        assert system.process.wait(60) == 1
        assert system.processes() == []
        assert f"state directory {system.state}: No such file or directory" in system.said()
        assert "nothing is left running" in system.said() and "Traceback" not in system.said()


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


def test_restarting_the_whole_system_often_is_no_crash_loop(tmp_path: Path) -> None:
    with running(tmp_path) as system:
        system.apply(system.tiny_model(), service())
        system.ready()
        for _ in range(3):
            system.stop()
            system.start()
            system.ready(within_s=8)


def test_a_stop_works_without_the_socket(tmp_path: Path) -> None:
    with running(tmp_path) as system:
        system.apply(system.tiny_model(), service())
        system.ready()
        (system.state / "supervisor.sock").unlink()
        assert system.stop() == 0
        assert system.processes() == []


def test_supervisord_killed_again_and_again_leaves_one_of_each(tmp_path: Path) -> None:
    with running(tmp_path) as system:
        system.apply(system.tiny_model(), service())
        engine = system.ready()
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
