"""Boards for tests and measurements: what the sidecar would know of a Mac with so many services."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any

from metal_supervisor.cluster.report import report
from metal_supervisor.host.addresses import AddressChoice
from metal_supervisor.sidecar.board import Board, Row
from metal_supervisor.sidecar.counters import Counted
from metal_supervisor.sidecar.http.app import create_app
from metal_supervisor.sidecar.http.server import bound, run
from metal_supervisor.sidecar.inventory import Offer
from metal_supervisor.spec import histogram
from metal_supervisor.spec.processes import Observed
from metal_supervisor.spec.record import Verdict
from metal_supervisor.spec.types import ModelFile, Standing
from tests.support.records import a_record

GIB = 1 << 30
NOW = 1_790_000_000.0
HOSTILE = (
    "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>\n[+]forged ok\r\n# HELP x y\u202egnp.exe\u2066"
    "\x1b[31m\x00</style></main><!--{{7*7}}{% raw %}\u2028\udcff"
)


def row(number: int = 0, name: str = "", message: str = "", **changes: Any) -> Row:
    """One service; every fourth serves, loads, crashes or waits."""
    kind = number % 4
    name = name or f"model-{number:03}"
    standing = Standing.WAIT if kind == 3 else Standing.RUN
    waits = "needs 61.2 GiB, 10.3 GiB of 48.0 GiB left; try a smaller quantization"
    record = a_record(
        name,
        uid=f"uid-{number}",
        verdict=Verdict(standing, "InsufficientMemory" if kind == 3 else "Admitted", message or waits, NOW),
        port=18100 + number,
        host=None if kind == 3 else f"default.{name}.a.json",
        reserved_bytes=GIB // 3,
    )
    observed = Observed(
        f"default.{name}",
        0 if kind > 1 else 4000 + number,
        kind == 0,
        NOW,
        ("RUNNING", "RUNNING", "FATAL", "")[kind],
        message or ("", "loading the model", "exit status 1", "")[kind],
        memory_bytes=GIB // 4 if kind < 2 else 0,
        last_exit="exit status 1",
    )
    record = replace(record, **changes)
    return Row(record, observed, report(record, observed), f"10.0.0.5:{18100 + number}", GIB // 4)


def board(count: int = 4, text: str = "", **changes: Any) -> Board:
    """A board of so many services; `text` stands wherever somebody else's words may."""
    file = ModelFile("Downloading", message=text or "25 % of 4.0 GiB", got_bytes=GIB, total_bytes=4 * GIB)
    told = {
        "at": NOW,
        "did": text or "start default.model-000: new",
        "cluster": {"server": text or "https://api.example:6443", "synced": True, "operator": False},
        "memory": {
            "total": 64 * GIB,
            "budget": 48 * GIB,
            "because": text or "75 % of 64.0 GiB",
            "charged": 10 * GIB,
            "left": 38 * GIB,
            "waiting": 1,
            "pressure": "Normal",
            "why": text,
            "available": 40 * GIB,
            "swap": 0,
            "problems": [],
            "evictions": 0,
            "skipped": {},
        },
        "models": {f"default/{text or 'phi'}": {"uid": "u", "generation": 1, "source": "hf://a", "file": asdict(file)}},
        "notices": [{"name": text or "default.x.conf", "reason": text or "put aside: no section"}],
    }
    rows = tuple(row(number, f"{text}{number}" if text else "", text) for number in range(count))
    programs = [each.record.program for each in rows]
    plain = Board(
        at=NOW,
        rows=rows,
        counted=Counted(
            probes=dict.fromkeys(programs, histogram.empty(histogram.PROBE_S).with_value(0.01)),
            starts=dict.fromkeys(programs, histogram.empty(histogram.START_S).with_value(2.0)),
        ),
        controller=told,
        node=text or "mac-studio",
        programs={"controller": "RUNNING", "sidecar": "RUNNING"},
        address=AddressChoice("10.0.0.5", text or "the route to api.example"),
        engines=(Offer("llama-server", "llama-server", text or "b7200", ("gguf",)),),
    )
    return replace(plain, **changes)


@contextlib.contextmanager
def served(look: Callable[[], Board], app: Any = None) -> Iterator[Any]:
    """The real server on a free port (`effective_port`), for as long as the block lasts; `app`: another application."""
    server = bound(app or create_app(look), "127.0.0.1", 0)
    thread = threading.Thread(target=run, args=(server,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        # A thread that answers still would write into whatever has the descriptors of a closed server.
        server.task_dispatcher.shutdown(timeout=30)
        with server.trigger.lock:  # a loop that is awake already would close the trigger before it is pulled
            server.trigger.thunks.append(server.close)
            server.trigger.pull_trigger()
        thread.join(10)
