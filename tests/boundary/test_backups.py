"""The store of models is no matter of Time Machine, and no temporary directory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from metal_supervisor.host.commands import Done
from metal_supervisor.models import backups


def test_time_machine_is_told_on_a_mac_and_nobody_elsewhere(tmp_path: Path) -> None:
    ran: list[Any] = []

    def run(argv: Sequence[str], timeout_s: float) -> Done:
        ran.append((argv, timeout_s))
        return Done(0, "", "")

    backups.exclude(tmp_path, run, "darwin")
    assert ran == [(("/usr/bin/tmutil", "addexclusion", str(tmp_path)), backups.TIMEOUT_S)]
    backups.exclude(tmp_path, run, "linux")
    assert len(ran) == 1


def test_a_mac_without_it_fetches_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backups, "TMUTIL", str(tmp_path / "none"))
    backups.exclude(tmp_path, platform="darwin")  # raises nothing


@pytest.mark.parametrize(
    ("path", "temporary"),
    [
        ("/tmp/llmkube-models", True),
        ("/private/tmp/m", True),
        ("/var/folders/xy/T/m", True),
        ("/var/tmp", True),
        ("/Users/Shared/models", False),
        ("/tmpfoo", False),
        ("/home/somebody/tmp", False),
    ],
)
def test_what_the_system_empties_is_known(path: str, temporary: bool) -> None:
    assert backups.is_temporary(Path(path)) is temporary
