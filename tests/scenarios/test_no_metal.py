"""A Mac whose process sees no Metal device: nothing starts there, what runs goes on, until there is one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mac_part import say, standing_in
from tests.system import System, eventually, running, service

REASON = "MetalUnavailable"


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with running(tmp_path_factory.mktemp("no-metal")) as up:
        up.apply(up.tiny_model(), service("kept"))
        up.ready("kept")
        yield up


def test_nothing_starts_without_metal_what_runs_is_kept_and_it_begins_when_metal_is_there(
    system: System, tmp_path: Path
) -> None:
    engine = system.ready("kept")
    say(tmp_path, "metal", "no")
    with standing_in(system, "controller", tmp_path):
        stream = system.stream("kept", tokens=400)
        system.apply(service("late"))
        told = eventually(lambda: REASON in system.told("late") and system.told("late"), what="the refusal")
        assert "metal-supervisor doctor" in told and system.status("late")["phase"] == "Failed"
        assert "default.late" not in system.rpc.table()
        eventually(lambda: system.condition("Degraded", "kept").get("reason") == REASON, what="a word on what runs")
        assert system.pid("kept") == engine and system.slice_ready("kept")
        assert stream.completed(), stream.error

        say(tmp_path, "metal", "yes")
        system.ready("late")
        eventually(lambda: not system.condition("Degraded", "kept"), what="the warning to go")
        assert system.pid("kept") == engine


def test_not_knowing_refuses_nothing(system: System, tmp_path: Path) -> None:
    say(tmp_path, "metal", "nobody knows")
    with standing_in(system, "controller", tmp_path):
        system.apply(service("unknown"))
        system.ready("unknown")


def test_an_engine_that_was_stopped_without_metal_is_refused_too(system: System, tmp_path: Path) -> None:
    say(tmp_path, "metal", "no")
    with standing_in(system, "controller", tmp_path):
        eventually(lambda: system.condition("Degraded", "kept").get("reason") == REASON, what="it to be known")
        system.supervisorctl("stop", "default.kept")
        eventually(lambda: REASON in system.told("kept"), what="the refusal of what does not run any more")
        kept = system.rpc.table().get("default.kept")
        assert kept is None or not kept.pid
        say(tmp_path, "metal", "yes")
        system.ready("kept")
