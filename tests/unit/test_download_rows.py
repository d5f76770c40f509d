"""Downloads in the controller's report, as metrics and /status have them."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from metal_supervisor.sidecar import board
from metal_supervisor.sidecar.http.metrics import Exposition
from metal_supervisor.spec.types import ModelFile
from metal_supervisor.state.downloads import Download, downloads


def told(**files: ModelFile) -> dict[str, Any]:
    """A report; `default_tiny=…` is the Model default/tiny."""
    return {
        "models": {
            name.replace("_", "/"): {"uid": "u", "generation": 1, "source": "https://h/m?token=x", "file": asdict(file)}
            for name, file in files.items()
        }
    }


COMING = ModelFile("Downloading", message="25 % of 400 B", got_bytes=100, total_bytes=400)


def scrape(report: dict[str, Any]) -> list[str]:
    text = Exposition().render(board.Board(controller=report))[0].decode()
    return [line for line in text.splitlines() if "model_download" in line and not line.startswith("#")]


def test_what_is_not_whole_is_told_by_name() -> None:
    found = downloads(told(default_b=COMING, default_a=ModelFile("Failed", message="no"), x_y=ModelFile("Ready", "/m")))
    assert [(each.key, each.phase, each.under_way) for each in found] == [
        (("default", "a"), "Failed", False),
        (("default", "b"), "Downloading", True),
    ]
    assert found[1] == Download("default", "b", "https://h/m?token=x", "Downloading", 100, 400, "25 % of 400 B")


@pytest.mark.parametrize(
    "report",
    [
        {},
        {"models": None},
        {"models": []},
        {"models": {"a/b": None}},
        {"models": {"a/b": {"file": "x"}}},
        {"models": {"a/b": {"file": {"phase": ["Downloading"]}}}},
    ],
)
def test_a_report_of_another_version_says_nothing(report: dict[str, Any]) -> None:
    assert downloads(report) == ()
    assert board.status(board.Board(controller=report))["downloads"] == []


def test_counts_of_another_version_are_none() -> None:
    row = {"file": {"phase": "Downloading", "got_bytes": "many", "total_bytes": -1}}
    (found,) = downloads({"models": {"a/b": row}})
    assert (found.got_bytes, found.total_bytes) == (0, 0)


def test_status_has_downloads_without_their_source() -> None:
    body = board.status(board.Board(controller=told(default_tiny=COMING)))
    assert body["downloads"] == [
        {
            "namespace": "default",
            "model": "tiny",
            "phase": "Downloading",
            "gotBytes": 100,
            "totalBytes": 400,
            "message": "25 % of 400 B",
        }
    ]
    assert "token" not in str(body["downloads"])


def test_gauges_follow_a_download_and_go_with_it() -> None:
    assert scrape(told(default_tiny=COMING)) == [
        'metal_supervisor_model_download_bytes{model="tiny",namespace="default"} 100.0',
        'metal_supervisor_model_download_total_bytes{model="tiny",namespace="default"} 400.0',
    ]
    for over in (ModelFile("Ready", "/m.gguf"), ModelFile("Failed", message="404"), ModelFile("Pending")):
        assert scrape(told(default_tiny=over)) == []


def test_a_size_that_nobody_knows_has_no_gauge() -> None:
    assert scrape(told(default_tiny=ModelFile("Downloading", got_bytes=7))) == [
        'metal_supervisor_model_download_bytes{model="tiny",namespace="default"} 7.0'
    ]
