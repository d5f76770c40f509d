"""Lines of `metal-supervisor run`, read off a state directory."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import socket
import stat
import subprocess
import sys
import time
from dataclasses import replace
from itertools import chain, count, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from metal_supervisor import launch
from metal_supervisor.cli import changes, foreground
from metal_supervisor.cli.foreground import Foreground
from metal_supervisor.cli.serve import Serve, ServeOrder
from metal_supervisor.install import checks
from metal_supervisor.settings.loader import Overrides, Settings, save_overrides
from metal_supervisor.spec.processes import Observed
from metal_supervisor.spec.record import Verdict
from metal_supervisor.spec.types import Endpoint, Standing
from metal_supervisor.state import gateway_note
from metal_supervisor.state.directory import StateDir
from metal_supervisor.state.kept_files import write_atomic
from metal_supervisor.state.own_processes import CannotBoot, own
from metal_supervisor.state.reports import CONTROLLER_REPORT
from tests.support.records import a_record

RECORD = a_record(endpoint=Endpoint("tiny", 8080, "/v1", "ClusterIP", None), port=18100)


needs_full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a device that is always full")


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    directory = StateDir(tmp_path / "state")
    directory.create()
    directory.write_record(RECORD)
    directory.write_observed(Observed("default.tiny", 7, True, 1.0, "RUNNING"))
    return directory


def shown(settings: Settings) -> tuple[Foreground, io.StringIO]:
    out = io.StringIO()
    return Foreground(settings, Overrides(), None, out), out


@pytest.mark.parametrize(
    ("bind", "where"), [("", "127.0.0.1"), ("192.168.1.20", "192.168.1.20"), ("::", "[::1]"), ("fd00::2", "[fd00::2]")]
)
def test_with_a_cluster_a_ready_model_is_told_with_a_url_that_works_here(
    state: StateDir, bind: str, where: str
) -> None:
    run, out = shown(Settings(kubeconfig="/k", bind=bind))
    run.printer.print_states(state, run.settings)
    run.printer.print_hint(state, run.settings)
    assert f"Ready       http://{where}:18100/v1\n" in out.getvalue()
    assert f"curl http://{where}:18100/v1/chat/completions -d" in out.getvalue()


def test_commands_for_a_model_are_told_when_it_is_ready_though_those_for_the_system_were_told_before(
    state: StateDir,
) -> None:
    """A model that is fetched for an hour is Ready long after the first commands were printed."""
    run, out = shown(Settings())
    state.write_observed(Observed("default.tiny", 7, False, 1.0, "RUNNING"))
    run.printer.print_states(state, run.settings)
    run.printer.print_hint(state, run.settings)
    assert out.getvalue().count("localhost:9090/healthz") == 1 and "chat tiny" not in out.getvalue()
    state.write_observed(Observed("default.tiny", 7, True, 1.0, "RUNNING"))
    for _ in range(2):
        run.printer.print_states(state, run.settings)
        run.printer.print_hint(state, run.settings)
    for once in ("localhost:9090/healthz", "chat tiny", "curl http://127.0.0.1:18100/v1/chat", "serve OWNER/REPO"):
        assert out.getvalue().count(once) == 1, once


def test_a_system_that_was_started_for_a_model_names_its_request_and_how_to_keep_the_system(state: StateDir) -> None:
    """A service from before may be Ready sooner, and its engine may want a key."""
    out, settings = io.StringIO(), Settings(state_dir=str(state.path))
    served = Foreground(settings, Overrides(), None, out, ("default", "mine")).printer
    served.print_states(state, settings)
    served.print_hint(state, settings)
    assert "curl http" not in out.getvalue() and "metal-supervisor serve" in out.getvalue()
    state.write_record(a_record("mine", port=18101, edition="0123456789ab"))
    state.spec_path("default.mine").write_text(json.dumps({"env": {"LLAMA_API_KEY": "sekrit"}}))
    state.write_observed(Observed("default.mine", 7, True, 1.0, "RUNNING"))
    served.print_states(state, settings)
    served.print_hint(state, settings)
    told = out.getvalue()
    request = 'curl http://127.0.0.1:18101/v1/chat/completions -H "Authorization: Bearer $('
    assert request in told and "key show mine" in told and ":18100/v1/chat" not in told and "sekrit" not in told
    assert re.search(r"stays in this terminal: Ctrl-C stops everything\. .*metal-supervisor install --state-dir", told)


def test_what_the_run_before_left_behind_is_not_told_as_news(state: StateDir) -> None:
    run, out = shown(Settings())
    state.write_observed(Observed("default.tiny", 7, False, 1.0, "STOPPING"))
    run.printer.print_states(state, run.settings)
    assert out.getvalue() == ""
    for ready, word in ((True, "RUNNING"), (False, "STOPPING")):
        state.write_observed(Observed("default.tiny", 7, ready, 1.0, word))
        run.printer.print_states(state, run.settings)
    assert "Ready" in out.getvalue() and "the engine is ending" in out.getvalue()


@pytest.mark.parametrize("standing", [Standing.WAIT, Standing.FAILED])
def test_what_the_run_before_decided_is_told_once_it_is_decided_again(state: StateDir, standing: Standing) -> None:
    """Its message may name a budget that has changed since."""

    def decided(text: str, pid: int, synced: bool) -> str:
        state.write_record(replace(RECORD, verdict=Verdict(standing, "InsufficientMemory", text, 0.0)))
        told = {"pid": pid, "at": time.time(), "cluster": {"synced": synced}}
        write_atomic(state.path / CONTROLLER_REPORT, json.dumps(told))
        run.printer.print_states(state, run.settings)
        return out.getvalue()

    run, out = shown(Settings())
    assert decided("28 GiB left", 1 << 22, synced=True) == ""
    assert decided("28 GiB left", os.getpid(), synced=False) == ""
    assert "14 GiB left" in decided("14 GiB left", os.getpid(), synced=True)
    assert "28 GiB" not in out.getvalue()


def test_a_model_of_embeddings_is_tried_with_a_request_that_it_can_answer(state: StateDir) -> None:
    state.write_record(replace(RECORD, mode="embedding"))
    run, out = shown(Settings())
    run.printer.print_states(state, run.settings)
    run.printer.print_hint(state, run.settings)
    tried = """curl http://127.0.0.1:18100/v1/embeddings -d '{"model":"tiny","input":"hi"}'"""
    assert tried in out.getvalue() and "chat" not in out.getvalue()


