"""What the controller wrote in a pass reaches its readers, also if the pass fails afterwards."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from metal_supervisor.controller.loop import Controller
from metal_supervisor.launch import NOW
from metal_supervisor.settings.loader import Settings
from metal_supervisor.state.directory import StateDir
from metal_supervisor.state.doorbell import Doorbell
from tests.boundary.test_many_stops import record
from tests.boundary.test_placement import NoKube


@pytest.mark.parametrize("error", [OSError("full"), ValueError("a programming error")])
def test_what_a_pass_wrote_before_it_failed_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    state = StateDir(tmp_path / "state")
    state.create()
    nothing: Any = None
    kube: Any = NoKube()
    controller = Controller(Settings(state_dir=str(state.path)), state, kube, nothing, lambda: True)
    for part in ("services", "models", "placement", "memory", "metal"):
        monkeypatch.setattr(controller, part, SimpleNamespace(start=lambda: None))
    bells = [Doorbell(state.path, name) for name in ("sidecar", "gateway")]
    made = record("new")
    controller.records = {made.key: made}

    def failing() -> float:
        assert controller._keep_records([made]) == {made.program}
        raise error

    monkeypatch.setattr(controller, "one_pass", failing)
    rounds = iter([False, True])
    controller.run(lambda: next(rounds))
    assert [os.read(bell.fileno(), 10) for bell in bells] == [NOW, NOW]
