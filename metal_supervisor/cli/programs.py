"""The programs that supervisord starts, as commands: controller, sidecar, gateway and the ones beside them."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

from metal_supervisor import launch
from metal_supervisor.cli.command_parser import state_dir
from metal_supervisor.settings import loader
from metal_supervisor.spec.document import mapping
from metal_supervisor.state import gateway_note, own_processes
from metal_supervisor.state.home import StateHome
from metal_supervisor.state.reports import controller_report

PARENT_EVERY_S = 2.0
RECORDS_NAMED = 3
"""Services that one message names."""


def add(commands: Any) -> None:
    """Add a command for each. Without a help text they are internal: neither --help nor completion offers them."""
    for name, program in PROGRAMS.items():
        command = commands.add_parser(name, description=f"the {name}; supervisord starts it")
        command.add_argument("--state-dir", type=state_dir, required=True)
        command.set_defaults(action=program)


class _Stop:
    """Flag that becomes true on TERM or INT, and then calls `wake`."""

    def __init__(self) -> None:
        self._come = False
        self.wake: Callable[[], None] = lambda: None
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, self._on_signal)

    def _on_signal(self, _signum: int, _frame: object) -> None:
        self._come = True
        self.wake()

    def __call__(self) -> bool:
        return self._come


def _program(arguments: argparse.Namespace, outlives: bool = False) -> tuple[loader.Settings, StateHome, str]:
    """(settings, state directory, problem of the settings on file) for a program that supervisord started.

    `outlives`: it survives supervisord, and runs beside the one that the next supervisord starts.
    """
    from metal_supervisor.settings import logging as logs

    gc.freeze()  # each caller has loaded its modules by now; none of them is searched for garbage again
    gc.enable()
    state = Path(arguments.state_dir)
    settings, problem = loader.load_good(state.resolve())
    directory = StateHome(settings.state_path)
    logs.configure(settings.log_level, settings.log_format)
    if problem:
        log = logging.getLogger(arguments.command)
        log.error("settings are wrong; the last good ones stay", extra={"why": problem})
    logs.die_with_threads()
    parent = os.getppid()
    if parent == 1:
        raise own_processes.CannotBoot("supervisord is gone already")
    if outlives:
        own_processes.outlive(directory, arguments.command)
    else:
        _held.append(own_processes.own(directory, arguments.command))
        threading.Thread(target=_follow_parent, args=(parent,), name="parent", daemon=True).start()
    return settings, directory, problem


_held: list[TextIO] = []


def _follow_parent(parent: int) -> None:
    """End this process when its supervisord was killed: the next one starts another."""
    launch.wait_for_exit(parent, launch.start_time(parent))
    while os.getppid() == parent:  # a system may tell of an end early, or not let us watch
        time.sleep(PARENT_EVERY_S)
    os.kill(os.getpid(), signal.SIGTERM)


def _each_pass(stop: Callable[[], bool], settings: loader.Settings) -> Callable[[], bool]:
    """Function for a loop to call before each pass: updates the log's level, and returns True if the loop must end."""
    from metal_supervisor.settings import logging as logs

    level = logs.LogLevel(settings.state_path, settings.log_level)

    def asked() -> bool:
        level.look()
        return stop()

    return asked


def _controller(arguments: argparse.Namespace) -> int:
    from metal_supervisor.cluster.kube import Kube
    from metal_supervisor.controller.loop import Controller
    from metal_supervisor.state.directory import StateDir
    from metal_supervisor.supervisord.client import Supervisord

    stop = _Stop()
    settings, home, problem = _program(arguments)
    directory = StateDir(home.path)
    kube = Kube(settings.kubeconfig_path, settings.context)
    controller = Controller(settings, directory, kube, Supervisord(directory.socket))
    if problem:
        controller.controller_status.tell("settings", problem)
    stop.wake = controller.wake
    controller.run(_each_pass(stop, settings))
    return 0


