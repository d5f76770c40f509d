"""Workflows of GitHub, held against what GitHub takes: by actionlint, because nothing here runs them."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.support import parts
from tests.support.system import ROOT

from tests.support.finders.find_actionlint import find  # isort: skip

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def problems(*paths: Path) -> str:
    """What actionlint says, "" if nothing; without checkers of the shell and of Python, which may be on PATH or not."""
    command = [str(parts.found(find)), "-no-color", "-shellcheck=", "-pyflakes=", *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return done.stdout + done.stderr if done.returncode else ""


def test_every_workflow_is_one_that_github_takes() -> None:
    assert WORKFLOWS and problems(*WORKFLOWS) == ""


def test_a_broken_one_is_seen(tmp_path: Path) -> None:
    broken = tmp_path / "macos.yml"
    text = WORKFLOWS[0].read_text()
    for old, new, why in (
        ("macos-latest", "macos-newest", 'label "macos-newest" is unknown'),
        ("${{ matrix.os }}", "${{ matrix.oz }}", 'property "oz" is not defined'),
        ("timeout-minutes", "timeout-minute", 'unexpected key "timeout-minute"'),
    ):
        assert old in text
        broken.write_text(text.replace(old, new))
        assert why in problems(broken)
