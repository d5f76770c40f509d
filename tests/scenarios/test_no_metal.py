"""A Mac whose process sees no Metal device: nothing starts there, what runs goes on, until there is one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from metal_supervisor import boot
from metal_supervisor.core.types import State
from tests.mac_part import say, standing_in
from tests.system import System, eventually, kill, running, service

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


def test_a_stop_by_hand_is_remembered_through_a_time_without_metal(system: System, tmp_path: Path) -> None:
    engine = system.ready("kept")
    system.supervisorctl("stop", "default.kept")
    eventually(lambda: "StoppedByHand" in system.told("kept"), what="the stop to be told")
    say(tmp_path, "metal", "no")
    with standing_in(system, "controller", tmp_path):
        eventually(lambda: system.condition("Degraded", "kept").get("reason") == REASON, what="it to be known")
        say(tmp_path, "metal", "yes")
        eventually(lambda: not system.condition("Degraded", "kept"), what="Metal to be there")
        assert "StoppedByHand" in system.told("kept") and not system.pid("kept")
        system.supervisorctl("start", "default.kept")
        assert system.ready("kept") != engine


def test_an_engine_that_has_ended_without_metal_is_not_started_again_on_the_cpu(system: System, tmp_path: Path) -> None:
    def crash() -> bool:
        with contextlib.suppress(ProcessLookupError):
            if pid := system.pid("kept"):
                kill(pid)
        return system.rpc.table()["default.kept"].state is State.FATAL

    system.ready("kept")
    system.supervisorctl("stop", "controller")  # else it starts the engine again when that is due
    eventually(crash, 30, "supervisord to give up on it")
    say(tmp_path, "metal", "no")
    with standing_in(system, "controller", tmp_path):
        eventually(lambda: REASON in system.told("kept"), what="the refusal of what does not run any more")
        eventually(lambda: "default.kept" not in system.rpc.table(), what="its program to be gone")
        say(tmp_path, "metal", "yes")
        system.ready("kept", 60)


def test_what_a_boot_without_metal_held_back_is_started_by_the_controller_and_not_taken_for_stopped(
    tmp_path: Path,
) -> None:
    with running(tmp_path) as system:
        system.apply(system.tiny_model(), service("tiny"))
        before = system.ready()
        system.stop()
        boot._hold_without_metal(system.files, lambda: False, lambda _: None)
        assert "autostart=false" in system.files.section_text("default.tiny")
        system.start()
        assert system.ready() != before
        eventually(lambda: "autostart=true" in system.files.section_text("default.tiny"), what="it to be as before")
