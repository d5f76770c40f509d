"""supervisord itself, patched: `python -m metal_supervisor.supervisord.daemon`, with its arguments.

Four defects of supervisord are patched. Its logger reports a line it could not write on stderr, which is a file on
the same full disk: that second failure would end supervisord. Its loop takes the list of groups before it serves
its callers, and starts the programs on the list afterwards: a group removed in between would leave an unsupervised
process. At shutdown it takes a second for each group, even one without a process: with a hundred engines, which end
at once, that is longer than launchd waits. A log file that was deleted stays deleted until its program starts again:
it is made again as soon as there is output. And it has the wait of `poller` and the calls of `rpc_plugin`.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any

from supervisor import loggers, options, supervisord
from supervisor.states import ProcessStates

from metal_supervisor.supervisord import rpc_plugin
from metal_supervisor.supervisord.poller import Poller

LOOK_EVERY_S = 5.0
"""Interval at which a log that is written to is checked for a deleted file."""


def reopen_if_deleted(handler: Any) -> None:
    """Make a handler's log file again if it was deleted or replaced; where that fails, the handler stays as it is.

    Not with SIGUSR2: supervisord closes all its logs then, and ends if one cannot be opened, as on a full disk.
    """
    path, now = getattr(handler, "baseFilename", None), time.monotonic()
    if path is None or now < getattr(handler, "looked_at", 0.0) + LOOK_EVERY_S:
        return
    handler.looked_at = now
    with contextlib.suppress(OSError, ValueError):
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(path), os.fstat(handler.stream.fileno())):
                return
        stream = open(path, "ab")  # noqa: SIM115 - as the handler itself has it
        handler.stream.close()
        handler.stream = stream


def main() -> None:
    """Run supervisord."""
    listen = options.ServerOptions.openhttpservers

    def listen_with_ours(own: Any, running: Any) -> None:
        rpc_plugin.add_to(own)
        listen(own, running)

    run = supervisord.Supervisor.runforever

    def run_woken(running: Any) -> None:
        poller = running.options.poller = Poller(running.options.poller, running)
        try:
            run(running)
        finally:
            poller.end()

    emit = loggers.Handler.emit

    def emit_to_file(handler: Any, record: Any) -> None:
        reopen_if_deleted(handler)
        emit(handler, record)

    tell, remove = loggers.Handler.handleError, supervisord.Supervisor.remove_process_group
    stop_next = supervisord.Supervisor.ordered_stop_groups_phase_2

    def tell_if_possible(handler: Any) -> None:
        with contextlib.suppress(OSError):
            tell(handler)

    def remove_for_good(running: Any, name: str) -> Any:
        group = running.process_groups[name]
        done = remove(running, name)
        if done:
            for process in group.processes.values():
                process.spawn = lambda: None
        return done

    def stop_next_that_runs(running: Any) -> None:
        stop_next(running)
        while running.stop_groups:
            group = running.stop_groups[-1]
            for process in group.processes.values():
                if process.state == ProcessStates.BACKOFF:  # one that ended while it was STARTING
                    process.give_up()
            if group.get_unstopped_processes():
                return
            running.stop_groups.pop()

    options.ServerOptions.openhttpservers = listen_with_ours
    supervisord.Supervisor.runforever = run_woken
    loggers.Handler.handleError = tell_if_possible
    loggers.Handler.emit = emit_to_file
    supervisord.Supervisor.ordered_stop_groups_phase_2 = stop_next_that_runs
    supervisord.Supervisor.remove_process_group = remove_for_good
    supervisord.main()


if __name__ == "__main__":
    main()
