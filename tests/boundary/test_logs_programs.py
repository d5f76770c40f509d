"""A program of ours that cannot go on says why in its log, on a line like any other."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from metal_supervisor.settings.loader import Overrides, save_overrides
from metal_supervisor.settings.logging import entry_in
from metal_supervisor.state.directory import StateDir
from tests.support.pseudo import WITHIN_S, Terminal


def command(tmp_path: Path, **values: Any) -> list[str]:
    state = StateDir(tmp_path / "state")
    state.create()
    bad = tmp_path / "kubeconfig"
    bad.write_text("nonsense: \x1b[2J\n")
    save_overrides(state.path, Overrides("", {"kubeconfig": str(bad), **values}))
    return [sys.executable, "-m", "metal_supervisor", "controller", "--state-dir", str(state.path)]


def test_a_login_that_is_none_is_a_line_of_json(tmp_path: Path) -> None:
    done = subprocess.run(command(tmp_path), capture_output=True, text=True, timeout=60)
    (told,) = map(json.loads, done.stderr.splitlines())
    assert (done.returncode, done.stdout) == (1, "")
    assert (told["level"], told["logger"], told["msg"]) == ("error", "controller", "the program cannot go on")
    assert str(tmp_path / "kubeconfig") in told["why"]


@pytest.mark.parametrize(("form", "is_json"), [("auto", False), ("json", True)])
def test_on_a_terminal_it_is_text_unless_somebody_chose(tmp_path: Path, form: str, is_json: bool) -> None:
    terminal = Terminal(command(tmp_path, log_format=form), columns=1000)
    (line,) = terminal.rest().splitlines()
    assert terminal.process.wait(WITHIN_S) == 1 and line.isprintable()
    assert (entry_in(line) is not None) == is_json and "the program cannot go on" in line
