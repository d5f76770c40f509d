"""A pass that fails: what it wrote reaches its readers, and what it left undone is done by the next one."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from metal_supervisor.controller.loop import Controller
from metal_supervisor.controller.plan import Action, Step
from metal_supervisor.launch import NOW
from metal_supervisor.memory.ledger import Decision, Ledger
from metal_supervisor.settings.loader import Settings
from metal_supervisor.state.directory import StateDir
from metal_supervisor.state.doorbell import Doorbell
from tests.boundary.test_many_stops import record
from tests.boundary.test_placement import NoKube


@pytest.fixture
def controller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Controller:
    """One without a cluster and a supervisord."""
    state = StateDir(tmp_path / "state")
    state.create()
    nothing: Any = None
    kube: Any = NoKube()
    controller = Controller(Settings(state_dir=str(state.path)), state, kube, nothing, lambda: True)
    for part in ("services", "models", "placement", "memory", "metal"):
        monkeypatch.setattr(controller, part, SimpleNamespace(start=lambda: None))
    made = record("new")
    controller.records = {made.key: made}
    return controller


@pytest.mark.parametrize("error", [OSError("full"), ValueError("a programming error")])
def test_what_a_pass_wrote_before_it_failed_is_told(
    controller: Controller, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    bells = [Doorbell(controller.state.path, name) for name in ("sidecar", "gateway")]
    (made,) = controller.records.values()

    def failing() -> float:
        assert controller._keep_records([made]) == {made.program}
        raise error

    monkeypatch.setattr(controller, "one_pass", failing)
    rounds = iter([False, True])
    controller.run(lambda: next(rounds))
    assert [os.read(bell.fileno(), 10) for bell in bells] == [NOW, NOW]


def test_it_is_in_a_hurry_while_somebody_waits(controller: Controller, monkeypatch: pytest.MonkeyPatch) -> None:
    def decided(*decisions: Decision) -> None:
        ledger = Ledger(0, {("default", str(number)): each for number, each in enumerate(decisions)})
        monkeypatch.setattr(controller, "memory", SimpleNamespace(ledger=ledger))

    decided(Decision(True))
    assert not controller._is_awaited([]) and not controller._is_awaited([Step(Action.ADD, "a", "new")])
    assert controller._is_awaited([Step(Action.ADD, "a", "new"), Step(Action.WAIT, "b", "its turn")])
    decided(Decision(True), Decision(False, "InsufficientMemory"))
    assert controller._is_awaited([])
