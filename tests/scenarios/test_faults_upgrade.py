"""Another release takes over a running system, and gives it back: no engine notices."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import metal_supervisor
from metal_supervisor.state.home import FORMAT_FILE, STATE_FORMAT
from tests.support.faults import Figure, fault
from tests.support.releases import install
from tests.support.system import System, engine_path, eventually, kill, running, service

NEXT = "9.9.9"
CHANGES = {
    "__init__.py": [(f'"{metal_supervisor.__version__}"', f'"{NEXT}"')],
    "state/programs.py": [
        ("startretries=3", "startretries=4"),
        ("-I -S {home}/current/launch.py ", "-I -S -B {home}/current/launch.py "),
    ],
    "runtimes/llama_server.py": [
        ('argv.append("--jinja"', 'argv.append("--check-tensors")\n    argv.append("--jinja"')
    ],
}
"""What the next build does differently: section, launcher's call, an engine's arguments."""


@pytest.fixture(scope="module")
def next_release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The python of an installation of the next release, at another path."""
    base = tmp_path_factory.mktemp("next")
    package = base / "lib" / "metal_supervisor"
    shutil.copytree(Path(metal_supervisor.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(Path(metal_supervisor.__file__).parents[1] / "conf", base / "lib" / "conf")
    for name, changes in CHANGES.items():
        text = (package / name).read_text()
        for before, after in changes:
            assert before in text, f"{name} has no {before!r} any more; the next release must be made anew"
            text = text.replace(before, after)
        (package / name).write_text(text)
    return install(base)


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """One whose settings are in a file, and whose engine says slowly what it knows while `slow` is there."""
    base = tmp_path_factory.mktemp("upgrade")
    engine = base / "llama-server"
    engine.write_text(f'#!/bin/sh\n[ ! -e {base}/slow ] || [ "$1" != --help ] || sleep 3\nexec {engine_path()} "$@"\n')
    engine.chmod(0o755)
    (base / "settings.toml").write_text("log_files = 3\n")
    with running(base, "--config", str(base / "settings.toml"), engine=engine) as up:
        up.apply(up.tiny_model(), service("tiny", contextSize=32768))
        up.ready()
        yield up


def take_over(system: System, python: str | Path) -> None:
    """What a user types after an upgrade."""
    done = subprocess.run(
        [str(python), "-I", "-m", "metal_supervisor", "upgrade", "--state-dir", str(system.state)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def version(system: System) -> str:
    return str(json.loads(system.fetch("/status")[1])["version"])


@fault(
    "U145",
    "a release with another path, section and engine arguments takes over",
    happens="its controller and sidecar start; the engines go on as they were started",
    sees="the new version in /status",
    bound="same pids, 0 bytes lost",
)
@fault(
    "U146",
    "the release before is put back, and supervisord is then killed with -9",
    happens="the survivors are stood in for",
    sees="the old version",
    bound="same pids, 0 bytes lost",
)
def test_an_upgrade_and_the_downgrade_after_it_restart_no_engine(
    system: System, next_release: Path, figure: Figure
) -> None:
    engine = system.ready()
    stream = system.stream(tokens=300, slow=False)
    with figure.timed("upgraded"):
        take_over(system, next_release)
    eventually(lambda: version(system) == NEXT, 30, "the next release to speak")
    eventually(lambda: system.health()[0] == 200, 30, "health")
    assert "startretries=3" in system.files.section_text("default.tiny")
    assert system.pid() == engine
    system.apply(service("born-next"))
    younger = system.ready("born-next")
    assert "--check-tensors" in command_of(younger) and "--check-tensors" not in command_of(engine)
    assert "startretries=4" in system.files.section_text("default.born-next")

    stream.goes_on()
    with figure.timed("downgraded"):
        take_over(system, sys.executable)
    eventually(lambda: version(system) == metal_supervisor.__version__, 30, "this release to speak")
    eventually(lambda: system.health()[0] == 200, 30, "health")
    system.ready()
    system.ready("born-next")
    assert (system.pid(), system.pid("born-next")) == (engine, younger)

    old = system.supervisord_pid()
    stream.goes_on()
    kill(old)
    eventually(lambda: system.supervisord_pid() not in (0, old) and system.rpc.answers(), 30, "supervisord to be back")
    eventually(lambda: (system.pid(), system.pid("born-next")) == (engine, younger), 30, "both to be stood in for")
    whole = stream.completed()
    for case in ("U145", "U146"):
        figure.add("engine restarts", int((system.pid(), system.pid("born-next")) != (engine, younger)), "", case=case)
        figure.add("answers cut", int(not whole), "", case=case)
    assert whole, stream.error
    system.ready("born-next")

    # What waited is taken up when the engine ends for a reason of its own that makes it start anew.
    system.apply(service("tiny", contextSize=16384))
    eventually(lambda: system.pid() not in (0, engine), 30, "the edited service to be replaced")
    system.delete("born-next")
    eventually(lambda: "default.born-next" not in system.rpc.table(), 30, "it to be gone")


def test_a_state_directory_of_another_format_is_refused_in_a_sentence(system: System) -> None:
    engine, kept = system.ready(), system.state / FORMAT_FILE
    said = f"state directory {system.state} has format 9, and this version has {STATE_FORMAT}: use"
    kept.write_text("9")
    done = subprocess.run(
        [sys.executable, "-I", "-m", "metal_supervisor", "upgrade", "--state-dir", str(system.state)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (1, "") and said in done.stderr
    assert system.pid() == engine
    kept.write_text(STATE_FORMAT)


def command_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")


@fault(
    "U145b",
    "a setting that changes an engine's arguments is changed, and the controller restarted",
    happens="the engine goes on; what it would be started with waits for its next start",
    sees="nothing",
    bound="same pid; supervisorctl update changes nothing either",
)
def test_a_setting_waits_for_the_next_start_and_update_by_hand_is_harmless(system: System, figure: Figure) -> None:
    engine, settings = system.ready(), system.base / "settings.toml"
    settings.write_text("log_files = 9\n")
    with figure.timed("controller back"):
        restart(system, "controller")
    eventually(lambda: system.health()[0] == 200, 30, "health")
    system.supervisorctl("update")
    assert system.pid() == engine
    assert "stdout_logfile_backups=3" in system.files.section_text("default.tiny")
    figure.add("engine restarts", 0 if system.pid() == engine else 1, "")
    assert system.stop() == 0
    system.start()
    system.ready()
    assert "stdout_logfile_backups=9" in system.files.section_text("default.tiny")


@fault(
    "U149",
    "the settings file is broken, and the controller is restarted",
    happens="the last settings that were in order stay",
    sees="the line of the mistake in the log and /status",
    bound="0 engine restarts",
)
def test_a_broken_settings_file_keeps_the_settings_that_were_in_order(system: System, figure: Figure) -> None:
    engine, settings = system.ready(), system.base / "settings.toml"
    fine = settings.read_text()
    settings.write_text("log_level = \n")
    with figure.timed("controller back"):
        restart(system, "controller")
        notices = eventually(lambda: told(system), 30, "the mistake in /status")
    assert re.search(r"settings\.toml.*line 1", notices[0]["reason"])
    system.apply(service("later"))
    system.ready("later")
    assert system.pid() == engine
    figure.add("engine restarts", 0 if system.pid() == engine else 1, "")
    settings.write_text(fine)
    restart(system, "controller")
    eventually(lambda: not told(system), 30, "the notice to be gone")
    system.delete("later")


def told(system: System) -> list[dict[str, str]]:
    return list(json.loads(system.fetch("/status")[1])["controller"].get("notices") or [])


def restart(system: System, program: str) -> None:
    """supervisorctl restart, waited for."""
    before = eventually(lambda: system.own_pid(program), 30, program)
    os.kill(before, 15)
    eventually(lambda: system.own_pid(program) not in (0, before), 30, f"{program} to be back")


@fault(
    "U151",
    "a record is gone when the controller starts, and the engine's program takes long to say what it knows",
    happens="the engine is left alone until that is known; then its record is made anew",
    sees="nothing",
    bound="same pid, 0 bytes lost",
)
def test_an_engine_without_a_record_is_left_alone_until_it_is_known_what_it_should_run(system: System) -> None:
    pid, record, slow = system.ready(), system.files.record_path("default.tiny"), system.base / "slow"
    stream = system.stream()
    slow.touch()
    record.unlink()
    kill(system.own_pid("controller"))
    eventually(record.exists, 30, "its record to be made anew")
    eventually(lambda: system.condition("MetalReady").get("status") == "True", 30, system.said())
    assert stream.completed(), stream.error
    assert system.ready() == pid
    slow.unlink()
