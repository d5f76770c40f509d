"""The services of this Mac as the gateway sees them: read from the records and the sidecar's observations."""

from __future__ import annotations

import functools
import itertools
import time

from metal_supervisor.cluster.report import report
from metal_supervisor.gateway.routing import Backend, ServiceTable
from metal_supervisor.host import processes
from metal_supervisor.host.local_status import asked_at
from metal_supervisor.runtimes.llama_memory import demands
from metal_supervisor.settings.loader import Settings
from metal_supervisor.spec import first_request
from metal_supervisor.spec.document import items
from metal_supervisor.spec.hosts import in_url
from metal_supervisor.spec.processes import Observed
from metal_supervisor.spec.record import Record
from metal_supervisor.spec.types import Json, Standing
from metal_supervisor.state.directory import StateDir
from metal_supervisor.state.throttle import Throttle

LLAMA = "llama-server"
"""It serves one model under any name. Other runtimes want their own name for it."""
CONTEXT_FLAGS = ("--context", "--max-model-len")
MOST_DIGITS = 18
"""Of a context."""
SHARE = 0.2
"""Share of a core that many readings in a row may take."""
LONGEST_PAUSE_S = 0.5
"""Longest pause between two readings."""
CHECKING = "Checking"
"""Reason of a service whose prerequisites are looked at, which is over soon."""


class BackendReader:
    """Reads the state directory, and keeps what was read last."""

    def __init__(self, settings: Settings, directory: StateDir) -> None:
        self._bind, self._state = settings.bind_address, directory
        self._throttle = Throttle(SHARE, LONGEST_PAUSE_S)
        self.services = ServiceTable()
        self.read_at = 0.0
        """Monotonic time of the last reading."""
        self.next_at = 0.0
        """Monotonic time of the next one: the sidecar rings for each file that it writes."""

    def read(self) -> None:
        """Read all records and observations; unchanged files cost a stat each. Runs in a thread."""
        self._throttle.begin()
        observed = self._state.observations()
        # A record that cannot be read just now is repaired by the controller: its service stays as it was.
        records, bad = self._state.records()
        kept = [each for each in self.services.backends if each.program in bad]
        found = [
            self._backend(each, observed.get(name))
            for name, each in records.items()
            if not each.is_daemon and each.verdict.standing is not Standing.REMOVING
        ]
        self.services = ServiceTable((*found, *kept))
        self.read_at = time.monotonic()
        self.next_at = self.read_at + self._throttle.pause_s()

    def _backend(self, record: Record, observed: Observed | None) -> Backend:
        told = report(record, observed)
        note = self._state.run_note(record.program)
        spec = note.spec if note else self._state.spec_of(record.program)
        on_demand = record.idle_s is not None
        # What was seen last of an engine that is being unloaded may still say that it is ready.
        gone = observed is not None and (record.stop_sent or processes.started_at(observed.pid) is None)
        ready = told.engine_ready and not (on_demand and gone)
        # Of an engine that is not up, the spec of its last run may be older than an edit of its key.
        key_known = ready or spec.get("asked") == record.asked
        key, *further_keys = first_request.keys_of(spec.get("env"))[1] or ("",) if key_known else ("",)
        return Backend(
            program=record.program,
            namespace=record.namespace,
            name=record.name,
            runtime=record.runtime,
            ready=ready and record.port is not None,
            phase=told.phase,
            reason=told.reason,
            message=told.message,
            address=asked_at(record.host or self._bind),
            port=record.port or 0,
            pid=observed.pid if observed else 0,
            key=key,
            further_keys=tuple(further_keys),
            checks_model=record.runtime != LLAMA,
            names_itself=record.probe.names_itself,
            context=context_of(record.runtime, tuple(map(str, items(spec, "argv")))),
            created=int(record.admitted_at),
            aliases=tuple(each for each in record.aliases if each not in record.lost_names),
            lost_names=record.lost_names,
            on_demand=on_demand,
            held=not ready and (told.ready or (on_demand and told.reason == CHECKING)),
            withdraw=record.withdraw,
            front=f"{in_url(self._bind)}:{record.front_port}" if on_demand and record.front_port is not None else "",
        )


@functools.lru_cache(maxsize=1024)
def context_of(runtime: str, argv: tuple[str, ...]) -> int:
    """Tokens of one request by an engine's command line, 0 if it does not tell."""
    if runtime == LLAMA:
        cache = demands(argv[1:]).settings
        return cache.context if cache.unified else cache.context // cache.slots
    told = [value for flag, value in itertools.pairwise(argv) if flag in CONTEXT_FLAGS]
    return int(told[-1]) if told and told[-1].isdecimal() and len(told[-1]) <= MOST_DIGITS else 0


def first_id(document: Json) -> str:
    """The first model of an engine's `/v1/models`, "" if it lists none."""
    rows = document.get("data") if isinstance(document, dict) else None
    first = rows[0] if isinstance(rows, list) and rows else None
    name = first.get("id") if isinstance(first, dict) else None
    return name if isinstance(name, str) else ""