def test_a_system_that_is_joined_keeps_its_settings_and_that_is_told(state: StateDir) -> None:
    save_overrides(state.path, Overrides("", {"port": 39090, "gateway": "127.0.0.1:39200"}))
    ours = Settings(state_dir=str(state.path), port=39091, gateway="127.0.0.1:39201")
    run, out = shown(ours)
    run._joining = True
    kept = run._keep_settings()
    run._head()
    run._up(kept)
    run.printer.print_hint(state, run.settings)
    told = out.getvalue()
    assert "gateway  http://127.0.0.1:39200/v1 for all" in told and "localhost:39090/healthz" in told
    assert "settings stay that system's, which differ in --port, --gateway; Ctrl-C and run again" in told


@pytest.mark.parametrize("name", ["plain", "with some spaces", "'quote'", "a;b"])
def test_a_path_can_be_copied_into_a_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    for path in (tmp_path / name, tmp_path.parent / name):
        read = subprocess.run(["sh", "-c", f"printf %s {changes.shown(path)}"], capture_output=True, text=True)
        assert Path(read.stdout).absolute() == path


@pytest.mark.parametrize("name", ["plain", "with some spaces", "'quote'", "a;b", "$HOME"])
@pytest.mark.parametrize("shell", [each for each in ("sh", "bash", "zsh", "fish") if shutil.which(each)])
def test_one_line_gives_a_shell_the_kubeconfig_and_the_programs(tmp_path: Path, name: str, shell: str) -> None:
    programs, kubeconfig = tmp_path / name / "bin", tmp_path / name / "kubeconfig"
    programs.mkdir(parents=True)
    (programs / "ours").symlink_to("/bin/echo")
    line = changes.export_line(kubeconfig, programs)
    read = subprocess.run([shell, "-c", f'{line}; ours "$KUBECONFIG"; env true'], capture_output=True, text=True)
    assert (read.stdout, read.stderr, read.returncode) == (f"{kubeconfig}\n", "", 0)


def test_a_gateway_that_must_not_listen_is_not_told_with_a_url(state: StateDir) -> None:
    run, out = shown(Settings(gateway="0.0.0.0:9100"))
    run._head()
    assert "beyond loopback" in out.getvalue() and "for all models" not in out.getvalue()


def test_advice_of_the_controller_is_told_once_for_each_text(state: StateDir) -> None:
    run, out = shown(Settings())
    run.printer.print_advice(state)
    missing = "no namespace\x1b[2J"
    texts = [json.dumps({"cluster": {"advice": each}}) for each in ("", missing, missing, "")]
    for at, text in enumerate([*texts, "{"]):
        write_atomic(state.path / CONTROLLER_REPORT, text)
        os.utime(state.path / CONTROLLER_REPORT, (at, at))  # a clock that ticks between two writes
        run.printer.print_advice(state)
    assert out.getvalue().count("no namespace?[2J") == 1 and out.getvalue().count("\n") == 1


