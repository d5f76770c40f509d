"""`metal-supervisor run` on a terminal while a model comes: one line that moves; off a terminal no such thing."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from pathlib import Path

from tests.support.hub import Hub
from tests.support.system import System, eventually, model, running, service

ERASED = "\x1b[2K"
GAUGE = 'metal_supervisor_model_download_bytes{model="tiny",namespace="default"}'
BAR = r"default\.tiny [^\n]*\d+%"
STYLE = r"\x1b\[[0-9;]*m"


def raw(system: System) -> str:
    """What it printed, with what moves the cursor and without colors."""
    return re.sub(STYLE, "", system.log.read_bytes().decode())


@contextlib.contextmanager
def on_a_terminal(system: System) -> Iterator[System]:
    """The system started on a terminal of 100 columns; what that shows is what it said."""
    main, theirs = pty.openpty()
    fcntl.ioctl(main, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    system.process = subprocess.Popen(
        [sys.executable, "-m", "metal_supervisor", "run", *system.flags],
        stdout=theirs,
        stderr=theirs,
        stdin=theirs,
        start_new_session=True,
        env={**os.environ, "TERM": "xterm"},
    )
    os.close(theirs)

    def copy() -> None:
        with system.log.open("ab", buffering=0) as log, contextlib.suppress(OSError):  # the other end was closed
            while data := os.read(main, 65536):
                log.write(data)

    reader = threading.Thread(target=copy)
    reader.start()
    try:
        eventually(lambda: system.get("/version"), what=f"the API to answer; {system.said()}")
        yield system
    finally:
        system.close()
        reader.join()
        os.close(main)


def test_a_terminal_shows_how_far_each_download_is_and_then_only_what_happened(tmp_path: Path) -> None:
    base = System(tmp_path)
    with Hub({"o/r": {"tiny.gguf": base.tiny}}) as hub:
        hub.bytes_per_s = base.tiny.stat().st_size / 10
        system = System(tmp_path, "--hf-endpoint", hub.url)
        with on_a_terminal(system):
            system.apply(model(source="hf://o/r/tiny.gguf"), service())
            eventually(lambda: re.search(BAR, raw(system)), 40, "the bar")
            eventually(lambda: GAUGE in system.fetch("/metrics")[1], what="the gauge")
            hub.bytes_per_s = 0.0
            system.ready()
            eventually(lambda: re.search(r"default\.tiny +Ready", system.said()), what="the line of the end")
            eventually(lambda: GAUGE not in system.fetch("/metrics")[1], what="the gauge to go")
            before, _, last = raw(system).rpartition(ERASED)
            assert re.search(BAR, before) and not re.search(BAR, last), "nothing of the bar stays"
            assert len(re.findall(r"s  default\.tiny +Pending", system.said())) <= 4


def test_off_a_terminal_nothing_is_rewritten(tmp_path: Path) -> None:
    base = System(tmp_path)
    with Hub({"o/r": {"tiny.gguf": base.tiny}}) as hub:
        hub.bytes_per_s = base.tiny.stat().st_size / 4
        with running(tmp_path, "--hf-endpoint", hub.url) as system:
            system.apply(model(source="hf://o/r/tiny.gguf"), service())
            system.ready()
            printed = system.log.read_bytes()
            assert b"\x1b" not in printed and b"\r" not in printed
