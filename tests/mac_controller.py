"""The controller of a Mac, on any machine: whether Metal is there is what a file says, `yes`, `no` or anything else.

`python -m tests.mac_controller STATE FILE`, in the place of the controller that supervisord would start.
"""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path

from metal_supervisor import config, logs
from metal_supervisor.boundary import metal
from metal_supervisor.boundary.kube import Kube
from metal_supervisor.boundary.state import StateDir
from metal_supervisor.boundary.supervisord import Supervisord
from metal_supervisor.controller import Controller

metal.AGAIN_S = 0.05


def main(state: Path, says: Path) -> None:
    """Runs until it is told to end."""
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    logs.configure("info")
    directory = StateDir(state)
    question = {"yes": True, "no": False}
    controller = Controller(
        config.load_saved(state), directory, Kube(state / "kubeconfig"), Supervisord(directory.socket),
        lambda: question.get(says.read_text().strip()),
    )  # fmt: skip
    signal.signal(signal.SIGTERM, lambda *_: (stop.set(), controller.wake()))
    controller.run(stop.is_set)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
