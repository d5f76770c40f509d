"""The last release is taken over while its engines run: none is interrupted, and their next start obeys new rules."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.scenarios.test_faults_upgrade import take_over, version
from tests.support import mlx
from tests.support.mlx import mlx_model, mlx_service
from tests.support.releases import last_release
from tests.support.runtimes import KINDS, missing
from tests.support.system import System, eventually, halted, kill, running, seccomp, service

CACHE = [{"name": "LLAMA_CACHE", "value": "/tmp/attack"}]
"""The last release hands it to the engine; this one refuses it."""
(OMLX,) = (each for each in KINDS if each.name == "omlx")


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """A system of the last release that this one has taken over: a plain service, one that is refused now, and oMLX."""
    base = tmp_path_factory.mktemp("last")
    shared = not missing(OMLX)
    flags = ("--omlx", str(OMLX.program())) if shared else ()
    with running(base, *flags, "--ollama-url", "off", python=last_release(tmp_path_factory.mktemp("release"))) as up:
        up.apply(up.tiny_model(), service(), service("hostile", env=CACHE))
        if shared:
            mlx.tiny(base / "model")
            up.apply(mlx_model("one", base / "model"), mlx_service("one", "one", runtime="omlx"))
            up.ready("one", within_s=90)
        for name in ("tiny", "hostile"):
            up.ready(name)
        before = pids(up)
        sections = {path.name: path.read_bytes() for path in (up.state / "models.d").glob("*.conf")}
        take_over(up, sys.executable)
        eventually(lambda: version(up) and row(up, "hostile")["warning"], 30, "this release to judge the services")
        assert pids(up) == before
        assert {path.name: path.read_bytes() for path in (up.state / "models.d").glob("*.conf")} == sections
        yield up


def pids(system: System) -> list[int]:
    """Of each service's engine or attendant, and of oMLX."""
    return [*(system.pid(name) for name in ("tiny", "hostile", "one")), system.own_pid("omlx")]


def row(system: System, name: str = "tiny") -> dict[str, Any]:
    """A service as /status has it."""
    rows = json.loads(system.fetch("/status")[1])["services"]
    found = {each["name"]: each for each in rows}
    return dict(found[name])


def command(system: System, name: str) -> str:
    """What a command of this release prints about the system."""
    words = [sys.executable, "-m", "metal_supervisor", name, "--state-dir", str(system.state)]
    return subprocess.run(words, capture_output=True, text=True, timeout=60).stdout


def test_a_refused_service_runs_on_and_is_named_everywhere(system: System) -> None:
    assert system.status("hostile")["phase"] == "Ready"
    degraded = eventually(lambda: system.condition("Degraded", "hostile"), what="the condition")
    assert degraded["reason"] == "InvalidSpec" and "LLAMA_CACHE" in degraded["message"]
    assert "next start, which is refused" in degraded["message"]
    assert 'metal_supervisor_service_revoked{name="hostile",namespace="default"} 1' in system.fetch("/metrics")[1]
    assert "LLAMA_CACHE" in command(system, "status")


def test_an_engine_of_the_last_release_is_confined_from_its_next_start(system: System) -> None:
    before = system.pid()
    assert seccomp(before) == "0" and row(system)["confined"] is False
    assert eventually(lambda: system.condition("Confined"), what="the condition")["reason"] == "NotYet"
    kill(before)
    eventually(lambda: system.pid() not in (0, before) and row(system)["confined"], 30, "a confined engine")
    assert seccomp(system.ready()) == "2"


def test_an_omlx_of_the_last_release_goes_on_and_is_confined_from_its_next_start(system: System) -> None:
    OMLX.program()  # or it is skipped
    before = system.pid("one"), system.own_pid("omlx")
    said = eventually(lambda: system.condition("Confined", "one"), 60, "this release to judge the service")
    assert (system.pid("one"), system.own_pid("omlx"), said["reason"]) == (*before, "NotYet")
    assert seccomp(before[1]) == "0" and system.ask("one", model="one")[0] == 200
    waits = system.state / "pending" / "omlx.conf"
    eventually(waits.exists, 60, "its trial, and then what it is started from next")
    with halted(system.own_pid("controller")):  # supervisord restarts it as it was
        kill(before[1])
        eventually(lambda: system.noted_pid("omlx") not in (0, before[1]), 60, "another")
    eventually(lambda: system.condition("Confined", "one")["status"] == "True", 60, "a confined one")
    system.ready("one", within_s=90)
    assert seccomp(system.own_pid("omlx")) == "2" and system.ask("one", model="one")[0] == 200


def test_the_next_start_of_a_refused_service_is_refused_with_the_reason(system: System) -> None:
    before = system.pid("hostile")
    kill(before)
    eventually(lambda: system.status("hostile").get("phase") == "Failed", 30, "the refusal")
    assert row(system, "hostile")["reason"] == "InvalidSpec" and not system.pid("hostile")
    system.apply(service("hostile"))
    assert system.ready("hostile") != before
    assert not row(system, "hostile")["warning"]
