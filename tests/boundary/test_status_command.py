"""`metal-supervisor status` as a process of its own, before a stand-in for the sidecar, with and without a terminal."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from metal_supervisor.cli.status import Silent, Status
from metal_supervisor.settings.loader import Overrides, Settings, save_overrides
from metal_supervisor.spec.processes import Observed
from metal_supervisor.spec.record import Record
from metal_supervisor.spec.types import Endpoint
from metal_supervisor.state.directory import StateDir
from metal_supervisor.supervisord.client import Supervisord
from tests.support.pseudo import Terminal
from tests.support.records import a_record
from tests.support.sized_terminal import SEQUENCE
from tests.support.typed import typed

WITHIN_S = 30.0
EVIL = "x\r\n\x1b[2J\u202e\x9b31m"
COUNTS = "llamacpp:tokens_predicted_total 600\nllamacpp:tokens_predicted_seconds_total 12.5\n"


class Sidecar:
    """Answers /status with a document, as an engine would /metrics with its counters; counts what was asked."""

    def __init__(self) -> None:
        self.document: Any = {}
        self.asked: list[str] = []
        self._news = threading.Condition()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = COUNTS.encode() if self.path == "/metrics" else json.dumps(outer.document).encode()
                self.send_response(200)
                self.send_header("Content-Type", "text/plain" if self.path == "/metrics" else "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)
                with outer._news:
                    outer.asked.append(self.path)
                    outer._news.notify_all()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.server.server_port
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def asked_again(self, times: int) -> None:
        """Waits until /status was asked for so many times more."""
        with self._news:
            until = self.asked.count("/status") + times
            assert self._news.wait_for(lambda: self.asked.count("/status") >= until, WITHIN_S), self.asked


@pytest.fixture
def sidecar() -> Iterator[Sidecar]:
    made = Sidecar()
    yield made
    made.server.shutdown()
    made.server.server_close()


def record(port: int) -> Record:
    return a_record(
        endpoint=Endpoint("tiny", 8080, "/v1", "ClusterIP", None),
        port=port,
        host="127.0.0.1",
        edition="0123456789ab",
    )


def document(phase: str = "Ready", message: str = "") -> dict[str, Any]:
    row = {
        "namespace": "default",
        "name": "tiny",
        "program": "default.tiny",
        "phase": phase,
        "reason": "Why",
        "message": message,
        "ready": phase == "Ready",
        "runtime": "llama-server",
        "pid": os.getpid(),
        "restarts": 0,
        "memory": {"reservedBytes": 1 << 30, "measuredBytes": 1 << 29},
    }
    return {"node": "mac", "cluster": {"server": "k", "reachable": True}, "at": time.time(), "services": [row]}


@pytest.fixture
def state(tmp_path: Path, sidecar: Sidecar) -> StateDir:
    directory = StateDir(tmp_path / "state")
    directory.create()
    save_overrides(directory.path, Overrides("", {"port": sidecar.port}))
    directory.write_record(record(sidecar.port))
    directory.write_observed(Observed("default.tiny", 0, False, 1.0, "FATAL", message=EVIL))
    sidecar.document = document()
    return directory


def command(state: StateDir, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "metal_supervisor", "status", "--state-dir", str(state.path), *arguments]


def status(state: StateDir, *arguments: str) -> subprocess.CompletedProcess[str]:
    return typed(*command(state, *arguments)[3:])


def closed_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def test_the_table_has_what_the_sidecar_the_process_and_the_engine_tell(state: StateDir, sidecar: Sidecar) -> None:
    done = status(state)
    assert (done.returncode, done.stderr) == (0, "")
    row = done.stdout.splitlines()[-1].split()
    assert row[:4] == ["default/tiny", "Ready", "llama-server", f"http://127.0.0.1:{sidecar.port}/v1"]
    assert row[4:6] == ["512", "MiB/1.0"], "another unit for each"
    assert "48.0" in row and sidecar.asked.count("/metrics") == 1


def test_an_engine_that_is_to_fall_asleep_is_not_asked_how_fast_it_writes(state: StateDir, sidecar: Sidecar) -> None:
    from dataclasses import replace

    kept = record(sidecar.port)
    state.write_record(replace(kept, probe=replace(kept.probe, asleep_path="/props")))
    assert status(state).returncode == 0 and "/metrics" not in sidecar.asked


def test_only_what_is_to_come_is_called_a_fetch(state: StateDir, sidecar: Sidecar) -> None:
    rows = [
        {"namespace": "d", "model": name, "phase": phase, "gotBytes": 0, "totalBytes": 0, "message": "m"}
        for name, phase in (("bad", "Failed"), ("good", "Downloading"))
    ]
    sidecar.document = document() | {"downloads": rows}
    assert [line.split()[1] for line in status(state).stdout.splitlines() if "fetches" in line] == ["d.good"]


def test_json_is_the_document_as_it_came(state: StateDir, sidecar: Sidecar) -> None:
    sidecar.document = document(message=EVIL) | {"of a later release": [1]}
    done = status(state, "--json")
    assert done.returncode == 0 and json.loads(done.stdout) == sidecar.document


@pytest.mark.parametrize("strange", [[], {"x": 1}, {"node": 1, "cluster": 1, "services": {}}])
def test_what_is_no_sidecar_is_said_to_be_none_and_the_files_are_shown(
    state: StateDir, sidecar: Sidecar, strange: object
) -> None:
    sidecar.document = strange
    done = status(state)
    assert done.returncode == 3 and "is not metal-supervisor; see --port and --state-dir" in done.stderr
    assert "default/tiny" in done.stdout


def test_where_nothing_answers_the_files_are_shown_and_it_is_said(state: StateDir) -> None:
    done = status(state, "--port", closed_port())
    assert done.returncode == 3
    assert f"is it running? start it with: metal-supervisor run --state-dir {state.path}\n" in done.stderr
    assert "this is what its files say:" in done.stderr
    head, row = done.stdout.splitlines()
    assert head.startswith("NAME ") and "CrashLoopBackOff" in row and row.isprintable()
    silent = status(state, "--json", "--port", closed_port())
    assert (silent.returncode, silent.stdout) == (3, "")


def test_where_only_the_sidecar_is_down_the_running_supervisord_is_named(
    state: StateDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Supervisord, "answers", lambda _: True)
    with pytest.raises(Silent, match=r"though supervisord runs; .*supervisorctl -c \S+/supervisord.conf status$"):
        Status(Settings(state_dir=str(state.path), port=int(closed_port())), sys.stdout, print)._ask()


def test_where_there_is_nothing_at_all_only_that_is_said(tmp_path: Path) -> None:
    done = status(StateDir(tmp_path / "none"), "--port", closed_port())
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (3, "", 1)
    assert not (tmp_path / "none").exists()


def test_watching_into_a_pipe_prints_again_when_something_changed_and_only_then(
    state: StateDir, sidecar: Sidecar
) -> None:
    with subprocess.Popen(command(state, "--watch"), stdout=subprocess.PIPE, text=True, encoding="utf-8") as process:
        assert process.stdout is not None
        sidecar.asked_again(1)
        sidecar.document = document()  # only its time is another one
        sidecar.asked_again(2)
        sidecar.document = document("Failed", EVIL)
        sidecar.asked_again(2)
        process.send_signal(signal.SIGINT)
        told = process.stdout.read()
        assert process.wait(WITHIN_S) == 0
    rows = [line for line in told.splitlines() if line.startswith("default/tiny")]
    assert [row.split()[1] for row in rows] == ["Ready", "Failed"]
    assert all(char.isprintable() for char in told.replace("\n", ""))


def test_a_reader_that_has_seen_enough_ends_it_without_a_word(state: StateDir, sidecar: Sidecar) -> None:
    process = subprocess.Popen(command(state, "--watch"), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    sidecar.document = document("Failed")
    with process.stderr:
        assert process.wait(WITHIN_S) == 0 and process.stderr.read() == b""


@pytest.mark.parametrize(("columns", "no_colour"), [(40, "1"), (200, "1"), (200, "")])
def test_on_a_terminal_it_is_drawn_anew_and_ends_clean_with_ctrl_c(
    state: StateDir, sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch, columns: int, no_colour: str
) -> None:
    monkeypatch.setenv("NO_COLOR", no_colour)
    sidecar.document = document("Creating", f"{EVIL} {'words ' * 60}")
    terminal = Terminal(command(state, "--watch"), columns)
    first = terminal.until("Why: x\\r\\n\\x1b[2J" if columns == 200 else "Creating")
    assert SEQUENCE.sub("", first).lstrip("\r\n").startswith("node ")
    sidecar.document = document("Ready")
    terminal.until("\x1b[1A\x1b[2K")  # the lines before are erased
    drawn = terminal.until("Ready " if no_colour else "\x1b[32mReady\x1b[0m")
    assert all(len(SEQUENCE.sub("", line)) <= columns for line in drawn.split("\r\n"))
    terminal.process.send_signal(signal.SIGINT)
    rest = terminal.rest()
    assert terminal.process.wait(WITHIN_S) == 0
    assert "Traceback" not in rest and "\x1b[?25h" in rest, "the cursor is shown again"
    assert SEQUENCE.sub("", rest).endswith("\r\n")


def test_a_port_that_another_system_has_is_told_with_the_command_that_shows_it(
    state: StateDir, sidecar: Sidecar, tmp_path: Path
) -> None:
    sidecar.document = document() | {"stateDirectory": str(state.path)}
    assert status(state).returncode == 0
    sidecar.document = document() | {"stateDirectory": f"{tmp_path}/an other\x1b[2J"}
    done = status(state)
    assert done.returncode == 3
    assert f"metal-supervisor status --state-dir '{tmp_path}/an other" in done.stderr
    assert done.stderr.replace("\n", "").isprintable()
    assert "default/tiny" in done.stdout, "from the files of the one that was asked about"


def test_the_system_of_this_directory_is_found(state: StateDir, tmp_path: Path) -> None:
    (tmp_path / ".run").symlink_to(state.path)
    line = [sys.executable, "-m", "metal_supervisor"]
    environ = {"PATH": os.environ["PATH"], "HOME": str(tmp_path / "home")}
    said = ["default/tiny", "default/tiny: ", "only one"]
    for words, wanted in zip((["status"], ["explain", "tiny"], ["cordon"]), said, strict=True):
        done = subprocess.run([*line, *words], capture_output=True, text=True, timeout=60, cwd=tmp_path, env=environ)
        assert wanted in done.stdout + done.stderr, words
    assert not (tmp_path / "home").exists()


def test_what_speaks_no_http_is_said_to_be_silent(state: StateDir) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection = listener.accept()[0]
            with connection:
                connection.recv(4096)
                connection.sendall(b"SSH-2.0-x\r\n")

        threading.Thread(target=answer, daemon=True).start()
        done = status(state, "--port", str(listener.getsockname()[1]))
    assert done.returncode == 3 and "no HTTP" in done.stderr and "Traceback" not in done.stderr
