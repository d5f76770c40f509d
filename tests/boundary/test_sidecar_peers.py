"""Peers that the controller calls silent: a report from before this sidecar's time says nothing of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from metal_supervisor.settings.loader import Settings
from metal_supervisor.sidecar import loop
from metal_supervisor.sidecar.loop import Sidecar
from metal_supervisor.state.directory import StateDir
from tests.boundary.test_failure_registrar import Cluster

SILENT = ("default", "mac-b")


def test_an_old_report_takes_no_peer_out_and_neither_does_one_that_has_stood_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = StateDir(tmp_path / "state")
    state.create()
    cluster: Any = Cluster()
    supervisord: Any = None
    settings = Settings(state_dir=str(state.path), node_name="mac-a", kubeconfig="x")
    sidecar = Sidecar(settings, state, cluster, supervisord)

    def silent(at: float) -> tuple[tuple[str, str], ...]:
        return sidecar._around([], {"at": at, "silent": [list(SILENT)]}).silent

    assert silent(100.0) == () == silent(100.0), "yesterday's"
    assert silent(200.0) == (SILENT,)
    monkeypatch.setattr(sidecar, "_heard_of", lambda _told: loop.time.monotonic() - loop.NEWS_S - 1)
    assert silent(200.0) == (), "the controller hangs"
