"""`metal-supervisor drain`: what it says, and when it ends. A stand-in answers, or not, for supervisord."""

from __future__ import annotations

from pathlib import Path

import pytest

from metal_supervisor.placement import cordon
from metal_supervisor.state.directory import StateDir
from tests.support.records import a_record


class StandInSupervisord:
    """Stand-in for the client: it answers, or does not."""

    up = True

    def __init__(self, _socket: str) -> None:
        pass

    def answers(self) -> bool:
        return self.up


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StateDir:
    monkeypatch.setattr(cordon, "Supervisord", StandInSupervisord)
    directory = StateDir(tmp_path)
    directory.create()
    return directory


def test_a_record_that_cannot_be_read_is_not_nothing(state: StateDir) -> None:
    state.record_path("default.broken").write_text("{")
    said: list[str] = []
    assert cordon.drain(state, 0.0, said.append) == 1
    assert said[0] == "draining: default.broken" and said[-1].startswith("still here: default.broken;")


def test_a_system_that_does_not_run_hands_nothing_over(state: StateDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StandInSupervisord, "up", False)
    state.write_record(a_record())
    said: list[str] = []
    assert cordon.drain(state, 0.0, said.append) == 3
    assert "nothing runs here" in said[0] and not any("keeps serving" in line for line in said)
    assert state.cordoned() == "drain", "it starts drained"


def test_a_system_with_nothing_on_it_is_drained_at_once(state: StateDir) -> None:
    said: list[str] = []
    assert cordon.drain(state, 0.0, said.append) == 0
    assert said[0] == "draining: nothing runs here" and said[-1].startswith("drained;")
