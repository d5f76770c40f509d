"""The naps of tests/support/delays.py: they are where they are meant to be, and calls do what they did."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.support import delays

SHOWN = """
import json, os, queue, socket, threading
box = queue.Queue()
box.put(1)
print(json.dumps([os.rename.__name__, socket.socket.recv.__name__, threading.Event().set.__name__, box.get()]))
"""


def shown(first: str) -> list[object]:
    """What a new process says after a line of its own."""
    command = [sys.executable, "-I", "-S", "-c", first + SHOWN]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    found: list[object] = json.loads(done.stdout)
    return found


def test_a_program_takes_naps_from_its_first_line_on_and_only_if_told() -> None:
    assert shown(delays.line("7")) == ["napping", "napping", "napping", 1]
    if not delays.SEED:
        assert shown("") == ["rename", "recv", "set", 1]
