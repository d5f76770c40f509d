"""The store of models is no matter of Time Machine, and no temporary directory."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from metal_supervisor.models import backups


def test_time_machine_is_told_on_a_mac_and_nobody_elsewhere(tmp_path: Path) -> None:
    ran: list[Any] = []
    command = backups.exclude(tmp_path, lambda *args, **more: ran.append((args, more)), "darwin")
    assert command == ("/usr/bin/tmutil", "addexclusion", str(tmp_path)) and ran[0][0] == (command,)
    assert ran[0][1]["timeout"] == backups.TIMEOUT_S
    assert backups.exclude(tmp_path, lambda *args, **more: ran.append(args), "linux") is None and len(ran) == 1


@pytest.mark.parametrize("error", [FileNotFoundError(2, "x"), subprocess.TimeoutExpired("tmutil", 1)])
def test_a_mac_without_it_fetches_all_the_same(error: Exception, tmp_path: Path) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    assert backups.exclude(tmp_path, fail, "darwin") is None


@pytest.mark.parametrize(
    ("path", "temporary"),
    [
        ("/tmp/llmkube-models", True), ("/private/tmp/m", True), ("/var/folders/xy/T/m", True), ("/var/tmp", True),
        ("/Users/Shared/models", False), ("/tmpfoo", False), ("/home/somebody/tmp", False),
    ],
)
def test_what_the_system_empties_is_known(path: str, temporary: bool) -> None:
    assert backups.is_temporary(Path(path)) is temporary
