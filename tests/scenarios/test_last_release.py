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
from tests.support.runtimes import omlx
from tests.support.system import System, eventually, kill, running, seccomp, service

CACHE = [{"name": "LLAMA_CACHE", "value": "/tmp/attack"}]
"""The last release hands it to the engine; this one refuses it."""


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """A system of the last release that this one has taken over, with a plain service and one that is refused now."""
    base = tmp_path_factory.mktemp("last")
    with running(base, python=last_release(tmp_path_factory.mktemp("release"))) as up:
        up.apply(up.tiny_model(), service(), service("hostile", env=CACHE))
        before = up.ready(), up.ready("hostile")
        sections = {path.name: path.read_bytes() for path in (up.state / "models.d").glob("*.conf")}
        take_over(up, sys.executable)
        eventually(lambda: version(up) and row(up, "hostile")["warning"], 30, "this release to judge the services")
        assert (up.pid(), up.pid("hostile")) == before
        assert {path.name: path.read_bytes() for path in (up.state / "models.d").glob("*.conf")} == sections
        yield up


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


def test_an_omlx_of_the_last_release_goes_on_and_is_confined_from_its_next_start(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    base = tmp_path_factory.mktemp("omlx")
    mlx.tiny(base / "model")
    release = last_release(tmp_path_factory.mktemp("release"))
    with running(base, "--omlx", str(omlx()), "--ollama-url", "off", python=release) as up:
        up.apply(mlx_model("one", base / "model"), mlx_service("one", "one", runtime="omlx"))
        up.ready("one", within_s=90)
        before = up.pid("one"), up.own_pid("omlx")
        take_over(up, sys.executable)
        eventually(lambda: version(up) and up.condition("Confined", "one"), 60, "this release to judge the service")
        said = eventually(lambda: up.condition("Confined", "one"), what="the condition")
        assert (up.pid("one"), up.own_pid("omlx"), said["reason"]) == (*before, "NotYet")
        assert seccomp(before[1]) == "0" and up.ask("one", model="one")[0] == 200
        eventually(lambda: pending(up), 60, "its trial, and then what it is started from next")
        kill(before[1])
        eventually(lambda: up.own_pid("omlx") not in (0, before[1]), 30, "another")
        eventually(lambda: up.condition("Confined", "one")["status"] == "True", 60, "a confined one")
        up.ready("one", within_s=90)
        assert seccomp(up.own_pid("omlx")) == "2" and up.ask("one", model="one")[0] == 200


def pending(system: System) -> str:
    """The spec that oMLX starts from next, "" while it is the one that it runs from."""
    return str(json.loads((system.state / "records" / "omlx.json").read_text()).get("next_spec") or "")


def test_the_next_start_of_a_refused_service_is_refused_with_the_reason(system: System) -> None:
    before = system.pid("hostile")
    kill(before)
    eventually(lambda: system.status("hostile").get("phase") == "Failed", 30, "the refusal")
    assert row(system, "hostile")["reason"] == "InvalidSpec" and not system.pid("hostile")
    system.apply(service("hostile"))
    assert system.ready("hostile") != before
    assert not row(system, "hostile")["warning"]
