"""What the scenarios about supervisord share: an engine that streams meanwhile, and looks at the process table."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator

from tests.support.faults import Figure
from tests.support.system import ISVC, System, eventually


@contextlib.contextmanager
def streaming(system: System, figure: Figure) -> Iterator[None]:
    """Meanwhile an engine streams: its answers end whole, and it is the same one afterwards."""
    engine, restarts = system.ready(), system.observe()["restarts"]
    stream = system.stream()
    yield
    assert stream.completed(), f"{stream.chunks} chunks, {stream.error}"
    assert system.pid() == engine
    assert system.slice_ready() is True
    figure.add("engine restarts", system.observe()["restarts"] - restarts, "")


def engines_of(system: System, name: str) -> list[int]:
    """Every engine process of one service."""
    return [
        pid
        for pid, command in system.commands().items()
        if "--alias" in command and command[command.index("--alias") + 1].split(",")[0] == name
    ]


def taken(system: System, name: str) -> bool:
    """Whether the controller has the latest edit."""
    record = json.loads(system.files.record_path(f"default.{name}").read_text())
    return bool(record["generation"] == system.get(f"{ISVC}/{name}")["metadata"]["generation"])


def in_table(system: System, name: str) -> str:
    row = system.rpc.table().get(f"default.{name}")
    return row.state.value if row else ""


def gone(system: System, *names: str) -> None:
    for name in names:
        system.delete(name)
    eventually(lambda: not any(in_table(system, name) for name in names), 30, "the programs to be gone")


def with_context(system: System, name: str, size: int) -> int:
    """Pid of the only engine of a service, if it has this context size, else 0."""
    for pid, command in system.commands().items():
        if "--ctx-size" in command and command[command.index("--ctx-size") + 1] == str(size):
            return pid if engines_of(system, name) == [pid] else 0
    return 0
