"""docs/cli.md says what the commands say of themselves."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import cli_page
import pytest

from metal_supervisor.cli import main
from metal_supervisor.settings import loader

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_is_that_of_the_commands_as_they_are() -> None:
    done = subprocess.run(
        [sys.executable, "tools/cli_page.py", "--check"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_page_that_is_not_is_noticed_and_it_is_said_how_to_mend_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli_page, "PAGE", tmp_path / "cli.md")
    monkeypatch.setattr(sys, "argv", ["cli_page.py"])
    assert cli_page.main() == 0
    cli_page.PAGE.write_text(cli_page.PAGE.read_text() + "\n")
    monkeypatch.setattr(sys, "argv", ["cli_page.py", "--check"])
    assert cli_page.main() == 1 and "run: .venv/bin/python tools/cli_page.py" in capsys.readouterr().err


def test_every_command_is_on_it_with_every_flag_of_its_own() -> None:
    text = cli_page.page()
    for name, parser in main.parser().commands().items():
        section = text.partition(f"\n### `metal-supervisor {name}`\n")[2].partition("\n### ")[0]
        assert section, name
        for action in parser._actions:
            own = not isinstance(action, (argparse._HelpAction, argparse._SubParsersAction))
            if own and action.dest not in loader.FIELDS:
                assert _named(action) in section, action


def _named(action: argparse.Action) -> str:
    return action.option_strings[-1] if action.option_strings else str(action.metavar or action.dest.upper())
