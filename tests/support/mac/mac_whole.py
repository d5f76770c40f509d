#!/usr/bin/env python3
"""From a checkout to an answer and back, as a new user goes: `make run`, then an installation, then none.

Each answers a chat, and again after kill -9 of each of its processes; the engine outlives all others. On a Mac it must
use Metal. For a machine that has no other use, such as a hosted Mac: it installs into this user's home directory, and
refuses where an installation is already.

    python -m tests.support.mac.mac_whole
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parents[3]

if TYPE_CHECKING:
    from tests.support.system import System

ENGINE = "the engine"
SUPERVISORD = "supervisord"
READY_S = 180.0
BACK_S = 90.0
MAKE_S = 900.0
METAL = "MTL0", "ggml_metal"
"""Either is in the log of a llama-server that computes on Metal."""


def say(text: str) -> None:
    print(f"mac_whole: {text}", flush=True)


@contextlib.contextmanager
def make_run(checkout: Path, base: Path, environ: Mapping[str, str]) -> Iterator[System]:
    """`make run` in a checkout, ended by what a terminal's Ctrl-C does; `base`: a directory for its output."""
    from tests.support.system import System, eventually

    system = System(base, state=checkout / ".run")
    ports = f"{system.ports.start}-{system.ports.stop - 1}"
    with system.log.open("wb") as log:
        process = subprocess.Popen(
            ["make", "run", f"PORT={system.http}", f"ARGS=--ports {ports}"],
            cwd=checkout,
            env=dict(environ),
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    try:
        eventually(lambda: "default.tiny             Ready" in system.said(), READY_S, f"Ready; {system.said()}")
        yield system
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGINT)
        process.wait(BACK_S)
        system.close()


@contextlib.contextmanager
def installed(state: Path, base: Path) -> Iterator[System]:
    """An installation under launchd with an API of its own, and a model in it; `base`: a directory for the model."""
    from tests.support.system import System, eventually, service

    base.mkdir()
    system = System(base, state=state)
    flags = f"--port {system.http} --ports {system.ports.start}-{system.ports.stop - 1}"
    make("install-metal-agent", "EMBEDDED=1", f"ARGS={flags}")
    try:
        eventually(lambda: system.health()[0] == 200, READY_S, "the sidecar to answer")
        system.apply(system.tiny_model(), service())
        system.ready(within_s=READY_S)
        yield system
    finally:
        make("uninstall-metal-agent")
        system.close()


def make(*arguments: str) -> None:
    """Runs make in this checkout. Raises CalledProcessError."""
    say(f"make {' '.join(arguments)}")
    subprocess.run(["make", *arguments], cwd=ROOT, check=True, timeout=MAKE_S)


def answers(system: System) -> str:
    """One chat; on a Mac, of an engine on Metal."""
    answer = system.chat()
    assert "hello world" in answer, answer
    log = (system.state / "log" / "default.tiny.log").read_text(errors="replace")
    assert sys.platform != "darwin" or any(word in log for word in METAL), f"not on Metal:\n{log[-3000:]}"
    return answer


def killed(system: System) -> list[str]:
    """Kills each process once, and waits until a chat is answered again; what was killed."""
    from tests.support.system import eventually, kill

    def pid(name: str) -> int:
        if name == SUPERVISORD:
            return system.supervisord_pid()
        return system.pid() if name == ENGINE else system.own_pid(name)

    own = [name for name, row in system.rpc.table().items() if "." not in name and row.pid]
    names = [ENGINE, *own, SUPERVISORD]
    for name in names:
        before, engine = pid(name), system.pid()
        kill(before)
        eventually(lambda name=name, before=before: pid(name) not in (0, before), BACK_S, f"{name} to be back")
        eventually(lambda: system.pid() and "hello world" in system.chat(), BACK_S, f"an answer after {name}'s end")
        if name != ENGINE:
            eventually(lambda engine=engine: system.pid() == engine, BACK_S, f"the engine to outlive {name}")
        say(f"{name} was killed, and all is well again")
    return names


def main() -> int:
    """The command line."""
    if len(sys.argv) > 1:
        print(__doc__, file=sys.stderr)
        return 0 if sys.argv[1:] in (["-h"], ["--help"]) else 2
    if sys.platform != "darwin":
        print("mac_whole: this is for a Mac; here, make run and make test", file=sys.stderr)
        return 2
    state = Path.home() / ".metal-supervisor"
    if state.exists():
        print(f"mac_whole: {state} is there already; this is for a Mac that has no other use", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="mac-whole-") as directory:
        with make_run(ROOT, Path(directory), os.environ) as system:
            say(f"make run answers: {answers(system)}")
            killed(system)
        assert "nothing is left running" in system.said(), system.said()
    # In the home directory, because an installation reads no model from temporary ones.
    with tempfile.TemporaryDirectory(prefix="mac-whole-", dir=Path.home()) as directory:
        with installed(state, Path(directory) / "base") as system:
            say(f"the installation answers: {answers(system)}")
            killed(system)
        assert system.processes() == [], system.processes()
    return 0


if __name__ == "__main__":
    sys.exit(main())
