"""The memory of a soak: a budget into which not everybody fits, and who may wait for want of it.

What a service needs is said here by what was asked for, not by what the system says of itself.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from metal_supervisor.launch import MARK, note_path
from metal_supervisor.memory.budget import Budget
from metal_supervisor.memory.machine_memory import host_budget
from metal_supervisor.memory.refusals import INSUFFICIENT
from metal_supervisor.models.metadata import Reading
from metal_supervisor.runtimes.llama_memory import demand, prompt_cache_mib
from metal_supervisor.spec.gguf import read_header
from metal_supervisor.spec.limits import PRIORITIES
from metal_supervisor.spec.record import Record
from metal_supervisor.spec.sizes import amount
from metal_supervisor.spec.types import Standing
from tests.support.in_memory import InMemory
from tests.support.soak.soak_check import Claim, Engine
from tests.support.soak.soak_plan import ANY, EXTRAS

CALM_CONTEXT = 32768
SPARE_PART = 0.5
"""Of one more service: there is a rest, but it is not enough for that."""
FEW_SHARE = 0.02
"""Of the memory: below that the machine is short of it, whoever else has it."""


@dataclass(frozen=True)
class Want:
    """One InferenceService as it was last asked for."""

    context: int = 4096
    priority: str = "normal"
    replicas: int = 1
    suspended: bool = False
    tokens: int = 100
    cache_mib: int | None = None
    """`--cache-ram`; None: what the system thinks is worth it."""

    @property
    def runs(self) -> bool:
        return self.replicas > 0 and not self.suspended

    @property
    def phase(self) -> str:
        return "Suspended" if self.suspended else "Ready" if self.replicas else "Stopped"


def first_wants() -> dict[str, Want]:
    """What is asked for before anything else."""
    return {name: Want(context=CALM_CONTEXT) if name == "real-calm" else Want() for name in (*ANY, *EXTRAS[:1])}


class Sizes:
    """How much each service needs, and how much there is."""

    def __init__(self, model: Path) -> None:
        content = model.read_bytes()
        self._reading = Reading(len(content), read_header(InMemory(content), len(content)))
        whole = host_budget(1.0, None).total_bytes
        first = sum(self.need_bytes(want) for want in first_wants().values())
        self.fraction = (first + SPARE_PART * self.need_bytes(Want())) / whole
        self.budget: Budget = host_budget(self.fraction, None)

    @property
    def flags(self) -> list[str]:
        """Settings of a system with that budget, on a machine whose other users do not matter."""
        share = str(FEW_SHARE)
        return [
            "--memory-fraction",
            repr(self.fraction),
            "--memory-pressure-warning",
            share,
            "--memory-pressure-critical",
            share,
            "--memory-watchdog-interval",
            "1",
        ]

    def need_bytes(self, want: Want) -> int:
        """What an engine takes that runs as it is wanted."""
        argv = ["--ctx-size", str(want.context), "--parallel", "2"]
        cache = prompt_cache_mib(argv, self._reading) if want.cache_mib is None else want.cache_mib
        found = demand([*argv, "--cache-ram", str(cache)], self._reading, lambda _path: None)
        assert found is not None and found.bytes is not None
        return found.bytes


class Reservations:
    """What is reserved for engine processes, by their launchers' notes, whose paths follow from their environments.

    A note that was lost since is remembered.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, float], int] = {}

    def of(self, engine: Engine) -> int:
        """Bytes, 0 while that cannot be read."""
        try:
            born = engine.pid, engine.started
            if born not in self._known:
                note = json.loads(Path(note_path(psutil.Process(engine.pid).environ()[MARK])).read_bytes())
                if note["pid"] != engine.pid:
                    return 0
                self._known[born] = max(int(note["spec"]["reserved_bytes"]), 0)
            return self._known[born]
        except (psutil.Error, OSError, ValueError, KeyError, TypeError):
            return 0


# ── who waits ────────────────────────────────────────────────────────────────────────────────────


def waits(record: Record) -> str:
    """Why a service, or its latest edit, waits for memory: the message, "" if it does not."""
    if record.verdict.standing is Standing.WAIT and record.verdict.reason == INSUFFICIENT:
        return record.verdict.message
    if record.verdict.standing is Standing.RUN and record.warning and record.warning[0] == INSUFFICIENT:
        return record.warning[1]
    return ""


def claims(wanted: Mapping[str, Want], records: Mapping[str, Record], sizes: Sizes) -> list[Claim]:
    """Everybody's claim to memory at a quiet moment, by name; `records` by program."""
    found = []
    for name, want in sorted(wanted.items()):
        record = records.get(f"default.{name}")
        if want.runs and record is not None:
            holds = record.reserved_bytes if record.verdict.standing is Standing.RUN else 0
            found.append(
                Claim(
                    name,
                    PRIORITIES[want.priority],
                    record.queued_at or 0.0,
                    sizes.need_bytes(want),
                    holds,
                    waits=bool(waits(record)),
                    protected=record.protected,
                )
            )
    return found


def untrue(claim: Claim, message: str, claimed: Collection[Claim], budget_bytes: int) -> str:
    """What is wrong with the arithmetic that somebody who waits is told, "" if nothing is."""
    left = budget_bytes - sum(each.holds_bytes for each in claimed)
    true = [
        f"needs {amount(need, 'up')}, {amount(max(room, 0), 'down')} of {amount(budget_bytes)} left"
        for need, room in (
            (claim.need_bytes, left + claim.holds_bytes),
            (max(claim.need_bytes - claim.holds_bytes, 0), left),
        )
    ]
    return "" if any(each in message for each in true) else f"it is told {message!r}, but it {true[0]}"


class Queue:
    """How often somebody had to wait."""

    def __init__(self) -> None:
        self.times = 0
        self.longest = 0
        self._waiting: frozenset[str] = frozenset()

    def look(self, records: Mapping[str, Record]) -> None:
        now = frozenset(program for program, record in records.items() if waits(record))
        self.times += len(now - self._waiting)
        self.longest = max(self.longest, len(now))
        self._waiting = now
