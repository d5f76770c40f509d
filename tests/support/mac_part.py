"""The controller or the sidecar of a Mac, on any machine, with what the world around it is taken from files.

`python -m tests.support.mac_part controller|sidecar STATE WORLD`, in place of the one that supervisord starts. In the
directory WORLD, each as it is at the moment: `metal` says `yes`, `no` or anything else of the Metal device; `address`
is the one from which the API server is reached; `slept` is for how many seconds the machine has been asleep so far,
which the clocks of a Mac tell, and the wall clock with them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.support.system import System

ROOT = Path(__file__).resolve().parents[2]


def say(world: Path, name: str, text: object) -> None:
    """Makes the world so, in one step."""
    temporary = world / f".{name}"
    temporary.write_text(str(text))
    temporary.replace(world / name)


@contextlib.contextmanager
def standing_in(system: System, part: str, world: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A part of a running system is one of ours until the block ends; then the system's own takes over again."""
    system.supervisorctl("stop", part)
    log_path = system.state / "log" / f"world-{part}.log"
    with log_path.open("ab") as log:
        command = [sys.executable, "-m", "tests.support.mac_part", part, str(system.files.path), str(world)]
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
    try:
        yield process
        assert process.poll() is None, "it has ended by itself"
    except BaseException:
        sys.stderr.write(f"── {log_path.name} ──\n{log_path.read_text()[-4000:]}\n")
        raise
    finally:
        process.terminate()
        process.wait(20)
        system.supervisorctl("start", part)


def main(part: str, state: Path, world: Path) -> None:
    """Runs until it is told to end."""
    from metal_supervisor.host import machine

    def told(name: str, default: str = "") -> str:
        try:
            return (world / name).read_text().strip()
        except FileNotFoundError:
            return default

    real_time, real_route = time.time, machine.route_to
    time.time = lambda: real_time() + float(told("slept", "0"))
    machine.route_to = lambda *where: told("address") or real_route(*where)

    from metal_supervisor.cluster.kube import Kube
    from metal_supervisor.host import sleep_clock
    from metal_supervisor.runtimes import metal_device, setting_checks  # noqa: F401 - completes the settings
    from metal_supervisor.settings import loader, logging
    from metal_supervisor.state.directory import StateDir
    from metal_supervisor.supervisord.client import Supervisord

    clocks = sleep_clock.Clocks(lambda: time.monotonic() + float(told("slept", "0")), time.monotonic)
    sleep_clock.system_clocks = lambda: clocks
    metal_device.AGAIN_S = 0.05
    stop = threading.Event()
    logging.configure("info")
    settings, directory = loader.load_saved(state), StateDir(state)
    kubeconfig = Path(settings.kubeconfig) if settings.kubeconfig else state / "kubeconfig"
    parts = settings, directory, Kube(kubeconfig), Supervisord(directory.socket)
    runs = _sidecar(parts) if part == "sidecar" else _controller(parts, told)
    signal.signal(signal.SIGTERM, lambda *_: (stop.set(), runs.wake()))
    runs.run(stop.is_set)
    os._exit(0)


def _controller(parts: tuple, told: object):  # type: ignore[no-untyped-def, type-arg]
    from metal_supervisor.controller.loop import Controller

    return Controller(*parts, lambda: {"yes": True, "no": False}.get(told("metal")))  # type: ignore[operator]


def _sidecar(parts: tuple):  # type: ignore[no-untyped-def, type-arg]
    from metal_supervisor.sidecar.http import app, server
    from metal_supervisor.sidecar.loop import Sidecar

    sidecar = Sidecar(*parts)
    server.serve(app.create_app(sidecar.current), parts[0].port)
    return sidecar


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
