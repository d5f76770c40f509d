"""Peers that the controller calls silent: a report from before this sidecar's time says nothing of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from metal_supervisor.sidecar import loop
from metal_supervisor.sidecar.cluster_context import cluster_context
from tests.boundary.test_failure_registrar import Cluster
from tests.boundary.test_sidecar_leaves import a_sidecar

SILENT = ("default", "mac-b")


def test_an_old_report_takes_no_peer_out_and_neither_does_one_that_has_stood_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sidecar = a_sidecar(tmp_path, Cluster(), kubeconfig="x")

    def silent(at: float) -> tuple[tuple[str, str], ...]:
        return sidecar._cluster_context([], {"at": at, "silent": [list(SILENT)]}).silent

    assert silent(100.0) == () == silent(100.0), "yesterday's"
    assert silent(200.0) == (SILENT,)
    monkeypatch.setattr(sidecar, "_heard_of", lambda _told: loop.time.monotonic() - loop.NEWS_S - 1)
    assert silent(200.0) == (), "the controller hangs"


@pytest.mark.parametrize("told", [5, "ab", {"a": 1}, [["a"], {}], None])
def test_parts_of_the_controllers_report_that_are_malformed_are_ignored(told: Any) -> None:
    found = cluster_context("", [], {"namespaces": told, "silent": told, "cluster": told}, {})
    assert found.silent == () == tuple(found.namespaces) and found.operator is None and not found.cloned
