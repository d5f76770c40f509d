"""Processes as supervisord, the launcher, the sidecar and the gateway tell of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from metal_supervisor.spec.document import string
from metal_supervisor.spec.types import Json
from metal_supervisor.spec.withdrawal import NO_WITHDRAWAL, WithdrawalToken


class State(str, Enum):
    """supervisord's process states, by their own names."""

    STOPPED = "STOPPED"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    BACKOFF = "BACKOFF"
    STOPPING = "STOPPING"
    EXITED = "EXITED"
    FATAL = "FATAL"
    UNKNOWN = "UNKNOWN"


LIVE = frozenset({State.STARTING, State.RUNNING, State.STOPPING})
"""States in which supervisord has a process."""


@dataclass(frozen=True)
class ProgramState:
    """One row of supervisord's process table."""

    name: str
    state: State
    pid: int
    """0 when there is no process."""
    start: float
    """Unix time of the last spawn, 0 if never."""
    stop: float
    """Unix time of the last exit or stop, 0 if there was none."""


@dataclass(frozen=True)
class Diff:
    """Result of `reloadConfig`: the differences between the files and the active groups."""

    added: frozenset[str] = frozenset()
    changed: frozenset[str] = frozenset()
    removed: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.names)

    @property
    def names(self) -> frozenset[str]:
        """Every program that differs."""
        return self.added | self.changed | self.removed


@dataclass(frozen=True)
class RunNote:
    """The launcher's note of a program's latest start (`runs/*.json`)."""

    pid: int
    """The engine itself, which a stand-in only represents."""
    launcher_pid: int
    """The program's pid according to supervisord; differs from `pid` for a stand-in."""
    started: str
    """Identity of the process start, comparable only for equality."""
    spec: Json
    """The spec that it was started from; {} if that is not known."""
    starts: tuple[float, ...]
    """Unix times of the recent starts that count towards a crash loop."""
    not_before: float
    """Unix time before which the launcher refuses to start, 0 if it does not."""
    refused: str
    """Reason why the last attempt to start was refused, e.g. `PortInUse`; "" if it was not."""
    refused_message: str
    confined: bool = False
    """The operating system confines it to its policy."""
    session: int = 0
    """Session that its processes cannot leave, 0 where they can."""
    restored: bool = False
    """The note was lost and made again at a boot: whether the engine is confined is not known."""

    @property
    def edition(self) -> str:
        """Edition of its spec, "" if that is not known."""
        return string(self.spec, "edition")

    @property
    def asked(self) -> str:
        """`Service.asked` of the request that its spec answers, "" if that is not known."""
        return string(self.spec, "asked")


@dataclass(frozen=True)
class Observed:
    """Observed state of one program, written by the sidecar (`observed/*.json`)."""

    program: str
    pid: int
    ready: bool
    since: float
    """Unix time of the last change of `ready`."""
    state: str
    """State of the process according to supervisord."""
    message: str = ""
    withdrawn: WithdrawalToken = NO_WITHDRAWAL
    """The withdraw token that has been carried out."""
    restarts: int = 0
    """Unplanned starts, one after the first of each row that the launcher notes."""
    counted_start: float = 0.0
    """Unix time of the latest start that `restarts` knows of."""
    last_exit: str = ""
    """E.g. `exit status 1`, `terminated by SIGKILL`."""
    failing: str = ""
    """Request (`EngineRun.asked`) whose engine crashed until it was held, and has not served since; "" if none."""
    published: str = ""
    """Last failure to publish in the cluster, "" when in order."""
    busy: bool = False
    """It still has requests running; asked once it is to be withdrawn."""
    drained: WithdrawalToken = NO_WITHDRAWAL
    """The withdraw token after which it was seen idle."""
    served: bool = False
    """This process has been ready before."""
    hung: str = ""
    """Reason why this process should be restarted, "" if it should not."""
    memory_bytes: int = 0
    """Measured memory footprint, with its children; 0 if it is not known."""
    confined: bool | None = None
    """The operating system confines this process to its policy; None if that is not known."""
    exits: dict[str, int] = field(default_factory=dict)
    """Exits of its engine, counted by reason: `stopped` if it was to stop, else `exit_1`, `SIGKILL` …"""
    model_name: str = ""
    """Name of its own that the engine wants in requests, "" if it takes the service's, or if that is not known."""
    acceleration: dict[str, str | int] = field(default_factory=dict)
    """`status.acceleration` of this process, {} if it does not say what it has on the GPU."""
    wakes: dict[str, float] = field(default_factory=dict)
    """On demand, its latest loads: UTC time at which it was asked for -> seconds until it was ready."""

    def to_decide_by(self, reserved_bytes: int) -> tuple[object, ...]:
        """The fields that the controller decides by and has from the sidecar alone; the rest is for people.

        `reserved_bytes`: of its record, which count if they are more than it holds.
        """
        word = "" if self.state in (State.STARTING.value, State.RUNNING.value) else self.state
        held = max(self.memory_bytes, reserved_bytes)
        return word, self.ready, self.served, self.hung, held, self.withdrawn, self.drained, self.busy


@dataclass(frozen=True)
class EngineUse:
    """Use of one engine, through the gateway."""

    waiting: int = 0
    """Requests held until it is ready."""
    in_flight: int = 0
    """Requests sent to it, and not answered yet."""
    used_at: float = 0.0
    """Unix time of the latest request, or of the end of its answer; 0 without one."""
    withdrawn: WithdrawalToken = NO_WITHDRAWAL
    """The withdrawal since which it has been sent nothing."""


UNUSED = EngineUse()
