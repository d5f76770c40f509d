"""docs/metal-supervisor.1 is that of the commands, and roff takes it."""

from __future__ import annotations

import re
import shutil
import subprocess

import man_page
import pytest

from metal_supervisor.cli.command_parser import GROUPS


def test_it_is_that_of_the_commands() -> None:
    assert man_page.PAGE.read_text("utf-8") == man_page.page(), "run: .venv/bin/python tools/man_page.py"


def test_roff_takes_it_and_prints_every_command() -> None:
    groff = shutil.which("groff")
    if groff is None:
        pytest.skip("groff is not installed; apt-get install groff-base")
    command = [groff, "-man", "-ww", "-Tascii", "-P-c", str(man_page.PAGE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0 and not done.stderr
    found = re.sub(".\x08", "", done.stdout)  # bold is a letter struck twice
    assert all(name in found for names in GROUPS.values() for name in names)


def test_text_is_text() -> None:
    assert man_page._escaped(".TH a\\b -x") == "\\&.TH a\\eb \\-x"
