"""`metal-supervisor doctor` beside a running system: nothing fails, and what is then broken is named."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.own_command import typed
from tests.support.system import System, engine_path, eventually, kill, running, service

Told = dict[str, list[dict[str, str]]]
SETTINGS = "lease_duration = 30\n"


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """Its engine is a link, as Homebrew makes them."""
    base = tmp_path_factory.mktemp("doctor")
    link = base / "llama-server"
    link.symlink_to(engine_path().resolve())
    (base / "m.toml").write_text(SETTINGS)
    flags = "--config", str(base / "m.toml"), "--ollama-url", "off", "--allow-env", "GREETING"
    with running(base, *flags, engine=link) as up:
        up.apply(up.tiny_model(), service())
        up.ready()
        yield up


def doctor(state: Path, *flags: str) -> tuple[int, Told, str]:
    """(exit code, findings by check, standard error) of one that is told no more than where the state is."""
    code, out, err = typed("doctor", "--json", "--state-dir", str(state), *flags)
    told: Told = {}
    body: Any = json.loads(out)
    for each in body["findings"]:
        told.setdefault(each["check"], []).append(each)
    assert body["ok"] is (code == 0)
    return code, told, err


def test_nothing_fails_while_a_system_runs_and_the_settings_are_its_own(system: System) -> None:
    code, told, said = doctor(system.state)
    failed = [each for findings in told.values() for each in findings if each["status"] == "fail"]
    assert (code, failed, said) == (0, [], "")
    asked = "supervisord", "programs", "engines", "builds", "ports", "api", "rights", "kinds"
    for name in asked:
        assert [each["status"] for each in told[name]] == ["ok"], told[name]
    assert "4." in told["supervisord"][0]["text"]
    assert str(system.base / "llama-server") in told["engines"][0]["text"], "as the system was started, not from PATH"
    assert "1 running" in told["builds"][0]["text"]


def test_an_upgrade_under_a_running_model_is_named_and_a_restart_is_what_helps(system: System) -> None:
    engine = psutil.Process(system.pid())
    eventually(lambda: time.time() - engine.create_time() > 2, what="a start that is told from what comes after it")
    link = system.base / "llama-server"
    fresh = link.with_name("fresh")
    fresh.symlink_to(link.resolve())
    os.replace(fresh, link)
    code, told, _ = doctor(system.state)
    (found,) = told["builds"]
    assert code == 0 and found["status"] == "warn" and found["fix"].endswith("supervisorctl restart default.tiny")
    before = system.pid()
    system.supervisorctl("restart", "default.tiny")
    eventually(lambda: system.pid() not in (0, before), what="a new process")
    system.ready()
    assert doctor(system.state)[1]["builds"][0]["status"] == "ok"


def test_a_settings_file_that_breaks_while_the_system_runs_is_named_and_the_rest_is_as_it_runs(system: System) -> None:
    file = system.base / "m.toml"
    file.write_text("lease_duraton = 30\n")
    code, told, _ = doctor(system.state)
    file.write_text(SETTINGS)
    assert code == 1 and "did you mean lease_duration?" in told["settings"][0]["text"]
    assert [name for name, each in told.items() if any(one["status"] == "fail" for one in each)] == ["settings"]


def test_a_supervisord_that_was_killed_is_named(system: System) -> None:
    """The last: nothing runs after it."""
    pid = system.ready()
    assert system.process is not None
    system.process.kill()  # which would start another supervisord
    system.process.wait()
    kill(system.supervisord_pid())
    try:
        eventually(lambda: not system.rpc.answers(), what="supervisord to be gone")
        code, told, _ = doctor(system.state)
    finally:
        kill(pid)
    assert code == 1 and "does not answer" in told["supervisord"][0]["text"]
    eventually(lambda: not system.processes(), what="our programs to follow their supervisord")