def test_a_gateway_that_cannot_listen_is_told_unless_the_note_is_of_an_earlier_run(state: StateDir) -> None:
    run, out = shown(Settings())
    for at, pid in enumerate((1 << 22, os.getpid(), os.getpid())):
        problem = "127.0.0.1:9100 cannot be listened on"
        gateway_note.write(state.path, {"at": time.time(), "pid": pid, "problem": problem})
        os.utime(state.path / gateway_note.FILE, (at, at))
        run.printer.print_advice(state)
        assert out.getvalue().count("cannot be listened on") == min(at, 1)


def test_a_port_is_not_taken_by_what_a_killed_supervisord_of_this_directory_left_behind(state: StateDir) -> None:
    """The start that follows ends it; without that, a run that was killed with its supervisord could not follow."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        run, _ = shown(Settings(state_dir=str(state.path), port=listener.getsockname()[1]))
        with pytest.raises(CannotBoot, match="is taken by"):
            run._check_port()
        with own(state, "sidecar"):
            run._check_port()


@pytest.mark.parametrize("names", [["app"], ["Documents", ".cache"], ["log", "src"], ["cluster-notes"]], ids="-".join)
def test_a_directory_with_directories_of_somebody_else_is_left_as_it_is(tmp_path: Path, names: list[str]) -> None:
    """An uninstall would take an app/ for its own."""
    for name in names:
        (tmp_path / name).mkdir()
    tmp_path.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-m", "metal_supervisor", "run", "--state-dir", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1 and repr(sorted(names)[-1]) in done.stderr and "--state-dir" in done.stderr
    assert sorted(os.listdir(tmp_path)) == sorted(names) and stat.S_IMODE(tmp_path.stat().st_mode) == 0o755


@pytest.mark.parametrize(
    "names",
    [[], ["models"], ["log", "hub", "models"], [".Trashes", "lost+found"], ["models.d", "app"]],
    ids=lambda names: "-".join(names) or "empty",
)
def test_one_that_was_restored_or_left_by_an_uninstall_is_taken(tmp_path: Path, names: list[str]) -> None:
    (tmp_path / "apiserver.db").touch()
    for name in names:
        (tmp_path / name).mkdir()
    checks.refuse_strange(tmp_path)


def test_one_that_holds_the_directory_of_another_system_is_taken(tmp_path: Path) -> None:
    """After `make run CLUSTER=…`, which keeps `.run/cluster-…`, the plain `make run` was refused."""
    StateDir(tmp_path / "cluster-1234abcd").create()
    checks.refuse_strange(tmp_path)


def test_a_supervisord_that_was_joined_has_ended_before_it_is_told(
    state: StateDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It closes its socket first, and takes a moment more to end."""
    run, out = shown(Settings(state_dir=str(state.path)))
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as ending:
        (state.path / "supervisord.pid").write_text(f"{ending.pid}\n")
        answers, naps = chain([True], repeat(False)), count(1)

        def nap(_seconds: float) -> None:
            assert "nothing is left running" not in out.getvalue()
            if next(naps) == 10:
                ending.terminate()

        closed: Any = SimpleNamespace(answers=lambda: next(answers), shutdown=lambda: None, table=dict)
        monkeypatch.setattr(run, "_supervisord", closed)
        monkeypatch.setattr(foreground.time, "sleep", nap)
        run._down()
        assert launch.start_time(ending.pid) == "" and "nothing is left running" in out.getvalue()


@needs_full
def test_a_full_disk_below_stdout_does_not_end_the_system() -> None:
    """The line is lost, and what is supervised is not."""
    with Path("/dev/full").open("w") as full:
        Foreground(Settings(), Overrides(), None, full).printer.say("a line")
        Serve(Settings(), Overrides(), ServeOrder("x"), full).say("a line")
        with contextlib.suppress(OSError):
            full.close()


@needs_full
@pytest.mark.parametrize("words", [("version",), ("doctor", "--json"), ("models", "ls", "--json")])
def test_output_that_cannot_be_written_is_one_line_and_exit_code_1(tmp_path: Path, words: tuple[str, ...]) -> None:
    state = () if words == ("version",) else ("--state-dir", str(tmp_path))
    command = [sys.executable, "-I", "-m", "metal_supervisor", *words, *state]
    for shell, why in (('exec "$@" >/dev/full', "No space left on device"), ('exec "$@" >&-', "is closed")):
        done = subprocess.run(
            ["/bin/sh", "-c", shell, "sh", *command], stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
        assert done.returncode == 1 and why in done.stderr and done.stderr.count("\n") == 1, done.stderr
