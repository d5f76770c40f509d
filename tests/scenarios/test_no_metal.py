"""A Mac whose process sees no Metal device: nothing starts there, what runs goes on, until there is one."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from metal_supervisor.controller import boot, plan
from metal_supervisor.settings import loader
from metal_supervisor.settings.loader import Overrides
from metal_supervisor.spec.processes import State
from tests.support.engines import Stopwatch
from tests.support.faults import Figure, fault
from tests.support.mac_part import say, standing_in
from tests.support.system import System, eventually, kill, running, service

REASON = "MetalUnavailable"


def fatal(system: System) -> bool:
    """Ends the engine once more; whether supervisord has given up on it."""
    with contextlib.suppress(ProcessLookupError):
        if pid := system.pid("kept"):
            kill(pid)
    return system.rpc.table()["default.kept"].state is State.FATAL


def told(system: System) -> dict[str, Any]:
    """The controller's report."""
    return dict(json.loads((system.state / "controller.json").read_text()))


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with running(tmp_path_factory.mktemp("no-metal")) as up:
        up.apply(up.tiny_model(), service("kept"))
        up.ready("kept")
        yield up


@fault(
    "H1",
    "this Mac's processes see no Metal device, as in a virtual machine; later there is one",
    happens="nothing starts on the processor; what runs and its answer go on; what waited starts by itself",
    sees="Failed, MetalUnavailable, and `metal-supervisor doctor`; what runs is Degraded with the same word",
    bound="0 bytes lost; 30 s from Metal to Ready",
)
def test_nothing_starts_without_metal_what_runs_is_kept_and_it_begins_when_metal_is_there(
    system: System, tmp_path: Path, figure: Figure
) -> None:
    engine = system.ready("kept")
    say(tmp_path, "metal", "no")
    with standing_in(system, "controller", tmp_path):
        stream = system.stream("kept")
        watch = Stopwatch(figure)
        system.apply(service("late"))
        word = watch.when(
            "apply to verdict",
            lambda: eventually(lambda: REASON in system.told("late") and system.told("late"), what="the refusal"),
        )
        assert "metal-supervisor doctor" in word and system.status("late")["phase"] == "Failed"
        assert "default.late" not in system.rpc.table()
        eventually(lambda: system.condition("Degraded", "kept").get("reason") == REASON, what="a word on what runs")
        assert system.pid("kept") == engine and system.slice_ready("kept")
        assert stream.completed(), stream.error

        figure.add("answers cut", 0, "")
        watch = Stopwatch(figure)
        say(tmp_path, "metal", "yes")
        watch.when("Metal to Ready", lambda: system.ready("late"))
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
    system.ready("kept")
    system.supervisorctl("stop", "controller")  # else it starts the engine again when that is due
    eventually(lambda: fatal(system), 30, "supervisord to give up on it")
    say(tmp_path, "metal", "no")
    with standing_in(system, "controller", tmp_path):
        eventually(lambda: REASON in system.told("kept"), what="the refusal of what does not run any more")
        record = system.files.record_of("default.kept")
        assert record is not None and record.runs and record.edition, "it keeps its place, and would survive a reboot"
        assert not system.pid("kept")
        say(tmp_path, "metal", "yes")
        system.ready("kept", 60)


def test_what_a_boot_without_metal_held_back_is_started_by_the_controller_and_not_taken_for_stopped(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = system.ready("kept")
    system.stop()
    monkeypatch.setattr(boot.metal_device, "question_of", lambda _settings: lambda: False)
    said: list[str] = []
    boot.prepare(loader.load_saved(system.state), Overrides(), said.append)
    assert any("no Metal device" in line for line in said)
    assert "autostart=false" in system.files.section_text("default.kept")
    monkeypatch.undo()
    system.start()  # on Linux nobody asks, so its own controller starts what was held
    assert system.ready("kept") != before
    eventually(lambda: "autostart=true" in system.files.section_text("default.kept"), what="it to be as before")


def test_with_the_api_away_nothing_is_started_without_metal_either(system: System, tmp_path: Path) -> None:
    system.ready("kept")
    system.supervisorctl("stop", "controller", "apiserver")
    eventually(lambda: fatal(system), 30, "supervisord to give up on it")
    due = plan.retry_at(system.files.run_note("default.kept"), system.rpc.table()["default.kept"], time.time())
    say(tmp_path, "metal", "no")
    with standing_in(system, "controller", tmp_path):
        eventually(lambda: told(system).get("metal") == "absent", what="it to be known")
        eventually(lambda: told(system).get("at", 0.0) > due, 60, "a pass after the pause")
        assert system.rpc.table()["default.kept"].state is State.FATAL
        say(tmp_path, "metal", "yes")
        eventually(lambda: system.pid("kept") != 0, 30, "it to be started once Metal is there")
        system.supervisorctl("start", "apiserver")
        system.ready("kept")
