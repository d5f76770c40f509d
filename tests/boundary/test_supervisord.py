"""The client against a real supervisord, and `refusal` against what that supervisord really does."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from supervisor.options import decode_wait_status
from supervisor.poller import PollPoller
from supervisor.states import ProcessStates, SupervisorStates

from metal_supervisor import launch
from metal_supervisor.spec.processes import LIVE, Diff, ProgramState, State
from metal_supervisor.supervisord import client as supervisord_module
from metal_supervisor.supervisord import daemon as daemon_module
from metal_supervisor.supervisord import poller as poller_module
from metal_supervisor.supervisord.client import BrokenFile, Refused, ShuttingDown, Supervisord, Unavailable
from metal_supervisor.supervisord.exits import Exits
from metal_supervisor.supervisord.rpc_plugin import MOST_GONE, Programs
from metal_supervisor.supervisord.section_files import refusal
from tests.support.system import eventually, kill

CONF = """
[supervisord]
nodaemon=true
silent=true
nocleanup=true
logfile={d}/log
pidfile={d}/pid
childlogdir={d}
[unix_http_server]
file={d}/s
[rpcinterface:supervisor]
supervisor.rpcinterface_factory=supervisor.rpcinterface:make_main_rpcinterface
[include]
files={d}/models.d/*.conf
"""


def section(name: str, command: str = "/bin/sleep 60", **more: object) -> str:
    options = {
        "command": command,
        "startsecs": 0,
        "stdout_logfile": "/dev/null",
        "stdout_logfile_maxbytes": 0,
        "redirect_stderr": "true",
        **more,
    }
    return f"[program:{name}]\n" + "".join(f"{key}={value}\n" for key, value in options.items())


def test_supervisord_is_started_by_its_module() -> None:
    command = [sys.executable, "-I", "-m", "metal_supervisor.supervisord.daemon", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == importlib.metadata.version("supervisor"), done.stderr


class Daemon:
    """A supervisord of one's own, and a client of it."""

    module = "metal_supervisor.supervisord.daemon"

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="sv"))
        self.files = self.path / "models.d"
        self.files.mkdir()
        (self.path / "c.conf").write_text(CONF.format(d=self.path))
        self.rpc = Supervisord(str(self.path / "s"))
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-W", "ignore", "-m", self.module, "-n", "-c", f"{self.path}/c.conf"]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        eventually(self.rpc.answers, what="supervisord to answer")

    def end(self) -> None:
        if self.process:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
            try:
                self.process.wait(30)
            finally:
                self.process.kill()
                self.process.wait()
        self.process = None

    def write(self, name: str, text: str) -> Path:
        path = self.files / f"{name}.conf"
        path.write_text(text)
        return path

    def run(self, name: str, *arguments: str, **more: object) -> None:
        self.write(name, section(name, *arguments, **more))
        assert name in self.rpc.reload().added
        self.rpc.add(name)

    def state(self, name: str) -> State | None:
        row = self.rpc.table().get(name)
        return row.state if row else None

    def becomes(self, name: str, *states: State | None) -> None:
        eventually(lambda: self.state(name) in states, what=f"{name} to be {states}")


SPEAKS = "/bin/sh -c 'while :; do echo line; sleep 0.2; done'"


@pytest.fixture(scope="module")
def shared() -> Iterator[Daemon]:
    daemon = Daemon()
    daemon.start()
    yield daemon
    daemon.rpc.close()
    daemon.end()
    shutil.rmtree(daemon.path)


@pytest.fixture
def daemon(shared: Daemon) -> Iterator[Daemon]:
    """The shared supervisord, empty before and after."""
    yield shared
    if not shared.process or shared.process.poll() is not None:
        shared.start()
    for path in shared.files.iterdir():
        path.unlink()
    for name in shared.rpc.table():
        shared.rpc.stop(name)
    for name in shared.rpc.table():
        shared.becomes(name, State.STOPPED, State.EXITED, State.FATAL)
        shared.rpc.remove(name)
    assert shared.rpc.table() == {}


def test_a_program_is_added_shown_stopped_started_replaced_and_removed(daemon: Daemon) -> None:
    daemon.run("default.a")
    daemon.becomes("default.a", State.RUNNING)
    row = daemon.rpc.table()["default.a"]
    os.kill(row.pid, 0)
    assert time.time() >= row.start > 0
    daemon.rpc.stop("default.a")
    daemon.becomes("default.a", State.STOPPED)
    assert daemon.rpc.table()["default.a"].pid == 0
    daemon.rpc.start("default.a")
    daemon.becomes("default.a", State.RUNNING)
    path = daemon.write("default.a", section("default.a", "/bin/sleep 61"))
    assert daemon.rpc.reload().changed == {"default.a"}
    daemon.rpc.stop("default.a")
    daemon.becomes("default.a", State.STOPPED)
    daemon.rpc.replace("default.a")
    daemon.becomes("default.a", State.RUNNING)
    assert not daemon.rpc.reload()
    path.unlink()
    assert daemon.rpc.reload().removed == {"default.a"}
    daemon.rpc.stop("default.a")
    daemon.becomes("default.a", State.STOPPED)
    daemon.rpc.remove("default.a")
    assert daemon.rpc.table() == {}


def test_what_is_so_already_is_no_error(daemon: Daemon) -> None:
    daemon.run("default.a")
    pid = daemon.rpc.table()["default.a"].pid
    daemon.rpc.add("default.a")
    daemon.rpc.start("default.a")
    daemon.rpc.remove("default.a")
    daemon.rpc.replace("default.a")
    assert daemon.rpc.table()["default.a"].pid == pid
    daemon.rpc.stop("default.a")
    daemon.becomes("default.a", State.STOPPED)
    daemon.rpc.stop("default.a")
    daemon.rpc.signal("default.a", "TERM")
    for call in (daemon.rpc.add, daemon.rpc.remove, daemon.rpc.replace, daemon.rpc.start, daemon.rpc.stop):
        call("default.none")
    daemon.rpc.signal("default.none", "TERM")


def test_other_faults_are_told(daemon: Daemon) -> None:
    daemon.run("default.a", "/no/such/file", autostart="false")
    with pytest.raises(Refused) as caught:
        daemon.rpc.start("default.a")
    assert caught.value.code == 20
    with pytest.raises(Refused):
        daemon.rpc.call("supervisor.noSuchMethod")
    assert daemon.rpc.answers()


def test_sections_that_are_read_one_by_one_are_those_of_a_reload(daemon: Daemon) -> None:
    daemon.run("default.a")
    pid = daemon.rpc.table()["default.a"].pid
    odd = {"autostart": "false", "environment": 'A="1",B="%(ENV_HOME)s"', "stopsignal": "INT", "directory": "%(here)s"}
    daemon.write("default.b", section("default.b", "/bin/sh -c 'exec sleep 60' # and more", **odd))
    daemon.write("default.c", section("default.c"))
    assert daemon.rpc.reread(["default.b", "default.none"]) == Diff(frozenset(["default.b"]))
    daemon.rpc.add("default.b")
    # A reload of all compares what it reads with what was added.
    assert daemon.rpc.reload() == Diff(frozenset(["default.c"]))
    assert not daemon.rpc.reread(["default.a", "default.b"])
    daemon.write("default.b", section("default.b"))
    (daemon.files / "default.a.conf").unlink()
    found = Diff(frozenset(["default.c"]), frozenset(["default.b"]), frozenset(["default.a"]))
    assert daemon.rpc.reread(["default.a", "default.b", "default.c"]) == found == daemon.rpc.reload()
    assert daemon.rpc.table()["default.a"].pid == pid


@pytest.mark.parametrize("text", ["rubbish\n", "[program:x]\n", section("y"), section("x") + section("y"), "", "\xff"])
def test_a_file_with_anything_else_has_to_be_read_with_all(daemon: Daemon, text: str) -> None:
    daemon.run("default.a")
    (daemon.files / "x.conf").write_bytes(text.encode("latin-1"))
    before = daemon.rpc.table().keys()
    assert daemon.rpc.reread(["default.a", "x"]) is None
    assert daemon.rpc.table().keys() == before


def test_a_supervisord_of_an_earlier_release_answers_too() -> None:
    old = Daemon()
    old.module = "supervisor.supervisord"
    try:
        old.start()
        old.run("default.a")
        old.becomes("default.a", State.RUNNING)
        row = old.rpc.table()["default.a"]
        os.kill(row.pid, 0)
        assert time.time() >= row.start > 0
        assert old.rpc.reread(["default.a"]) is None
    finally:
        old.rpc.close()
        old.end()
        shutil.rmtree(old.path)


def test_what_changed_of_the_table_makes_the_table_that_is_read_as_a_whole(daemon: Daemon) -> None:
    names, rng = [f"default.{number}" for number in range(4)], random.Random(1)
    other = Supervisord(str(daemon.path / "s"))

    def whole() -> Mapping[str, ProgramState]:
        other._whole_at = 0.0
        return other.table()

    try:
        first = daemon.rpc.table()
        for _ in range(60):
            name, before = rng.choice(names), daemon.rpc.table()
            if name not in before:
                daemon.write(name, section(name, autostart=rng.choice(["true", "false"])))
                daemon.rpc.reload()
                daemon.rpc.add(name)
            elif before[name].state in LIVE:
                if rng.choice([True, False]):
                    daemon.rpc.stop(name)
                else:
                    with contextlib.suppress(ProcessLookupError):  # it was stopping, or supervisord starts it anew
                        kill(before[name].pid)
            else:
                rng.choice([daemon.rpc.start, daemon.rpc.remove, daemon.rpc.replace])(name)
            eventually(lambda: daemon.rpc.table() == whole(), what=f"{daemon.rpc.table()} to be {whole()}")
        eventually(lambda: daemon.rpc.table() is daemon.rpc.table(), what="nothing to change any more")
        assert daemon.rpc.table() is not first
    finally:
        other.close()


def test_the_table_of_another_supervisord_is_read_as_a_whole(daemon: Daemon) -> None:
    daemon.run("default.a")
    pid = daemon.rpc.table()["default.a"].pid
    daemon.end()
    daemon.start()
    assert daemon.rpc.table()["default.a"].pid != pid


def test_programs_that_are_gone_are_not_remembered_for_ever() -> None:
    groups = {"a": SimpleNamespace(processes={})}
    own = Programs(SimpleNamespace(process_groups=groups, get_state=lambda: SupervisorStates.RUNNING), Path("/none"))
    first, *_ = json.loads(own.changes(""))
    own._note("gone")
    edition, whole, _, gone = json.loads(own.changes(first))
    assert (whole, gone) == (False, ["gone"])
    for number in range(MOST_GONE + 2):
        own._note(f"b{number}")
    assert len(own._changed) <= MOST_GONE
    assert [json.loads(own.changes(each))[1] for each in (first, edition, "x/1", "rubbish")] == [True] * 4
    assert json.loads(own.changes(json.loads(own.changes(""))[0]))[1:] == [False, [], []]


def test_a_poke_has_a_death_noticed_at_once(daemon: Daemon) -> None:
    daemon.run("default.a", autorestart="false")
    daemon.becomes("default.a", State.RUNNING)
    os.kill(daemon.rpc.table()["default.a"].pid, signal.SIGKILL)
    eventually(lambda: daemon.rpc.poke() or daemon.state("default.a") is State.EXITED, 0.9, "it to be noticed")


def test_a_broken_file_is_named_and_the_running_are_not_touched(daemon: Daemon) -> None:
    daemon.run("default.a")
    pid = daemon.rpc.table()["default.a"].pid
    for text in ("[program:x]\n", "rubbish\n", "[program:y]\ncommand=/bin/true\nautostart=perhaps\n"):
        path = daemon.write("default.bad", text)
        with pytest.raises(BrokenFile) as caught:
            daemon.rpc.reload()
        assert caught.value.path in (path, None)
        assert refusal(path)
        path.unlink()
        assert not daemon.rpc.reload()
    assert daemon.rpc.table()["default.a"].pid == pid


class Waits:
    """A poller of which only the waits are of interest."""

    def __init__(self) -> None:
        self.waits: list[float] = []

    def register_readable(self, _fd: int) -> None:
        pass

    def poll(self, wait_s: float) -> tuple[list[int], list[int]]:
        self.waits.append(wait_s)
        return [], []


class Running:
    """As much of a Supervisor as a poller looks at."""

    def __init__(self, state: int = ProcessStates.RUNNING) -> None:
        self.process = SimpleNamespace(state=state)
        self.process_groups = {"a": SimpleNamespace(processes={"a": self.process})}
        self.channel = SimpleNamespace(delay=0)
        self.options = SimpleNamespace(mood=SupervisorStates.RUNNING, get_socket_map=lambda: {3: self.channel})


@pytest.fixture
def signals() -> Iterator[None]:
    before = signal.signal(signal.SIGCHLD, lambda *_: None)
    yield
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, before)


def test_supervisord_waits_long_only_while_time_changes_nothing(signals: None) -> None:
    waits, running = Waits(), Running()
    own = poller_module.Poller(waits, running)
    own.poll(1)
    for state in poller_module.MOVING:
        running.process.state = state
        own.poll(1)
    running.process.state = ProcessStates.FATAL
    running.channel.delay = 0.1
    own.poll(1)
    running.channel.delay = False
    running.options.mood = SupervisorStates.SHUTDOWN
    own.poll(1)
    assert waits.waits == [poller_module.REST_S, *(1 for _ in poller_module.MOVING), 1, 1]


def test_an_exit_ends_supervisords_wait_and_has_it_turn_once_more(
    signals: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(poller_module, "REST_S", 3600)
    own = poller_module.Poller(PollPoller(None), Running())
    with subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE) as child:
        threading.Timer(0.2, child.kill).start()
        assert own.poll(1) == ([], []), "the signal is not told as something to read"
        assert own.poll(1) == ([], []), "a dead process is started again in the turn after it was reaped"
    waits = Waits()
    own._poller = waits
    own.poll(1)
    assert waits.waits == [3600]


def test_a_process_that_ends_is_started_again_without_a_call(daemon: Daemon) -> None:
    daemon.run("default.a")
    daemon.becomes("default.a", State.RUNNING)
    log = daemon.path / "log"
    for _ in range(2):
        before = log.read_text().count("spawned: 'default.a'")
        os.kill(daemon.rpc.table()["default.a"].pid, signal.SIGKILL)
        eventually(lambda before=before: log.read_text().count("spawned: 'default.a'") > before)
        daemon.becomes("default.a", State.RUNNING)


def test_last_exit_is_in_supervisords_words(daemon: Daemon) -> None:
    log = daemon.path / "log"
    exits = Exits(log)
    daemon.run("default.a", "/bin/sh -c 'exit 7'", autorestart="false")
    daemon.becomes("default.a", State.EXITED)
    assert exits.last("default.a") == "exit status 7"
    daemon.run("default.a.b")
    daemon.becomes("default.a.b", State.RUNNING)
    os.kill(daemon.rpc.table()["default.a.b"].pid, signal.SIGKILL)
    eventually(lambda: exits.last("default.a.b") == "terminated by SIGKILL", what=log.read_text()[-300:])
    assert exits.last("default.a") == "exit status 7"
    daemon.run("default.b.c", f"/bin/sh -c 'exit {launch.EXIT_UNSEEN}'", autorestart="false")
    daemon.becomes("default.b.c", State.EXITED)
    assert exits.last("default.b.c") == "exit status unknown"
    assert exits.last("default.b") == ""
    assert Exits(daemon.path / "none").last("default.a") == ""


def test_an_exit_with_a_core_dump_is_one_by_its_signal(tmp_path: Path) -> None:
    """The words are those of `supervisor.options.decode_wait_status`."""
    log = tmp_path / "log"
    _, told = decode_wait_status(signal.SIGSEGV | 0x80)
    log.write_text(f"2026-01-01 00:00:00,000 WARN exited: default.a ({told}; not expected)\n")
    assert "core dumped" in told and Exits(log).last("default.a") == "terminated by SIGSEGV"


def test_the_log_is_read_on_where_it_was_left(tmp_path: Path) -> None:
    log = tmp_path / "log"
    exits = Exits(log, most_bytes=200)

    def ended(name: str, code: int) -> str:
        return f"2026-01-01 00:00:00,000 WARN exited: {name} (exit status {code}; not expected)\n"

    log.write_text(ended("default.a", 1))
    assert exits.last("default.a") == "exit status 1"
    line = ended("default.b", 2)
    for part in (line[:40], line[40:]):  # one that was read while it was written
        with log.open("a") as file:
            file.write(part)
        found = exits.last("default.b"), exits.last("default.a")
    assert found == ("exit status 2", "exit status 1")
    with log.open("a") as file:
        file.write("\n".join(["x" * 50] * 20) + "\n" + ended("default.b", 3))
    assert exits.last("default.b") == "exit status 3"
    log.write_text(ended("default.c", 4))  # emptied
    assert (exits.last("default.b"), exits.last("default.c")) == ("", "exit status 4")
    log.rename(tmp_path / "log.1")
    log.write_text(ended("default.d", 5) + ended("default.e", 6))  # rotated
    assert [exits.last(f"default.{name}") for name in "cde"] == ["", "exit status 5", "exit status 6"]


BAD = {
    "no command": "[program:x]\n",
    "no section": "command=/bin/true\n",
    "rubbish": "\x00\x01rubbish",
    "value": "[program:x]\ncommand=/bin/true\nautostart=perhaps\n",
    "no environment": section("x", "%(ENV_NOPE)s"),
    "expansion": section("x", "/bin/true %(nope)s"),
    "percent": section("x", "/bin/true 100%"),
    "stop signal": section("x", stopsignal="NOPE"),
    "umask": section("x", umask="999"),
    "user": section("x", user="nobody-of-that-name"),
    "processes": section("x", numprocs=2),
    "environment": section("x", environment='A="b'),
    "restart": section("x", autorestart="maybe"),
    "log directory": section("x", stdout_logfile="/no/such/directory/log"),
    "group": "[group:g]\nprograms=none\n",
    "size": section("x", stdout_logfile_maxbytes="many"),
    "empty name": section(""),
    "bracket": "[program:x\ncommand=a\n",
    "quote": section("x", "/bin/sh -c 'oops"),
    "number": section("x", startsecs="two"),
    "colon": section("a:b"),
    "listener": "[eventlistener:e]\ncommand=/bin/true\n",
}
GOOD = {
    "empty": "",
    "comment": "; nothing here\n",
    "plain": section("x"),
    "two": section("x") + section("y"),
    "escaped": section("x", "/bin/echo 100%%"),
    "here": section("x", "%(here)s/x"),
    "unknown option": section("x", zzz=1),
    "group": section("x") + "[group:g]\nprograms=x\n",
    "umlaut": "; ü\n" + section("x"),
    "twice": section("x") + section("x"),
    "bom": "\ufeff; mark\n" + section("x"),
}


def loads(daemon: Daemon) -> bool:
    """Whether the real supervisord takes its files, alive afterwards."""
    try:
        daemon.rpc.reload()
    except (BrokenFile, Refused):
        return False
    finally:
        assert daemon.process and daemon.process.poll() is None
    return True


@pytest.mark.parametrize("kind", [*BAD, *GOOD])
def test_refusal_says_what_the_real_supervisord_says(daemon: Daemon, kind: str) -> None:
    path = daemon.write("default.x", BAD.get(kind, GOOD.get(kind, "")))
    said = refusal(path)
    assert (said is None) is loads(daemon), said
    if said:
        assert "\n" not in said and len(said) <= 300


@pytest.mark.parametrize("kind", ["no command", "value", "no section", "expansion", "user", "stop signal"])
def test_a_bad_file_is_refused(tmp_path: Path, kind: str) -> None:
    (tmp_path / "x.conf").write_text(BAD[kind])
    assert refusal(tmp_path / "x.conf")


@pytest.mark.parametrize("kind", ["empty", "comment", "plain", "two", "escaped", "umlaut"])
def test_a_good_file_is_accepted(tmp_path: Path, kind: str) -> None:
    (tmp_path / "x.conf").write_text(GOOD[kind])
    assert refusal(tmp_path / "x.conf") is None


def test_what_would_change_supervisord_itself_or_cannot_be_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.conf"
    for name in ("supervisord", "unix_http_server", "include", "inet_http_server", "rpcinterface:x", "evil"):
        path.write_text(f"[{name}]\nfile=/tmp/x\nfiles=/tmp/*\n")
        assert name in (refusal(path) or "")
    path.write_bytes(section("x").encode() + b"; \xff\n")
    assert refusal(path)
    path.unlink()
    assert refusal(path)
    path.mkdir()
    assert refusal(path)


LOOKS = """
import os, pathlib, sys
from metal_supervisor.supervisord.section_files import refusal
path = pathlib.Path(sys.argv[1])
assert refusal(path) is None
before = os.listdir("/dev/fd")
for _ in range(20):
    refusal(path)
assert os.listdir("/dev/fd") == before, (os.listdir("/dev/fd"), before)
"""


def test_refusing_leaks_nothing(tmp_path: Path) -> None:
    (tmp_path / "x.conf").write_text(section("x"))
    # In a process of its own: in this one, threads of other tests open and close files too.
    subprocess.run([sys.executable, "-c", LOOKS, str(tmp_path / "x.conf")], check=True, timeout=60)


# ── its worst days ───────────────────────────────────────────────────────────────────────────────


def test_a_hanging_supervisord_is_given_up_and_found_again(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisord_module, "TIMEOUT_S", 0.2)
    assert daemon.process
    client = Supervisord(str(daemon.path / "s"))
    assert client.table() == {}
    os.kill(daemon.process.pid, signal.SIGSTOP)
    try:
        for _ in range(2):
            with pytest.raises(Unavailable):
                client.table()
        assert not client.answers()
    finally:
        os.kill(daemon.process.pid, signal.SIGCONT)
    eventually(client.answers, what="it to answer")
    assert client.table() == {}
    client.close()


def test_a_client_survives_a_restart_of_supervisord(daemon: Daemon) -> None:
    daemon.run("default.a")
    daemon.end()
    assert not daemon.rpc.answers()
    with pytest.raises(Unavailable):
        daemon.rpc.table()
    daemon.start()
    assert set(daemon.rpc.table()) == {"default.a"}
    assert daemon.process
    daemon.process.kill()
    daemon.process.wait()
    daemon.start()
    assert set(daemon.rpc.table()) == {"default.a"}


def test_a_supervisord_that_shuts_down_is_unavailable_and_still_there(daemon: Daemon) -> None:
    stubborn = """/bin/sh -c 'trap "" TERM; echo ready > {}; while :; do sleep 0.05; done'""".format(daemon.path / "r")
    daemon.run("default.a", stubborn, stopwaitsecs=2)
    eventually((daemon.path / "r").exists, what="the trap")
    daemon.rpc.shutdown()

    def refused() -> bool:
        try:
            daemon.rpc.table()
        except ShuttingDown:
            return True
        except Unavailable:
            return False
        return False

    eventually(refused, 1.5, "it to refuse")
    assert daemon.rpc.answers()
    assert daemon.process
    daemon.process.wait(30)
    assert not daemon.rpc.answers()


def test_threads_share_a_client(daemon: Daemon) -> None:
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(20):
                daemon.rpc.table()
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"rubbish\r\n\r\n",
        b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Type: text/xml\r\nContent-Length: 4\r\n\r\n<no>",
        b"HTTP/1.1 200 OK\r\nContent-Type: text/xml\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Type: text/xml\r\nContent-Length: 400\r\n\r\n<?xml version='1.0'?><methodR",
    ],
    ids=["silence", "rubbish", "500", "no xml", "empty", "cut"],
)
def test_whatever_answers_in_its_place_is_unavailable(answer: bytes) -> None:
    with tempfile.TemporaryDirectory() as directory, socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{directory}/s")
        server.listen()

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    with connection:
                        connection.recv(65536)
                        connection.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        client = Supervisord(f"{directory}/s")
        try:
            with pytest.raises(Unavailable):
                client.table()
        finally:
            client.close()
            server.shutdown(socket.SHUT_RDWR)
            thread.join(30)


def test_a_group_that_is_replaced_in_the_moment_of_a_crash_is_one_process(daemon: Daemon) -> None:
    # supervisord takes the list of its groups before it hears its callers, and moves on what is on the list afterwards.
    assert daemon.process is not None
    supervisord = psutil.Process(daemon.process.pid)
    for number in range(5):
        name = f"turn{number}"
        daemon.run(name, autorestart="true")
        daemon.becomes(name, State.RUNNING)
        pid = daemon.rpc.table()[name].pid
        os.kill(pid, signal.SIGKILL)
        eventually(lambda pid=pid: not psutil.pid_exists(pid), what="the death to be taken note of")
        daemon.rpc.replace(name)
        daemon.becomes(name, State.RUNNING)
        # A child that has just been forked is not yet what it becomes.
        eventually(lambda: {each.cmdline()[0] for each in supervisord.children()} == {"/bin/sleep"})
        assert len(supervisord.children()) == number + 1


def test_a_deleted_log_is_made_again_while_its_program_runs(daemon: Daemon) -> None:
    log, own = daemon.path / "logs" / "speaks.log", daemon.path / "log"
    log.parent.mkdir()
    daemon.run("speaks", SPEAKS, stdout_logfile=log, stdout_logfile_maxbytes="1MB")
    eventually(log.read_bytes, what="a line")
    log.unlink()
    eventually(lambda: log.read_bytes().endswith(b"line\n"), 30, "a log that was deleted")
    log.unlink()
    log.touch()
    eventually(lambda: log.read_bytes().endswith(b"line\n"), 30, "a log that was replaced")
    own.unlink()
    daemon.run("other", "/bin/sleep 0.5", autorestart="true")
    eventually(lambda: b"other" in own.read_bytes(), 30, "supervisord's own log")
    shutil.rmtree(log.parent)
    time.sleep(daemon_module.LOOK_EVERY_S)  # until the file has been missed, and could not be made
    assert daemon.state("speaks") is State.RUNNING
    log.parent.mkdir()
    eventually(log.read_bytes, 30, "a log whose directory was deleted")
