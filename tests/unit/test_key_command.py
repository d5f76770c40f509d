"""`metal-supervisor key list`, as text and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from metal_supervisor.cli import main


def test_the_list_has_limits_and_never_a_digest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = ["--file", str(tmp_path / "keys")]
    assert main.main(["key", "add", "ci", *file, "--services", "a,team/*", "--per-minute", "5"]) == 0
    capsys.readouterr()
    assert main.main(["key", "list", *file]) == 0
    assert capsys.readouterr().out == "ci services=a,team/* per-minute=5\n"
    assert main.main(["key", "list", *file, "--json"]) == 0
    wanted = [{"name": "ci", "services": ["a", "team/*"], "perMinute": 5, "atOnce": 0}]
    assert json.loads(capsys.readouterr().out) == wanted