def _sidecar(arguments: argparse.Namespace) -> int:
    from metal_supervisor.cluster.kube import Kube
    from metal_supervisor.sidecar import exit_messages
    from metal_supervisor.sidecar.http import app, metrics_server, server
    from metal_supervisor.sidecar.loop import Sidecar
    from metal_supervisor.state.directory import StateDir
    from metal_supervisor.supervisord.client import Supervisord

    stop = _Stop()
    settings, home, _ = _program(arguments)
    directory = StateDir(home.path)
    sidecar = Sidecar(
        settings, directory, Kube(settings.kubeconfig_path, settings.context), Supervisord(directory.socket)
    )
    page = app.create_app(sidecar.current, log_of=lambda program: exit_messages.last_lines(directory, program))
    server.serve(page, settings.port)
    if settings.metrics_listen:
        address, port = settings.metrics_address
        scraped = metrics_server.create_app(sidecar.current, directory.key_of, settings.bind_address)
        server.serve(scraped, port, address, metrics_server.TAKEN, server.THREADS + metrics_server.AT_ONCE)
    stop.wake = sidecar.wake
    sidecar.run(_each_pass(stop, settings))
    return 0


def _apiserver(arguments: argparse.Namespace) -> int:
    from metal_supervisor import apiserver

    settings, directory, _ = _program(arguments)
    port, prefix = own_processes.saved_access(directory)
    options = apiserver.Options(
        data_file=settings.state_path / "apiserver.db",
        port=port,
        prefix=prefix,
        crd_paths=tuple(sorted((loader.conf_dir() / "crds").glob("*.yaml"))),
        empty_refused=_recorded(settings.state_path),
    )
    try:
        apiserver.serve(options)
    except apiserver.UnusableData as error:
        raise own_processes.CannotBoot(str(error)) from None
    return 0


def _recorded(state: Path) -> str:
    """Why the embedded API must not serve a file without objects: services of it have records. "" if it may.

    Served, it would mean that all of them were deleted.
    """
    server = str(mapping(controller_report(state), "cluster").get("server"))
    names = sorted(path.stem for path in (state / "records").glob("*.*.json"))
    if not names or not server.startswith("http://127.0.0.1:"):  # a cluster's
        return ""
    more = ", …" if len(names) > RECORDS_NAMED else ""
    return (
        f"{state / 'records'} has services that ran here ({', '.join(names[:RECORDS_NAMED])}{more}): put your copy "
        "back (docs/operations.md, What to keep a copy of), or delete that directory to begin without services; "
        "then `supervisorctl start apiserver`, or start the system"
    )


def _power(arguments: argparse.Namespace) -> int:
    from metal_supervisor.host.power_program import PowerProgram

    stop = _Stop()
    _, directory, _ = _program(arguments)
    program = PowerProgram(directory.path)
    stop.wake = program.wake
    program.run(stop)
    return 0


def _gateway(arguments: argparse.Namespace) -> int:
    from metal_supervisor.gateway import worker
    from metal_supervisor.state.directory import StateDir

    settings, home, _ = _program(arguments, outlives=True)
    return worker.run(settings, StateDir(home.path), _each_pass(lambda: False, settings))


def _gateway_holder(arguments: argparse.Namespace) -> int:
    from metal_supervisor.gateway.holder import SOCKET_FILE, Holder

    stop = _Stop()
    settings, directory, _ = _program(arguments)
    Holder(Path(directory.home) / SOCKET_FILE).run(_each_pass(stop, settings))
    return 0


PROGRAMS: Mapping[str, Callable[[argparse.Namespace], int]] = {
    "controller": _controller,
    "sidecar": _sidecar,
    "apiserver": _apiserver,
    "power": _power,
    **dict.fromkeys(gateway_note.WORKERS, _gateway),
    "gateway-holder": _gateway_holder,
}
"""Programs that supervisord starts."""
