"""The last release is taken over while its engines run: none is interrupted, and their next start obeys new rules."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.releases import last_release
from tests.scenarios.test_faults_upgrade import take_over, version
from tests.system import System, eventually, kill, running, seccomp, service

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
    assert "default/hostile runs as an older release allowed" in command(system, "doctor")
    assert "LLAMA_CACHE" in command(system, "status")


def test_an_engine_of_the_last_release_is_confined_from_its_next_start(system: System) -> None:
    before = system.pid()
    assert seccomp(before) == "0" and row(system)["confined"] is False
    assert eventually(lambda: system.condition("Confined"), what="the condition")["reason"] == "NotYet"
    kill(before)
    eventually(lambda: system.pid() not in (0, before) and row(system)["confined"], 30, "a confined engine")
    assert seccomp(system.ready()) == "2"


def test_the_next_start_of_a_refused_service_is_refused_with_the_reason(system: System) -> None:
    before = system.pid("hostile")
    kill(before)
    eventually(lambda: system.status("hostile").get("phase") == "Failed", 30, "the refusal")
    assert row(system, "hostile")["reason"] == "InvalidSpec" and not system.pid("hostile")
    system.apply(service("hostile"))
    assert system.ready("hostile") != before
    assert not row(system, "hostile")["warning"]
